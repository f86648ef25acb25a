"""Ranks of one host read each other's memory: the same sums, and never a wrong one."""

import os
import re
from dataclasses import replace

import numpy as np
import pytest
from hosts import CPU, run, schedules, sums_in_disorder
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing import can_read, needs_reading, needs_sharing

import relaxmpi as rx
from relaxmpi.primitives import pulls, shared_schedule
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.wire import Plain
from relaxmpi.primitives.work import Work

MANY = pytest.mark.ranks(2, 3, 4)
NOBODY = 2**22 + 1  # Linux has no process of this number

# Beyond the length from which ranks read, for any number of them, and uneven.
LONG = 300_001


@given(
    st.integers(2, 5),
    st.lists(st.sampled_from([1, 2, 7, 63, 64, 65, 500, 1001]), min_size=1, max_size=4),
    st.sampled_from(["f4", "f2", "f8", "i4", "u1", "c8"]),
    st.booleans(),
    st.sampled_from(["all", "hidden", "never"]),
    st.sampled_from([16, 600, pulls._OF_ALL]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=300, deadline=None)
def test_all_orders_of_steps_give_the_same_sums(n, counts, dtype, in_place, who, part, seed):
    """Some ranks do it in Python and some by compiled code; one may have what nobody can read."""
    draw = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulls, "_SHORT", 0)
        patch.setattr(pulls, "_OF_ALL", part)
        ranks = schedules(n, 256, np.flatnonzero(draw.integers(0, 2, n)), reading=True)
        odd = ranks[draw.integers(n)]._pulls
        if who == "hidden":
            odd._processes = [NOBODY] * n
            odd.words[0][:] = NOBODY
        if who == "never":
            odd.__init__(odd._slots, None)
        sums_in_disorder(ranks, counts, dtype, in_place, seed)
    assert all(rank._pulls.able == (who != "never") for rank in ranks)


class Two:
    """Two ranks in one call, which go on when they are told to."""

    def __init__(self, monkeypatch, compiled):
        monkeypatch.setattr(pulls, "_SHORT", 0)
        self.ranks = schedules(2, 256, compiled, reading=True)
        self.x = np.full(10, 1.0), np.full(10, 2.0)
        self.flows = [
            s.allreduce(CPU, a, a, Op.SUM, Plain(CPU, "float64", s._comm.scratch))
            for s, a in zip(self.ranks, self.x, strict=True)
        ]
        self.waits = [next(flow) for flow in self.flows]

    def go_on(self, rank):
        """Go as far as the other one allows."""
        while self.waits[rank].test():
            self.waits[rank] = next(self.flows[rank])

    def give_up(self, rank):
        """Withdraw, use the memory for something else, and come back to say the next turn."""
        self.ranks[rank]._slots.withdraw()
        self.x[rank][:] = 99
        self.ranks[rank]._slots.say()


@pytest.mark.parametrize("compiled", [(), (0,), (1,), (0, 1)])
def test_a_rank_returns_when_its_peer_has_read_all(monkeypatch, compiled):
    """Else it could write to what is still read."""
    two = Two(monkeypatch, compiled)
    for turn in range(20):
        try:
            two.go_on(turn % 2)
        except StopIteration:
            break
        assert turn < 19
    assert (two.x[0] == 3).all()
    assert (two.x[1] == 3).all()
    with pytest.raises(StopIteration):
        two.go_on((turn + 1) % 2)


@pytest.mark.parametrize("compiled", [(), (0,)])
def test_sums_of_a_rank_that_has_withdrawn_are_no_result(monkeypatch, compiled):
    two = Two(monkeypatch, compiled)
    two.go_on(0)  # has added up its chunk
    two.give_up(1)
    two.go_on(0)
    assert (two.x[0] == [3] * 5 + [99] * 5).all()
    two.ranks[1]._slots.say()
    for _ in range(50):
        two.go_on(0)


def test_numbers_of_a_rank_that_withdraws_meanwhile_are_no_result(monkeypatch):
    two = Two(monkeypatch, ())
    read = pulls.Reader.read

    def beaten(self, *args):
        two.give_up(1)
        two.ranks[1]._slots.say()
        return read(self, *args)

    monkeypatch.setattr(pulls.Reader, "read", beaten)
    for _ in range(50):
        two.go_on(0)


