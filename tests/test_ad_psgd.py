"""AD-PSGD, and OSGP without a bound: what holds at any pace, in the simulated world."""

import numpy as np
import pytest
from gossips import pulls, simulate

import relaxmpi as rx

FREE = {"ad-psgd": rx.ADPSGD(), "osgp": rx.OSGP(tau=None, topology=rx.Ring())}
free = pytest.mark.parametrize("spec", FREE.values(), ids=FREE)


@free
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(3))
def test_law_the_sum_changes_by_the_gradients_alone(spec, n, seed):
    def run():
        with rx.Comm.world() as comm:
            x = np.full(3, 5.0 + comm.rank)
            opt = spec.bind(comm, x, lr=0.03)
            moved = np.zeros(3)
            for _ in range(40 + 20 * comm.rank):
                comm.compute(1e-3 * (1 + comm.rank % 3))
                g = pulls(comm, size=3)(x)
                moved -= 0.03 * g
                opt.step(g)
            mean = opt.mean()
            opt.finish()
            return mean, 5.0 + comm.rank + moved, x.copy()

    runs = simulate(n, run, seed, delayed=seed > 0)
    want = np.mean([total for _, total, _ in runs], axis=0)
    for mean, _, _ in runs:
        np.testing.assert_allclose(mean, want, rtol=1e-12)
        np.testing.assert_array_equal(mean, runs[0][0])


@free
def test_ranks_agree_and_go_where_the_gradients_pull(spec):
    def run():
        with rx.Comm.world() as comm:
            x = np.zeros(1)
            opt = spec.bind(comm, x, lr=0.01)
            tail = []
            for t in range(1200):
                comm.compute(1e-3)
                opt.step(pulls(comm)(x))
                if t > 600:
                    tail.append(x[0])
            mean = opt.mean()[0]
            opt.finish()
            return mean, np.mean(tail), np.std(tail)

    for mean, average, deviation in simulate(8, run):
        assert abs(mean - 3.5) < 0.1
        assert abs(average - 3.5) < 0.2
        assert deviation < 0.1


@free
def test_a_slow_rank_slows_nobody(spec):
    def run():
        with rx.Comm.world() as comm:
            x = np.zeros(1)
            opt = spec.bind(comm, x, lr=0.01)
            begin, slow = comm.now(), 1 + 9 * (comm.rank == 3)
            for _ in range(200 // slow):
                comm.compute(1e-3 * slow)
                opt.step(pulls(comm)(x))
            took = comm.now() - begin
            opt.finish()
            return took

    assert max(simulate(4, run)[:3]) < 0.21


@free
@pytest.mark.parametrize("seed", range(2))
def test_what_was_saved_goes_on_from_there(spec, seed):
    """No two free runs are alike; but nothing is lost, and the model is the one that was saved."""

    def run():
        with rx.Comm.world() as comm:
            x = np.full(1, float(comm.rank))
            opt = spec.bind(comm, x, lr=0.01)
            for _ in range(20 + comm.rank):
                comm.compute(1e-3)
                opt.step(pulls(comm)(x))
            state, kept = opt.state_dict(), x.copy()
            want = opt.mean()[0]
            for _ in range(5):
                opt.step(np.ones(1))
            opt.load_state_dict(state)
            np.testing.assert_array_equal(x, kept)
            assert opt.mean()[0] == want
            opt.finish()
            y = np.zeros(1)
            again = spec.bind(comm, y, lr=0.01)
            again.load_state_dict(state)
            np.testing.assert_array_equal(y, kept)
            assert again.mean()[0] == want
            again.finish()
            again.step(np.zeros(1))  # goes on after the end, too
            again.finish()

    simulate(4, run, seed, delayed=seed > 0)


@pytest.mark.ranks(1, 2, 3, 4)
@free
def test_on_real_ranks(comm, spec):
    x = np.full(50, float(comm.rank))
    opt = spec.bind(comm, x, lr=0.0)
    for _ in range(30):
        opt.step(np.zeros(50))
    mean = opt.mean()
    np.testing.assert_allclose(mean, (comm.size - 1) / 2, rtol=1e-12)
    opt.finish()
    assert x.std() < 1e-12


@pytest.mark.ranks(1)
@free
def test_law_one_rank_is_plain_descent(comm, spec):
    x, want = np.ones(5), np.ones(5)
    opt = spec.bind(comm, x, lr=0.1)
    for _ in range(9):
        opt.step(x - 3)
        want -= 0.1 * (want - 3)
    opt.finish()
    assert x.tobytes() == want.tobytes()
