"""The moves of full precision inside one host, by memory that all its ranks see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from relaxmpi.primitives.devices import Device
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.schedules import FlatSchedule
from relaxmpi.primitives.wire import Plain, Wire
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.slots import Slots
    from relaxmpi.primitives.stream import Stream

__all__ = ["SharedMoves", "takes"]

# Bytes from which messages are faster for all but all-reduces: MPI copies long ones once, from one
# process to the other, where slots take two copies. An all-to-all has less for each copy.
_LONG = 2 * 1024 * 1024
_LONG_TO_ALL = 512 * 1024


class SharedMoves(FlatSchedule):
    """Every rank puts its numbers where the others read them; see `SharedSchedule`."""

    def __init__(self, comm: Stream, slots: Slots) -> None:
        super().__init__(comm)
        self._slots = slots

    def _each(self, x: Any) -> int:
        """How many of such numbers a slot has room for, if a part of it belongs to each rank."""
        return int(self._slots.nbytes // (self._comm.size * x.itemsize))

    def reduce_scatter(
        self, device: Device, x: Any, place: Any, op: Op, wire: Wire, bounds: list[tuple[int, int]]
    ) -> Flow[Any]:
        """See `FlatSchedule`."""
        if not takes(wire, device) or x.nbytes > _LONG:
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
        if not takes(wire, device) or out.nbytes > _LONG:
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
        if not takes(wire, device) or sum(place.nbytes for place in places) > _LONG:
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


def takes(wire: Wire, device: Device) -> TypeGuard[Plain]:
    """Whether plain numbers in host memory are to be moved."""
    return isinstance(wire, Plain) and device.name == "cpu"


def _rounds(
    bounds: list[tuple[int, int]], each: int
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Cut all chunks into parts of `each` numbers: where parts begin, and their bounds."""
    for at in range(0, max(hi - lo for lo, hi in bounds), each):
        yield at, [(min(lo + at, hi), min(lo + at + each, hi)) for lo, hi in bounds]
