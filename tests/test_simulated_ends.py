"""How a simulated world ends: deadlocks, errors, interrupts and real locks leave no thread."""

import _thread
import logging
import signal
import sys
import threading
import time

import numpy as np
import pytest

import relaxmpi as rx


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def notes(error):
    return "".join(getattr(error, "__notes__", [str(error.__cause__)]))


# -------------------------------------------------------------------------- deadlocks


def test_a_deadlock_says_who_waits_for_what():
    def program():
        one, two = rx.Comm.world(), rx.Comm.world()
        rx.barrier(one)
        if one.rank == 2:
            rx.barrier(two)
        else:
            rx.allreduce(one, np.ones(5), name="loss")
        rx.barrier(one)

    with pytest.raises(rx.Deadlock) as stuck:
        rx.SimulatedWorld(4).run(program)
    said = str(stuck.value)
    assert "ranks 0, 1, 3 wait in allreduce sum float64 (5,) name 'loss' for rank 2" in said
    assert "rank 2 waits in barrier for ranks 0, 1, 3" in said


def test_a_deadlock_of_streams_that_move_together():
    def program():
        with rx.Comm.world() as one, one.dup(together=True) as two, one.dup() as three:
            if one.rank == 1:
                rx.barrier(three)
            works = [rx.allreduce.start(comm, np.ones(9)) for comm in (one, two)]
            for work in reversed(works):
                work.wait()

    with pytest.raises(rx.Deadlock, match=r"ranks 0, 2 wait in allreduce .* for rank 1; rank 1"):
        rx.SimulatedWorld(3).run(program)


def test_a_deadlock_takes_no_virtual_time_of_waiting():
    def program():
        one, two = rx.Comm.world(), rx.Comm.world()
        one.compute(2.0)
        rx.barrier(one if one.rank else two)

    world = rx.SimulatedWorld(2)
    with pytest.raises(rx.Deadlock, match="after 2 s"):
        world.run(program)
    assert max(world.clocks) == 2.0


def test_a_receive_that_nobody_sends_to():
    @rx.primitive
    def lonely(comm):
        from relaxmpi.primitives.devices import device_of

        def flow():
            if comm.rank == 1:
                yield comm.transport(device_of(np.empty(0))).irecv(np.empty(1), 0)

        return flow()

    def program():
        with rx.Comm.world() as comm:
            lonely(comm)
            rx.barrier(comm)

    with pytest.raises(rx.Deadlock, match=r"barrier for rank 1; rank 1 waits in lonely for rank 0"):
        rx.SimulatedWorld(2).run(program)


def test_a_call_with_a_timeout_of_its_own_is_no_deadlock():
    def program():
        one, two = rx.Comm.world(), rx.Comm.world()
        work = rx.allreduce.start(one if one.rank else two, 1)
        with pytest.raises(TimeoutError):
            work.wait(5.0)
        with two.background(), one.background():  # a wait drives its own Comm only
            other = rx.allreduce.start(two if one.rank else one, 1)
            one.compute(0.01)
        return work.wait() + other.wait(), one.now()

    for value, now in rx.SimulatedWorld(2).run(program):
        assert value == 4
        assert 5.0 < now < 5.1


def test_with_a_fault_time_jumps_to_the_timeout():
    def program():
        one, two = rx.Comm.world(), rx.Comm.world()
        rx.barrier(one)
        with pytest.raises(rx.PeerTimeout):
            rx.allreduce(one, np.ones(3))
        with pytest.raises(rx.BrokenComm):
            rx.allreduce(one, np.ones(3))
        return rx.allreduce(two, 1)

    world = rx.SimulatedWorld(2, faults=[rx.faults.Drop(nth=0, source=0)])
    begin = time.perf_counter()
    assert world.run(program) == [2, 2]
    assert time.perf_counter() - begin < 10
    assert 60 < max(world.clocks) < 130


def test_a_slow_rank_is_a_timeout_as_on_mpi_and_no_deadlock():
    def program():
        comm = rx.Comm.world(timeout=2)
        comm.compute(50.0 * (comm.rank == 0))
        with pytest.raises(rx.PeerTimeout) as error:
            rx.allreduce(comm, 1)
        return str(error.value), comm.now()

    first, *others = rx.SimulatedWorld(3).run(program)
    assert first[1] > 50
    assert "gave up" in first[0]
    for text, now in others:
        assert "not heard from rank 0" in text
        assert 2 < now < 4


