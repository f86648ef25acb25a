"""Laws of the neighbour verbs, on real ranks and in simulated worlds."""

import gc

import numpy as np
import pytest

import relaxmpi as rx

RANKS = pytest.mark.ranks(1, 2, 3, 4)
DTYPES = ["f8", "f4", "f2", "c8"]
STATIC = [rx.Ring(), rx.Complete(), rx.Exponential()]


def start(rank, d, dtype="f8"):
    values = np.random.default_rng([3, rank, d]).standard_normal(d)
    return (values * (1 + 2j) if np.dtype(dtype).kind == "c" else values).astype(dtype)


def mixed(topology, xs):
    """W x in the order of ranks, with every product and sum rounded: the oracle."""
    W, n = topology.matrix(len(xs)), len(xs)
    work = np.dtype("f4") if xs[0].dtype == np.float16 else xs[0].dtype
    real = np.empty(0, work).real.dtype.type
    out = []
    for i in range(n):
        terms = [xs[j].astype(work) * real(W[i, j]) for j in range(n) if W[i, j]]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        out.append(total.astype(xs[0].dtype))
    return out


def everyones(comm, x):
    return [np.frombuffer(raw, x.dtype) for raw in comm.mpi.allgather(x.tobytes())]


@RANKS
def test_average_is_w_times_x(comm):
    n, r = comm.size, comm.rank
    for dtype in DTYPES:
        for topology in STATIC:
            for d in (0, 1, 7):
                xs = [start(k, d, dtype) for k in range(n)]
                expected = mixed(topology, xs)[r] if n > 1 else xs[r]
                x, out = xs[r].copy(), np.empty_like(xs[r])
                assert rx.neighbor_allreduce(comm, x, out, topology=topology) is out
                assert np.array_equal(x, xs[r])
                assert rx.neighbor_allreduce(comm, x, topology=topology) is x
                assert np.array_equal(x, expected)
                assert np.array_equal(out, expected)


@RANKS
def test_averages_over_the_complete_graph_are_identical(comm):
    x = start(comm.rank, 1001, "f4")
    rx.neighbor_allreduce(comm, x, topology=rx.Complete())
    assert len({y.tobytes() for y in everyones(comm, x)}) == 1


@RANKS
def test_push_sum_reaches_the_mean(comm):
    n, r = comm.size, comm.rank
    for topology in (rx.OnePeerExponential(), rx.Exponential()):
        for d in (0, 1, 7, 513):
            xs = [start(k, d) for k in range(n)]
            x, w = xs[r].copy(), np.ones(1)
            for k in range(60):
                dx, dw = rx.push_sum(comm, x, w, topology=topology, step=k)
                assert isinstance(dw, float)
                assert dx.shape == x.shape
                x += dx
                w += dw
            assert np.allclose(x / w, np.mean(xs, axis=0), atol=1e-12)


@RANKS
def test_pairs_end_with_the_same_bits(comm):
    peer = comm.rank ^ 1
    if peer >= comm.size:
        return
    for dtype in DTYPES:
        for d in (0, 1, 7, 513):
            x, theirs = start(comm.rank, d, dtype), start(peer, d, dtype)
            expected = (x.astype("c16") + theirs.astype("c16")) / 2
            work = rx.pairwise_average.start(comm, x, peer=peer)
            assert work.wait() is x
            y = start(comm.rank, d, dtype)
            assert rx.pairwise_average(comm, y, peer=peer) is y
            assert np.allclose(x, expected, rtol=2e-3 if dtype == "f2" else 1e-6)
            assert x.tobytes() == y.tobytes()
            other = np.empty_like(x)
            comm.mpi.Sendrecv(x.view("u1"), peer, 0, other.view("u1"), peer, 0)
            assert x.tobytes() == other.tobytes()