def test_a_result_may_lie_where_nobody_reads(monkeypatch):
    """As memory that a device has mapped: all take two copies then, and no longer."""
    monkeypatch.setattr(pulls, "_SHORT", 0)
    ranks = schedules(2, 256, reading=True)
    x, out = [np.full(10, 1.0), np.full(10, 2.0)], [np.zeros(10), np.zeros(10)]
    hidden = out[1].ctypes.data
    lets = pulls.Reader.lets
    monkeypatch.setattr(
        pulls.Reader,
        "lets",
        lambda self, p, begin, end: begin != hidden and lets(self, p, begin, end),
    )
    wire = Plain(CPU, "float64", ranks[0]._comm.scratch)
    run([s.allreduce(CPU, a, b, Op.SUM, wire) for s, a, b in zip(ranks, x, out, strict=True)], 1)
    assert all((b == 3).all() for b in out)
    assert all(rank._pulls.able for rank in ranks)


def test_a_dead_process_is_waited_for(monkeypatch):
    monkeypatch.setattr(pulls, "_SHORT", 0)
    for compiled in ((), (0, 1)):
        ranks = schedules(2, 256, compiled, reading=True)
        for rank in ranks:
            dead = rank._pulls
            dead._processes = [os.getpid() if r == rank._comm.rank else NOBODY for r in (0, 1)]
            dead.words[0][:] = dead._processes
        x = [np.ones(10), np.ones(10)]
        flows = [
            s.allreduce(CPU, a, a, Op.SUM, Plain(CPU, "float64", s._comm.scratch))
            for s, a in zip(ranks, x, strict=True)
        ]
        with pytest.raises(AssertionError, match="nothing moves"):
            run(flows, 1)


@MANY
def test_ranks_of_this_machine_read_each_other(comm):
    """Else all others here would test slots."""
    needs_sharing()
    assert comm.shared.pulls.reads or not can_read()


@MANY
def test_messages_reduce_to_the_same_bytes(comm):
    needs_reading()
    by_messages = rx.Comm(comm._world, replace(comm.settings, shared_memory=0))
    for warm in (False, True):
        if warm:
            for _ in range(shared_schedule._WARM_UP):
                rx.allreduce(comm, 1)
        for dtype in ("f4", "f2", "f8", "i8", "c8"):
            x = np.random.default_rng(comm.rank).integers(-50, 50, LONG).astype(dtype)
            right = rx.allreduce(by_messages, x.copy())
            out, y = np.empty_like(x), x.copy()
            assert rx.allreduce(comm, x, out).tobytes() == right.tobytes()
            assert rx.allreduce(comm, y).tobytes() == right.tobytes()
            assert comm.schedule._pulls.able


@MANY
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_one_rank_that_may_not_read_is_enough(comm, dtype):
    needs_sharing()
    wanted = replace(comm.settings, single_copy=int(comm.rank != 1))
    other = rx.Comm(comm._world, wanted)
    x = np.full(LONG, 1.0 + comm.rank, dtype)
    for _ in range(2):
        y = x.copy()
        assert (rx.allreduce(other, y) == sum(range(1, comm.size + 1))).all()
        assert not other.schedule._pulls.able
    before = other.stats.payload_bytes
    rx.allreduce(other, x)
    expected = 2 * (comm.size - 1) * x.nbytes / comm.size
    assert other.stats.payload_bytes - before == pytest.approx(expected, rel=1e-4)


@MANY
def test_what_was_learned_before_ranks_could_not_read_is_done_without(comm):
    """The call that finds out is forgotten, beside ranks whose array is of another kind, too."""
    needs_sharing()
    other = rx.Comm(comm._world, replace(comm.settings, single_copy=int(comm.rank != 1)))
    for _ in range(shared_schedule._WARM_UP):
        rx.allreduce(other, 1)
    kind = type("Array", (np.ndarray,), {})
    for k in range(4):
        x = np.full(LONG, 1.0 + comm.rank)
        got = rx.allreduce(other, x.view(kind) if k % 2 and comm.rank == 0 else x)
        assert (got == sum(range(1, comm.size + 1))).all()
        assert ((LONG,), np.dtype("f8"), False, "") not in other.schedule._learned


@MANY
def test_a_long_call_is_learned_and_counted_as_before(comm):
    needs_reading()
    for _ in range(shared_schedule._WARM_UP):
        rx.allreduce(comm, 1)
    x, counted = np.ones(LONG, "f4"), []
    for _ in range(3):
        before = comm.stats.payload_bytes, comm.stats.messages, comm.stats.header_bytes
        rx.allreduce(comm, x, op=rx.MEAN)
        after = comm.stats.payload_bytes, comm.stats.messages, comm.stats.header_bytes
        counted.append(np.subtract(after, before).tolist())
    assert ((LONG,), np.dtype("f4"), True, "") in comm.schedule._learned
    assert counted[0] == counted[1] == counted[2]
    assert (x == 1).all()


