"""Faults of a simulated world, as values: what happens to messages and to ranks, and when.

Messages are those that carry data; agreements and notices are lost only with a rank that is
killed. On MPI's terms a link neither loses nor repeats nor reorders: a simulated one numbers its
messages, throws copies away and restores the order, as TCP does, so these three show as time, or,
where a message is lost for good, as PeerTimeout, never as wrong numbers. Only the asynchronous
endpoints see them as they are, and make up for them: `AsyncPushSum` and `AsyncPairwise`.

Example:
    >>> import relaxmpi as rx
    >>> hurt = [rx.faults.Reorder(0.1, within=1e-3), rx.faults.Kill(rank=1, at=2.0)]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "Delay",
    "Drop",
    "Duplicate",
    "Fault",
    "Kill",
    "MessageFault",
    "Pause",
    "RankFault",
    "Reorder",
    "SlowDown",
    "draw",
]

_MASK = 2**64 - 1


def draw(*words: int) -> float:
    """Return a number in [0, 1) that depends on the words only, on every machine.

    Rounds of splitmix64 (Steele, Lea and Flood 2014), so that what happens to one message does
    not depend on how many others there were.

    Example:
        >>> draw(1, 2) == draw(1, 2), draw(1, 2) == draw(2, 1)
        (True, False)
    """
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


@dataclass(frozen=True)
class MessageFault:
    """Which messages are hit.

    Attributes:
        probability: Of each message that meets the rest, by the world's seed.
        source: The sending rank; None: any.
        dest: The receiving rank; None: any.
        nth: Only this message, counted from 0, of each pair of ranks; None: any.
        after: Seconds of virtual time from which on messages are hit.
        before: Seconds of virtual time until which messages are hit.
    """

    probability: float = 1.0
    source: int | None = None
    dest: int | None = None
    nth: int | None = None
    after: float = 0.0
    before: float = math.inf

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"probability must be in [0, 1], not {self.probability!r}")

    def meets(self, source: int, dest: int, nth: int, time: float) -> bool:
        """Whether a message meets the conditions, chance aside."""
        return (
            self.source in (None, source)
            and self.dest in (None, dest)
            and self.nth in (None, nth)
            and self.after <= time < self.before
        )


@dataclass(frozen=True)
class Drop(MessageFault):
    """The message is lost, after it has left its sender."""


@dataclass(frozen=True)
class Duplicate(MessageFault):
    """The message is sent twice.

    Attributes:
        later: Seconds until the copy is sent.
    """

    later: float = 0.0


@dataclass(frozen=True)
class Delay(MessageFault):
    """The message arrives later.

    Attributes:
        seconds: By this much.
    """

    seconds: float = 1e-3


@dataclass(frozen=True)
class Reorder(MessageFault):
    """The message arrives later by a time drawn for it, so that others overtake it.

    Attributes:
        within: Seconds; times are uniform in [0, within).
    """

    within: float = 1e-3


@dataclass(frozen=True)
class RankFault:
    """Which rank is hit."""

    rank: int


@dataclass(frozen=True)
class Pause(RankFault):
    """The rank stands still.

    Attributes:
        at: Virtual seconds.
        seconds: For so long.
    """

    at: float = 0.0
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if not (self.at >= 0 and 0 <= self.seconds < math.inf):
            raise ValueError(f"times of a Pause must be zero or more: {self}")


@dataclass(frozen=True)
class SlowDown(RankFault):
    """What the rank computes, and what a message costs it, takes longer.

    Attributes:
        factor: So many times.
        at: Virtual seconds when it begins.
        until: Virtual seconds when it ends.
    """

    factor: float = 2.0
    at: float = 0.0
    until: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"the factor of a SlowDown must be above zero: {self}")


@dataclass(frozen=True)
class Kill(RankFault):
    """The rank's program ends without a word.

    Attributes:
        at: Virtual seconds; None: by call.
        call: Before its part in this agreement, counted from 0 over all its Comms: each call of
            a verb or primitive makes one, also inside a primitive, and so do `dup`, `split` and
            `by_node`; a neighbour verb counts as one. None: by time.
    """

    at: float | None = None
    call: int | None = None

    def __post_init__(self) -> None:
        if (self.at is None) == (self.call is None):
            raise ValueError(f"a Kill has either a time or the number of a call: {self}")


Fault = MessageFault | RankFault


class Fate(NamedTuple):
    """What happens to one message."""

    dropped: bool = False
    delay: float = 0.0
    copies: tuple[float, ...] = ()  # how much later each is sent


UNHURT = Fate()


class Fates:
    """The faults of one world, asked about each message and each rank."""

    def __init__(self, faults: Sequence[Fault], n: int, seed: int) -> None:
        for fault in faults:
            if not isinstance(fault, (MessageFault, RankFault)):
                raise TypeError(f"{fault!r} is not a fault: see relaxmpi.faults")
            if isinstance(fault, RankFault) and not 0 <= fault.rank < n:
                raise ValueError(f"there is no rank {fault.rank} among {n}: {fault}")
        self._seed = seed
        self.of_messages = [f for f in faults if isinstance(f, MessageFault)]
        self.of_ranks = [f for f in faults if isinstance(f, RankFault)]
        self._slow = [f for f in self.of_ranks if isinstance(f, SlowDown)]
        self._count: dict[tuple[int, int], int] = {}

    def of(self, source: int, dest: int, time: float) -> Fate:
        """Return what happens to the next message of this pair of ranks."""
        if not self.of_messages:
            return UNHURT
        nth = self._count.get((source, dest), 0)
        self._count[source, dest] = nth + 1
        dropped, delay, copies = False, 0.0, []
        for number, fault in enumerate(self.of_messages):
            words = (self._seed, number, source, dest, nth)
            if not fault.meets(source, dest, nth, time) or draw(*words, 0) >= fault.probability:
                continue
            if isinstance(fault, Drop):
                dropped = True
            elif isinstance(fault, Duplicate):
                copies.append(fault.later)
            elif isinstance(fault, Delay):
                delay += fault.seconds
            elif isinstance(fault, Reorder):
                delay += fault.within * draw(*words, 1)
        return Fate(dropped, delay, tuple(copies))

    def slowness(self, rank: int, time: float) -> float:
        """Return how many times longer this rank takes now."""
        factor = 1.0
        for fault in self._slow:
            if fault.rank == rank and fault.at <= time < fault.until:
                factor *= fault.factor
        return factor
