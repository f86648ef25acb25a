"""Messages between the ranks of a Comm whose time is taken: what `from_measurement` is made of."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from relaxmpi.primitives.devices import device_of
from relaxmpi.primitives.primitive import primitive
from relaxmpi.primitives.transport import Every
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm
    from relaxmpi.primitives.transport import Transport

__all__ = ["BURST", "WORD", "Pairs", "burst", "exchange", "host", "paired", "trips"]

WORD = 8
BURST = 24
_TRIPS = 3

Pairs = Sequence[tuple[int, int]]


def host(comm: Comm) -> Transport:
    """Return what moves arrays of the CPU."""
    return comm.transport(device_of(np.empty(0)))


def paired(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """All pairs are at work at once, or those that wait for the others would be in their way."""
    return list(zip(ranks[::2], ranks[1::2], strict=False))


def _partner(comm: Comm, pairs: Pairs) -> tuple[int | None, bool]:
    """Return this rank's other one, if there is one, and whether this one comes first."""
    for first, second in pairs:
        if comm.rank in (first, second):
            return (second, True) if comm.rank == first else (first, False)
    return None, False


@primitive
def trips(comm: Comm, pairs: Pairs, size: int) -> Flow[float]:
    """Return the seconds of so many bytes' way there and back, as the first ranks see it."""
    transport, word = host(comm), np.zeros(size, np.uint8)
    there, first = _partner(comm, pairs)

    def flow() -> Flow[float]:
        seconds: list[float] = []
        if there is None:
            return 0.0
        for _ in range(_TRIPS):
            begin = comm.now()
            if first:
                yield transport.isend(word, there)
            yield transport.irecv(word, there)
            if not first:
                yield transport.isend(word, there)
            seconds.append(comm.now() - begin)
        return median(seconds[1:]) if first else 0.0

    return flow()


@primitive
def burst(comm: Comm, pairs: Pairs, size: int, pause: float) -> Flow[float]:
    """Seconds of the processor to send a message; on second ranks, to receive it."""
    transport, words = host(comm), np.zeros((BURST, size), np.uint8)
    there, first = _partner(comm, pairs)

    def flow() -> Flow[float]:
        if there is None:
            return 0.0
        if not first:
            comm.compute(pause)  # until all are here
        begin = comm.now()
        requests = [(transport.isend if first else transport.irecv)(w, there) for w in words]
        posted = comm.now()
        yield Every(requests)
        return ((posted if first else comm.now()) - begin) / BURST

    return flow()


@primitive
def exchange(comm: Comm, pairs: Pairs, size: int, count: int) -> Flow[float]:
    """Seconds in which the two of each pair send each other `count` messages of `size` bytes."""
    transport = host(comm)
    inbox, outbox = np.zeros((count, size), np.uint8), np.zeros(size, np.uint8)
    there, _ = _partner(comm, pairs)

    def flow() -> Flow[float]:
        begin = comm.now()
        if there is not None:
            moving = [transport.irecv(place, there) for place in inbox]
            yield Every([*moving, *(transport.isend(outbox, there) for _ in inbox)])
        return comm.now() - begin

    return flow()