@MANY
def test_ranks_that_differ_move_nothing(comm):
    needs_reading()
    for warm in (False, True):
        for _ in range(warm * shared_schedule._WARM_UP):
            rx.allreduce(comm, 1)
        x = np.full(LONG, 1.0 + comm.rank)
        for _ in range(2):
            rx.allreduce(comm, x.copy())
        kept = x.copy()
        with pytest.raises(rx.MismatchError, match="rank"):
            rx.allreduce(comm, x, op=rx.MEAN if comm.rank == 1 else rx.SUM)
        assert (x == kept).all()
        rx.allreduce(comm, x)
        assert (x == sum(range(1, comm.size + 1))).all()


STOPPED = """
import os, signal, sys, time
import numpy as np
import relaxmpi as rx
from relaxmpi.primitives import pulls

comm = rx.Comm.world(timeout=3)
when = int(sys.argv[1])
others = comm.mpi.allgather(os.getpid())
x = np.full(300_001, 1.0 + comm.rank)
rx.allreduce(comm, x.copy())
assert comm.schedule._pulls.able
read, reads = pulls.Reader.read, []

def stopping(self, *args):
    reads.append(args)
    if comm.rank == 0 and len(reads) == when:
        os.kill(os.getpid(), signal.SIGSTOP)
    return read(self, *args)

comm.mpi.Barrier()
pulls.Reader.read = stopping
try:
    rx.allreduce(comm, x)
    print("RETURNED", comm.rank, flush=True)
except rx.RelaxError as error:
    print("RAISED", comm.rank, type(error).__name__, flush=True)
    if comm.rank:
        x[:] = 99
        os.kill(others[0], signal.SIGCONT)
        time.sleep(3)  # or there would be nothing to read
os._exit(0)
"""


@pytest.mark.parametrize("when", ["first", "last"])
def test_a_rank_that_was_stopped_does_not_return_what_came_too_late(launch, when):
    """Its peer has given up meanwhile, and has other numbers in that memory."""
    needs_reading()
    reads = -(-300_001 // 2 * 8 // pulls._OF_ALL) + 1
    done = launch(STOPPED, 2, str(1 if when == "first" else reads))
    assert "RETURNED" not in done.stdout
    assert sorted(re.findall(r"RAISED (\d) \w+", done.stdout)) == ["0", "1"]


GONE = """
import ctypes, mmap, os, time
import numpy as np
import relaxmpi as rx
from relaxmpi.primitives import pulls

comm = rx.Comm.world(timeout=3)
x = np.frombuffer(mmap.mmap(-1, 300_001 * 8), np.float64)
x[:] = 1
rx.allreduce(comm, x)
assert comm.schedule._pulls.able
unmap = ctypes.CDLL(None).munmap
unmap.argtypes = ctypes.c_void_p, ctypes.c_size_t

def gone(self, *args):
    assert unmap(x.ctypes.data, x.nbytes) == 0
    time.sleep(5)
    raise MemoryError

if comm.rank == 1:
    pulls.Reader.read = gone
try:
    rx.allreduce(comm, x)
    print("RETURNED", comm.rank, flush=True)
except Exception as error:
    print("RAISED", comm.rank, type(error).__name__, flush=True)
comm.mpi.Barrier()
os._exit(0)
"""


def test_memory_that_is_gone_ends_in_an_error_everywhere(launch):
    needs_reading()
    done = launch(GONE, 3)
    assert "RETURNED" not in done.stdout
    assert re.findall(r"RAISED 1 (\w+)", done.stdout) == ["MemoryError"]
    assert sorted(re.findall(r"RAISED (\d) ", done.stdout)) == ["0", "1", "2"]


def test_memory_is_withdrawn_before_anybody_sees_that_the_call_has_failed(monkeypatch):
    """Else another thread could go on and write to it."""
    order = []
    fail = Work._fail
    monkeypatch.setattr(Work, "_fail", lambda *a: (order.append("failed"), fail(*a)))

    def program():
        comm = rx.Comm.world(timeout=1)
        if comm.rank:
            comm.compute(5)
        else:
            comm.queue.withdrawals.append(lambda: order.append("withdrawn"))
            with pytest.raises(rx.PeerTimeout):
                rx.allreduce(comm, np.ones(3))

    rx.SimulatedWorld(2).run(program)
    assert order[:2] == ["withdrawn", "failed"]
