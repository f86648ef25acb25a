"""The moves of the neighbour verbs: what one rank posts, and what it makes of what arrives.

Sums are made in the order of ranks, the own contribution in its place, so that every way to run
a call gives the same bits. Half precision is summed in single precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relaxmpi.primitives.transport import Turn
from relaxmpi.primitives.work import in_background

if TYPE_CHECKING:
    from relaxmpi.primitives.devices import Flat
    from relaxmpi.primitives.gossip.edges import Exchange
    from relaxmpi.primitives.gossip.routes import Route
    from relaxmpi.primitives.work import Flow

__all__ = ["average", "meet", "push"]

_WORK = {"float16": "float32", "bfloat16": "float32"}


class Room:
    """Memory and arithmetic of one call, for numbers like those of `flat`."""

    def __init__(self, exchange: Exchange, flat: Flat) -> None:
        self.buffers, self.device, self.dtype = exchange.buffers, flat.device, flat.dtype
        self.work, self.count = _WORK.get(flat.dtype, flat.dtype), len(flat.data)
        self.kernels = flat.device.kernels

    def take(self, dtype: str = "") -> Any:
        """Return memory for the numbers, as they travel or in another format."""
        return self.buffers.take(self.device, self.count, dtype or self.dtype)

    def widen(self, data: Any) -> Any:
        """Return the numbers in the work format, which is often the very same."""
        return self.device.cast(data, self.dtype, self.work)

    def narrow(self, data: Any, out: Any) -> None:
        """Write work numbers where they belong, unless they are there."""
        if data is not out:
            self.device.copy(out, self.device.cast(data, self.work, self.dtype))


def average(exchange: Exchange, flat: Flat, target: Any, route: Route) -> Flow[None]:
    """Post x to the neighbours; the flow returned puts sum_j W_ij x_j into `target`."""
    room, x = Room(exchange, flat), flat.data
    arriving = {peer: room.take() for peer in route.into}
    for peer, data in arriving.items():
        exchange.receive(peer, data, room.count)
    for peer in route.out:
        exchange.send(peer, x, room.count)

    def rest() -> Flow[None]:
        for peer in arriving:
            yield from exchange.arrived(peer)
        yield exchange.left()  # the result may go where x lies
        terms = [(peer, arriving[peer], route.into[peer]) for peer in arriving]
        if route.keep or not terms:
            terms.append((exchange.rank, x, route.keep))
        terms.sort(key=lambda term: term[0])
        _weighted(room, [(data, weight) for _, data, weight in terms], target)

    return rest()


def _weighted(room: Room, terms: list[tuple[Any, float]], target: Any) -> None:
    """Add up in the order given; `target` may be one of the terms, and is written last."""
    kernels = room.kernels
    wide = [(room.widen(data), weight) for data, weight in terms]
    plain = room.work == room.dtype
    if len(wide) == 1:
        total = target if plain else room.take(room.work)
        kernels.scaled(*wide[0], total)
        room.narrow(total, target)
        return
    between = room.take(room.work) if len(wide) > 2 or not plain else None
    for k in range(1, len(wide)):
        out = target if plain and k == len(wide) - 1 else between
        if k == 1:
            kernels.pair(*wide[0], *wide[1], out)
        else:
            kernels.mix(between, *wide[k], out)
    if not plain:
        room.narrow(between, target)


def push(exchange: Exchange, flat: Flat, w: Any, route: Route) -> Flow[tuple[Any, float]]:
    """Post the shares of x and w and keep the rest; the flow returns what arrives, flat."""
    room, x = Room(exchange, flat), flat.data
    arriving = {peer: room.take() for peer in route.into}
    for peer, data in arriving.items():
        exchange.receive(peer, data, room.count)
    weight = float(w[0])
    for peer, share in _shares(room, x, route, exchange.held).items():
        exchange.send(peer, share, room.count, route.out[peer] * weight)
    w[0] = route.keep * weight

    def rest() -> Flow[tuple[Any, float]]:
        total, dw = None, 0.0
        for peer, data in arriving.items():
            dw += yield from exchange.arrived(peer)
            if len(arriving) == 1:
                total = data
            elif total is None:
                total = room.widen(data)
            else:
                room.kernels.accumulate(total, room.widen(data))
        if exchange.held:
            yield exchange.left()
        else:
            exchange.leave()
        if total is None:
            return room.device.zeros(room.count, room.dtype), dw
        if len(arriving) > 1 and room.work != room.dtype:
            wide, total = total, room.take()
            room.narrow(wide, total)
        return total, dw

    return rest()


def _shares(room: Room, x: Any, route: Route, held: bool) -> dict[int, Any]:
    """Return what goes to each rank, and leave in x what is kept.

    Where that is equal, and x is held until the call ends, x itself is what goes.
    """
    kernels, wide = room.kernels, room.widen(x)
    if held and wide is x and [*route.out.values()] == [route.keep] * len(route.out):
        kernels.scaled(x, route.keep, x)
        return dict.fromkeys(route.out, x)
    by_weight: dict[float, Any] = {}
    weights = sorted(set(route.out.values()))
    for weight in weights:
        share = room.take(room.work)
        if weight == weights[-1]:
            kernels.share(wide, route.keep, weight, share)
        else:
            kernels.scaled(wide, weight, share)
        if room.work != room.dtype:
            narrow = room.take()
            room.narrow(share, narrow)
            share = narrow
        by_weight[weight] = share
    if not weights and route.keep != 1.0:
        kernels.scaled(wide, route.keep, wide)
    room.narrow(wide, x)
    return {peer: by_weight[weight] for peer, weight in route.out.items()}


def meet(exchange: Exchange, flat: Flat, peer: int) -> Flow[None]:
    """Post x, or a snapshot of it, to a peer; the flow moves x half of the way to the peer's."""
    room, x = Room(exchange, flat), flat.data
    theirs = room.take()
    exchange.receive(peer, theirs, room.count)
    mine = x
    if not exchange.held:
        mine = room.take()
        room.device.copy(mine, x)
    exchange.send(peer, mine, room.count)

    def rest() -> Flow[None]:
        yield from exchange.arrived(peer)
        if exchange.held:
            yield exchange.left()
        # A progress thread must not write to what its caller may be changing.
        yield Turn(lambda: not in_background())
        wide = room.widen(x)
        if mine is x:
            room.kernels.pair(wide, 0.5, room.widen(theirs), 0.5, wide)
        else:
            room.kernels.meet(wide, room.widen(mine), room.widen(theirs))
        room.narrow(wide, x)
        exchange.leave()

    return rest()
