"""DifferenceCompression and DCD: replicas, the mean, mass, state."""

import numpy as np
import pytest

import relaxmpi as rx
from relaxmpi.primitives import kernels

RANKS = pytest.mark.ranks(1, 2, 3, 4)
FOUR, EIGHT = rx.Quantizer(bits=4), rx.Quantizer(bits=8)


def begin(comm, d=700, dtype="f4"):
    return np.random.default_rng([1, comm.rank]).standard_normal(d).astype(dtype)


def gossip(steps, memory_of, d=700, dtype="f4", lr=0.0):
    def program():
        with rx.Comm.world() as comm:
            x, memory = begin(comm, d, dtype), memory_of()
            rng, first = np.random.default_rng(comm.rank), x.copy()
            for _ in range(steps):
                if lr:
                    x -= (lr * rng.standard_normal(d)).astype(dtype)
                rx.neighbor_allreduce(comm, x, topology=rx.Ring(), codec=memory)
            return first, x, memory

    return program


def same_replicas(ranks, codec_memory=2):
    for ran in ranks:
        for peer, replica in ran[codec_memory].replicas("heard").items():
            (own,) = ranks[peer][codec_memory].replicas("own").values()
            assert replica.tobytes() == own.tobytes()


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "memory_of",
    [
        lambda: rx.DCD(rx.MinMaxUInt8()),
        lambda: rx.DifferenceCompression(FOUR),
        lambda: rx.DifferenceCompression(rx.TopK(0.1), gamma=0.2),
    ],
)
def test_replicas_are_the_owners_bits(n, memory_of):  # compression 40, bagua 19
    ranks = rx.SimulatedWorld(n, seed=n).run(gossip(50, memory_of, lr=0.1))
    same_replicas(ranks)
    if n > 1 and isinstance(ranks[0][2], rx.DCD):
        for _, x, memory in ranks:
            (own,) = memory.replicas("own").values()
            assert x.tobytes() == own.tobytes()


def test_exact_codecs_are_plain_gossip():  # compression 42
    plain = rx.SimulatedWorld(5).run(gossip(20, lambda: None))
    choco = lambda: rx.DifferenceCompression(rx.Identity(), gamma=1.0)  # noqa: E731
    for _, x, _ in rx.SimulatedWorld(5).run(gossip(0, choco)):
        assert len(x)
    for memory_of, steps in ((choco, 20), (lambda: rx.DCD(rx.Identity()), 21)):
        for (_, x, _), (_, y, _) in zip(
            rx.SimulatedWorld(5).run(gossip(steps, memory_of)), plain, strict=True
        ):
            assert np.allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("codec", [FOUR, rx.OneBit(bucket=32), rx.TopK(0.1)])
def test_the_mean_stays_and_ranks_agree(codec):
    memory_of = lambda: rx.DifferenceCompression(codec, gamma=0.3)  # noqa: E731
    ranks = rx.SimulatedWorld(6).run(gossip(400, memory_of, dtype="f8"))
    mean = np.mean([first for first, _, _ in ranks], axis=0)
    assert np.allclose(np.mean([x for _, x, _ in ranks], axis=0), mean, atol=1e-13)
    assert max(np.abs(x - mean).max() for _, x, _ in ranks) < 0.1


def test_equal_ranks_stay_where_they_are():
    def program(memory):
        with rx.Comm.world() as comm:
            x = np.float32([1, -2, 3])
            memory = memory()
            for _ in range(40):
                rx.neighbor_allreduce(comm, x, topology=rx.Exponential(), codec=memory)
            return x

    for memory in (lambda: rx.DCD(rx.MinMaxUInt8()), lambda: rx.DifferenceCompression(EIGHT)):
        for x in rx.SimulatedWorld(6).run(program, memory):
            assert x.tobytes() == np.float32([1, -2, 3]).tobytes()


def test_compressed_push_sum_keeps_its_mass():
    """Two calls in flight, messages delayed, a topology that varies: law 4."""

    def program():
        with rx.Comm.world() as comm:
            x, w = begin(comm, 300, "f8"), np.ones(1)
            first, flight, memory = x.copy(), [], rx.DifferenceCompression(FOUR)
            topology = rx.OnePeerExponential(2)
            for k in range(300):
                work = rx.push_sum.start(comm, x, w, topology=topology, step=k, codec=memory)
                flight.append(work)
                if len(flight) > 2:
                    dx, dw = flight.pop(0).wait()
                    x += dx
                    w += dw
            for work in flight:
                dx, dw = work.wait()
                x += dx
                w += dw
            return first, x, w, memory

    for seed in range(3):
        harm = [rx.faults.Delay(0.3, seconds=1e-3), rx.faults.Reorder(0.3)]
        ranks = rx.SimulatedWorld(5, seed=seed, faults=harm).run(program)
        assert np.allclose(sum(r[1] for r in ranks), sum(r[0] for r in ranks), atol=1e-11)
        assert np.isclose(sum(r[2][0] for r in ranks), 5, atol=1e-12)
        mean = np.mean([r[0] for r in ranks], axis=0)
        for me, (_, x, w, memory) in enumerate(ranks):
            assert np.abs(x / w - mean).max() < 1e-3
            for peer, replica in memory.replicas("heard").items():
                assert replica.tobytes() == ranks[peer][3].replicas("sent")[me].tobytes()