def test_time_in_computation_is_not_held_against_the_peers():
    def program():
        comm = rx.Comm.world(timeout=1)
        comm.compute(100.5 * comm.rank)
        works = [rx.allreduce.start(comm, np.ones(1000)) for _ in range(3)]
        comm.compute(100.5 * (2 - comm.rank) - 0.5 * (comm.rank == 0))
        return [work.wait()[0] for work in works]

    assert rx.SimulatedWorld(3).run(program) == [[3.0] * 3] * 3


# --------------------------------------------------------------------------- errors


def test_an_error_on_one_rank_ends_all_and_names_the_rank():
    ended = []

    def program():
        comm = rx.Comm.world()
        try:
            if comm.rank == 2:
                comm.compute(1.0)
                raise KeyError("mine")
            while True:
                rx.barrier(comm)
        except Exception:
            assert comm.rank == 2
            raise
        finally:
            ended.append(comm.rank)

    world = rx.SimulatedWorld(4, seed=7)
    with pytest.raises(KeyError, match="mine") as error:
        world.run(program)
    assert "rank 2" in notes(error.value)
    assert "seed 7" in notes(error.value)
    assert sorted(ended) == [0, 1, 2, 3]


def test_an_error_inside_a_flow_reaches_the_caller():
    class Bad(rx.Codec):
        def nbytes(self, count, dtype):
            return 4 * count

        def encode(self, x, payload, *, key=None, offset=0):
            raise KeyError("encode")

        def decode(self, payload, out):
            raise AssertionError

        def describe(self):
            return "bad"

    with pytest.raises(KeyError, match="encode"):
        rx.SimulatedWorld(2).run(lambda: rx.allreduce(rx.Comm.world(), np.ones(4), codec=Bad()))


def test_messages_of_another_length_are_an_error():
    @rx.primitive
    def crossed(comm):
        from relaxmpi.primitives.devices import device_of

        transport = comm.transport(device_of(np.empty(0)))

        def flow():
            if comm.rank == 0:
                yield transport.isend(np.ones(3), 1)
            else:
                yield transport.irecv(np.ones(2), 0)

        return flow()

    with pytest.raises(rx.RelaxError, match="24 bytes met a receive of 16"):
        rx.SimulatedWorld(2).run(lambda: crossed(rx.Comm.world()))


def test_an_error_before_any_call_and_with_no_comm_at_all():
    def program():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rx.SimulatedWorld(100).run(program)
    assert rx.SimulatedWorld(3).run(lambda: 5) == [5, 5, 5]


def test_code_that_calls_on_while_it_is_ended():
    def program():
        comm = rx.Comm.world()
        if comm.rank == 0:
            comm.compute(1.0)
            raise KeyError
        try:
            rx.barrier(comm)
        finally:
            for _ in range(3):
                try:
                    rx.barrier(comm)
                except BaseException:
                    comm.progress()

    with pytest.raises(KeyError):
        rx.SimulatedWorld(3).run(program)


# ------------------------------------------------------------------------ interrupts


def test_a_keyboard_interrupt_in_a_rank():
    def program():
        comm = rx.Comm.world()
        if comm.rank == 1:
            raise KeyboardInterrupt
        rx.barrier(comm)

    with pytest.raises(KeyboardInterrupt):
        rx.SimulatedWorld(3).run(program)


@pytest.mark.parametrize("what", ["busy", "asleep"])
def test_ctrl_c_ends_all_ranks(what):
    def program():
        comm = rx.Comm.world()
        while True:
            rx.barrier(comm)
            if what == "asleep" and comm.rank == 1:
                time.sleep(0.2)

    before = signal.signal(signal.SIGALRM, lambda *_: _thread.interrupt_main())
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            rx.SimulatedWorld(3).run(program)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_sleep_takes_real_time_only():
    def program():
        comm = rx.Comm.world()
        time.sleep(0.05)
        rx.barrier(comm)
        return comm.now()

    begin = time.perf_counter()
    assert max(rx.SimulatedWorld(4).run(program)) < 1e-3
    assert time.perf_counter() - begin >= 0.2


