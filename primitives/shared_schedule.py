"""The moves of full precision inside one host, by memory that all its ranks see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from relaxmpi.primitives.devices import Device
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.schedules import FlatSchedule
from relaxmpi.primitives.wire import Plain, Wire, chunks
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.shared import Slots
    from relaxmpi.primitives.stream import Stream

__all__ = ["SharedSchedule"]

# Bytes that each rank may move more in one turn than in two, because a turn costs. In one it reads
# and adds everything, (3 n - 1) times the buffer; in two it moves about six times the buffer.
_A_TURN = 1280 * 1024


class SharedSchedule(FlatSchedule):
    """Every rank puts its numbers where the others read them.

    Counted as what a bandwidth-optimal exchange of messages sends.
    """

    def __init__(self, comm: Stream, slots: Slots) -> None:
        super().__init__(comm)
        self._slots = slots

    def undoing(self, device: Device) -> Callable[[], None] | None:
        """See `FlatSchedule`: a slot that nobody reads is as good as one that was never filled."""
        return self._slots.take_back if device.name == "cpu" else None

    def allreduce(self, device: Device, x: Any, out: Any, op: Op, wire: Wire) -> Flow[None]:
        """Reduce `x` over the ranks into `out`, which may be `x`."""
        if not _takes(wire, device):
            return super().allreduce(device, x, out, op, wire)
        n = self._comm.size
        at_once = (3 * n - 7) * x.nbytes <= _A_TURN
        if at_once and x.nbytes <= self._slots.nbytes:
            return self._at_once(device, x, out, op, wire)
        return self._in_pieces(device, x, out, op, wire, at_once)

    def _at_once(self, device: Device, x: Any, out: Any, op: Op, wire: Plain) -> Flow[None]:
        """Every rank reads and adds all."""
        comm, slots = self._comm, self._slots
        n = comm.size
        given = slots.turn(len(x), x.dtype)
        device.copy(given[comm.rank], x)
        yield slots.given()
        self._count(2 * (n - 1) * x.nbytes // n, 2 * (n - 1))
        wire.deliver(wire.reduced(given, out, op), out, op, n)

    def _in_pieces(
        self, device: Device, x: Any, out: Any, op: Op, wire: Plain, at_once: bool
    ) -> Flow[None]:
        n, me = self._comm.size, self._comm.rank
        for lo, hi in chunks(len(x), -(-x.nbytes // self._slots.nbytes)):
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
        each = slots.nbytes // (n * x.itemsize)
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
