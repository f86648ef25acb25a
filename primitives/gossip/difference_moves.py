"""The moves of the neighbour verbs with a memory around a codec; see `difference` for the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relaxmpi.primitives.gossip.difference import DCD, DifferenceCompression, Replicas
from relaxmpi.primitives.gossip.moves import Room
from relaxmpi.primitives.transport import Turn

if TYPE_CHECKING:
    from relaxmpi.primitives.codecs import Codec, Key
    from relaxmpi.primitives.devices import Flat
    from relaxmpi.primitives.gossip.edges import Exchange
    from relaxmpi.primitives.gossip.routes import Route
    from relaxmpi.primitives.work import Flow

__all__ = ["choco", "dcd", "push"]


class Coder:
    """A codec, the memory around it and the buffers of one call.

    Args:
        exchange: The messages of the call.
        flat: The buffer.
        memory: The replicas.
        codec: The memory's codec, as its work is priced in this world.
        key: Of this call.
    """

    def __init__(
        self, exchange: Exchange, flat: Flat, memory: Replicas, codec: Codec, key: Key
    ) -> None:
        self.room = Room(exchange, flat)
        self.exchange, self.memory, self._codec, self._key = exchange, memory, codec, key
        self._bytes = codec.nbytes(self.room.count, self.room.work)
        self.place = memory.queue()

    def replica(self, side: str, peer: int) -> Any:
        """Return what is known at an end of an edge."""
        room = self.room
        return self.memory.held(side, peer, room.device, room.count, room.work)

    def heard(self, route: Route) -> list[tuple[Any, float]]:
        """Return the replicas of all in-neighbours with their weights."""
        return [(self.replica("heard", peer), weight) for peer, weight in route.into.items()]

    def payload(self) -> Any:
        """Return memory for encoded numbers."""
        return self.room.buffers.take(self.room.device, self._bytes, "uint8")

    def encode(self, change: Any, replica: Any) -> Any:
        """Encode a change, let the replica follow it, and return the payload."""
        payload = self.payload()
        self._codec.encode(change, payload, key=self._key)
        self.follow(replica, payload)
        return payload

    def news(self, x: Any, replica: Any, give: float = 0.0) -> Any:
        """Encode what the replica does not know of x, let it follow, and return the payload.

        Then x <- x - give replica.
        """
        payload = self.payload()
        self._codec.encode_difference(x, replica, payload, key=self._key, give=give)
        return payload

    def follow(self, replica: Any, payload: Any, part: float = 0.0, share: Any = None) -> None:
        """Add what a payload says to a replica; then share = part replica."""
        self._codec.decode_follow(payload, replica, part=part, share=share)

    def receive(self, peer: int, data: Any) -> None:
        """Post a receive on an edge with a replica."""
        self.exchange.receive(peer, data, self.room.count, self.memory.age("heard", peer))

    def send(self, peer: int, data: Any, weight: float = 0.0) -> None:
        """Post a message on an edge with a replica."""
        age = self.memory.age("sent", peer)
        self.exchange.send(peer, data, self.room.count, weight, age)

    def in_turn(self, flow: Flow[Any]) -> Flow[Any]:
        """Return the flow behind those of earlier calls with the same memory."""
        place = self.place
        try:
            yield Turn(place.due)
            result = yield from flow
        except BaseException:
            place.fail()
            raise
        place.end()
        return result


def choco(
    exchange: Exchange,
    flat: Flat,
    target: Any,
    route: Route,
    memory: DifferenceCompression,
    codec: Codec,
    key: Key,
) -> Flow[None]:
    """Post what has changed in x; the flow moves x towards the neighbours' replicas."""
    coder = Coder(exchange, flat, memory, codec, key)
    room, kernels = coder.room, coder.room.kernels
    arriving = {peer: coder.payload() for peer in route.into}
    for peer, data in arriving.items():
        coder.receive(peer, data)
    own = coder.replica("own", exchange.rank)
    payload = coder.news(room.widen(flat.data), own)
    for peer in route.out:
        coder.send(peer, payload)

    def rest() -> Flow[None]:
        for peer, data in arriving.items():
            yield from exchange.arrived(peer)
            coder.follow(coder.replica("heard", peer), data)
        gap = room.take(room.work)
        kernels.drift(own, own, coder.heard(route), gap)
        plain = room.work == room.dtype
        out = target if plain else room.take(room.work)
        kernels.mix(room.widen(flat.data), gap, memory.gamma, out)
        room.narrow(out, target)
        exchange.leave()

    return coder.in_turn(rest())


