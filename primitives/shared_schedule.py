"""The moves of full precision inside one host, by memory that all its ranks see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.devices import Device, Flat
from relaxmpi.primitives.ops import MEAN, SUM, Op
from relaxmpi.primitives.primitive import Plan
from relaxmpi.primitives.schedules import FlatSchedule
from relaxmpi.primitives.turns import Turns
from relaxmpi.primitives.wire import Plain, Wire, chunks
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.shared import Slots
    from relaxmpi.primitives.stream import Stream

__all__ = ["SharedSchedule"]

# Bytes that each rank may move more in one turn than in two, because a turn costs. In one it moves
# n + 3 times the buffer, its own to its slot and all that are given to their sum, in two 5 - 2 / n.
_A_TURN = 640 * 1024

# All-reduces before numba is imported, for which a program with fewer of them would wait longer
# than for all of them.
_WARM_UP = 100

# Calls whose checks are remembered.
_MOST_KNOWN = 256


class _Known(NamedTuple):
    """A call that has been checked, and what compiled code is told about it."""

    call: Call
    spans: Any
    sent: tuple[int, int]


class SharedSchedule(FlatSchedule):
    """Every rank puts its numbers where the others read them.

    Counted as what a bandwidth-optimal exchange of messages sends.

    Args:
        comm: The ranks.
        slots: Where their numbers go.
        polite: Whether others may need the core of a rank that waits.
    """

    def __init__(self, comm: Stream, slots: Slots, polite: bool) -> None:
        super().__init__(comm)
        self._slots, self._polite = slots, polite
        self._cold = _WARM_UP
        self._turns: Turns | None = None
        self._known: dict[tuple[Any, ...], _Known] = {}

    def undoing(self, device: Device) -> Callable[[], None] | None:
        """See `FlatSchedule`: a slot that nobody reads is as good as one that was never filled."""
        return self._slots.take_back if device.name == "cpu" else None

    def learn(self, call: Call, flat: Flat, op: Op, name: str) -> None:
        """See `FlatSchedule`: a call of one compiled turn is made again without its checks."""
        x, turns = flat.data, self._turns
        if turns is None or not turns.takes(x) or not op.additive or not self._is_one(x):
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[flat.shape, x.dtype, op is MEAN, name] = _Known(
            call, turns.spans(x), self._sent(x)
        )

    def again(self, x: Any, out: Any, op: Op, name: str) -> Plan[Any] | None:
        """See `FlatSchedule`."""
        turns = self._turns
        if turns is None or type(x) is not np.ndarray or type(name) is not str:
            return None
        if op is not SUM and op is not MEAN:
            return None
        known = self._known.get((x.shape, x.dtype, op is MEAN, name))
        if known is None or not x.flags.carray:
            return None
        if out is None:
            out = x
        elif type(out) is not np.ndarray or (out.shape, out.dtype) != (x.shape, x.dtype):
            return None
        elif not out.flags.carray or np.may_share_memory(x, out):
            return None
        flow = self._once(turns, known, x, out, op is MEAN)
        return Plan(known.call, flow, self._slots.take_back)

    def _once(self, turns: Turns, known: _Known, x: Any, out: Any, mean: bool) -> Flow[Any]:
        yield turns.again(x.reshape(-1), out.reshape(-1), known.spans, mean)
        self._count(*known.sent)
        return out

    def _is_one(self, x: Any) -> bool:
        """Whether one turn is enough for an all-reduce."""
        return self._at_one_go(x) and bool(0 < x.nbytes <= self._slots.nbytes)

    def _at_one_go(self, x: Any) -> bool:
        n = self._comm.size
        return bool((n - 2 + 2 / n) * x.nbytes <= _A_TURN)

    def allreduce(self, device: Device, x: Any, out: Any, op: Op, wire: Wire) -> Flow[None]:
        """Reduce `x` over the ranks into `out`, which may be `x`."""
        if not _takes(wire, device):
            return super().allreduce(device, x, out, op, wire)
        at_once = self._at_one_go(x)
        turns = self._compiled() if op.additive else None
        if turns is not None and turns.takes(x) and turns.takes(out):
            return self._by_turns(turns, x, out, op is Op.MEAN, at_once)
        return self._in_pieces(device, x, out, op, wire, at_once)

    def _compiled(self) -> Turns | None:
        """Return the compiled turns, once there have been so many calls that they are worth it."""
        if self._cold:
            self._cold -= 1
            if not self._cold and import_module("relaxmpi.primitives._jit").compiles():
                self._turns = Turns(self._slots, self._polite)
        return self._turns

    def _by_turns(self, turns: Turns, x: Any, out: Any, mean: bool, at_once: bool) -> Flow[None]:
        n = self._comm.size
        self._count(*self._sent(x))
        for lo, hi in self._pieces(x):
            if at_once:
                yield turns.at_once(x[lo:hi], out[lo:hi], mean)
                continue
            bounds = chunks(hi - lo, n)
            scatter = turns.scatter(x[lo:hi], out[lo:hi], bounds, self._each(x), mean)
            yield scatter
            yield turns.gather(out[lo:hi], bounds, scatter)

    def _each(self, x: Any) -> int:
        """How many of such numbers a slot has room for, if a part of it belongs to each rank."""
        return int(self._slots.nbytes // (self._comm.size * x.itemsize))

    def _pieces(self, x: Any) -> list[tuple[int, int]]:
        """Cut a buffer into what goes in one turn, or in two."""
        if self._is_one(x):
            return [(0, len(x))]
        return chunks(len(x), -(-len(x) // (self._each(x) * self._comm.size)))

    def _at_once(self, device: Device, x: Any, out: Any, op: Op, wire: Plain) -> Flow[None]:
        """Every rank reads and adds all."""
        comm, slots = self._comm, self._slots
        n = comm.size
        given = slots.turn(len(x), x.dtype)
        device.copy(given[comm.rank], x)
        yield slots.given()
        self._count(*self._sent(x))
        wire.deliver(wire.reduced(given, out, op), out, op, n)

    def _in_pieces(
        self, device: Device, x: Any, out: Any, op: Op, wire: Plain, at_once: bool
    ) -> Flow[None]:
        n, me = self._comm.size, self._comm.rank
        for lo, hi in self._pieces(x):
            if at_once:
                yield from self._at_once(device, x[lo:hi], out[lo:hi], op, wire)
                continue
            bounds = chunks(hi - lo, n)
            place = out[lo:hi][slice(*bounds[me])]
            total = yield from self.reduce_scatter(device, x[lo:hi], place, op, wire, bounds)
            yield from self.gather(device, total, place, out[lo:hi], op, wire, bounds)

    def reduce_scatter(
        self, device: Device, x: Any, place: Any, op: Op, wire: Wire, bounds: list[tuple[int, int]]
    ) -> Flow[Any]:
        """See `FlatSchedule`. Slots have a part for each rank, which only that one reads."""
        if not _takes(wire, device):
            return (yield from super().reduce_scatter(device, x, place, op, wire, bounds))
        n, me, slots = self._comm.size, self._comm.rank, self._slots
        wide = wire.work != wire.dtype
        total = self._comm.scratch(device, len(place), wire.work) if wide else place
        each = self._each(x)
        for at, spans in _rounds(bounds, each):
            given = slots.turn(n * each, x.dtype)
            for r, (lo, hi) in enumerate(spans):
                if r != me and hi > lo:
                    device.copy(given[me][r * each : r * each + hi - lo], x[lo:hi])
            yield slots.given()
            lo, hi = spans[me]
            if hi > lo:
                inbox = [row[me * each : me * each + hi - lo] for row in given]
                inbox[me] = x[lo:hi]
                into = total[at : at + hi - lo]
                so_far = wire.reduced(inbox, into, op, me)
                if so_far is not into:
                    device.copy(into, so_far)
        self._count(x.nbytes - place.nbytes, n - 1)
        return total

    def gather(
        self,
        device: Device,
        total: Any,
        place: Any,
        out: Any,
        op: Op,
        wire: Wire,
        bounds: list[tuple[int, int]],
    ) -> Flow[None]:
        """See `FlatSchedule`. All ranks read all of every slot."""
        if not _takes(wire, device):
            yield from super().gather(device, total, place, out, op, wire, bounds)
            return
        n, me, slots = self._comm.size, self._comm.rank, self._slots
        each = slots.nbytes // out.itemsize
        for at, spans in _rounds(bounds, each):
            given = slots.turn(each, out.dtype)
            lo, hi = spans[me]
            if hi > lo:
                mine = wire.repack(total[at : at + hi - lo], lo, hi)
                device.copy(given[me][: hi - lo], mine)
                if total is not place:
                    wire.unpack(mine, out[lo:hi], op, n)
            yield slots.given()
            for r, (lo, hi) in enumerate(spans):
                if r != me and hi > lo:
                    wire.unpack(given[r][: hi - lo], out[lo:hi], op, n)
        self._count((n - 1) * place.nbytes, n - 1)

    def _sent(self, x: Any) -> tuple[int, int]:
        """Bytes and messages of an all-reduce."""
        n = self._comm.size
        return 2 * (n - 1) * x.nbytes // n, 2 * (n - 1)

    def _count(self, nbytes: int, messages: int) -> None:
        self._comm.stats.payload_bytes += nbytes
        self._comm.stats.messages += messages


def _takes(wire: Wire, device: Device) -> TypeGuard[Plain]:
    return isinstance(wire, Plain) and device.name == "cpu"


def _rounds(
    bounds: list[tuple[int, int]], each: int
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Cut all chunks into parts of `each` numbers: where parts begin, and their bounds."""
    for at in range(0, max(hi - lo for lo, hi in bounds), each):
        yield at, [(min(lo + at, hi), min(lo + at + each, hi)) for lo, hi in bounds]
