"""Laws of AsyncPairwise, the communication of AD-PSGD: sums, no deadlock, ends."""

import logging

import numpy as np
import pytest

import relaxmpi as rx
from relaxmpi import faults

LATE = [faults.Delay(0.5, seconds=3e-3)]
LOSSY = [faults.Drop(0.3), faults.Duplicate(0.1, later=2e-3), faults.Reorder(0.5, within=5e-3)]


def exchange(comm, steps, gradient=0.0, size=3):
    """Random exchanges at random paces; returns x at the start, what was added since, and x."""
    rng = np.random.default_rng((11, comm.rank))
    x = rng.standard_normal(size)
    begin, added = x.copy(), np.zeros(size)
    pairs = rx.AsyncPairwise(comm, x)
    assert pairs.active == (comm.rank % 2 == 0)
    for _ in range(steps):
        if not pairs.active:
            pairs.serve()
        elif pairs.peers and pairs.fold(wait=rng.random() < 0.5):
            pairs.ask(int(rng.choice(pairs.peers)))
        comm.compute(1e-3 * rng.random())
        step = gradient * (x - comm.rank)
        x -= step
        added -= step
    pairs.close()
    return begin, added, x, pairs


@pytest.mark.parametrize("faulty", [[], LATE, LOSSY], ids=["healthy", "late", "lossy"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_exchanges_keep_the_sum(n, faulty):
    """C13: to rounding, with gradient steps between question and answer; any n, also odd ones."""
    for seed in range(2):

        def program():
            with rx.Comm.world() as comm:
                return exchange(comm, 100, 0.05)

        ends = rx.SimulatedWorld(n, faults=faulty, seed=seed).run(program)
        expected = sum(begin + added for begin, added, *_ in ends)
        assert abs(sum(x for *_, x, _ in ends) - expected).max() < 1e-12
        asked = sum(pairs.exchanges for *_, pairs in ends if pairs.active)
        assert asked == sum(pairs.exchanges for *_, pairs in ends if not pairs.active)
        assert n == 1 or asked > 10


def test_one_rank_that_all_others_hammer():
    """C13: n - 1 askers at once; C14: nobody waits in a circle."""

    def program():
        with rx.Comm.world() as comm:
            x = np.full(4, float(comm.rank))
            pairs = rx.AsyncPairwise(comm, x)
            for _ in range(300):
                if pairs.active:
                    pairs.ask(1)
                else:
                    pairs.serve()
                    comm.compute(1e-5)
            pairs.close()
            return x, pairs.exchanges

    ends = rx.SimulatedWorld(6).run(program)
    assert abs(sum(x for x, _ in ends) - 15).max() < 1e-12
    assert ends[1][1] == 900


def test_without_gradients_all_find_the_mean():
    def program():
        with rx.Comm.world() as comm:
            return exchange(comm, 200)

    ends = rx.SimulatedWorld(6).run(program)
    mean = sum(begin for begin, *_ in ends) / 6
    assert max(abs(x - mean).max() for *_, x, _ in ends) < 1e-3


def test_a_slow_rank_slows_nobody_else():
    """C34: askers go on while a slow answerer computes."""

    def program():
        with rx.Comm.world() as comm:
            x = np.ones(2)
            pairs = rx.AsyncPairwise(comm, x)
            for step in range(30):
                comm.compute(0.1)
                if not pairs.active:
                    pairs.serve()
                elif pairs.fold(wait=False):
                    pairs.ask(pairs.peers[step % len(pairs.peers)])
            took = comm.now()
            pairs.close()
            return took

    took = rx.SimulatedWorld(4, faults=[faults.SlowDown(3, factor=5.0)]).run(program)
    assert max(took[:3]) < 3.1
    assert took[3] > 14


def test_drained_state_has_the_sum():
    def program():
        with rx.Comm.world() as comm:
            x = np.full(1, float(comm.rank))
            pairs = rx.AsyncPairwise(comm, x)
            for step in range(20):
                comm.compute(0.01 * (1 + comm.rank))
                if pairs.active:
                    pairs.ask(pairs.peers[step % len(pairs.peers)])
                else:
                    pairs.serve()
            pairs.drain()
            held = x.copy()
            if pairs.active:
                pairs.ask(pairs.peers[0])
            pairs.close()
            return held

    assert sum(rx.SimulatedWorld(4).run(program)) == pytest.approx([6.0], abs=1e-13)


def test_no_answer_is_a_timeout_that_names_the_edge(caplog):
    caplog.set_level(logging.CRITICAL, "relaxmpi")

    def program():
        with rx.Comm.world(timeout=5) as comm:
            pairs = rx.AsyncPairwise(comm, np.ones(1))
            if comm.rank == 0:
                comm.compute(1.0)
                pairs.ask(1)
                with pytest.raises(rx.PeerTimeout, match="edge 1 -> 0: no answer to question 1"):
                    pairs.fold()
                with pytest.raises(rx.BrokenComm, match="broke earlier"):
                    pairs.fold()
                pairs.close()
            else:
                comm.compute(100.0)

    rx.SimulatedWorld(2, faults=[faults.Kill(1, at=0.5)]).run(program)


def test_mistakes():
    def program():
        with rx.Comm.world() as comm:
            with pytest.raises(rx.MismatchError):
                rx.AsyncPairwise(comm, np.ones(1 + (comm.rank == 1)))
            with pytest.raises(TypeError, match="float32 or float64"):
                rx.AsyncPairwise(comm, np.ones(1, "f2"))
            pairs = rx.AsyncPairwise(comm, np.ones(1))
            with pytest.raises(ValueError, match="even ranks ask, odd ranks answer"):
                pairs.ask(2 if comm.rank == 0 else 0)
            pairs.close()
            pairs.close()
            with pytest.raises(rx.RelaxError, match="closed"):
                pairs.serve()

    rx.SimulatedWorld(3).run(program)


@pytest.mark.ranks(1, 2, 3, 4)
def test_on_real_ranks(comm):
    begin, added, x, pairs = exchange(comm, 60, 0.05, size=1000)
    expected, total = rx.allreduce(comm, begin + added), rx.allreduce(comm, x.copy())
    assert abs(total - expected).max() < 1e-11
    done = rx.allreduce(comm, np.array([pairs.exchanges * (1 if pairs.active else -1)]))
    assert done[0] == 0
