"""Hierarchy: full precision where the network is fast, the codec where it is slow."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any

from relaxmpi.primitives.agreement import nothing
from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.comm import Comm
from relaxmpi.primitives.devices import Device
from relaxmpi.primitives.gossip.nodes import NodePatience, by_node, of_cross
from relaxmpi.primitives.ops import MEAN, SUM, Op
from relaxmpi.primitives.queue import Queue
from relaxmpi.primitives.schedules import FlatSchedule
from relaxmpi.primitives.wire import Coded, Wire, chunks
from relaxmpi.primitives.work import Flow, Work

if TYPE_CHECKING:
    from relaxmpi.primitives.gossip.routes import Route
    from relaxmpi.primitives.gossip.verb import Move

__all__ = ["Hierarchy"]


class Hierarchy(Comm):
    """A Comm that knows its nodes; made by `comm.by_node()`.

    `allreduce` reduces in full precision inside each node, sends one share a rank, encoded,
    between nodes, and spreads the result inside the nodes again; the mean is that over all
    ranks also where nodes are of unequal size. `broadcast` crosses each link once. Neighbour
    verbs take the mean inside each node and connect the nodes, in the order of this stream. The
    other verbs run as on a Comm.

    Attributes:
        local: The ranks of this node; on the same stream.
        cross: The ranks of the same number on their node, one a node; None on a rank whose
            number the smallest node does not have. What they move is counted in their own
            `stats`.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> with rx.Comm.world() as comm, comm.by_node() as nodes:
        ...     rx.allreduce(nodes, np.ones(2), op=rx.MEAN)
        array([1., 1.])
    """

    def __init__(self, comm: Comm, beside: Queue | None = None) -> None:
        super().__init__(comm._world, comm.settings, beside=beside)
        sizes = Counter(self.nodes)
        self.shares = min(sizes.values())
        self.local = self._part(self.nodes[self.rank])
        slot = self.local.rank
        self.cross = self._split(slot if slot < self.shares else None, self.rank, self.queue)
        self._parts = [part for part in (self.local, self.cross) if part is not None]

    def _part(self, color: int) -> Comm:
        part = self._split(color, self.rank, self.queue)
        assert part is not None  # a colour was given
        return part

    @cached_property
    def schedule(self) -> FlatSchedule:
        """The moves that make up a verb on this Hierarchy."""
        return _ByNode(self)

    def dup(self, *, together: bool = False) -> Hierarchy:
        """Return a Hierarchy of the same ranks with a stream of its own; see `Comm.dup`."""
        self._meet("dup")
        return Hierarchy(self, self.queue if together else None)

    @property
    def layout(self) -> str:
        """Which ranks reduce which parts, in words."""
        return f"{self.size} ranks on {len(set(self.nodes))} nodes"

    @property
    def seat(self) -> tuple[int, int]:
        """The number of this node and the number of nodes, as topologies count them."""
        numbers = sorted(set(self.nodes))
        return numbers.index(self.nodes[self.rank]), len(numbers)

    def exchange(
        self, move: Move, route: Route, step: int | None, *, held: bool = False
    ) -> Work[Any]:
        """Start a neighbour verb between nodes, in the order of this Hierarchy."""
        patience = NodePatience(self.local._notices)
        flow = self._meeting(move, route, step, patience)
        when = None if step is None else f"step {step}"
        return self.local.submit(Call((*move.what, when)), flow, patience)

    def exchanged(self, move: Move, route: Route, step: int | None) -> Any:
        """Do the same in a blocking call, and return the result."""
        return self.exchange(move, route, step, held=True).wait()

    def meeting(self, move: Move, route: Route, step: int | None) -> Flow[Any]:
        """Return the flow of a neighbour verb inside a primitive."""
        return self._meeting(move, route, step, NodePatience(self.local._notices))

    def _meeting(
        self, move: Move, route: Route, step: int | None, patience: NodePatience
    ) -> Flow[Any]:
        if self.size == 1:
            return move.alone()
        return by_node(self, move, route, step, patience)

    def decline(self, route: Route, call: Call) -> None:
        """Tell the neighbours and this node of a call that this rank refuses."""
        if self.cross is not None:
            self.cross.edges.skip(of_cross(self, route), str(call))
        self.local.submit(call, nothing()).wait()

    def begin(self) -> None:
        """Let the flow that starts now take the scratch of the one that has ended."""
        super().begin()
        self.local.begin()
        if self.cross is not None:
            self.cross.begin()

    def end(self) -> None:
        """Take note that the flow has ended, well or badly."""
        super().end()
        self.local.end()
        if self.cross is not None:
            self.cross.end()

    def close(self) -> None:
        """Give all its communicators back; see `Comm.close`."""
        super().close()
        self.local.close()
        if self.cross is not None:
            self.cross.close()


class _ByNode(FlatSchedule):
    def __init__(self, comm: Hierarchy) -> None:
        super().__init__(comm)
        self._nodes = comm

    def allreduce(self, device: Device, x: Any, out: Any, op: Op, wire: Wire) -> Flow[None]:
        """Reduce-scatter inside, all-reduce of one share a rank between, all-gather inside."""
        local, cross, n = self._nodes.local, self._nodes.cross, self._nodes.size
        if local.size == 1 and out is not x:  # nothing is reduced here, so work on a copy
            device.copy(out, x)
            x = out
        shares = self._nodes.shares
        empty = [(len(x), len(x))] * (local.size - shares)
        bounds = chunks(len(x), shares) + empty
        lo, hi = bounds[local.rank]
        inside, place = wire.inside(local.scratch), out[lo:hi]
        share = yield from local.schedule.reduce_scatter(
            device, x, place, SUM if op.additive else op, inside, bounds
        )
        if cross is not None and hi > lo:
            yield from self._between(cross, device, share, op, wire.shard(lo, cross.scratch), n)
        yield from local.schedule.gather(device, share, place, out, MEAN, inside, bounds)

    def _between(
        self, cross: Comm, device: Device, share: Any, op: Op, wire: Wire, n: int
    ) -> Flow[None]:
        """Reduce the nodes' sums; a coded one in the units of the mean over all n ranks."""
        if isinstance(wire, Coded) and cross.size > 1:
            device.scale(share, cross.size / n)
            yield from cross.schedule.allreduce(device, share, share, MEAN, wire)
            if op is SUM:
                device.scale(share, n)
            return
        if cross.size > 1:
            plain_op = SUM if op.additive else op
            yield from cross.schedule.allreduce(device, share, share, plain_op, wire)
        if op is MEAN:
            device.divide(share, n)

    def broadcast(self, device: Device, x: Any, root: int) -> Flow[None]:
        """Inside the root's node, between the first ranks of all nodes, inside the others."""
        hierarchy, nodes = self._nodes, self._nodes.nodes
        local, home = hierarchy.local, nodes[root] == nodes[hierarchy.rank]
        if home and local.size > 1:
            slot = nodes[:root].count(nodes[root])
            yield from local.schedule.broadcast(device, x, slot)
        if local.rank == 0 and hierarchy.cross is not None:
            firsts = sorted(nodes.index(node) for node in set(nodes))
            at = firsts.index(nodes.index(nodes[root]))
            if hierarchy.cross.size > 1:
                yield from hierarchy.cross.schedule.broadcast(device, x, at)
        if not home and local.size > 1:
            yield from local.schedule.broadcast(device, x, 0)