def test_a_pair_keeps_its_sum_while_both_go_on():  # C13
    def program():
        with rx.Comm.world() as comm:
            rng = np.random.default_rng(comm.rank)
            order = np.random.default_rng(7)
            x = rng.standard_normal(5)
            added, begun = np.zeros(5), x.copy()
            for _ in range(200):
                pairs = order.permutation(comm.size).reshape(-1, 2).tolist()
                mine = next(pair for pair in pairs if comm.rank in pair)
                peer = sum(mine) - comm.rank
                work = rx.pairwise_average.start(comm, x, peer=peer)
                step = rng.standard_normal(5) * 0.1
                x += step
                added += step
                work.wait()
            return begun + added, x

    for seed in range(3):
        expected, found = zip(*rx.SimulatedWorld(6, seed=seed).run(program), strict=True)
        assert np.allclose(sum(expected), sum(found), atol=1e-11)


def mixture(way):
    """Every verb, run in one of the ways that must give the same bits."""
    with rx.Comm.world(timeout=20) as comm:
        x, w = start(comm.rank, 1001, "f4"), np.ones(1)

        def go(verb, *args, **kwargs):
            if way == "blocking":
                return verb(comm, *args, **kwargs)
            if way == "flow":
                return rx.primitive(lambda c: verb.flow(c, *args, **kwargs))(comm)
            return verb.start(comm, *args, **kwargs).wait()

        memory = rx.DifferenceCompression(rx.Quantizer(bits=4, stochastic=True))
        shared = rx.DifferenceCompression(rx.Quantizer(bits=4))
        for k in range(6):
            dx, dw = go(rx.push_sum, x, w, topology=rx.OnePeerExponential(), step=k)
            x += dx
            w += dw
            go(rx.neighbor_allreduce, x, topology=rx.Ring())
            go(rx.neighbor_allreduce, x, topology=rx.Ring(), codec=memory, name="x")
            dx, dw = go(rx.push_sum, x, w, topology=rx.Exponential(), codec=shared, step=k)
            x += dx
            w += dw
            if comm.size % 2 == 0:
                go(rx.pairwise_average, x, peer=comm.rank ^ 1)
        return x.tobytes() + w.tobytes()


@RANKS
def test_one_result_however_it_is_run(comm):  # law 6
    expected = rx.SimulatedWorld(comm.size, seed=5).run(mixture, "started")[comm.rank]
    for way in ("blocking", "started", "flow"):
        assert mixture(way) == expected
    if comm.size > 1:
        for way in ("blocking", "flow"):
            assert rx.SimulatedWorld(comm.size).run(mixture, way)[comm.rank] == expected


@pytest.mark.ranks(2, 3)
def test_a_background_thread_changes_no_bit(comm):
    topology = rx.OnePeerExponential()

    def run():
        x, w = start(comm.rank, 100_003, "f4"), np.ones(1)
        for k in range(5):
            work = rx.push_sum.start(comm, x, w, topology=topology, step=k)
            pair = None
            if comm.rank < 2:
                y = x.copy()
                pair = rx.pairwise_average.start(comm, y, peer=1 - comm.rank)
                y += 1
            dx, dw = work.wait()
            x += dx
            w += dw
            if pair is not None:
                pair.wait()
        return x.tobytes()

    expected = run()
    with comm.background():
        assert run() == expected


@pytest.mark.ranks(2, 3)
def test_a_metric_does_not_wait_for_pushes(comm):
    topology, x, w = rx.Ring(), np.ones(3000), np.ones(1)
    rx.push_sum(comm, x, w, topology=topology)
    works = []
    if comm.rank:
        works = [rx.push_sum.start(comm, x, w, topology=topology) for _ in range(4)]
    assert rx.allreduce(comm, 1) == comm.size  # rank 0 has not pushed yet
    if comm.rank:
        assert not works[-1].test()
    comm.mpi.Barrier()
    if not comm.rank:
        works = [rx.push_sum.start(comm, x, w, topology=topology) for _ in range(4)]
    for work in works:
        work.wait()


