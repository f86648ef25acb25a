"""The transport of a simulated world: bytes are copied when they are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.simulation.channel import (
    DONE,
    Channel,
    Never,
    Parcel,
    Receive,
)
from relaxmpi.primitives.simulation.exchange import Exchange
from relaxmpi.primitives.simulation.load import Load, load_of
from relaxmpi.primitives.simulation.rank import Rank, Ticket
from relaxmpi.primitives.transport import TAG, Every, Request, pieces_of

if TYPE_CHECKING:
    from relaxmpi.primitives.settings import Settings
    from relaxmpi.primitives.simulation.fabric import Fabric
    from relaxmpi.primitives.simulation.world import RankWorld
    from relaxmpi.primitives.stats import Stats

__all__ = ["SimulatedTransport"]


class SimulatedTransport:
    """See `Transport`. Sums are never left to it: they go in the order of ranks, by messages."""

    def __init__(
        self, world: RankWorld, channel: Channel, settings: Settings, stats: Stats, nodes: int
    ) -> None:
        self.channel, self._rank = channel, world.rank
        self._stats, self._me = stats, world.me
        self._network, self._fabric = channel.fabric.network, channel.fabric
        self._nodes, self._exchanges = nodes, 0
        self._loads: dict[tuple[float, bool], Load] = {}
        self._places, self._place = channel.nodes, channel.nodes[world.rank]
        segment = settings.segment or self._network.segment
        self.longest = min(segment, settings.max_message) if nodes > 1 else settings.max_message

    def addressed(self, data: Any, dest: int, tag: int = TAG) -> Parcel:
        """Make a message of the bytes of `data`, which nobody will change."""
        size = data.nbytes * self._network.scale
        waits = size > self._network.eager and self.longest > self._network.eager
        return Parcel(data, self._load(size, dest), Ticket(self._me) if waits else None, tag)

    def _near(self, dest: int) -> bool:
        return self._places[dest] == self._place

    def _load(self, size: float, dest: int) -> Load:
        key = size, self._near(dest)
        found = self._loads.get(key)
        if found is None:
            found = self._loads[key] = load_of(self._network, size, self.longest, key[1])
        return found

    def _count(self, size: int) -> None:
        self._stats.payload_bytes += size
        self._stats.messages += 1

    def isend(self, data: Any, dest: int, tag: int = TAG) -> Request:
        """Start sending the bytes of `data`, which are copied now."""
        if self._me.dead:
            return Never()
        return self._send(self.parcel(data, dest, tag), dest)

    def parcel(self, data: Any, dest: int, tag: int = TAG) -> Parcel:
        """Make a message of a copy of the bytes of `data`, and count it."""
        self._count(data.nbytes)
        return self.addressed(data.view(np.uint8).copy(), dest, tag)

    def announce(self, header: Any, dest: int, tag: int) -> Request:
        """Start sending a short header, which is no payload and does not scale."""
        if self._me.dead:
            return Never()
        self._stats.header_bytes += header.size
        load = self._load(header.size, dest)
        return self._send(Parcel(header.copy(), load, None, tag), dest)

    def _send(self, parcel: Parcel, dest: int) -> Request:
        me, load, cost = self._me, parcel.load, self._fabric.cost
        cost(me, load.first)
        begin = me.clock
        cost(me, load.send - load.first)
        self.channel.pipe(self._rank, dest, _lane(parcel.tag)).send(parcel, begin)
        return DONE if parcel.sent is None else parcel.sent

    def irecv(self, data: Any, source: int, tag: int = TAG) -> Request:
        """Start receiving exactly the bytes of `data`."""
        request = Receive(self._me, data.view(np.uint8), self._fabric, tag)
        self.channel.pipe(source, self._rank, _lane(tag)).receive(request, self._me.clock)
        return request

    def ibroadcast(self, data: Any, root: int) -> Request:
        """Start a broadcast down a binomial tree; a rank sends on when the bytes are there."""
        raw, n = data.view(np.uint8), len(self.channel.members)
        place = (self._rank - root) % n
        # Place p hears from p without its highest bit, and tells p + 2^k for all higher k.
        height = place.bit_length()
        children = [place + (1 << k) for k in range((n - 1).bit_length() - 1, height - 1, -1)]
        dests = [(child + root) % n for child in children if child < n]
        if place:
            parent = (place - (1 << (height - 1)) + root) % n
            request = _Relay(self, self._me, raw, self._fabric, dests)
            self.channel.pipe(parent, self._rank, lane="tree").receive(request, self._me.clock)
            return request
        if self._me.dead:
            return Never()
        self._count(raw.size)
        copy = raw.copy()
        parcels = [self.addressed(copy, dest) for dest in dests]
        self._fabric.cost(self._me, sum(parcel.load.send for parcel in parcels))
        return Every(self.spread(self._me.clock, dests, parcels))

    def spread(self, time: float, dests: list[int], parcels: list[Parcel]) -> list[Request]:
        """Send messages down the tree of a broadcast."""
        for dest, parcel in zip(dests, parcels, strict=True):
            self.channel.pipe(self._rank, dest, lane="tree").send(parcel, time)
        return [parcel.sent for parcel in parcels if parcel.sent is not None]

    @property
    def shares(self) -> bool:
        """Whether ranks may share what all would make of the same messages: no work has a price."""
        return not self._network.work

    def exchange(self, payloads: dict[int, Any], expected: int) -> Exchange:
        """Send one message each to some ranks, and receive `expected` ones: all in one event.

        Every rank of the communicator takes part. Where two ranks get the same array it is
        copied once, and they read that copy.
        """
        made: dict[tuple[int, bool], Parcel] = {}
        parcels: dict[int, Parcel] = {}
        for dest, data in payloads.items():
            self._count(data.nbytes)
            key = id(data), self._near(dest)
            parcel = made.get(key)
            if parcel is None:
                other = made.get((key[0], not key[1]))
                copy = data.copy() if other is None else other.data
                parcel = made[key] = self.addressed(copy, dest)
            parcels[dest] = parcel
        exchange = Exchange(self.channel, self._me, self._rank, expected)
        if not self._me.dead:
            self._exchanges += 1
            exchange.start(self._exchanges, parcels)
        return exchange

    def reduction(self, data: Any, dtype: str, op: Op) -> None:
        """None: what MPI's own reductions add in which order, nobody knows."""
        return

    def pieces(self, data: Any) -> int:
        """In how many pieces a reduction of `data` should go: as over MPI."""
        return pieces_of(data.nbytes * self._network.scale, self._nodes)


def _lane(tag: int) -> str:
    """Neighbour verbs have messages of their own: what one of them lost holds up no other."""
    return "" if tag == TAG else "edge"


class _Relay(Receive):
    """A receive whose rank sends on what arrives, at its own processor's cost."""

    __slots__ = ("_dests", "_passed", "_transport")

    def __init__(
        self,
        transport: SimulatedTransport,
        rank: Rank,
        data: Any,
        fabric: Fabric,
        dests: list[int],
    ) -> None:
        super().__init__(rank, data, fabric)
        self._transport, self._dests = transport, dests
        self._passed: list[Parcel] = []

    def fill(self, time: float, parcel: Parcel, spread: float = 0.0) -> None:
        """The bytes have arrived."""
        address = self._transport.addressed
        self._passed = [address(parcel.data, dest) for dest in self._dests]
        self.extra = sum(passed.load.send for passed in self._passed)
        super().fill(time, parcel, spread)
        if self._dests:
            self._fabric.scheduler.help(self.rank, time, self._send_on)

    def _send_on(self, time: float) -> None:
        self._transport.spread(time, self._dests, self._passed)
