"""The moves of the centralised verbs among many simulated ranks: one event for n^2 messages.

The payloads, their order and so all results are those of `FlatSchedule`, which stays the oracle:
tests compare bytes and times of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relaxmpi.primitives.devices import Device
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.schedules import FlatSchedule
from relaxmpi.primitives.simulation.transport import SimulatedTransport
from relaxmpi.primitives.wire import Wire
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.stream import Stream

__all__ = ["GroupedSchedule"]


class GroupedSchedule(FlatSchedule):
    """See `FlatSchedule`; a device that moves its arrays in another way goes by messages."""

    def _group(self, device: Device) -> SimulatedTransport | None:
        transport = self._comm.transport(device)
        return transport if isinstance(transport, SimulatedTransport) else None

    def reduce_scatter(
        self, device: Device, x: Any, place: Any, op: Op, wire: Wire, bounds: list[tuple[int, int]]
    ) -> Flow[Any]:
        """See `FlatSchedule.reduce_scatter`."""
        transport = self._group(device)
        if transport is None:
            return (yield from super().reduce_scatter(device, x, place, op, wire, bounds))
        comm: Stream = self._comm
        n, me = comm.size, comm.rank
        lo, hi = bounds[me]
        payloads = {
            r: wire.pack(x, *bounds[r]) for r in _others(me, n) if bounds[r][1] > bounds[r][0]
        }
        exchange = transport.exchange(payloads, n - 1 if hi > lo else 0)
        total = wire.total(place)
        yield exchange
        if hi > lo:
            mine = wire.pack(x, lo, hi)
            so_far = wire.first(exchange.take(0) if me else mine, total)
            for r in range(1, n):
                # In place, this rank's numbers lie in `total` until they have been folded.
                into = total if r == n - 1 or me == 0 else so_far
                payload = mine if r == me else exchange.take(r)
                so_far = wire.fold(so_far, payload, op, into)
            total = so_far
            wire.finish(total, op, n)
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
        """See `FlatSchedule.gather`."""
        transport = self._group(device)
        if transport is None:
            yield from super().gather(device, total, place, out, op, wire, bounds)
            return
        n, me = self._comm.size, self._comm.rank
        lo, hi = bounds[me]
        filled = [r for r in range(n) if bounds[r][1] > bounds[r][0] and r != me]
        payloads = {}
        if hi > lo:
            mine = wire.repack(total, lo, hi)
            payloads = dict.fromkeys(_others(me, n), mine)
            wire.unpack(mine, place, op, n)
        exchange = transport.exchange(payloads, len(filled))
        yield exchange
        shared = transport.shares and wire.fills
        if shared and exchange.common is not None:
            device.copy(out, exchange.common)
            return
        for r in filled:
            wire.unpack(exchange.take(r), out[slice(*bounds[r])], op, n)
        if shared:
            exchange.share(out.copy())

    def allgather(self, device: Device, x: Any, places: list[Any], wire: Wire) -> Flow[None]:
        """See `FlatSchedule.allgather`."""
        transport = self._group(device)
        if transport is None:
            yield from super().allgather(device, x, places, wire)
            return
        n, me = self._comm.size, self._comm.rank
        filled = [r for r, place in enumerate(places) if r != me and len(place)]
        payloads = {}
        if len(x):
            mine = wire.pack(x, 0, len(x))
            payloads = dict.fromkeys(_others(me, n), mine)
            wire.unpack(mine, places[me], Op.MEAN, n)
        exchange = transport.exchange(payloads, len(filled))
        yield exchange
        for r in filled:
            wire.unpack(exchange.take(r), places[r], Op.MEAN, n)

    def alltoall(self, device: Device, x: Any, out: Any) -> Flow[None]:
        """See `FlatSchedule.alltoall`."""
        transport = self._group(device)
        if transport is None:
            yield from super().alltoall(device, x, out)
            return
        n, me = self._comm.size, self._comm.rank
        each = len(x) // n
        if not each:
            return
        parts = [slice(r * each, (r + 1) * each) for r in range(n)]
        others = _others(me, n)
        exchange = transport.exchange({r: x[parts[r]] for r in others}, n - 1)
        device.copy(out[parts[me]], x[parts[me]])
        yield exchange
        for r in others:
            device.copy(out[parts[r]], exchange.take(r))


def _others(me: int, n: int) -> list[int]:
    """Every other rank, each rank beginning with its right-hand neighbour."""
    return [(me + k) % n for k in range(1, n)]
