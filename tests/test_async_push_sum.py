"""Laws of AsyncPushSum: mass at every moment, the true mean, staleness, ends; numbers are checks
of the survey's list where they have one."""

import logging
import sys
import tracemalloc

import numpy as np
import pytest

import relaxmpi as rx
from relaxmpi import faults
from relaxmpi.primitives.asynchronous.edges import HEADER

# Random delays of 0 to 5 seconds on ordered edges, and a network that loses, repeats and reorders.
LATE = [faults.Delay(0.5, seconds=s) for s in (1, 2, 2)]
LOSSY = [faults.Drop(0.3), faults.Duplicate(0.1, later=2.0), faults.Reorder(0.8, within=5.0)]
HEALTHY = [faults.SlowDown(0, factor=3.0)]
WORLDS = {"late": LATE, "lossy": LOSSY, "healthy": HEALTHY}

CHORD = np.zeros((5, 5))  # i -> i + 1 and 0 -> 2
for sender, receivers in enumerate([[1, 2], [2], [3], [4], [0]]):
    CHORD[[sender, *receivers], sender] = 1 / (1 + len(receivers))


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Endpoints that break are what some of these tests are about."""
    caplog.set_level(logging.CRITICAL, "relaxmpi")


def mass(points):
    """Sums of x and w over all ranks of a simulated world, and what is put aside or in flight."""
    x = sum(p._x + (0 if p._aside is None else p._aside) for p in points)
    w = sum(p.w + p._aside_w for p in points)
    for point in points:
        for peer, out in point._out.items():
            into = points[peer]._in[point.comm.rank]
            w += out.given - into.w
            if point._carrier.replaces:
                x = x + (0 if out.phi is None else out.phi) - (0 if into.rho is None else into.rho)
                continue
            for flying in out.flying:
                if flying.stamp > into.taken:
                    x = x + flying.message[HEADER:].view(point._x.dtype)
    return x, w


def gathered(n, world, program):
    """Run a program that gets its Comm and the list of all endpoints, by rank."""
    points = [None] * n

    def body():
        with rx.Comm.world(timeout=1000) as comm:
            return program(comm, points)

    return world.run(body)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("faulty", ["late", "lossy"])
def test_mass_is_kept_at_every_tick_and_the_true_mean_is_found(faulty, seed):
    """C1, and C25: the same where messages are lost, repeated and reordered."""
    seen = []

    def program(comm, points):
        active = np.random.default_rng((seed, comm.rank))
        x = np.full(2, float(comm.rank))
        mix = points[comm.rank] = rx.AsyncPushSum(comm, x, rx.from_matrix(CHORD))
        rx.barrier(comm)
        for _ in range(1000):
            comm.compute(1.0)
            if active.random() < 0.3:
                mix.send()
                mix.fold()
            if comm.rank == 0:
                total, w = mass(points)
                seen.append(max(abs(total - 10).max(), abs(w - 5)))
        assert abs(mix.debiased - 2).max() < 1e-9
        mix.close()
        return x, mix.w

    uneven = [faults.Pause(1, at=100.5, seconds=50.0), faults.SlowDown(2, factor=1.5)]
    world = rx.SimulatedWorld(5, faults=[*WORLDS[faulty], *uneven], seed=seed)
    ends = gathered(5, world, program)
    assert max(seen) < 1e-11, world
    assert abs(sum(x for x, _ in ends) - 10).max() < 1e-11
    assert abs(sum(w for _, w in ends) - 5) < 1e-11


def test_plain_push_sum_fails_where_messages_are_lost():
    """C25: what the sums are for. The same mailbox, the same faults, shares instead of sums."""

    def program(comm, points):
        to = (comm.rank + 1) % comm.size
        box = comm.mailbox("plain push-sum", 16, ([(comm.rank - 1) % comm.size], [to]), 2)
        assert not box.reliable
        held = np.array([float(comm.rank), 1.0])

        def read(source, message):
            assert source == (comm.rank - 1) % comm.size
            held[:] += message.view(np.float64)

        for _ in range(300):
            comm.compute(1.0)
            held[:] /= 2
            box.send(to, held.view(np.uint8))
            while box.take(read):
                pass
        comm.free_mailbox(box)
        return held[1]

    left = sum(gathered(5, rx.SimulatedWorld(5, faults=LOSSY, seed=1), program))
    assert left < 0.1, "of 5"


@pytest.mark.parametrize("tau", [1, 2, 4])
def test_gradient_steps_change_the_mass_by_their_sum_and_staleness_is_bounded(tau):
    """C9: OSGP on free-running ranks."""
    n, lr, seen, given = 8, 0.02, [], np.zeros(1)

    def program(comm, points):
        x = np.zeros(1)
        topology = rx.OnePeerExponential()
        mix = points[comm.rank] = rx.AsyncPushSum(comm, x, topology, max_staleness=tau)
        rx.barrier(comm)
        for _ in range(600):
            comm.compute(1.0)
            step = lr * (mix.debiased - comm.rank)
            x[:] -= step
            given[:] += step
            mix.send()
            mix.fold()
            assert max(mix.staleness.values()) <= tau
            if comm.rank == 0:
                total, w = mass(points)
                seen.append(max(abs(total + given).max(), abs(w - n)))
        z = float(mix.debiased[0])
        mix.close()
        assert mix.stats.largest_staleness <= tau
        return z

    late = [faults.Delay(0.5, seconds=0.5 * tau), faults.Delay(0.5, seconds=0.5 * tau)]
    ends = gathered(n, rx.SimulatedWorld(n, faults=late, jitter=0.2), program)
    assert max(seen) < 1e-10
    assert abs(np.mean(ends) - 3.5) < 0.1
    assert abs(np.array(ends) - 3.5).max() < 0.5


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("tau", [0, 1, 4])
def test_a_paused_neighbour_blocks_its_peers_after_tau_steps_and_no_earlier(tau, lossy):
    """A rank whose in-peer made k pushes completes k + tau steps, and pushes in one more."""
    sent, done = [0, 0, 0], [0, 0, 0]

    def program(comm, points):
        mix = rx.AsyncPushSum(comm, np.ones(1), ONE_WAY, max_staleness=tau)
        comm.compute((0.6, 0.0, 0.3)[comm.rank])  # messages are here before they are due
        for _ in range(60):
            comm.compute(1.0)
            mix.send()
            sent[comm.rank] += comm.now() < 60
            mix.fold()
            done[comm.rank] += comm.now() < 60
        mix.close()

    rare = [faults.Drop(nth=10**6)] if lossy else []
    gathered(3, rx.SimulatedWorld(3, faults=[*rare, faults.Pause(1, at=10.8, seconds=50)]), program)
    assert 5 < sent[1] < 11
    assert done[2] == sent[1] + tau
    assert done[0] == sent[2] + tau == sent[1] + 1 + 2 * tau


ONE_WAY = rx.from_matrix(np.array([[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]]))


def test_no_bound_means_that_nobody_waits():
    def program(comm, points):
        mix = rx.AsyncPushSum(comm, np.ones(1), ONE_WAY)
        begin = comm.now()
        for _ in range(20):
            comm.compute(1.0)
            mix.send()
            mix.fold()
        took = comm.now() - begin
        mix.close()
        return took

    took = gathered(3, rx.SimulatedWorld(3, faults=[faults.SlowDown(1, factor=5.0)]), program)
    assert took[0] < 20.1
    assert took[2] < 20.1


@pytest.mark.parametrize("tau", [0, 2])
def test_a_peer_that_is_dead_is_a_timeout_that_names_the_edge(tau):
    """Law 11; a rank that waits for one that gave up hears of it."""
    said = {}

    def program(comm, points):
        mix = rx.AsyncPushSum(comm, np.ones(1), ONE_WAY, max_staleness=tau)
        with pytest.raises(rx.PeerTimeout) as error:
            for _ in range(40):
                comm.compute(1.0)
                mix.send()
                mix.fold()
        said[comm.rank] = str(error.value)
        with pytest.raises(rx.BrokenComm, match="broke earlier"):
            mix.send()
        mix.close()

    gathered(3, rx.SimulatedWorld(3, faults=[faults.Kill(1, at=10.5)]), program)
    assert "edge 1 -> 2" in said[2]
    assert "edge 2 -> 0" in said[0]
    assert "rank 2 gave up" in said[0]


def test_a_peer_that_leaves_without_close_is_named():
    said = {}

    def program(comm, points):
        mix = rx.AsyncPushSum(comm, np.ones(1), ONE_WAY, max_staleness=1)
        for _ in range(5 if comm.rank == 1 else 40):
            comm.compute(1.0)
            mix.send()
            try:
                mix.fold()
            except rx.PeerLeft as error:
                said[comm.rank] = str(error)
                break
        raise SystemExit

    gathered(3, rx.SimulatedWorld(3), program)
    assert "edge 1 -> 2" in said[2]
    assert "edge 2 -> 0" in said[0]
    assert "the program of rank 1 ended without close()" in said[2]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "topology", [rx.Ring(), rx.OnePeerExponential(), rx.Complete(), rx.RandomPairs()]
)
@pytest.mark.parametrize("tau", [None, 0, 3])
def test_closing_at_different_times_leaves_nothing_behind(world, topology, tau):
    """C33: per edge, what was sent was taken; sums are exact. Any n, also one and odd ones."""
    for n in (1, 2, 5):
        points = []

        def program(comm, points, kept=points):
            x = np.arange(3.0) + comm.rank
            mix = points[comm.rank] = rx.AsyncPushSum(comm, x, topology, max_staleness=tau)
            kept.append(mix)
            for _ in range(20 if comm.rank else 15):
                comm.compute(0.1 * (1 + comm.rank))
                mix.send()
                mix.fold()
            mix.close()
            mix.close()
            assert mix.in_flight == pytest.approx(0.0, abs=1e-12)
            return x, mix.w

        ends = gathered(n, rx.SimulatedWorld(n, faults=WORLDS[world], seed=n), program)
        expected = n * np.arange(3.0) + n * (n - 1) / 2
        assert abs(sum(x for x, _ in ends) - expected).max() < 1e-12 * n * n
        assert abs(sum(w for _, w in ends) - n) < 1e-12
        points.sort(key=lambda point: point.comm.rank)
        for point in points:
            for peer, edge in point._out.items():
                assert edge.sent == edge.acked == points[peer]._in[point.comm.rank].taken


def test_without_credit_shares_stay_and_too_little_weight_is_not_pushed():
    def program(comm, points):
        x = np.ones(1)
        mix = rx.AsyncPushSum(comm, x, rx.Ring(), floor=0.2)
        if comm.rank:
            comm.compute(100.0)
        for _ in range(10):
            comm.compute(1.0)
            mix.send()
        if comm.rank == 0:
            assert (mix.stats.messages, mix.stats.skipped) == (2, 8)  # two are outstanding
            assert (mix.w, x[0], mix.in_flight) == (0.25, 0.25, 0.75)
        mix.close()
        return x[0], mix.w

    ends = gathered(2, rx.SimulatedWorld(2), program)
    assert sum(w for _, w in ends) == pytest.approx(2.0, abs=1e-14)


def test_weight_guard():
    def program(comm, points):
        mix = rx.AsyncPushSum(comm, np.ones(1), rx.from_matrix(np.full((2, 2), 0.5)), floor=0.6)
        if comm.rank == 0:
            mix.send()  # the first push is allowed
            comm.compute(1.0)
            mix.send()
            assert (mix.w, mix.stats.low_weight) == (0.5, 1)
        rx.barrier(comm)
        mix.close()

    gathered(2, rx.SimulatedWorld(2), program)


@pytest.mark.parametrize("slow", [1, 8])
@pytest.mark.parametrize("latency", [1e-5, 3e-3])
@pytest.mark.parametrize(
    ("topology", "peers"), [(rx.OnePeerExponential(), 1), (rx.Ring(), 2), (rx.Exponential(), 3)]
)
def test_law_steps_stay_short(topology, peers, latency, slow):
    """W stays above floor / (1 + d), however late messages are and however slow a rank is."""

    def program():
        with rx.Comm.world(timeout=1e4) as comm:
            rng = np.random.default_rng(comm.rank)
            mix, least = rx.AsyncPushSum(comm, np.ones(1), topology, floor=0.5), 1.0
            for _ in range(100):
                comm.compute(1e-3 * (slow if comm.rank == 0 else 1) * (0.5 + rng.random()))
                mix.send()
                mix.fold()
                least = min(least, mix.w)
            mix.close()
            return min(least, mix.w)

    least = rx.SimulatedWorld(8, network=rx.Network(latency, 1e9), seed=1).run(program)
    assert min(least) > 0.5 / (1 + peers) - 1e-12


@pytest.mark.parametrize("world", ["late", "lossy"])
def test_saved_state_is_drained_and_resumes(world):
    """What is saved has all mass; going on from it is going on."""
    saved, points = {}, {}

    def steps(comm, mix, x, begin, end):
        rng = np.random.default_rng((7, comm.rank, begin))
        for step in range(begin, end):
            comm.compute(rng.random())
            x -= 0.1 * (x / mix.w - comm.rank) * (step < 30)
            mix.send()
            mix.fold()

    def first(comm, _):
        x = np.full(2, float(comm.rank))
        mix = rx.AsyncPushSum(comm, x, rx.OnePeerExponential(), max_staleness=2)
        steps(comm, mix, x, 0, 30)
        saved[comm.rank] = mix.state_dict(), x.copy()
        points[comm.rank] = mix.w
        steps(comm, mix, x, 30, 60)
        mix.close()
        return x, mix.w, mix.step

    def second(comm, _):
        state, x = saved[comm.rank]
        mix = rx.AsyncPushSum(comm, x, rx.OnePeerExponential(), max_staleness=2)
        mix.load_state_dict(state)
        assert (mix.w, mix.step) == (points[comm.rank], 30)
        steps(comm, mix, x, 30, 60)
        mix.close()
        return x, mix.w, mix.step

    ends = []
    for program in (first, second):
        ends.append(gathered(4, rx.SimulatedWorld(4, faults=WORLDS[world]), program))
    assert abs(sum(points.values()) - 4) < 1e-12
    for end in ends:
        assert abs(sum(w for _, w, _ in end) - 4) < 1e-12
        assert all(step == 60 for *_, step in end)
    assert abs(sum(x for x, *_ in ends[0]) - sum(x for x, *_ in ends[1])).max() < 1e-12


def test_resuming_in_lock_step_is_exact():
    """Law 9, where the order of events is fixed: tau = 0 and ranks of one pace."""
    saved = {}

    def steps(comm, mix, x, begin, end):
        for step in range(begin, end):
            comm.compute(1.0)
            x -= 0.1 * (x / mix.w - comm.rank - step)
            mix.send()
            mix.fold()
        return x.copy(), mix.w

    def first(comm, _):
        x = np.full(2, float(comm.rank))
        mix = rx.AsyncPushSum(comm, x, rx.OnePeerExponential(), max_staleness=0)
        steps(comm, mix, x, 0, 9)
        state = mix.state_dict()
        saved[comm.rank] = state, x.copy()
        end = steps(comm, mix, x, 9, 20)
        mix.close()
        return end

    def second(comm, _):
        state, x = saved[comm.rank]
        mix = rx.AsyncPushSum(comm, x, rx.OnePeerExponential(), max_staleness=0)
        mix.load_state_dict(state)
        end = steps(comm, mix, x, 9, 20)
        mix.close()
        return end

    one, two = (gathered(4, rx.SimulatedWorld(4), program) for program in (first, second))
    for (x, w), (y, v) in zip(one, two, strict=True):
        assert w == v
        assert (x == y).all()


@pytest.mark.long
@pytest.mark.parametrize("lossy", [False, True])
def test_twenty_thousand_steps_leave_no_memory_behind(lossy):
    blocks, steps = [], 3_000 if lossy else 10_000

    def program(comm, points):
        x = np.ones(64, np.float32)
        mix = points[comm.rank] = rx.AsyncPushSum(comm, x, rx.Ring())
        for step in range(steps):
            comm.compute(1e-4)
            mix.send()
            mix.fold()
            if comm.rank == 0 and step in (2_000, steps - 1):
                blocks.append(sys.getallocatedblocks())
        assert len(mix._spare) + len(mix._leaving) < 20
        mix.close()

    faulty = [faults.Drop(0.1), faults.Reorder(0.1, within=1e-3)] if lossy else []
    gathered(2, rx.SimulatedWorld(2, faults=faulty), program)
    assert blocks[1] - blocks[0] < 2_000


def test_ranks_that_differ_are_refused_on_all():
    """Law 11, at construction: nothing has moved, and the Comm stays usable."""

    def program(comm, points):
        odd = comm.rank == 1
        x = np.ones(4)
        for other in (
            {"x": np.ones(4, np.float32)},
            {"x": np.ones(5)},
            {"topology": rx.Exponential()},
            {"max_staleness": 3},
            {"name": "another"},
        ):
            given = {"x": x, "topology": rx.Ring(), **(other if odd else {})}
            with pytest.raises(rx.MismatchError, match="AsyncPushSum"):
                rx.AsyncPushSum(comm, given.pop("x"), given.pop("topology"), **given)
        for kind, other in (
            (TypeError, {"x": np.ones(4, np.int32)}),
            (TypeError, {"topology": "ring"}),
            (ValueError, {"max_staleness": -1}),
            (TypeError, {"codec": rx.Quantizer(bits=8)}),
            (TypeError, {"codec": rx.ErrorFeedback(rx.Quantizer(bits=8))}),
            (ValueError, {"floor": 1.0}),
            (TypeError, {"name": 3}),
        ):
            given = {"x": x, "topology": rx.Ring(), **other}
            with pytest.raises(kind):
                rx.AsyncPushSum(comm, given.pop("x"), given.pop("topology"), **given)
            given = {"x": x, "topology": rx.Ring(), **(other if odd else {})}
            with pytest.raises(rx.MismatchError, match="rank 1: AsyncPushSum, refused"):
                rx.AsyncPushSum(comm, given.pop("x"), given.pop("topology"), **given)
        assert rx.allreduce(comm, 1) == comm.size

    gathered(3, rx.SimulatedWorld(3), program)


def test_use_after_close_and_other_mistakes():
    def program(comm, points):
        mix = rx.AsyncPushSum(comm, np.ones(1), rx.Ring(), name="mine")
        mix.send(step=4)
        assert mix.step == 5
        with pytest.raises(ValueError, match="must not go back"):
            mix.send(step=4)
        with pytest.raises(rx.RelaxError, match="'mine' of this Comm is open"):
            comm.close()
        mix.close()
        for call in (mix.send, mix.fold, mix.state_dict):
            with pytest.raises(rx.RelaxError, match="closed"):
                call()

    gathered(2, rx.SimulatedWorld(2), program)


def steps_on(comm, count=30, **options):
    """Two endpoints on one Comm, of different lengths, with metrics in between."""
    x, y = np.full(7, float(comm.rank)), np.full(20_000, 2.0 * comm.rank, np.float32)
    one = rx.AsyncPushSum(comm, x, rx.Ring(), name="one", **options)
    two = rx.AsyncPushSum(comm, y, rx.OnePeerExponential(), name="two", **options)
    for step in range(count):
        one.send()
        two.send()
        if step % 7 == comm.rank:
            comm.compute(2e-4)
        if step % 20 == 0:
            assert rx.allreduce(comm, 1) == comm.size
        comm.progress()
        two.fold()
        one.fold()
    two.close()
    one.close()
    n = comm.size
    total = rx.allreduce(comm, np.append(x, [one.w, two.w, y.sum(dtype="f8") / y.size]))
    assert abs(total[:7] - n * (n - 1) / 2).max() < 1e-11
    assert total[7:9] == pytest.approx([n, n], abs=1e-11)
    assert total[9] == pytest.approx(n * (n - 1), rel=1e-5)
    return one, two


@pytest.mark.ranks(1, 2, 3, 4)
def test_on_real_ranks(comm):
    """The laws of sums, with and without a bound, and what goes over the wire: 4 bytes a number."""
    before = comm.stats.payload_bytes
    _, two = steps_on(comm)
    if comm.size > 1:
        assert two.stats.bytes == two.stats.messages * (HEADER + 80_000)
        assert comm.stats.payload_bytes - before >= two.stats.messages * 80_000
    steps_on(comm, max_staleness=0)
    steps_on(comm, max_staleness=3)


@pytest.mark.ranks(2, 4)
def test_in_the_background(comm):
    """What arrives while this thread computes is put aside, never into x."""
    with comm.background():
        mix = rx.AsyncPushSum(comm, (x := np.ones(1000)), rx.Ring())
        for _ in range(20):
            mix.send()
            before = x.copy()
            comm.compute(3e-3)
            assert (x == before).all()
            mix.fold()
        mix.close()
    assert rx.allreduce(comm, x.copy())[0] == pytest.approx(comm.size, abs=1e-11)


@pytest.mark.ranks(2, 3)
def test_one_rank_stops_a_second_earlier(comm):
    """C33, on MPI."""
    x = np.full(3, float(comm.rank))
    mix = rx.AsyncPushSum(comm, x, rx.Ring(), max_staleness=2)
    for _ in range(5 if comm.rank == 0 else 15):
        mix.send()
        mix.fold()
        comm.compute(0.01)
    if comm.rank:
        comm.compute(0.9)
    mix.close()
    assert rx.allreduce(comm, x.copy()) == pytest.approx(3 * [comm.size * (comm.size - 1) / 2])


@pytest.mark.ranks(2)
def test_many_steps_on_mpi_leave_no_memory_behind(comm):
    """And no requests: messages, their buffers and acknowledgements come back."""
    mix = rx.AsyncPushSum(comm, np.ones(1000, np.float32), rx.Ring(), max_staleness=4)
    for step in range(2000):
        mix.send()
        mix.fold()
        if step == 500:
            tracemalloc.start()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 100_000
    assert len(mix._spare) + len(mix._leaving) < 10
    assert len(mix._box._notes) < 10
    mix.close()


def test_a_program_that_ends_without_close_ends(launch):
    """Receives that are posted for ever do not hinder MPI's shutdown."""
    done = launch(
        """
        import numpy as np, relaxmpi as rx
        comm = rx.Comm.world()
        mix = rx.AsyncPushSum(comm, np.ones(1000), rx.Ring())
        mix.send(); mix.fold()
        rx.barrier(comm)
        print("over")
        """,
        2,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("over") == 2


def test_long_messages_between_nodes_go_in_pieces(launch):
    done = launch(
        """
        import numpy as np, relaxmpi as rx
        with rx.Comm.world() as comm:
            x = np.full(100_001, float(comm.rank))
            mix = rx.AsyncPushSum(comm, x, rx.Ring(), max_staleness=1)
            for _ in range(10):
                mix.send(); mix.fold()
            mix.close()
            total = rx.allreduce(comm, x.copy())
            assert abs(total - 1).max() < 1e-12, total
        """,
        2,
        env={"RELAXMPI_RANKS_PER_NODE": "1", "RELAXMPI_SEGMENT": "10000"},
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
