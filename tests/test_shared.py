"""Ranks of one host talk through memory that they share: any order of steps gives the same."""

import gc
import random
import re
import signal
import time
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hosts import CPU, nothing, reduced, run, schedules, sums_in_disorder
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing import needs_sharing

import relaxmpi as rx
from relaxmpi.primitives import board, shared_schedule
from relaxmpi.primitives.board import Board
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.wire import Plain, chunks
from relaxmpi.primitives.words import LINE

MANY = pytest.mark.ranks(2, 3, 4)


def boards(n):
    memory = memoryview(bytearray(8 * n * board.ROW)).cast("q")
    return [Board(memory, rank, n, nothing) for rank in range(n)]


@given(
    st.integers(2, 5),
    st.lists(st.sampled_from([1, 2, 7, 63, 64, 65, 500, 1001]), min_size=1, max_size=4),
    st.sampled_from(["f4", "f2", "f8", "i4", "u1", "c8"]),
    st.booleans(),
    st.sampled_from([0, 500, shared_schedule._A_TURN]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=300, deadline=None)
def test_all_orders_of_steps_give_the_same_sums(n, counts, dtype, in_place, a_turn, seed):
    """Calls one after the other, in slots of 256 bytes: one turn, two, and many pieces.

    Some ranks do it in Python and some by compiled code.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_schedule, "_A_TURN", a_turn)
        draw = np.random.default_rng(seed)
        ranks = schedules(n, 256, compiled=np.flatnonzero(draw.integers(0, 2, n)))
        sums_in_disorder(ranks, counts, dtype, in_place, seed)


@given(st.integers(2, 5), st.integers(1, 400), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_scatter_and_gather_with_chunks_of_any_length(n, count, seed):
    draw = np.random.default_rng(seed)
    cuts = [0, *sorted(draw.integers(0, count + 1, n - 1).tolist()), count]
    bounds = list(pairwise(cuts))
    parts = [draw.integers(0, 40, count).astype("f4") for _ in range(n)]
    right = reduced(parts, Op.SUM, n)
    outs = [np.empty_like(p) for p in parts]

    def program(rank, schedule):
        wire = Plain(CPU, "float32", schedule._comm.scratch)
        place = outs[rank][slice(*bounds[rank])]
        arguments = (CPU, parts[rank], place, Op.SUM, wire, bounds)
        total = yield from schedule.reduce_scatter(*arguments)
        assert (total == right[slice(*bounds[rank])]).all()
        yield from schedule.gather(CPU, total, place, outs[rank], Op.SUM, wire, bounds)

    run([program(r, s) for r, s in enumerate(schedules(n, 128))], seed)
    assert all((out == right).all() for out in outs)


@given(
    st.integers(2, 5),
    st.lists(st.sampled_from([1, 2, 7, 40, 41, 64, 65, 500]), min_size=1, max_size=4),
    st.sampled_from(["f4", "f2", "f8", "u1", "c8", "bool"]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_all_orders_of_steps_move_the_same_numbers(n, counts, dtype, seed):
    """All-gathers, all-to-alls and broadcasts one after the other, in slots of 256 bytes."""
    draw = np.random.default_rng(seed)
    calls = []
    for count in counts:
        xs = [draw.integers(0, 40, (n, count)).astype(dtype) for _ in range(n)]
        outs = [np.zeros_like(x) for x in xs]
        cuts = [0, *sorted(draw.integers(0, n * count + 1, n - 1).tolist()), n * count]
        calls.append((draw.integers(3), xs, outs, list(pairwise(cuts)), int(draw.integers(n))))

    def program(rank, schedule):
        for verb, xs, outs, bounds, root in calls:
            x, out = xs[rank].reshape(-1), outs[rank].reshape(-1)
            if verb == 0:
                wire = Plain(CPU, CPU.flat(x).dtype, schedule._comm.scratch)
                places = [out[lo:hi] for lo, hi in bounds]
                yield from schedule.allgather(CPU, x[slice(*bounds[rank])], places, wire)
            elif verb == 1:
                yield from schedule.alltoall(CPU, x, out)
            else:
                out[:] = x
                yield from schedule.broadcast(CPU, out, root)

    ranks = schedules(n, 256)
    run([program(r, s) for r, s in enumerate(ranks)], seed)
    for verb, xs, outs, bounds, root in calls:
        for rank, out in enumerate(outs):
            if verb == 0:
                right = np.concatenate(
                    [x.reshape(-1)[lo:hi] for x, (lo, hi) in zip(xs, bounds, strict=True)]
                )
            elif verb == 1:
                right = np.stack([x[rank] for x in xs])
            else:
                right = xs[root]
            assert out.tobytes() == right.tobytes()


@given(st.integers(2, 4), st.sampled_from([1, 9]), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_votes_find_each_other_however_far_a_rank_is_ahead(n, among, seed):
    """Rings of 16 entries: who has cast more than others have read waits for room, silently."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "_RING", 16)
        patch.setattr(board, "ROW", LINE + 32)
        vote_in_disorder(n, among, seed)


def vote_in_disorder(n, among, seed):
    """A rank looks for any of its `among` oldest votes that it has not heard about."""
    draw = random.Random(seed)
    tables, count = boards(n), 100
    odd = set(draw.sample(range(count), 5))
    left = [count] * n
    cast = [deque() for _ in range(n)]
    heard = [{} for _ in range(n)]
    looks = 0
    while any(len(h) < count for h in heard):
        looks += 1
        assert looks < 200_000, "nothing moves"
        rank = draw.randrange(n)
        if left[rank] and draw.random() < 0.7:
            number = count - left[rank]
            left[rank] -= 1
            code = number + (1000 if rank == 0 and number in odd else 0)
            cast[rank].append((number, tables[rank].vote(code)))
        elif cast[rank]:
            number, vote = draw.choice(list(cast[rank])[:among])
            if vote.test():
                assert vote.test()
                heard[rank][number] = vote.equal
                cast[rank].remove((number, vote))
    right = {number: number not in odd for number in range(count)}
    assert all(h == right for h in heard)


@given(st.integers(2, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_a_turn_that_was_taken_back_leaves_no_trace(n, seed):
    """Some ranks begin a call that then is none; the next one has numbers of its own only."""
    draw = np.random.default_rng(seed)
    ranks = schedules(n, 256, compiled=np.flatnonzero(draw.integers(0, 2, n)))
    for schedule in ranks:
        if draw.integers(2):
            wrong = np.full(3, 99, "f4")
            wire = Plain(CPU, "float32", schedule._comm.scratch)
            flow = schedule.allreduce(CPU, wrong, wrong, Op.SUM, wire)
            next(flow)
            schedule.undoing(CPU)()
            flow.close()
            assert (wrong == 99).all()
    right = [np.full(3, r, "f4") for r in range(n)]
    flows = [
        s.allreduce(CPU, x, x, Op.SUM, Plain(CPU, "float32", s._comm.scratch))
        for s, x in zip(ranks, right, strict=True)
    ]
    run(flows, seed)
    assert all((x == sum(range(n))).all() for x in right)


@MANY
def test_one_host_shares_memory(comm):
    """Else all others here would test messages."""
    needs_sharing()
    assert comm.shared is not None
    assert comm.dup().shared is not comm.shared


@MANY
@pytest.mark.parametrize("nbytes", [1, 4 * 2**20 - 8, 4 * 2**20, 9 * 2**20 + 24])
def test_buffers_around_the_length_of_a_slot(comm, nbytes):
    x = np.arange(nbytes // 8 + 1, dtype="f8") + comm.rank
    right = np.arange(len(x)) * comm.size + sum(range(comm.size))
    out = np.empty_like(x)
    rx.allreduce(comm, x, out)
    assert (out == right).all()
    assert x[0] == comm.rank
    assert (rx.allreduce.start(comm, x).wait() == right).all()
    chunk = rx.reduce_scatter(comm, out, op=rx.MAX)
    lo, hi = chunks(len(x), comm.size)[comm.rank]
    assert (chunk == right[lo:hi]).all()


@MANY
def test_one_rank_waits_for_each_call_and_another_starts_them_ahead(comm):
    """All of them read a buffer that the call before them writes."""
    x = np.ones(5)
    if comm.rank:
        for _ in range(100):
            rx.allreduce(comm, x, op=rx.MEAN)
            rx.allreduce(comm, x, op=rx.MAX)
    else:
        works = []
        for _ in range(100):
            works.append(rx.allreduce.start(comm, x, op=rx.MEAN))
            works.append(rx.allreduce.start(comm, x, op=rx.MAX))
        for work in works:
            work.wait()
    assert (x == 1).all()


@MANY
def test_a_disagreement_after_some_ranks_have_begun(comm):
    """Blocking calls put their numbers down before they know; started ones do not."""
    for turn in range(6):
        x, y = np.full(4, 1.0), np.full(3, 5.0)
        with pytest.raises(rx.MismatchError):
            if (comm.rank + turn) % comm.size:
                rx.allreduce(comm, x)
            elif turn % 2:
                rx.allreduce(comm, y)
            else:
                rx.allreduce.start(comm, y).wait()
        assert (x == 1).all()
        assert (y == 5).all()
        assert (rx.allreduce(comm, np.full(4, comm.rank + 1.0)) == sum(range(comm.size + 1))).all()


@MANY
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i4", "u1", "c8", "bool"])
def test_messages_reduce_to_the_same_bytes(comm, dtype):
    """Sums of whole numbers, in which no order of additions shows."""
    by_messages = rx.Comm(comm._world, replace(comm.settings, shared_memory=0))
    assert by_messages.shared is None
    draw = np.random.default_rng(comm.rank)
    op = rx.MAX if dtype == "bool" else rx.SUM
    for count in (1, 1001, 70_001, 700_001):
        x = draw.integers(0, 50, count).astype(dtype)
        right = rx.allreduce(by_messages, x.copy(), op=op)
        assert rx.allreduce(comm, x, op=op).tobytes() == right.tobytes()


@MANY
@pytest.mark.parametrize("dtype", ["f4", "f2", "i8", "c8", "bool"])
def test_messages_move_the_same_numbers(comm, dtype):
    """Also longer than a slot, and counted alike."""
    by_messages = rx.Comm(comm._world, replace(comm.settings, shared_memory=0))
    draw = np.random.default_rng(comm.rank)
    for count in (1, 1001, 2_200_001 if dtype == "f4" else 70_001):
        x = draw.integers(0, 2, (comm.size, count)).astype(dtype)
        mine = x[comm.rank]
        for verb in (
            lambda comm, x=mine: rx.allgather(comm, x),
            lambda comm, x=x: rx.alltoall(comm, x.copy()),
            lambda comm, x=x: rx.alltoall(comm, x, np.empty_like(x)),
            lambda comm, x=mine: rx.broadcast(comm, x.copy(), root=comm.size - 1),
            lambda comm, x=mine: rx.broadcast(comm, x.copy(), root=0),
        ):
            moved = []
            for by in (comm, by_messages):
                before = by.stats.payload_bytes
                result = verb(by)
                moved.append((result.shape, result.tobytes(), by.stats.payload_bytes - before))
            assert moved[0] == moved[1]


@MANY
def test_where_a_rank_may_not_open_memory_all_send_messages(comm, monkeypatch):
    def refuse(name):
        raise OSError("no files left")

    if comm.rank == 0:
        monkeypatch.setattr("os.memfd_create", refuse)
    with comm.dup() as other:
        assert other.shared is None
        assert rx.allreduce(other, comm.rank) == sum(range(comm.size))


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "MemoryError"])
def test_an_error_before_the_vote_breaks_the_comm_everywhere(launch, error):
    """The numbers are in the slot, and nobody has been told: no rank may go on a turn behind."""
    needs_sharing()
    done = launch(
        """
import sys
import numpy as np
import relaxmpi as rx
from relaxmpi.primitives.cpu import Cpu

comm = rx.Comm.world(timeout=20)
assert comm.shared is not None
copy = Cpu.copy

def interrupted(self, out, x):
    copy(self, out, x)
    Cpu.copy = copy
    raise {"KeyboardInterrupt": KeyboardInterrupt, "MemoryError": MemoryError}[sys.argv[1]]

if comm.rank == 0:
    Cpu.copy = interrupted
for k in range(4):
    try:
        got = rx.allreduce(comm, np.full(5, 10.0**k))
        print("WRONG", comm.rank, got, flush=True)
    except BaseException as error:
        print("RAISED", comm.rank, type(error).__name__, flush=True)
""",
        2,
        error,
    )
    said = re.findall(r"RAISED (\d) (\w+)", done.stdout)
    assert "WRONG" not in done.stdout
    assert ("0", error) in said
    assert ("0", "BrokenComm") in said
    assert done.seconds < 18


@pytest.mark.ranks(2)
def test_a_signal_does_not_leave_a_thread_inside_a_primitive(comm):
    class Alarm(Exception):
        pass

    def ring(number, frame):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        other = comm.dup()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Alarm):
            if comm.rank:
                while True:  # nobody comes: the alarm rings inside the call
                    rx.barrier(other)
            while True:
                time.sleep(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rx.allreduce(comm, 1) == 2
    if comm.rank == 0 or other.queue.idle:  # or it rang before the call
        rx.barrier(other)
    while not other.queue.idle:  # the interrupted call is pending
        other.progress()
    assert rx.allreduce(other, 1) == 2
    other.close()


@MANY
def test_parts_of_a_primitive_may_end_in_another_order_than_they_began(comm):
    @rx.primitive
    def backwards(comm, count):
        def flow():
            parts = [rx.barrier.flow(comm) for _ in range(count)]
            firsts = [next(part) for part in parts]
            for part, first in zip(reversed(parts), reversed(firsts), strict=True):
                yield first
                yield from part
            return (yield from rx.allreduce.flow(comm, np.ones(3)))

        return flow()

    for _ in range(3):
        assert (backwards(comm, 200) == comm.size).all()


@pytest.mark.ranks(2)
def test_calls_without_numbers_may_be_started_far_ahead(comm):
    """Rank 1 finds 200 votes, although rank 0 looks at none of them before it is told to."""
    if comm.rank == 0:
        works = [rx.barrier.start(comm) for _ in range(200)]
        comm.mpi.Barrier()
        for work in works:
            work.wait()
    else:
        time.sleep(0.3)
        for _ in range(200):
            rx.barrier(comm)
        comm.mpi.Barrier()


@pytest.mark.parametrize("off", ["all", "one"])
def test_without_shared_memory_all_ranks_send_messages(launch, off):
    done = launch(
        """
import os, sys
import numpy as np
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", 0)))
if sys.argv[1] == "all" or rank == 1:
    os.environ["RELAXMPI_SHARED_MEMORY"] = "0"
import relaxmpi as rx

with rx.Comm.world() as comm:
    assert comm.shared is None
    for count in (1, 1000, 300_000):
        x = np.full(count, comm.rank + 1.0)
        assert (rx.allreduce(comm, x) == sum(range(1, comm.size + 1))).all()
    print("FINE", comm.rank, flush=True)
""",
        3,
        off,
    )
    assert sorted(re.findall(r"FINE (\d)", done.stdout)) == ["0", "1", "2"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("calls", [1, shared_schedule._WARM_UP + 3])
def test_memory_goes_with_its_comm(comm, calls):
    """Also where calls are known."""
    needs_sharing()

    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:relaxmpi")

    gc.collect()
    before = mapped()
    other = comm.dup()
    for _ in range(calls):
        rx.allreduce(other, np.ones(10))
    assert mapped() == before + 1
    rx.barrier(other)
    gc.disable()
    other.close()  # while somebody still holds the Comm
    gc.enable()
    assert mapped() == before
