"""The laws of the verbs under faults: every law that holds on a healthy network holds on a bad one.

A failing example is printed by hypothesis with its seed and faults, and replays exactly.
"""

import collections
import logging
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relaxmpi as rx
from relaxmpi import faults

CODECS = [None, rx.Identity(), rx.Cast("fp16"), rx.MinMaxUInt8(), rx.Quantizer(bits=4), rx.OneBit()]
TIMES = st.floats(0, 2e-3)


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Broken Comms are what some of these tests are about; a thousand of them need no log."""
    caplog.set_level(logging.CRITICAL, "relaxmpi")


def chances(n):
    """Conditions of a message fault."""
    one = st.none() | st.integers(0, n - 1)
    return {
        "probability": st.sampled_from([0.05, 0.3, 1.0]),
        "source": one,
        "dest": one,
        "nth": st.none() | st.integers(0, 3),
        "after": TIMES,
    }


def harmless(n):
    """Faults that cost time only."""
    return st.lists(
        st.one_of(
            st.builds(faults.Delay, seconds=TIMES, **chances(n)),
            st.builds(faults.Reorder, within=TIMES, **chances(n)),
            st.builds(faults.Duplicate, later=TIMES, **chances(n)),
            st.builds(faults.Pause, rank=st.integers(0, n - 1), at=TIMES, seconds=TIMES),
            st.builds(
                faults.SlowDown,
                rank=st.integers(0, n - 1),
                factor=st.floats(0.5, 20),
                at=TIMES,
            ),
        ),
        max_size=5,
    )


def harmful(n):
    """Faults that lose something."""
    ranks = st.integers(0, n - 1)
    return st.one_of(
        st.builds(faults.Drop, **chances(n)),
        st.builds(faults.Kill, rank=ranks, at=TIMES),
        st.builds(faults.Kill, rank=ranks, call=st.integers(0, 9)),
    )


@st.composite
def worlds(draw, mixes=harmless, most=5):
    n = draw(st.integers(2, most))
    hurt = draw(mixes(n))
    network = rx.Network(
        latency=draw(st.sampled_from([0.0, 1e-6, 1e-4])),
        bandwidth=draw(st.sampled_from([1e6, 1e9])),
        eager=draw(st.sampled_from([0, 100, 10**6])),
        scale=draw(st.sampled_from([1.0, 3.0])),
    )
    return rx.SimulatedWorld(
        n,
        network=network,
        faults=hurt,
        seed=draw(st.integers(0, 2**32)),
        ranks_per_node=draw(st.integers(1, 2)),
        jitter=draw(st.sampled_from([0.0, 0.5])),
        grouped_above=draw(st.sampled_from([64, 1])),
    )


def healthy(world):
    return rx.SimulatedWorld(world.n, ranks_per_node=world.nodes.count(0))


class Clock:
    """A clock that sees to it that it never runs backwards."""

    def __init__(self, comm):
        self.comm, self.last = comm, comm.now()

    def __call__(self):
        now = self.comm.now()
        assert now >= self.last
        self.last = now


def numbers(rank, d=257, seed=0):
    return np.random.default_rng([9, rank, seed]).standard_normal(d).astype("f4")


def conserved(world):
    """Whether messages are neither made nor lost without being counted."""
    c = world.counts
    return c.sent + c.duplicated == c.received + c.discarded + c.dropped + c.in_flight


def several(codec, nodes, overlapped):
    """Several calls, some in flight at once; what this rank holds in the end, as bytes."""
    with rx.Comm.world() as world, world.dup(together=overlapped) as other:
        comm = world.by_node() if nodes else world
        clock, held, r = Clock(world), [], world.rank
        memory = None if codec is None else rx.ErrorFeedback(codec)
        for k in range(3):
            x, y = numbers(r, seed=k), numbers(r, 33, seed=k)
            if overlapped:
                with comm.background():
                    first = rx.allreduce.start(comm, x, op=rx.MEAN, codec=codec, name="x")
                    second = rx.allreduce.start(other, y, codec=memory, name="y")
                    world.compute(3e-4)
                    clock()
                    while not second.test():
                        clock()
                    first.wait()
            else:
                rx.allreduce(comm, x, op=rx.MEAN, codec=codec, name="x")
                clock()
                world.compute(3e-4)
                rx.allreduce(other, y, codec=memory, name="y")
            clock()
            held += [x, y, rx.broadcast(comm, numbers(r, 9), root=k % comm.size)]
            held.append(rx.allgather(other, numbers(r, 5, k), codec=codec))
            clock()
        if nodes:
            comm.close()
        return b"".join(h.tobytes() for h in held)


@settings(max_examples=25, deadline=None)
@given(
    world=worlds(),
    codec=st.sampled_from(CODECS),
    nodes=st.booleans(),
    overlapped=st.booleans(),
)
def test_all_ranks_hold_the_bytes_that_a_healthy_network_gives(world, codec, nodes, overlapped):
    """Laws 1, 6 and 12: faults cost time, never a bit."""
    results = world.run(several, codec, nodes, overlapped)
    assert len(set(results)) == 1
    assert results == healthy(world).run(several, codec, nodes, False)
    assert conserved(world)
    assert world.counts.received == world.counts.sent


@settings(max_examples=30, deadline=None)
@given(world=worlds(), codec=st.sampled_from(CODECS[1:]))
def test_feedback_loses_nothing(world, codec):
    """Law 2: sum_t y_t = sum_t mean_i x_it - mean_i e_iT - E_T, and bytes are what nbytes says."""
    steps, d = 4, 37

    def program():
        with rx.Comm.world() as comm:
            memory, total = rx.ErrorFeedback(codec), np.zeros(d)
            for k in range(steps):
                y = numbers(comm.rank, d, seed=k).astype("f8")
                total += rx.allreduce(comm, y, op=rx.MEAN, codec=memory)
            owed = np.zeros(d)
            for (lo, hi), e in memory.residual("worker").items():
                owed[lo:hi] += np.asarray(e) / comm.size
            for (lo, hi), e in memory.residual("owner").items():
                owed[lo:hi] += np.asarray(e)
            rx.allreduce(comm, owed)
            c = -(-d // comm.size)
            chunks = [len(range(min(r * c, d), min((r + 1) * c, d))) for r in range(comm.size)]
            sizes = [codec.nbytes(count, "float64") if count else 0 for count in chunks]
            mine = sizes[comm.rank]
            expected = sum(sizes) - mine + (comm.size - 1) * mine
            return total + owed, comm.stats.payload_bytes - steps * expected

    means = sum(
        np.mean([numbers(r, d, seed=k) for r in range(world.n)], axis=0, dtype="f8")
        for k in range(steps)
    )
    for total, _ in world.run(program):
        assert np.allclose(total, means, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(world=worlds(), codec=st.sampled_from([None, rx.Quantizer(bits=8)]))
def test_hierarchical_is_flat_and_fused_is_apart(world, codec):
    """Law 7: to rounding without a codec, within its error with one."""

    def program():
        with rx.Comm.world() as comm, comm.by_node() as nodes:
            flat = rx.allreduce(comm, numbers(comm.rank), op=rx.MEAN, codec=codec)
            high = rx.allreduce(nodes, numbers(comm.rank), op=rx.MEAN, codec=codec)
            parts = numbers(comm.rank)
            for lo in range(0, len(parts), 100):
                rx.allreduce(comm, parts[lo : lo + 100], op=rx.MEAN, codec=codec, name=str(lo))
            return flat, high, parts

    exact = np.mean([numbers(r) for r in range(world.n)], axis=0, dtype="f8")
    bound = 1e-6 if codec is None else 0.1
    for results in world.run(program):
        for result in results:
            assert np.allclose(result, exact, atol=bound)


WRONG = {
    TypeError: lambda comm: rx.allreduce(comm, np.ones(3, "i4"), op=rx.MEAN),
    ValueError: lambda comm: rx.broadcast(comm, np.ones(3), root=9),
    rx.MismatchError: lambda comm: rx.allreduce(comm, np.ones(3 + (comm.rank == 1))),
}


@settings(max_examples=40, deadline=None)
@given(world=worlds(), kind=st.sampled_from(list(WRONG)), alone=st.booleans())
def test_a_wrong_call_is_the_same_class_of_error_everywhere(world, kind, alone):
    """Law 11: before anything moved, and the Comm goes on."""

    def program():
        with rx.Comm.world() as comm:
            try:
                if alone and comm.rank == 0 and kind is not rx.MismatchError:
                    rx.allreduce(comm, np.ones(3))
                else:
                    WRONG[kind](comm)
            except Exception as error:
                raised = type(error)
            assert comm.stats.payload_bytes == 0
            assert rx.allreduce(comm, 1) == comm.size
            return raised

    expected = kind if not alone else rx.MismatchError
    raised = set(world.run(program))
    assert raised <= {kind, expected}
    assert len(raised) == 1 or alone


def hopeful():
    """Calls with a short timeout; the errors, or the sums."""
    comm = rx.Comm.world(timeout=0.5)
    seen = []
    for k in range(4):
        try:
            comm.compute(2e-4)
            begin = comm.now()
            x = np.full(100 * k + 3, 1.0 + comm.rank)
            rx.allreduce(comm, x, codec=rx.Identity() if k % 2 else None)
            rx.allgather(comm, x[:2])
            y = rx.broadcast(comm, np.full(40, comm.rank), root=k % comm.size)
            seen.append((x[0], y[0]))
        except rx.RelaxError as error:
            seen.append(type(error))
            assert comm.now() - begin < 2.0
    return seen


def check_survivors(world, results):
    """Right numbers up to the first error, and then nothing but errors."""
    n = world.n
    right = [(n * (n + 1) / 2, k % n) for k in range(4)]
    for rank, seen in enumerate(results):
        if rank in world.killed:
            assert seen is None
            continue
        ok = [s for s in seen if isinstance(s, tuple)]
        assert ok == right[: len(ok)]
        assert all(issubclass(s, rx.RelaxError) for s in seen[len(ok) :])
        if len(ok) < 4:
            assert seen[len(ok)] in (rx.PeerTimeout, rx.PeerLeft)
    assert conserved(world)


@settings(max_examples=150, deadline=None)
@given(
    world=worlds(
        lambda n: st.tuples(harmless(n), st.lists(harmful(n), min_size=1, max_size=3)).map(
            lambda pair: pair[0] + pair[1]
        )
    )
)
def test_what_is_lost_is_an_error_within_the_timeout_and_never_a_wrong_number(world):
    check_survivors(world, world.run(hopeful))


@pytest.mark.long
def test_a_killed_rank_is_an_error_on_the_others_in_a_thousand_seeds():
    outcomes = collections.Counter()
    for seed in range(1000):
        rank, when = seed % 3, faults.draw(seed, 77)
        at, call = (when * 1.5e-3, None) if seed % 2 else (None, int(12 * when))
        fault = faults.Kill(rank, at=at, call=call)
        world = rx.SimulatedWorld(3, faults=[fault], seed=seed)
        results = world.run(hopeful)
        check_survivors(world, results)
        assert world.killed in ([rank], [])
        outcomes[str([r if r is None else r[-1] for r in results])] += 1
    assert len(outcomes) > 3
    assert threading.active_count() < 10


def test_a_program_that_ends_early_is_peer_left():
    def program(early):
        comm = rx.Comm.world()
        for k in range(3):
            if comm.rank == 1 and k == 2:
                if early == "exit":
                    raise SystemExit(0)
                return "early"
            try:
                rx.allreduce(comm, np.ones(3))
            except rx.PeerLeft as error:
                assert "rank 1 ended after 2 calls" in str(error)
                assert comm.now() < 0.1
                return "left"
        return "done"

    assert rx.SimulatedWorld(3).run(program, "return") == ["left", "early", "left"]
    assert rx.SimulatedWorld(3).run(program, "exit") == ["left", None, "left"]


def test_a_killed_rank_is_silent_and_runs_no_handler_of_exceptions():
    handled, unwound = [], []

    def program():
        comm = rx.Comm.world(timeout=2)
        try:
            for _ in range(100):
                try:
                    comm.compute(0.1)
                    rx.allreduce(comm, 1)
                except Exception as error:
                    handled.append((comm.rank, type(error)))
                    return comm.now()
        finally:
            unwound.append(comm.rank)

    world = rx.SimulatedWorld(3, faults=[faults.Kill(1, at=0.95)])
    first, dead, third = world.run(program)
    assert dead is None
    assert world.killed == [1]
    assert handled == [(r, rx.PeerTimeout) for r in (handled[0][0], 2 - handled[0][0])]
    assert sorted(unwound) == [0, 1, 2]
    assert 2.9 < min(first, third) <= max(first, third) < 4.5
    assert 0.9 <= world.clocks[1] <= 0.96


def test_a_killed_rank_dies_before_its_call():
    def program():
        comm = rx.Comm.world(timeout=1)
        done = 0
        try:
            for done in range(10):  # noqa: B007
                rx.allreduce(comm, 1)
        except rx.PeerTimeout:
            return done
        return 10

    for call in (0, 3, 9, 10):
        world = rx.SimulatedWorld(2, faults=[faults.Kill(0, call=call)])
        assert world.run(program) == ([10, 10] if call == 10 else [None, call])


@pytest.mark.parametrize("above", [64, 1])
def test_messages_are_conserved_at_every_moment(above):
    hurt = [faults.Kill(2, at=8e-4), faults.SlowDown(1, factor=3.0)]
    if above > 1:
        hurt += [faults.Drop(0.02), faults.Duplicate(0.3, later=1e-4), faults.Reorder(0.3)]
    flying = 0

    def program():
        nonlocal flying
        comm = rx.Comm.world(timeout=0.5)
        works = [rx.allreduce.start(comm, numbers(comm.rank, 3000)) for _ in range(3)]
        for _ in range(50):
            comm.compute(2e-5)
            comm.progress()
            assert conserved(world)
            flying += world.counts.in_flight
        for work in works:
            try:
                work.wait()
            except rx.RelaxError:
                assert conserved(world)

    for seed in range(5):
        world = rx.SimulatedWorld(4, faults=hurt, seed=seed, grouped_above=above)
        world.run(program)
        assert conserved(world)
    assert flying > 0
    assert world.counts.sent > 20


# ------------------------------------------------------------------------ single faults


def clocks(*hurt, seed=0, **others):
    def program():
        with rx.Comm.world() as comm:
            for _ in range(5):
                comm.compute(1e-3)
                rx.allreduce(comm, np.ones(100))
            return comm.now()

    world = rx.SimulatedWorld(2, faults=hurt, seed=seed, **others)
    return max(world.run(program)), world.counts


def test_what_each_fault_does_to_time_and_counts():
    clean, none = clocks()
    assert none == (20, 0, 20, 0, 0, 0)
    late, counts = clocks(faults.Delay(source=0, nth=0, seconds=0.25))
    assert np.isclose(late - clean, 0.25, atol=2e-4)
    assert counts == none
    late, _ = clocks(faults.Reorder(within=0.25, source=0, nth=0), seed=5)
    assert 0 < late - clean < 0.25
    late, counts = clocks(faults.Duplicate(later=1e-4))
    assert counts[:5] == (20, 20, 20, counts.discarded, 0)
    assert counts.discarded + counts.in_flight == 20
    late, _ = clocks(faults.Pause(1, at=2e-3, seconds=0.5))
    assert np.isclose(late - clean, 0.5, atol=2e-3)
    late, _ = clocks(faults.SlowDown(1, factor=3.0, at=0.0))
    assert np.isclose(late - clean, 5 * 2e-3, atol=1e-4)
    late, _ = clocks(faults.SlowDown(1, factor=3.0, at=0.0, until=1e-9))
    assert np.isclose(late - clean, 2e-3, atol=1e-4)
    late, _ = clocks(jitter=0.5)
    assert 0 < late - clean < 5 * 0.5e-3
    late, _ = clocks(faults.Delay(seconds=0.25, after=1.0))
    assert late == clean


def test_the_peers_are_not_blamed_for_a_pause_of_this_rank():
    def program():
        with rx.Comm.world(timeout=1) as comm:
            comm.compute(0.2 * comm.rank)  # rank 0 is paused where it waits
            rx.allreduce(comm, 1)
            return comm.now()

    both = [faults.Pause(0, at=0.1, seconds=99.5), faults.Pause(1, at=0.1, seconds=100.0)]
    assert min(rx.SimulatedWorld(2, faults=both).run(program)) > 100
    with pytest.raises(rx.PeerTimeout):
        rx.SimulatedWorld(2, faults=both[1:]).run(program)


@pytest.mark.parametrize("background", [False, True])
def test_a_pause_takes_its_time_from_a_computation(background):
    def program():
        with rx.Comm.world() as comm:
            if background:
                with comm.background():
                    comm.compute(1.0)
            else:
                comm.compute(1.0)
            return comm.now()

    hurt = [
        faults.Pause(0, at=0.2, seconds=0.1),
        faults.Pause(0, at=0.25, seconds=0.1),
        faults.Pause(0, at=1.1, seconds=5.0),
        faults.Pause(1, at=1.5, seconds=1.0),
    ]
    assert np.allclose(rx.SimulatedWorld(2, faults=hurt).run(program), [6.15, 1.0])


def test_a_dropped_message_is_a_timeout_of_the_comm():
    def program():
        comm = rx.Comm.world(timeout=3)
        with pytest.raises(rx.PeerTimeout):
            for _ in range(5):
                rx.allreduce(comm, np.ones(100))
        with pytest.raises(rx.BrokenComm):
            rx.allreduce(comm, np.ones(100))
        return comm.now()

    world = rx.SimulatedWorld(2, faults=[faults.Drop(source=0, nth=3)])
    assert 3 < min(world.run(program)) < max(world.clocks) < 4.5
    assert world.counts.dropped == 1


def test_a_message_that_overtakes_waits_for_its_turn():
    """Twenty numbered messages of one pair, shuffled and doubled by the network."""

    @rx.primitive
    def stream(comm):
        from relaxmpi.primitives.devices import device_of
        from relaxmpi.primitives.transport import Every

        transport, inbox = comm.transport(device_of(np.empty(0))), np.zeros((20, 1))

        def flow():
            if comm.rank == 0:
                yield Every([transport.isend(np.full(1, float(k)), 1) for k in range(20)])
            else:
                for row in inbox:
                    yield transport.irecv(row, 0)
            return inbox[:, 0].tolist()

        return flow()

    hurt = [faults.Reorder(0.7, within=1e-2), faults.Duplicate(0.5, later=5e-3)]
    for seed in range(50):
        world = rx.SimulatedWorld(2, faults=hurt, seed=seed)
        _, got = world.run(lambda: stream(rx.Comm.world()))
        assert got == list(range(20))
        assert world.counts.received == 20
        assert world.counts.duplicated > 0


# ------------------------------------------------------------------- seeds that fail


def fragile():
    """A program that believes that a message never takes longer than a computation."""
    with rx.Comm.world() as comm:
        work = rx.allreduce.start(comm, np.ones(1000))
        for _ in range(6):
            comm.compute(3e-4)
            comm.progress()
        if comm.rank == 1 and not work.test():
            raise AssertionError(f"the race was lost at {comm.now()!r}")
        work.wait()
        return comm.now()


def test_a_failing_seed_is_named_and_replays_exactly():
    hurt = [faults.Reorder(0.5, within=1e-3)]

    def run(seed):
        world = rx.SimulatedWorld(3, faults=hurt, seed=seed)
        try:
            world.run(fragile)
        except AssertionError as error:
            return str(error), "".join(getattr(error, "__notes__", [str(error.__cause__)]))
        return None

    failing = {seed: said for seed in range(30) if (said := run(seed)) is not None}
    assert 3 < len(failing) < 27
    for seed, (text, note) in failing.items():
        assert f"seed {seed}" in note
        assert "rank 1" in note
        for _ in range(3):
            assert run(seed) == (text, note)