def dcd(
    exchange: Exchange,
    flat: Flat,
    target: Any,
    route: Route,
    memory: DCD,
    codec: Codec,
    key: Key,
) -> Flow[None]:
    """Post what x and the replicas make of this rank's, and put that into `target`.

    What the neighbours will make of this rank's x is known as soon as the message is.
    """
    coder = Coder(exchange, flat, memory, codec, key)
    room, kernels, me = coder.room, coder.room.kernels, exchange.rank
    if not memory.replicas("own"):
        return coder.in_turn(_introduce(coder, flat, target, route))
    arriving = {peer: coder.payload() for peer in route.into}
    for peer, data in arriving.items():
        coder.receive(peer, data)
    own, change = coder.replica("own", me), room.take(room.work)
    kernels.drift(room.widen(flat.data), own, coder.heard(route), change)
    payload = coder.encode(change, own)
    for peer in route.out:
        coder.send(peer, payload)
    room.narrow(own, target)

    def rest() -> Flow[None]:
        for peer, data in arriving.items():
            yield from exchange.arrived(peer)
            coder.follow(coder.replica("heard", peer), data)
        exchange.leave()

    return coder.in_turn(rest())


def _introduce(coder: Coder, flat: Flat, target: Any, route: Route) -> Flow[None]:
    """Post x itself; the flow makes the replicas of it."""
    room, exchange = coder.room, coder.exchange
    arriving = {peer: room.take() for peer in route.into}
    for peer, data in arriving.items():
        coder.receive(peer, data)
    for peer in route.out:
        coder.send(peer, flat.data)
    room.device.copy(coder.replica("own", exchange.rank), room.widen(flat.data))

    def rest() -> Flow[None]:
        for peer, data in arriving.items():
            yield from exchange.arrived(peer)
            room.device.copy(coder.replica("heard", peer), room.widen(data))
        yield exchange.left()
        if target is not flat.data:
            room.device.copy(target, flat.data)

    return rest()


def push(
    exchange: Exchange,
    flat: Flat,
    w: Any,
    route: Route,
    memory: DifferenceCompression,
    codec: Codec,
    key: Key,
) -> Flow[tuple[Any, float]]:
    """Post changes and give away parts of the replicas; the flow returns what others gave."""
    coder = Coder(exchange, flat, memory, codec, key)
    room, kernels, gamma = coder.room, coder.room.kernels, memory.gamma
    arriving = {peer: coder.payload() for peer in route.into}
    for peer, data in arriving.items():
        coder.receive(peer, data)
    wide, weight, alone = room.widen(flat.data), float(w[0]), len(route.out) == 1
    for peer, share in route.out.items():
        give = gamma * share
        news = coder.news(wide, coder.replica("sent", peer), give if alone else 0.0)
        coder.send(peer, news, give * weight)
    for peer, share in route.out.items():
        if not alone:  # what goes to each is encoded from the same x
            kernels.mix(wide, coder.replica("sent", peer), -gamma * share, wide)
        w[0] -= gamma * share * weight
    room.narrow(wide, flat.data)

    def rest() -> Flow[tuple[Any, float]]:
        total, dw = None, 0.0
        for peer, data in arriving.items():
            dw += yield from exchange.arrived(peer)
            replica, part = coder.replica("heard", peer), gamma * route.into[peer]
            if total is None:
                total = room.take(room.work)
                coder.follow(replica, data, part, total)
            else:
                coder.follow(replica, data)
                kernels.mix(total, replica, part, total)
        exchange.leave()
        if total is None:
            return room.device.zeros(room.count, room.dtype), dw
        if room.work == room.dtype:
            return total, dw
        narrow = room.take()
        room.narrow(total, narrow)
        return narrow, dw

    return coder.in_turn(rest())
