"""The edges of asynchronous push-sum: what was given and taken, and how it travels."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relaxmpi.primitives.errors import RelaxError
from relaxmpi.primitives.topology import Topology
from relaxmpi.primitives.transport import Request

__all__ = [
    "ACK",
    "GAVE_UP",
    "HEADER",
    "STEP",
    "STOP",
    "Flying",
    "Header",
    "InEdge",
    "Note",
    "OutEdge",
    "neighbours",
    "steps_of",
]

HEADER = 64  # bytes, so that the numbers behind it are aligned
_HEADER = struct.Struct("<4sHHiqqqdQ")
_PERIOD = 64  # steps of a schedule that are looked at to find all edges
_MAGIC = b"rxps"
_VERSION = 1
_NOTE = struct.Struct("<iiqqd")

ACK, STEP, STOP, GAVE_UP = range(1, 5)


class Header(NamedTuple):
    """What goes before the numbers of a message.

    Attributes:
        form: How the numbers are meant.
        epoch: How often the endpoint was drained before.
        stamp: Number of the message on its edge, from 1.
        step: The sender's step.
        length: How many numbers.
        w: Weight: of this share, or the sum of all shares so far.
        name: Hash of what the ranks agreed on.
    """

    form: int
    epoch: int
    stamp: int
    step: int
    length: int
    w: float
    name: int

    def write(self, message: Any) -> None:
        """Put it at the beginning of a message."""
        _HEADER.pack_into(message, 0, _MAGIC, _VERSION, *self)

    @classmethod
    def read(cls, message: Any, source: int) -> Header:
        """Read it; RelaxError where it is none."""
        magic, version, *rest = _HEADER.unpack_from(message, 0)
        if magic != _MAGIC or version != _VERSION:
            raise RelaxError(
                f"what rank {source} sent is no message of an endpoint of this version"
            )
        return cls(*rest)


class Note(NamedTuple):
    """A note on an edge.

    Attributes:
        kind: ACK: the message `stamp`, and all before it, were taken. STEP: `step` is made, and
            `stamp` is the last message. STOP: the last one until all are drained. GAVE_UP.
        epoch: As in Header.
        stamp: Of the last message that it speaks of.
        step: The sender's step.
        w: ACK: the sum of all weight that was taken.
    """

    kind: int
    epoch: int
    stamp: int = 0
    step: int = 0
    w: float = 0.0

    def pack(self) -> bytes:
        """Return its bytes."""
        return _NOTE.pack(*self)

    @classmethod
    def unpack(cls, note: bytes) -> Note:
        """Read it."""
        return cls(*_NOTE.unpack(note))


class Flying(NamedTuple):
    """A message that the peer has not said to have taken."""

    stamp: int
    message: Any
    request: Request
    time: float


@dataclass
class OutEdge:
    """To one peer.

    Attributes:
        peer: Its rank.
        sent: Stamp of the newest message.
        acked: Stamp of the newest one that the peer has said to have taken.
        given: Sum of all weight that was given.
        taken: How much of it the peer has said to have taken.
        step: Of the newest message.
        flying: The messages that count as under way.
        last: When the last one was sent.
        patience: Seconds to wait for word of it, where it may be lost.
        stopped: Whether the peer takes part no more until all are drained.
        phi: What the carrier keeps.
    """

    peer: int
    sent: int = 0
    acked: int = 0
    given: float = 0.0
    taken: float = 0.0
    step: int = -1
    flying: deque[Flying] = field(default_factory=deque)
    last: float = 0.0
    patience: float = 0.0
    stopped: bool = False
    phi: Any = None

    def levelled(self) -> OutEdge:
        """Return what remains of it when nothing is under way."""
        return OutEdge(self.peer, phi=self.phi)


@dataclass
class InEdge:
    """From one peer.

    Attributes:
        taken: Stamp of the newest message that was taken.
        rho: What its carrier keeps.
        w: Sum of all weight that was taken.
        heard: The newest step of the sender that was heard of and folded.
        fresh: The same, not yet folded.
        missing: The own call since which something is due; None: nothing is.
        passed: A step that the sender made without a message, and its last stamp then.
        stop: Stamp of the last message there will be, if the peer has said so.
    """

    taken: int = 0
    rho: Any = None
    w: float = 0.0
    heard: int = -1
    fresh: int = -1
    missing: int | None = None
    passed: tuple[int, int] | None = None
    stop: int | None = None

    def catch_up(self) -> None:
        """What was heard of is folded now."""
        self.heard = max(self.fresh, self.heard)
        self.missing = None

    def levelled(self) -> InEdge:
        """Return what remains of it when nothing is under way."""
        return InEdge(rho=self.rho, heard=self.heard, fresh=self.heard, missing=self.missing)


def steps_of(topology: Topology, n: int) -> range:
    """Return steps that show all edges of a topology; the first alone where there are too many."""
    period = topology.period(n)
    return range(period if period is not None and period <= _PERIOD else 1)


def neighbours(topology: Topology, rank: int, n: int) -> tuple[list[int], list[int]]:
    """Return all ranks that may send to this one in some step, and those it may send to."""
    steps = steps_of(topology, n)
    if topology.period(n) != len(steps):
        others = [r for r in range(n) if r != rank]
        return others, others
    sources = sorted({r for k in steps for r in topology.into(rank, n, k)})
    dests = sorted({r for k in steps for r in topology.out(rank, n, k)})
    return sources, dests
