"""The facts that cost others days: our verbs do not share the fault."""

import threading

import numpy as np
import pytest

import relaxmpi as rx

MANY = pytest.mark.ranks(2, 3, 4)


@MANY
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2"])
@pytest.mark.parametrize("op", [rx.MAX, rx.MIN])
def test_a_nan_survives_extremes(comm, dtype, op):
    for where in range(comm.size):
        x = np.full(5, float(comm.rank), dtype)
        if comm.rank == where:
            x[2] = np.nan
        rx.allreduce(comm, x, op=op)
        assert np.isnan(x[2])
        assert not np.isnan(x[[0, 1, 3, 4]]).any()


@MANY
def test_half_precision_does_not_overflow_in_the_sum(comm):
    x = np.full(7, 40000, "f2")
    assert (rx.allreduce(comm, x.copy(), op=rx.MEAN) == np.float16(40000)).all()
    alternating = np.full(3, 60000 if comm.rank % 2 else -60000, "f2")
    expected = 0 if comm.size % 2 == 0 else -60000
    assert (rx.allreduce(comm, alternating) == np.float16(expected)).all()
    assert np.isinf(rx.allreduce(comm, np.full(3, 60000, "f2"))).all()  # 2 x 60000 is no half


@MANY
def test_half_precision_rounds_once(comm):
    x = np.random.default_rng(comm.rank).standard_normal(1000).astype("f2")
    exact = sum(
        np.random.default_rng(r).standard_normal(1000).astype("f2").astype("f8")
        for r in range(comm.size)
    )
    assert np.array_equal(rx.allreduce(comm, x), exact.astype("f4").astype("f2"))


@pytest.mark.ranks(2, 4)
def test_a_thread_with_its_own_dup(comm):
    wrong = []

    def reduce_many(stream, value):
        for k in range(100):
            if (rx.allreduce(stream, np.full(100, value + k)) != comm.size * (value + k)).any():
                wrong.append(k)

    with comm.dup() as other:
        thread = threading.Thread(target=reduce_many, args=(other, 1000.0))
        thread.start()
        reduce_many(comm, 1.0)
        thread.join()
    assert not wrong


@pytest.mark.ranks(2)
def test_two_threads_on_one_comm_are_refused(comm):
    """One is told to use dup(), naming both; the other goes on unharmed."""
    inside, said = threading.Event(), []

    def second():
        inside.wait()
        try:
            rx.allreduce(comm, np.ones(3))
        except rx.RelaxError as error:
            said.append(str(error))

    @rx.primitive
    def slow(comm):
        def flow():
            inside.set()
            thread.join()
            yield from rx.barrier.flow(comm)

        return flow()

    thread = threading.Thread(target=second, name="intruder")
    thread.start()
    slow(comm)
    assert len(said) == 1
    assert "intruder" in said[0]
    assert "slow" in said[0]
    assert "dup" in said[0]
    assert rx.allreduce(comm, 1) == comm.size


@pytest.mark.ranks(2)
def test_threads_may_take_turns(comm):
    results = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: results.append(rx.allreduce(comm, 1)))
        thread.start()
        thread.join()
    assert results == [comm.size] * 3


@MANY
def test_a_dropped_work_is_completed(comm):
    """A dropped Isend request crashes; a dropped Work does not."""
    for _ in range(20):
        rx.allreduce.start(comm, np.ones(100_000, "f4"))
    assert rx.allreduce(comm, 1) == comm.size


@MANY
def test_the_buffer_may_be_dropped(comm):
    works = [rx.allreduce.start(comm, np.full(100_000, 1.0 * k)) for k in range(8)]
    for k, work in enumerate(works):
        assert (work.wait() == k * comm.size).all()


@MANY
def test_out_of_place_inputs_stay_readable(comm):
    x = np.arange(1000.0)
    x.flags.writeable = False
    assert np.array_equal(rx.allreduce(comm, x, np.empty(1000)), x * comm.size)


@MANY
def test_a_blocking_call_inside_a_primitive_is_refused(comm):
    @rx.primitive
    def nested(comm):
        def flow():
            rx.allreduce(comm, 1)
            yield from rx.barrier.flow(comm)

        return flow()

    with pytest.raises(rx.RelaxError, match="flow"):
        nested(comm)


@MANY
def test_a_foreign_comm_inside_a_primitive_is_refused(comm):
    other = comm.dup()

    @rx.primitive
    def mixed(comm):
        def flow():
            yield from rx.barrier.flow(other)

        return flow()

    with pytest.raises(rx.RelaxError, match="another Comm"):
        mixed(comm)
    other.close()


@MANY
def test_closing(comm):
    stream = comm.dup()
    work = rx.allreduce.start(stream, np.ones(1_000_000, "f4"))
    if not work.test():
        with pytest.raises(rx.RelaxError, match="pending"):
            stream.close()
    work.wait()
    stream.close()
    stream.close()
    with pytest.raises(rx.RelaxError, match="closed"):
        rx.barrier(stream)
    assert work.test()


@MANY
def test_wait_with_a_limit_leaves_the_work_pending(comm):
    with comm.dup() as stream:
        if comm.rank == 0:
            work = rx.allreduce.start(stream, np.ones(3))
            with pytest.raises(TimeoutError, match="still pending"):
                work.wait(timeout=0.05)
            comm.mpi.barrier()
        else:
            comm.mpi.barrier()
            work = rx.allreduce.start(stream, np.ones(3))
        assert (work.wait() == comm.size).all()
