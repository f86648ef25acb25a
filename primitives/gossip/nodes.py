"""Neighbour verbs on a Hierarchy: the ranks of a node share one model, and nodes gossip.

The mean is taken inside each node, each of its first ranks exchanges one share of the numbers
with the ranks of the same number on other nodes, and the result is spread inside the node. It
runs in the Hierarchy's order; its agreement is one inside the node, and headers between nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.arguments import ordered
from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.devices import Flat, device_of
from relaxmpi.primitives.errors import MismatchError, RelaxError
from relaxmpi.primitives.gossip.routes import Route
from relaxmpi.primitives.ops import MEAN
from relaxmpi.primitives.wire import Plain, chunks

if TYPE_CHECKING:
    from relaxmpi.primitives.gossip.patience import EdgePatience
    from relaxmpi.primitives.gossip.verb import Move
    from relaxmpi.primitives.hierarchy import Hierarchy
    from relaxmpi.primitives.notices import NoticeBoard
    from relaxmpi.primitives.work import Flow, Work

__all__ = ["NodePatience", "by_node", "of_cross"]


class NodePatience:
    """See `Patience`: of a call that waits inside the node, and of its messages between nodes."""

    def __init__(self, inside: NoticeBoard) -> None:
        self._inside, self.size = inside, max(inside.size, 2)
        self.between: EdgePatience | None = None

    def begin(self) -> int:
        """Count a call that starts and return its number."""
        return self._inside.begin()

    def end(self) -> None:
        """Count a call that ended."""
        self._inside.end()

    def look(self, work: Work[Any]) -> RelaxError | None:
        """Hear first the other nodes, then this one; an error breaks the Hierarchy."""
        error = None if self.between is None else self.between.look(work)
        if error is None:
            return self._inside.look(work)
        error.agreed = False  # type: ignore[attr-defined]
        self._inside.give_up(work)
        return error

    def due(self, work: Work[Any]) -> float:
        """Return the seconds of waiting until something is to be done."""
        due = self._inside.due(work)
        return due if self.between is None else min(due, self.between.due(work))

    def give_up(self, work: Work[Any]) -> None:
        """Tell the node and the neighbours that this rank will not finish."""
        self._inside.give_up(work)
        if self.between is not None:
            self.between.break_off()


def of_cross(nodes: Hierarchy, route: Route) -> Route:
    """Return a route between nodes as one between the ranks of `nodes.cross`."""
    cross, numbers = nodes.cross, sorted(set(nodes.nodes))
    assert cross is not None  # callers have looked
    out, into = (
        {cross.nodes.index(numbers[node]): weight for node, weight in weights.items()}
        for weights in (route.out, route.into)
    )
    return Route(out, into, route.keep)


def by_node(
    nodes: Hierarchy, move: Move, route: Route, step: int | None, patience: NodePatience
) -> Flow[Any]:
    """Return the flow of a call on a Hierarchy."""
    return ordered(nodes, move.flat, _by_node(nodes, move, route, step, patience))


def _by_node(
    nodes: Hierarchy, move: Move, route: Route, step: int | None, patience: NodePatience
) -> Flow[Any]:
    local, cross, flat, device = nodes.local, nodes.cross, move.flat, move.flat.device
    x, out, shares = flat.data, move.target.data, nodes.shares
    if local.size == 1 and out is not x:
        device.copy(out, x)
        x = out
    bounds = chunks(len(x), shares) + [(len(x), len(x))] * (local.size - shares)
    lo, hi = bounds[local.rank]
    wire = Plain(device, flat.dtype, local.scratch)
    if local.size > 1:
        reduced = local.schedule.reduce_scatter(device, x, out[lo:hi], MEAN, wire, bounds)
        share = yield from reduced
    else:
        share = wire.first(x[lo:hi], out[lo:hi])
    if hi == lo:  # work numbers, even if there are none
        share = device.empty(0, wire.work)
    result: Any = None
    if cross is not None:
        part = Flat(share, wire.work, (hi - lo,), device)
        exchange = cross.edges.exchange(Call(move.what), cross.transport(device), step)
        patience.between = cross.edges.patience(exchange)
        try:
            result = yield from move.post(exchange, of_cross(nodes, route), part, share)
        except MismatchError as error:
            error.agreed = False  # ranks without a share in this edge have gone on
            raise
        patience.between = None
    dx = nodes.edges.buffers.take(device, len(x), flat.dtype) if move.w is not None else None
    if local.size > 1:
        yield from local.schedule.gather(device, share, out[lo:hi], out, MEAN, wire, bounds)
        if dx is not None:
            mine = dx[:0] if result is None else result[0]
            yield from local.schedule.gather(device, mine, dx[lo:hi], dx, MEAN, wire, bounds)
    else:
        wire.deliver(share, out[lo:hi], MEAN, 1)
        if dx is not None:
            wire.deliver(result[0], dx, MEAN, 1)
    if dx is None:
        return move.give(None)
    weights = np.array([move.w[0], 0.0 if result is None else result[1]])
    if local.size > shares:  # some ranks have no share, and so no weight
        yield from local.schedule.broadcast(device_of(weights), weights, 0)
        move.w[0] = weights[0]
    return move.give((dx, float(weights[1])))