@pytest.mark.ranks(3)
def test_works_complete_in_any_order(comm):
    x, y = np.full(100_000, float(comm.rank)), np.full(3, float(comm.rank))
    if comm.rank == 0:
        slow = rx.pairwise_average.start(comm, x, peer=1)
        rx.pairwise_average(comm, y, peer=2)
        assert not slow.test()
        comm.mpi.send(None, 1)
        slow.wait()
    elif comm.rank == 1:
        comm.mpi.recv(source=0)
        rx.pairwise_average(comm, x, peer=0)
    else:
        rx.pairwise_average(comm, y, peer=0)
    assert np.all(x == [0.5, 0.5, 2.0][comm.rank])
    assert np.all(y == [1.0, 1.0, 1.0][comm.rank])


def test_mass_is_kept_whatever_comes_when():  # C1, law 4
    """Folds are as late as 5 steps, in any order, on a digraph that is not regular."""
    W = np.zeros((5, 5))
    for i in range(5):
        out = [(i + 1) % 5] + ([2] if i == 0 else [])
        W[[i, *out], i] = 1 / (1 + len(out))
    topology = rx.from_matrix(W)

    def program(codec):
        with rx.Comm.world() as comm:
            rng = np.random.default_rng(comm.rank)
            x, w, flight = np.full(2, float(comm.rank)), np.ones(1), []
            memory = rx.DifferenceCompression(codec) if codec else None

            def fold(k):
                dx, dw = flight.pop(k).wait()
                x[...] += dx
                w[0] += dw

            for k in range(300):
                comm.compute(float(rng.random()) * 1e-3)
                flight.append(rx.push_sum.start(comm, x, w, topology=topology, codec=memory))
                while flight and k < 200 and (len(flight) > 5 or rng.random() < 0.3):
                    fold(int(rng.integers(len(flight))))
                while k >= 200 and flight:
                    fold(0)
                if k % 50 == 49:  # with what is under way
                    parts = [(x, w), *(work.wait() for work in flight)]
                    mass = np.append(sum(p[0] for p in parts), sum(np.sum(p[1]) for p in parts))
                    total = rx.allreduce(comm, mass)
                    assert np.allclose(total, [10, 10, 5], atol=1e-12)
            return x / w

    harm = [rx.faults.Delay(0.2, seconds=3e-3), rx.faults.Reorder(0.2), rx.faults.Duplicate(0.2)]
    for seed in range(4):
        for z in rx.SimulatedWorld(5, seed=seed, faults=harm).run(program, None):
            assert np.allclose(z, 2, atol=1e-9)
    for z in rx.SimulatedWorld(5, faults=harm).run(program, rx.Quantizer(bits=4)):
        assert np.allclose(z, 2, atol=1e-2)


def test_weights_when_messages_are_late():  # C8
    def program(tau, peers):
        with rx.Comm.world() as comm:
            x, w, flight, seen = np.ones(1), np.ones(1), [], []
            for k in range(60):
                seen.append(float(w[0]))
                topology = rx.OnePeerExponential(peers)
                flight.append(rx.push_sum.start(comm, x, w, topology=topology, step=k))
                if len(flight) > tau:
                    dx, dw = flight.pop(0).wait()
                    x += dx
                    w += dw
            for work in flight:
                work.wait()
            return seen

    for seen in rx.SimulatedWorld(9).run(program, 1, 1):
        assert np.allclose(seen, [2 / 3 + (-0.5) ** k / 3 for k in range(60)], atol=1e-12)
    for tau, peers, limit in ((2, 1, 1 / 2), (4, 1, 1 / 3), (1, 2, 0.6)):
        for seen in rx.SimulatedWorld(9).run(program, tau, peers):
            assert abs(seen[-1] - limit) < 1e-2


