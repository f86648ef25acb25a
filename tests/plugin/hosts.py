"""All ranks of one host in this process, whose steps come in any order."""

import os
import random

import numpy as np

from relaxmpi.primitives.devices import device_of
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.pulls import Pulls
from relaxmpi.primitives.shared_schedule import SharedSchedule
from relaxmpi.primitives.slots import Slots
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.wire import Plain
from relaxmpi.primitives.words import LINE

CPU = device_of(np.zeros(1))


def nothing():
    pass


def schedules(n, nbytes, compiled=(), reading=False):
    """All ranks of a host of n, in this process, with slots of so many bytes."""
    memory = np.zeros(2 * n * nbytes, np.uint8)
    told = memoryview(bytearray(8 * n * LINE)).cast("q")
    made = []
    for rank in range(n):
        comm = type("Host", (), {})()
        comm.rank, comm.size, comm.stats = rank, n, Stats()
        comm.scratch = lambda device, count, dtype: device.empty(count, dtype)
        slots = Slots(memory, told, rank, n, nothing)
        pulls = Pulls(slots, [os.getpid()] * n if reading else None)
        made.append(SharedSchedule(comm, slots, pulls, polite=True))
        if rank in compiled:
            made[-1]._cold = 1
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


def sums_in_disorder(ranks, counts, dtype, in_place, seed):
    """Run the calls on all ranks, whose steps come in an order drawn by the seed."""
    draw, n = np.random.default_rng(seed), len(ranks)
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

    run([program(r, s) for r, s in enumerate(ranks)], seed)
    for (_, parts, outs), right in zip(calls, expected, strict=True):
        for rank in range(n):
            assert outs[rank].tobytes() == right.tobytes()
            assert in_place or parts[rank] is not outs[rank]
    sent = {s._comm.stats.payload_bytes for s in ranks}
    assert all(nbytes > 0 for nbytes in sent) or max(counts) < n
