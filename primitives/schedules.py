"""The moves of the centralised verbs among equals: who sends which chunk to whom, in which order.

A compressed value is quantised exactly twice whatever the number of ranks: by its contributor
and by the owner of its chunk (scatter-reduce, then all-gather; never a compressed ring). Every
rank decodes the same bytes, the owner too, so all end bit-identical.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.devices import Device, Flat
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.transport import Every, Request
from relaxmpi.primitives.wire import Plain, Wire, chunks
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.primitive import Plan
    from relaxmpi.primitives.stream import Stream

__all__ = ["FlatSchedule"]

# Pieces whose contributions are under way at once: more would flood a cold link's queues.
_AHEAD = 2

T = TypeVar("T")


class _Piece(NamedTuple):
    x: Any
    out: Any
    place: Any  # this rank's chunk of `out`
    wire: Wire
    bounds: list[tuple[int, int]]


class FlatSchedule:
    """All ranks of one Comm alike. Arrays are 1-D; with one rank, verbs never come here."""

    def __init__(self, comm: Stream) -> None:
        self._comm = comm

    def undoing(self, device: Device) -> Callable[[], None] | None:
        """Return what undoes the first step of an all-reduce in full precision.

        None where that step must not come before the agreement.
        """
        return None

    def learn(self, call: Call, flat: Flat, op: Op, name: str) -> None:
        """Take note of an all-reduce of numpy arrays that has been checked."""

    def forget(self) -> None:
        """Forget what was learned, and let go of its memory."""

    def again(self, x: Any, out: Any, op: Op, name: str) -> Plan[Any] | None:
        """Return the plan of such a call that has been learned; None where it must be checked.

        The arguments are what the caller passed, whatever that is; None for `out` is `x`.
        """
        return None

    def allreduce(self, device: Device, x: Any, out: Any, op: Op, wire: Wire) -> Flow[None]:
        """Reduce `x` over the ranks into `out`, which may be `x`."""
        transport = self._comm.transport(device)
        reduction = transport.reduction(x, wire.dtype, op) if isinstance(wire, Plain) else None
        if reduction is not None:
            target = wire.room(len(x)) if out is x else out
            yield reduction(x, target)
            wire.finish(target, op, self._comm.size)
            if target is not out:
                device.copy(out, target)
            return
        # A long buffer goes in pieces: while one is gathered the next is reduced, and the link is
        # never idle.
        cuts = chunks(len(x), wire.pieces(x, transport.pieces(x)))
        pieces = [self._piece(x, out, wire, lo, hi) for lo, hi in cuts]
        reducing = deque(
            _posted(self.reduce_scatter(device, p.x, p.place, op, p.wire, p.bounds))
            for p in pieces[:_AHEAD]
        )
        gathering = []
        for k, p in enumerate(pieces):
            total = yield from reducing.popleft()
            gather = self.gather(device, total, p.place, p.out, op, p.wire, p.bounds)
            gathering.append(_posted(gather))
            for q in pieces[k + _AHEAD : k + _AHEAD + 1]:
                scatter = self.reduce_scatter(device, q.x, q.place, op, q.wire, q.bounds)
                reducing.append(_posted(scatter))
        for gather in gathering:
            yield from gather

    def _piece(self, x: Any, out: Any, wire: Wire, lo: int, hi: int) -> _Piece:
        bounds = chunks(hi - lo, self._comm.size)
        place = out[lo:hi][slice(*bounds[self._comm.rank])]
        return _Piece(x[lo:hi], out[lo:hi], place, wire.at(lo), bounds)

    def reduce_scatter(
        self, device: Device, x: Any, place: Any, op: Op, wire: Wire, bounds: list[tuple[int, int]]
    ) -> Flow[Any]:
        """Return this rank's chunk x[slice(*bounds[rank])] of the reduction, as work numbers.

        `place` has the chunk's length and the caller's format; it may be that slice of `x`. The
        result is `place` itself where formats allow.
        """
        comm, transport = self._comm, self._comm.transport(device)
        n, me = comm.size, comm.rank
        lo, hi = bounds[me]
        inbox = {r: wire.room(hi - lo) for r in range(n) if r != me}
        arriving = {r: transport.irecv(inbox[r], r) for r in inbox} if hi > lo else {}
        leaving: list[Request] = []
        for r in _others(me, n):
            if bounds[r][1] > bounds[r][0]:
                leaving.append(transport.isend(wire.pack(x, *bounds[r]), r))
        total = wire.total(place)
        if hi > lo:
            inbox[me] = wire.pack(x, lo, hi)
            if me:
                yield arriving[0]
            so_far = wire.first(inbox[0], total)
            for r in range(1, n):
                if r != me:
                    yield arriving[r]
                # In place, this rank's numbers lie in `total` until they have been folded.
                into = total if r == n - 1 or me == 0 else so_far
                so_far = wire.fold(so_far, inbox[r], op, into)
            total = so_far
            wire.finish(total, op, n)
        yield Every(leaving)
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
        """Fill `out` from the reduced chunks that the ranks hold as work numbers.

        `place` is this rank's chunk of `out`, and `total` may be `place` itself.
        """
        comm, transport = self._comm, self._comm.transport(device)
        n, me = comm.size, comm.rank
        lo, hi = bounds[me]
        filled = [r for r in range(n) if bounds[r][1] > bounds[r][0]]
        landing = {r: wire.landing(out[slice(*bounds[r])]) for r in filled if r != me}
        arriving = {r: transport.irecv(landing[r], r) for r in landing}
        leaving: list[Request] = []
        if hi > lo:
            mine = wire.repack(total, lo, hi)
            leaving = [transport.isend(mine, r) for r in _others(me, n)]
            wire.unpack(mine, place, op, n)
        for r in landing:
            yield arriving[r]
            wire.unpack(landing[r], out[slice(*bounds[r])], op, n)
        yield Every(leaving)

    def allgather(self, device: Device, x: Any, places: list[Any], wire: Wire) -> Flow[None]:
        """Fill `places[r]` with the numbers of rank r."""
        comm, transport = self._comm, self._comm.transport(device)
        me = comm.rank
        landing = {r: wire.landing(p) for r, p in enumerate(places) if r != me and len(p)}
        arriving = {r: transport.irecv(landing[r], r) for r in landing}
        leaving: list[Request] = []
        if len(x):
            mine = wire.pack(x, 0, len(x))
            leaving = [transport.isend(mine, r) for r in _others(me, comm.size)]
            wire.unpack(mine, places[me], Op.MEAN, comm.size)
        for r in landing:
            yield arriving[r]
            wire.unpack(landing[r], places[r], Op.MEAN, comm.size)
        yield Every(leaving)

    def alltoall(self, device: Device, x: Any, out: Any) -> Flow[None]:
        """Send the r-th of n equal parts of `x` to rank r; `out` is another array."""
        comm, transport = self._comm, self._comm.transport(device)
        n, me = comm.size, comm.rank
        each = len(x) // n
        if not each:
            return
        parts = [slice(r * each, (r + 1) * each) for r in range(n)]
        others = _others(me, n)
        moving = [transport.irecv(out[parts[r]], r) for r in others]
        moving += [transport.isend(x[parts[r]], r) for r in others]
        device.copy(out[parts[me]], x[parts[me]])
        yield Every(moving)

    def broadcast(self, device: Device, x: Any, root: int) -> Flow[None]:
        """Fill `x` on every rank with that of `root`."""
        if len(x):
            yield self._comm.transport(device).ibroadcast(x, root)


def _others(me: int, n: int) -> list[int]:
    """Every other rank, each rank beginning with its right-hand neighbour."""
    return [(me + k) % n for k in range(1, n)]


def _posted(flow: Flow[T]) -> Flow[T]:
    """Run a flow up to its first request now; the flow returned is the rest."""
    first = next(flow)

    def rest() -> Flow[T]:
        yield first
        return (yield from flow)

    return rest()