def test_faults_that_a_link_recovers_change_nothing_but_time():
    clean = rx.SimulatedWorld(4).run(mixture, "started")
    for seed in range(6):
        harm = [rx.faults.Delay(0.1), rx.faults.Reorder(0.3), rx.faults.Duplicate(0.3)]
        world = rx.SimulatedWorld(4, seed=seed, faults=harm)
        assert world.run(mixture, "started") == clean


@RANKS
def test_arrays_of_every_kind(comm):
    torch = pytest.importorskip("torch")
    n, r = comm.size, comm.rank
    ring = rx.Ring()
    base = np.stack([start(k, 12, "f4") for k in range(n)]).reshape(n, 3, 4)
    expected = np.stack(mixed(ring, list(base)))[r] if n > 1 else base[r]
    for make in (torch.tensor, torch.as_tensor):
        t = make(base[r].copy())
        assert rx.neighbor_allreduce(comm, t, topology=ring) is t
        assert np.array_equal(t.numpy(), expected)
    strided = np.asfortranarray(base[r])
    out = np.empty((3, 4), np.float32)
    rx.neighbor_allreduce(comm, strided, out, topology=ring)
    assert np.array_equal(out, expected)
    with pytest.raises(ValueError, match="not C-contiguous"):
        rx.neighbor_allreduce(comm, strided, topology=ring)
    half = torch.full((3, 4), float(r), dtype=torch.bfloat16)
    w = torch.ones(1, dtype=torch.float64)
    for _ in range(40):
        dx, dw = rx.push_sum(comm, half, w, topology=ring)
        assert dx.dtype == torch.bfloat16
        assert dx.shape == half.shape
        half += dx
        w += dw
    assert torch.allclose(half.float() / w.float(), torch.tensor((n - 1) / 2), rtol=2e-2)


@pytest.mark.ranks(2)
def test_memory_goes_round_only_when_nobody_holds_it(comm):
    x, w, kept = np.full(5000, 1.0 + comm.rank), np.ones(1), []
    for k in range(200):
        dx, dw = rx.push_sum(comm, x, w, topology=rx.Ring(), step=k)
        if k % 50 == 0:
            kept.append((dx[7:9], dx[7:9].copy()))
        x += dx
        w += dw
    assert all(np.array_equal(view, copy) for view, copy in kept)
    held = [array for arrays in comm.edges.buffers._held.values() for array in arrays]
    assert len(held) <= len(kept) + 4
    gc.collect()
    assert comm.edges.pool.idle or comm.progress() is None


@RANKS
def test_what_was_sent_is_counted_and_traced(comm):
    x, w = np.ones(1000, np.float32), np.ones(1)
    rx.push_sum(comm, x, w, topology=rx.Complete())
    before = comm.stats.payload_bytes, comm.stats.messages, comm.stats.header_bytes
    with comm.trace() as trace:
        rx.push_sum(comm, x, w, topology=rx.Complete(), name="grads")
    n = comm.size
    assert comm.stats.payload_bytes - before[0] == 4000 * (n - 1)
    assert comm.stats.messages - before[1] == n - 1
    assert comm.stats.header_bytes - before[2] == 192 * (n - 1)
    assert "'grads'" in trace.recording.calls[0].title


def test_a_large_world():
    def program():
        with rx.Comm.world() as comm:
            x, w = np.full(10, float(comm.rank)), np.ones(1)
            for k in range(8):
                dx, dw = rx.push_sum(comm, x, w, topology=rx.OnePeerExponential(), step=k)
                x += dx
                w += dw
            return float(x[0] / w[0])

    assert rx.SimulatedWorld(256).run(program) == [127.5] * 256  # C3


def test_time_is_that_of_the_messages():
    network = rx.Network(latency=1e-3, bandwidth=1e6)

    def program():
        with rx.Comm.world() as comm:
            x = np.ones(125_000)  # 1 MB: a second
            rx.neighbor_allreduce(comm, x, topology=rx.Ring())
            return comm.now()

    times = rx.SimulatedWorld(4, network=network).run(program)
    assert 2.0 < max(times) < 2.1  # two neighbours share the link