def test_a_real_lock_held_across_a_call_is_reported_with_its_stack(caplog):
    lock = threading.Lock()

    def program():
        comm = rx.Comm.world()
        with lock:  # the line that blocks
            rx.barrier(comm)

    with pytest.raises(rx.RelaxError, match="the line that blocks") as error:
        rx.SimulatedWorld(3, watchdog=0.2).run(program)
    assert "real lock" in str(error.value)
    assert "the line that blocks" in caplog.text
    assert lock.acquire(timeout=1)


def test_a_long_computation_is_reported_and_goes_on(caplog):
    def program():
        comm = rx.Comm.world()
        end = time.perf_counter() + 1.5 * (comm.rank == 1)
        while time.perf_counter() < end:
            np.ones(1000).sum()
        return rx.allreduce(comm, 1)

    assert rx.SimulatedWorld(2, watchdog=0.2).run(program) == [2, 2]
    assert caplog.text.count("rank 1 of the simulated world has run for") == 1


def test_real_locks_that_are_not_held_across_calls_are_fine():
    lock, seen = threading.Lock(), []

    def program():
        comm = rx.Comm.world()
        for _ in range(5):
            with lock:
                seen.append(comm.rank)
            rx.barrier(comm)

    rx.SimulatedWorld(5).run(program)
    assert len(seen) == 25


def test_a_world_inside_a_rank_of_another():
    def inner():
        return rx.allreduce(rx.Comm.world(), 1)

    def outer():
        with rx.Comm.world() as comm:
            total = sum(rx.SimulatedWorld(comm.rank + 1).run(inner))
            return rx.allreduce(comm, total)

    assert rx.SimulatedWorld(3).run(outer) == [1 + 4 + 9] * 3


def test_many_worlds_leave_no_memory_behind():
    import gc
    import weakref

    class Big:
        pass

    held = []

    def program():
        big = Big()
        held.append(weakref.ref(big))
        with rx.Comm.world() as comm:
            rx.allreduce(comm, np.ones(10))
        return big

    world = rx.SimulatedWorld(3)
    world.run(program)
    gc.collect()
    assert all(ref() is None for ref in held)


# ----------------------------------------------------------------------------- torch


def test_attach_trains_the_same_model_as_one_rank_with_all_the_data():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    data = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    target = data.sum(1, keepdim=True)

    def train(bits=None, background=False):
        with rx.Comm.world() as comm:
            model = torch.nn.Sequential(
                torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            )
            with torch.no_grad():
                for k, p in enumerate(model.parameters()):
                    p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p) + 0.01 * k)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            algorithm = rx.SGD() if bits is None else rx.QSGD(bits=bits)
            mine = slice(comm.rank, None, comm.size)
            with rx.attach(model, optimizer, algorithm, comm=comm, bucket_bytes=64) as sync:
                for _ in range(5):
                    loss = torch.nn.functional.mse_loss(model(data[mine]), target[mine])
                    loss.backward()
                    comm.compute(1e-3)
                    optimizer.step()
                    optimizer.zero_grad()
                assert sync.stats().steps == 5
            return torch.cat([p.detach().ravel() for p in model.parameters()]).numpy()

    (alone,) = rx.SimulatedWorld(1).run(train)
    for n in (2, 4):
        world = rx.SimulatedWorld(n, ranks_per_node=2)
        together = world.run(train)
        assert len({t.tobytes() for t in together}) == 1
        assert np.allclose(together[0], alone, atol=1e-5)
        assert 5e-3 < max(world.clocks) < 20e-3
    coded = rx.SimulatedWorld(3).run(train, 8)
    assert len({t.tobytes() for t in coded}) == 1
    assert np.allclose(coded[0], alone, atol=0.05)


def test_the_log_is_quiet_in_a_healthy_world(caplog):
    caplog.set_level(logging.DEBUG)
    rx.SimulatedWorld(3).run(lambda: rx.allreduce(rx.Comm.world(), 1))
    assert caplog.text == ""
    assert sys.getswitchinterval() > 0
