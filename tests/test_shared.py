"""Ranks of one host talk through memory that they share: any order of steps gives the same."""

import gc
import random
import re
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relaxmpi as rx
from relaxmpi.primitives import shared
from relaxmpi.primitives.devices import device_of
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.shared import Board, Slots
from relaxmpi.primitives.shared_schedule import SharedSchedule
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.wire import Plain, chunks

MANY = pytest.mark.ranks(2, 3, 4)
CPU = device_of(np.zeros(1))


def nothing():
    pass


def boards(n):
    memory = memoryview(bytearray(8 * n * shared._BOARD)).cast("q")
    return [Board(memory, rank, n, nothing) for rank in range(n)]


def schedules(n, nbytes):
    """All ranks of a host of n, in this process, with slots of so many bytes."""
    memory = np.zeros(2 * n * nbytes, np.uint8)
    told = memoryview(bytearray(8 * n * shared._LINE)).cast("q")
    made = []
    for rank in range(n):
        comm = type("Host", (), {})()
        comm.rank, comm.size, comm.stats = rank, n, Stats()
        comm.scratch = lambda device, count, dtype: device.empty(count, dtype)
        made.append(SharedSchedule(comm, Slots(memory, told, rank, n, nothing)))
    return made


def run(flows, seed):
    """Advance the flows in an order drawn by the seed; return what they return."""
    draw = random.Random(seed)
    waits = dict.fromkeys(range(len(flows)))
    results = [None] * len(flows)
    looks = 0
    while waits:
        rank = draw.choice(list(waits))
        looks += 1
        assert looks < 100_000, "nothing moves"
        if waits[rank] is None or waits[rank].test():
            try:
                waits[rank] = next(flows[rank])
            except StopIteration as stop:
                results[rank] = stop.value
                del waits[rank]
    return results


def reduced(parts, op, n):
    """The reduction of all parts in the order of ranks."""
    wide = [p.astype("f4") if p.dtype == np.float16 else p for p in parts]
    total = wide[0].copy()
    for part in wide[1:]:
        total = {Op.MAX: np.maximum, Op.MIN: np.minimum}.get(op, np.add)(total, part)
    return (total / n if op is Op.MEAN else total).astype(parts[0].dtype)


@given(
    st.integers(2, 5),
    st.lists(st.sampled_from([1, 2, 7, 63, 64, 65, 500, 1001]), min_size=1, max_size=4),
    st.sampled_from(["f4", "f2", "f8", "i4", "u1", "c8"]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=300, deadline=None)
def test_all_orders_of_steps_give_the_same_sums(n, counts, dtype, in_place, seed):
    """Calls one after the other, in slots of 256 bytes: one turn, two, and many pieces."""
    draw = np.random.default_rng(seed)
    ops = [Op.SUM, Op.MAX] if dtype in ("i4", "u1") else [Op.SUM, Op.MEAN]
    calls = []
    for count in counts:
        op = ops[draw.integers(2)]
        parts = [draw.integers(0, 40, count).astype(dtype) for _ in range(n)]
        calls.append((op, parts, [p if in_place else np.empty_like(p) for p in parts]))
    expected = [reduced([p.copy() for p in parts], op, n) for op, parts, _ in calls]

    def program(rank, schedule):
        for op, parts, outs in calls:
            wire = Plain(CPU, CPU.flat(parts[rank]).dtype, schedule._comm.scratch)
            yield from schedule.allreduce(CPU, parts[rank], outs[rank], op, wire)

    ranks = schedules(n, 256)
    run([program(r, s) for r, s in enumerate(ranks)], seed)
    for (_, parts, outs), right in zip(calls, expected, strict=True):
        for rank in range(n):
            assert outs[rank].tobytes() == right.tobytes()
            assert in_place or parts[rank] is not outs[rank]
    sent = {s._comm.stats.payload_bytes for s in ranks}
    assert all(nbytes > 0 for nbytes in sent) or max(counts) < n


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


@given(st.integers(2, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_votes_come_in_their_order_however_far_a_rank_is_ahead(n, seed):
    """A rank that has cast 100 votes before another casts its first waits for room, silently."""
    draw = random.Random(seed)
    tables, count = boards(n), 100
    odd = set(draw.sample(range(count), 5))
    left = [count] * n
    cast = [deque() for _ in range(n)]
    heard = [[] for _ in range(n)]
    looks = 0
    while any(len(h) < count for h in heard):
        looks += 1
        assert looks < 200_000, "nothing moves"
        rank = draw.randrange(n)
        if left[rank] and draw.random() < 0.7:
            number = count - left[rank]
            left[rank] -= 1
            code = number + (1000 if rank == 0 and number in odd else 0)
            cast[rank].append(tables[rank].vote(code))
        elif cast[rank] and cast[rank][0].request.test():
            heard[rank].append(cast[rank].popleft().equal)
    right = [number not in odd for number in range(count)]
    assert all(h == right for h in heard)


@given(st.integers(2, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_a_turn_that_was_taken_back_leaves_no_trace(n, seed):
    """Some ranks begin a call that then is none; the next one has numbers of its own only."""
    ranks = schedules(n, 256)
    draw = np.random.default_rng(seed)
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
def test_memory_goes_with_its_comm(comm):
    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:relaxmpi")

    gc.collect()
    before = mapped()
    other = comm.dup()
    rx.allreduce(other, np.ones(10))
    assert mapped() == before + 1
    rx.barrier(other)
    gc.disable()
    other.close()  # while somebody still holds the Comm
    gc.enable()
    assert mapped() == before
