"""The edges of asynchronous push-sum: what was given and taken, and how it travels."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from relaxmpi.primitives.errors import RelaxError
from relaxmpi.primitives.transport import Request

__all__ = ["Carrier", "Flying", "Header", "InEdge", "Note", "OutEdge", "Shares", "Sums"]

HEADER = 64  # bytes, so that the numbers behind it are aligned
_HEADER = struct.Struct("<4sHHiqqqdQ")
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
        count: How many numbers.
        w: Weight: a share, or the sum of all shares so far.
        name: Hash of what the ranks agreed on.
    """

    form: int
    epoch: int
    stamp: int
    step: int
    count: int
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
            raise RelaxError(f"what rank {source} sent is no message of this endpoint")
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
    """To one peer. `given` and `taken` are sums of weight; `phi` is what its carrier keeps."""

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


class Carrier(Protocol):
    """How numbers travel on an edge.

    Attributes:
        form: Its number in headers.
        nbytes: Bytes of one message behind the header.
        replaces: Whether a newer message makes older ones superfluous.
    """

    form: int
    nbytes: int
    replaces: bool

    def give(self, edge: OutEdge, x: Any, p: float, payload: Any) -> float:
        """Put the share p of `x` on an edge; return the part of the weight that goes with it."""

    def keep(self, x: Any, part: float) -> None:
        """Leave to `x` the part that was not given."""

    def again(self, edge: OutEdge, payload: Any) -> None:
        """Fill the payload of the edge's newest message once more."""

    def take(self, edge: InEdge, payload: Any, into: Any) -> None:
        """Add to `into` what a message brings."""

    def level(self, edge: OutEdge | InEdge) -> None:
        """Begin anew on an edge on which nothing is under way."""


class Shares:
    """The shares p x themselves, for mailboxes on which every message arrives, once, in order."""

    form, replaces = 1, False

    def __init__(self, x: Any) -> None:
        self._dtype, self.nbytes = x.dtype, x.nbytes

    def give(self, edge: OutEdge, x: Any, p: float, payload: Any) -> float:
        """See `Carrier`."""
        np.multiply(x, self._dtype.type(p), out=payload.view(self._dtype))
        return p

    def keep(self, x: Any, part: float) -> None:
        """See `Carrier`."""
        x *= self._dtype.type(part)

    def again(self, edge: OutEdge, payload: Any) -> None:
        """Nothing is ever sent again."""
        raise NotImplementedError

    def take(self, edge: InEdge, payload: Any, into: Any) -> None:
        """See `Carrier`."""
        into += payload.view(self._dtype)

    def level(self, edge: OutEdge | InEdge) -> None:
        """There is nothing to forget."""


class Sums:
    """Sums of all shares so far, phi, in float64: robust push-sum.

    The receiver adds phi - rho and remembers rho = phi (Spiridonoff, Olshevsky and Paschalidis
    2020), so a newer message replaces an older one, and lost or repeated ones cost nothing. The
    difference of two sums over k shares is exact to k ulps of float64.
    """

    form, replaces = 2, True

    def __init__(self, x: Any) -> None:
        self._count, self._dtype, self.nbytes = len(x), x.dtype, 8 * len(x)

    def give(self, edge: OutEdge, x: Any, p: float, payload: Any) -> float:
        """See `Carrier`."""
        if edge.phi is None:
            edge.phi = np.zeros(self._count)
        edge.phi += x * self._dtype.type(p)
        self.again(edge, payload)
        return p

    def keep(self, x: Any, part: float) -> None:
        """See `Carrier`."""
        x *= self._dtype.type(part)

    def again(self, edge: OutEdge, payload: Any) -> None:
        """See `Carrier`."""
        payload.view(np.float64)[:] = edge.phi

    def take(self, edge: InEdge, payload: Any, into: Any) -> None:
        """See `Carrier`."""
        phi = payload.view(np.float64)
        if edge.rho is None:
            edge.rho = np.zeros(self._count)
        np.subtract(phi, edge.rho, out=edge.rho)
        into += edge.rho.astype(self._dtype, copy=False)
        edge.rho[:] = phi

    def level(self, edge: OutEdge | InEdge) -> None:
        """See `Carrier`: what was given and what was taken are equal now."""
        if isinstance(edge, OutEdge):
            edge.phi = None
        else:
            edge.rho = None
