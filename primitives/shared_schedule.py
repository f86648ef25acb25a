"""The moves of full precision inside one host, by memory that all its ranks see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard

from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.devices import Device, Flat
from relaxmpi.primitives.learned import Learned, sent_by
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.schedules import FlatSchedule
from relaxmpi.primitives.turns import Turns
from relaxmpi.primitives.wire import Plain, Wire, chunks
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.primitive import Plan
    from relaxmpi.primitives.slots import Slots
    from relaxmpi.primitives.stream import Stream

__all__ = ["SharedSchedule"]

# Bytes that each rank may move more in one turn than in two, because a turn costs. In one it moves
# n + 3 times the buffer, its own to its slot and all that are given to their sum, in two 5 - 2 / n.
_A_TURN = 640 * 1024

# Bytes from which messages are faster for all but all-reduces: MPI copies long ones once, from one
# process to the other, where slots take two copies. An all-to-all has less for each copy.
_LONG = 2 * 1024 * 1024
_LONG_TO_ALL = 512 * 1024

# All-reduces before numba is imported, for which a program with fewer of them would wait longer
# than for all of them.
_WARM_UP = 100


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
        self._learned = Learned(comm)

    def undoing(self, device: Device) -> Callable[[], None] | None:
        """See `FlatSchedule`: a slot that nobody reads is as good as one that was never filled."""
        return self._slots.take_back if device.name == "cpu" else None

    def learn(self, call: Call, flat: Flat, op: Op, name: str) -> None:
        """See `FlatSchedule`: a call of one compiled turn is made again without its checks."""
        if self._turns is not None and self._is_one(flat.data):
            self._learned.add(self._turns, call, flat, op, name)

    def again(self, x: Any, out: Any, op: Op, name: str) -> Plan[Any] | None:
        """See `FlatSchedule`."""
        return None if self._turns is None else self._learned.plan(self._turns, x, out, op, name)

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
        for lo, hi in self._pieces(x):
            if at_once:
                yield turns.at_once(x[lo:hi], out[lo:hi], mean)
                continue
            bounds = chunks(hi - lo, n)
            scatter = turns.scatter(x[lo:hi], out[lo:hi], bounds, self._each(x), mean)
            yield scatter
            yield turns.gather(out[lo:hi], bounds, scatter)
        self._count(*sent_by(n, x))

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
        self._count(*sent_by(self._comm.size, x))
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
            total = yield from self._scatter(device, x[lo:hi], place, op, wire, bounds)
            yield from self._gather(device, total, place, out[lo:hi], op, wire, bounds)

    def reduce_scatter(
        self, device: Device, x: Any, place: Any, op: Op, wire: Wire, bounds: list[tuple[int, int]]
    ) -> Flow[Any]:
        """See `FlatSchedule`."""
        if not _takes(wire, device) or x.nbytes > _LONG:
            return super().reduce_scatter(device, x, place, op, wire, bounds)
        return self._scatter(device, x, place, op, wire, bounds)

    def _scatter(
        self, device: Device, x: Any, place: Any, op: Op, wire: Plain, bounds: list[tuple[int, int]]
    ) -> Flow[Any]:
        """Slots have a part for each rank, which only that one reads."""
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
        """See `FlatSchedule`."""
        if not _takes(wire, device) or out.nbytes > _LONG:
            return super().gather(device, total, place, out, op, wire, bounds)
        return self._gather(device, total, place, out, op, wire, bounds)

    def _gather(
        self,
        device: Device,
        total: Any,
        place: Any,
        out: Any,
        op: Op,
        wire: Plain,
        bounds: list[tuple[int, int]],
    ) -> Flow[None]:
        """All ranks read all of every slot."""
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

    def allgather(self, device: Device, x: Any, places: list[Any], wire: Wire) -> Flow[None]:
        """See `FlatSchedule`. All ranks read all of every slot."""
        if not _takes(wire, device) or sum(place.nbytes for place in places) > _LONG:
            yield from super().allgather(device, x, places, wire)
            return
        n, me, slots = self._comm.size, self._comm.rank, self._slots
        each = slots.nbytes // x.itemsize
        for at in range(0, max(map(len, places)), each):
            given = slots.turn(each, x.dtype)
            mine = x[at : at + each]
            device.copy(given[me][: len(mine)], mine)
            yield slots.given()
            for place, slot in zip(places, given, strict=True):
                part = place[at : at + each]
                device.copy(part, slot[: len(part)])
        self._count((n - 1) * x.nbytes, n - 1)

    def alltoall(self, device: Device, x: Any, out: Any) -> Flow[None]:
        """See `FlatSchedule`. Slots have a part for each rank, which only that one reads."""
        if device.name != "cpu" or x.nbytes > _LONG_TO_ALL:
            yield from super().alltoall(device, x, out)
            return
        n, me, slots, each = self._comm.size, self._comm.rank, self._slots, self._each(x)
        rows, results = x.reshape(n, -1), out.reshape(n, -1)
        for at in range(0, rows.shape[1], each):
            given = slots.turn(n * each, x.dtype)
            part = rows[:, at : at + each]
            count = part.shape[1]
            device.copy(given[me].reshape(n, each)[:, :count], part)
            yield slots.given()
            for r, slot in enumerate(given):
                device.copy(results[r, at : at + count], slot[me * each : me * each + count])
        self._count((n - 1) * x.nbytes // n, n - 1)

    def broadcast(self, device: Device, x: Any, root: int) -> Flow[None]:
        """See `FlatSchedule`. All ranks read the slot of one."""
        if device.name != "cpu" or x.nbytes > _LONG:
            yield from super().broadcast(device, x, root)
            return
        slots = self._slots
        each = slots.nbytes // x.itemsize
        for at in range(0, len(x), each):
            part = x[at : at + each]
            slot = slots.turn(each, x.dtype)[root][: len(part)]
            if self._comm.rank == root:
                device.copy(slot, part)
            yield slots.given()
            if self._comm.rank != root:
                device.copy(part, slot)
        if self._comm.rank == root:
            self._count(x.nbytes, 1)

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
