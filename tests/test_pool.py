"""The lane of neighbour verbs: a blocking call becomes a work only where it must."""

import numpy as np
import pytest

import relaxmpi as rx


class Patience:
    """Counts the works that it looks after."""

    size = 1
    begun = 0

    def begin(self):
        self.begun += 1
        return self.begun - 1

    def end(self):
        pass

    def look(self, work):
        return None


class Late:
    """A request that is done after so many looks; a look may raise instead."""

    def __init__(self, looks, error=None):
        self.looks, self.error = looks, error

    def test(self):
        self.looks -= 1
        if self.looks == 0 and self.error is not None:
            raise self.error
        return self.looks < 0


class MpiError(Exception):
    def Get_error_class(self):
        return 1


@pytest.fixture
def pool(comm, monkeypatch):
    lane = comm.edges.pool
    monkeypatch.setattr(type(lane._world), "brisk", 60.0)  # a pause of the process is no long call
    return lane


def run(pool, *requests):
    patience = Patience()

    def flow():
        try:
            yield from requests
        except MpiError:
            return "mended"
        return "done"

    return (lambda: pool.run(flow(), lambda: "call", patience)), patience


@pytest.mark.ranks(1)
def test_a_short_call_is_no_work(pool):
    call, patience = run(pool, Late(0), Late(3))
    assert call() == "done"
    assert patience.begun == 0
    assert pool.idle


@pytest.mark.ranks(1)
def test_a_long_call_becomes_one(pool, monkeypatch):
    monkeypatch.setattr(type(pool._world), "brisk", 1e-4)
    late = Late(5000)
    call, patience = run(pool, Late(0), late)
    assert call() == "done"
    assert patience.begun == 1
    assert late.looks == -1  # it was never waited for again


@pytest.mark.ranks(1)
def test_behind_others_it_is_one(pool):
    pending = Late(50)
    work = pool.submit((r for r in [pending]), lambda: "first", Patience())
    call, patience = run(pool, Late(100))
    assert call() == "done"
    assert patience.begun == 1
    assert work.test()


@pytest.mark.ranks(1)
def test_a_signal_leaves_the_messages_under_way(pool):
    call, _ = run(pool, Late(2, KeyboardInterrupt()), Late(1))
    with pytest.raises(KeyboardInterrupt):
        call()
    assert len(pool) == 1
    pool._works[0].wait()
    assert pool.idle


@pytest.mark.ranks(1)
def test_an_error_of_mpi_is_the_flows(pool):
    call, patience = run(pool, Late(2, MpiError()))
    assert call() == "mended"
    assert patience.begun == 0


@pytest.mark.ranks(2)
def test_blocking_calls_between_started_ones(comm):
    graph, x, w = rx.Ring(), np.full(1000, float(comm.rank)), np.ones(1)
    for _ in range(40):
        work = rx.push_sum.start(comm, x, w, topology=graph)
        dx, dw = rx.push_sum(comm, x, w, topology=graph)
        ex, ew = work.wait()
        x += dx + ex
        w += dw + ew
    np.testing.assert_allclose(x / w[0], 0.5)
