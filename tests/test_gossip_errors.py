"""Neighbour verbs that are called wrongly, or whose peers do not come: an error at both ends."""

import sys
from dataclasses import dataclass

import numpy as np
import pytest

import relaxmpi as rx

RING, ONE_PEER = rx.Ring(), rx.OnePeerExponential()
LOPSIDED = rx.from_matrix(np.array([[0.5, 0, 0.5], [0.25, 0.5, 0], [0.25, 0.5, 0.5]]))
X, W = np.ones(3), np.ones(1)


def outcome(function):
    """What a rank ends with: its error, if it ends so."""

    def program():
        with rx.Comm.world(timeout=5) as comm:
            try:
                return function(comm)
            except Exception as error:
                return error

    return program


def run(n, function, **world):
    return rx.SimulatedWorld(n, **world).run(outcome(function))


def average(comm, x, **kwargs):
    return rx.neighbor_allreduce(comm, x.copy(), **{"topology": RING, **kwargs})


def push(comm, x, **kwargs):
    given = {"topology": ONE_PEER, "step": 0, **kwargs}
    return rx.push_sum(comm, x.copy(), given.pop("w", W.copy()), **given)


REFUSED = {
    "integers": (TypeError, "floats", lambda c: average(c, np.ones(3, int))),
    "bool": (TypeError, "floats", lambda c: push(c, np.ones(3, bool))),
    "plain codec": (TypeError, "DifferenceComp", lambda c: average(c, X, codec=rx.MinMaxUInt8())),
    "feedback": (
        TypeError,
        "DifferenceComp",
        lambda c: push(c, X, codec=rx.ErrorFeedback(rx.OneBit())),
    ),
    "DCD pushes": (TypeError, "must be a Diff", lambda c: push(c, X, codec=rx.DCD(rx.OneBit()))),
    "no step": (ValueError, "step=", lambda c: push(c, X, step=None)),
    "far step": (ValueError, "less than 2", lambda c: push(c, X, step=2**63)),
    "step": (TypeError, "step must be", lambda c: push(c, X, step="0")),
    "rows": (ValueError, "push_sum", lambda c: average(c, X, topology=LOPSIDED)),
    "topology": (TypeError, "must be a Topology", lambda c: average(c, X, topology="ring")),
    "w": (TypeError, "w must be", lambda c: push(c, X, w=1.0)),
    "w of floats": (TypeError, "w must be", lambda c: push(c, X, w=np.ones(1, np.float32))),
    "w of two": (TypeError, "w must be", lambda c: push(c, X, w=np.ones(2))),
    "replicas": (
        ValueError,
        "does not vary",
        lambda c: average(
            c, X, topology=rx.ShiftOne(), step=0, codec=rx.DifferenceCompression(rx.OneBit())
        ),
    ),
    "complex": (
        TypeError,
        "real floats",
        lambda c: average(c, X + 0j, codec=rx.DifferenceCompression(rx.OneBit())),
    ),
    "name": (TypeError, "name must be", lambda c: average(c, X, name=3)),
    "own peer": (
        ValueError,
        "is this rank: name another",
        lambda c: rx.pairwise_average(c, X, peer=c.rank),
    ),
    "no peer": (
        ValueError,
        "none of 3 ranks: name another",
        lambda c: rx.pairwise_average(c, X, peer=9),
    ),
    "all-reduce": (
        TypeError,
        "ErrorFeedback",
        lambda c: rx.allreduce(c, X.copy(), codec=rx.DifferenceCompression(rx.OneBit())),
    ),
    "odd": (ValueError, "", lambda c: average(c, X, topology=rx.BipartiteExponential(), step=0)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_all_and_usable_afterwards(case):
    kind, words, call = REFUSED[case]

    def function(comm):
        found = []
        for again in (False, True):
            if again:
                average(comm, X)
                push(comm, X)
            try:
                call(comm)
            except Exception as error:
                found.append(error)
        assert np.array_equal(average(comm, X), X)
        return found

    for errors in run(3, function):
        assert [type(error) for error in errors] == [kind, kind]
        assert all(words in str(error) for error in errors)


def test_steps_may_be_numbers_of_numpy():
    def function(comm):
        ends = []
        for step in (1, np.int64(1)):
            x, codec = np.arange(3.0) + comm.rank, rx.Quantizer(bits=2)
            average(comm, x, topology=rx.OnePeerExponential(), step=step)
            dx, dw = push(comm, x, step=step)
            rx.allreduce(comm, x, codec=codec, step=step)
            ends.append((x.tobytes(), dx.tobytes(), dw))
        return ends

    for plain, numpy in run(2, function):
        assert plain == numpy


def test_one_rank_refuses_and_its_neighbours_hear_of_it():
    def function(comm):
        average(comm, X)
        try:
            average(comm, np.ones(3, int if comm.rank == 1 else float))
        except Exception as error:
            found = error
        return found, average(comm, X)

    results = run(3, function)
    assert [type(error) for error, _ in results] == [rx.MismatchError, TypeError, rx.MismatchError]
    assert all("rank 1" in str(results[r][0]) and "int64" in str(results[r][0]) for r in (0, 2))
    assert all(np.array_equal(y, X) for _, y in results)


@pytest.mark.ranks(2, 3)
def test_different_calls_on_an_edge(comm):
    first = comm.rank == 0
    memory = rx.DifferenceCompression(rx.Quantizer(bits=4 if first else 8))
    cases = [
        lambda c: average(c, np.ones(7 if first else 200_000)),
        lambda c: average(c, np.ones(200_000 if first else 7)),
        lambda c: average(c, np.ones(4 if first else 0)),
        lambda c: average(c, np.ones(4, np.float32 if first else np.float64)),
        lambda c: average(c, np.ones(4), name="a" if first else "b"),
        lambda c: average(c, np.ones(4), step=1 if first else 2),
        lambda c: average(c, np.ones(4), codec=memory),
        lambda c: average(c, X) if first else push(c, X, topology=RING),
    ]
    for topology in (RING, rx.Complete()):
        average(comm, X, topology=topology)
    cases.append(lambda c: average(c, X, topology=RING if first else rx.Complete()))
    for case in cases:
        shared = comm.rank == 0 or comm.size == 2
        with rx.Comm.world(timeout=20) as stream:
            for topology in (RING, rx.Complete()):
                average(stream, X, topology=topology)
            try:
                case(stream)
                assert not shared
            except rx.MismatchError as error:
                assert "rank 0" in str(error)
                assert "rank 1" in str(error) or "rank 2" in str(error)
            comm.mpi.Barrier()
            assert rx.allreduce(stream, 1) == comm.size  # centralised calls go on


def test_a_new_topology_is_agreed_on():
    for error in run(3, lambda c: average(c, X, topology=RING if c.rank else rx.Complete())):
        assert isinstance(error, rx.MismatchError)
        assert "Ring()" in str(error)
        assert "Complete()" in str(error)
        assert "nothing was moved" in str(error)


def test_a_bad_graph_is_refused_by_all():
    @dataclass(frozen=True)
    class Crooked(rx.Topology):
        def out(self, rank, n, step=0):
            return {(rank + 1) % n: 0.5}

        def into(self, rank, n, step=0):
            return {(rank + 1) % n: 0.5}

    for error in run(3, lambda c: push(c, X, topology=Crooked())):
        assert isinstance(error, ValueError)


def test_replicas_of_different_age():
    def function(comm):
        memory = rx.DifferenceCompression(rx.Quantizer(bits=8))
        for k in range(4):
            if comm.rank == 1 and k == 2:
                memory.reset()
            average(comm, X, codec=memory)

    assert all("memory of rank" in str(error) for error in run(3, function))


def test_who_does_not_come():
    def late(comm):
        average(comm, X)
        if comm.rank == 0:
            comm.compute(100)
        average(comm, X)

    errors = run(4, late)
    for r in (1, 3):
        assert isinstance(errors[r], rx.PeerTimeout)
        assert "nothing from rank 0 for 5 s" in str(errors[r])
        assert "neighbor_allreduce" in str(errors[r])

    def leaves(comm):
        average(comm, X)
        if comm.rank == 0:
            sys.exit()
        average(comm, X)

    world = rx.SimulatedWorld(3)
    errors = world.run(outcome(leaves))
    assert all(isinstance(error, rx.PeerLeft) and "rank 0" in str(error) for error in errors[1:])
    assert max(world.clocks) < 1


def pushes(comm):
    x, w = X.copy(), W.copy()
    for k in range(10):
        dx, dw = rx.push_sum(comm, x, w, topology=ONE_PEER, step=k)
        x += dx
        w += dw
        comm.compute(1e-3)
    return x / w


def test_lost_messages_and_lost_ranks():
    for nth in (6, 7):  # a header, numbers
        errors = run(3, pushes, faults=[rx.faults.Drop(source=0, dest=1, nth=nth)])
        assert any(
            isinstance(error, rx.PeerTimeout) and "push_sum" in str(error) and "step" in str(error)
            for error in errors
        )
    world = rx.SimulatedWorld(3, faults=[rx.faults.Kill(rank=0, at=5e-3)])
    errors = world.run(outcome(pushes))
    assert world.killed == [0]
    assert all(isinstance(errors[r], rx.PeerTimeout) for r in (1, 2))
    assert any("nothing from rank 0" in str(errors[r]) for r in (1, 2))
    for x in run(3, pushes, faults=[rx.faults.Pause(rank=1, at=3e-3, seconds=2.0)]):
        assert np.array_equal(x, X)


def test_peers_that_name_others():
    def function(comm):
        return rx.pairwise_average(comm, X.copy(), peer=(comm.rank + 1) % 3)

    with pytest.raises(rx.Deadlock, match="pairwise_average"):
        rx.SimulatedWorld(3).run(outcome(function))
    errors = run(
        4,
        lambda comm: function(comm) if comm.rank < 3 else comm.compute(1),
        faults=[rx.faults.Kill(rank=3, at=1e-9)],
    )
    assert all(isinstance(error, rx.PeerTimeout) for error in errors[:3])
    for rank, error in enumerate(errors[:3]):
        peer, third = (rank + 1) % 3, (rank + 2) % 3
        assert f"rank {peer} waits for rank {third} in pairwise_average" in str(error)


@pytest.mark.ranks(1, 2)
def test_a_comm_is_not_closed_over_pending_calls(comm):
    x, w = X.copy(), W.copy()
    stream = comm.dup()
    rx.push_sum(stream, x, w, topology=RING)
    if comm.size == 1 or comm.rank == 0:
        work = rx.push_sum.start(stream, x, w, topology=RING)
        if comm.size == 2:
            with pytest.raises(rx.RelaxError, match="pending"):
                stream.close()
        comm.mpi.Barrier()
        work.wait()
    else:
        comm.mpi.Barrier()
        rx.push_sum(stream, x, w, topology=RING)
    stream.close()
    with pytest.raises(rx.RelaxError, match="closed"):
        rx.push_sum(stream, x, w, topology=RING)


@pytest.mark.ranks(2)
def test_sends_outlive_their_comm(comm):
    """Rank 0 is done with its last call, and its Comm, before rank 1 has taken what it sent."""
    W2 = rx.from_matrix(np.array([[0.5, 0.0], [0.5, 1.0]]))
    x, w = np.full(2_000_000, 1.0), W.copy()
    stream = comm.dup()
    rx.push_sum(stream, x, w, topology=W2)
    if comm.rank:
        comm.mpi.Barrier()
        dx, dw = rx.push_sum(stream, x, w, topology=W2)
        assert np.all(dx == 0.25)
        assert dw == 0.25
    else:
        rx.push_sum.start(stream, x, w, topology=W2).wait()
        stream.close()
        x[:] = -1
        comm.mpi.Barrier()
    if not stream.closed:
        stream.close()


def test_inside_a_primitive():
    def function(comm):
        @rx.primitive
        def wrong(comm):
            def flow():
                yield from ()
                average(comm, X)

            return flow()

        wrong(comm)

    assert all("yield from" in str(error) for error in run(2, function))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", [4, -2])
def test_what_a_mismatch_leaves_behind_meets_no_later_call(comm, more):
    """Not even after the tags that MPI promises have all been used."""
    peer = 1 - comm.rank
    x = np.full(4 + (more if comm.rank else 0), -100.0)
    with pytest.raises(rx.MismatchError):
        average(comm, x)
    for number in range(2**14 - 2, 2**14 + 3):
        comm.edges.sent[peer] = comm.edges.received[peer] = number
        for count in (4, 4 + more):
            y = np.full(count, number + comm.rank)
            assert (average(comm, y.astype("f8")) == number + 0.5).all()
            comm.edges.sent[peer] = comm.edges.received[peer] = number