@RANKS
def test_stopped_and_resumed(comm):  # law 9
    def run(memories, x, w, steps):
        for k in steps:
            rx.neighbor_allreduce(comm, x, topology=rx.Ring(), codec=memories[0], step=k)
            rx.neighbor_allreduce(comm, x, topology=rx.Ring(), codec=memories[1], step=k)
            args = {"topology": rx.OnePeerExponential(), "step": k, "codec": memories[2]}
            dx, dw = rx.push_sum(comm, x, w, **args)
            x += dx
            w += dw

    def fresh():
        return (
            rx.DCD(rx.MinMaxUInt8()),
            rx.DifferenceCompression(FOUR),
            rx.DifferenceCompression(EIGHT),
        )

    memories, x, w = fresh(), begin(comm, 101), np.ones(1)
    run(memories, x, w, range(5))
    states, y, v = [m.state_dict() for m in memories], x.copy(), w.copy()
    run(memories, x, w, range(5, 9))
    others = fresh()
    for memory, state in zip(others, states, strict=True):
        memory.load_state_dict(state)
    run(others, y, v, range(5, 9))
    assert x.tobytes() == y.tobytes()
    assert w[0] == v[0]


def test_a_bad_step_is_not_remembered():
    def program():
        with rx.Comm.world() as comm:
            x, memory = np.float32([1, 2, 3]), rx.DifferenceCompression(EIGHT)
            bad = np.float32([np.nan, np.inf, 3])
            rx.neighbor_allreduce(comm, x, topology=rx.Ring(), codec=memory)
            rx.neighbor_allreduce(comm, bad, topology=rx.Ring(), codec=memory)
            rx.neighbor_allreduce(comm, x, topology=rx.Ring(), codec=memory)
            return np.isfinite(x).all(), np.isnan(bad[0])

    assert rx.SimulatedWorld(3).run(program) == [(True, True)] * 3


def test_bad_memories():
    with pytest.raises(TypeError, match="wraps a Codec"):
        rx.DifferenceCompression(rx.ErrorFeedback(FOUR))
    with pytest.raises(ValueError, match="gamma"):
        rx.DifferenceCompression(FOUR, gamma=0)

    def program():
        with rx.Comm.world() as comm:
            memory, found = rx.DifferenceCompression(FOUR), []
            ring = {"topology": rx.Ring(), "codec": memory}
            x, w = np.ones(4, np.float32), np.ones(1)
            rx.neighbor_allreduce(comm, x, **ring)
            work = rx.neighbor_allreduce.start(comm, x, **ring)
            for call in (
                lambda: rx.neighbor_allreduce(comm, x, **ring),
                memory.state_dict,
                lambda: rx.neighbor_allreduce(comm, np.ones(5, np.float32), **ring),
                lambda: rx.push_sum(comm, x, w, **ring),
            ):
                try:
                    call()
                except (ValueError, rx.RelaxError) as error:
                    found.append(str(error))
                if len(found) == 2:
                    work.wait()
            return found

    for found in rx.SimulatedWorld(2).run(program):
        assert "in use" in found[0]
        assert "cannot be saved" in found[1]
        assert "holds the replicas" in found[2]
        assert "holds the replicas" in found[3]


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8"])
@pytest.mark.parametrize("others", range(5))
@pytest.mark.parametrize("size", [0, 1, 7, 1000])
def test_drift_is_the_sum_of_the_gaps_bit_for_bit(dtype, others, size):
    draw = np.random.default_rng(others)
    halves = draw.standard_normal((2 + others, size, np.dtype(dtype).itemsize // 4))
    x, mine, *rest = halves.astype("f4").view(dtype)[..., 0]
    weights = [np.float32(w) for w in draw.random(others)]
    want = x - mine
    for theirs, weight in zip(rest, weights, strict=True):
        want += weight.astype(want.real.dtype) * (theirs - mine)
    out = np.empty_like(x)
    kernels.drift(x, mine, list(zip(rest, map(float, weights), strict=True)), out)
    np.testing.assert_array_equal(out.view("u1"), want.view("u1"))
