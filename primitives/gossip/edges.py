"""What the neighbour verbs of one Comm share: numbered messages on each edge, and their checks.

Every call that uses an edge sends a header and, right behind it, the numbers, which go out of the
caller's memory without a copy. Headers have one size and a tag that counts the calls on their
edge, so a call that does not fit is recognised whatever its length. The tag of the numbers also
depends on what the call is: a receive must never meet a longer message, because Open MPI does not
survive one that is cut off in the middle of a rendezvous. Nor must one meet what a call that did
not fit has left behind, so these tags come again only after all that MPI has.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Hashable
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from relaxmpi.primitives.buffers import Buffers
from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.errors import MismatchError
from relaxmpi.primitives.gossip.patience import EdgePatience
from relaxmpi.primitives.gossip.pool import Pool
from relaxmpi.primitives.transport import TAG, Every, Request

if TYPE_CHECKING:
    from relaxmpi.primitives.devices import Device
    from relaxmpi.primitives.gossip.routes import Known, Route
    from relaxmpi.primitives.gossip.verb import Move
    from relaxmpi.primitives.notices import NoticeBoard
    from relaxmpi.primitives.stream import Stream
    from relaxmpi.primitives.topology import Topology
    from relaxmpi.primitives.transport import Transport
    from relaxmpi.primitives.work import Flow

__all__ = ["Edges", "Exchange", "Header"]

_LAYOUT = struct.Struct("<4sIiIqqqdQ136s")
_MAGIC, _VERSION = b"rlxm", 1
_HEADERS, _COUNTED = TAG + 15, 2**13
_NUMBERS = 2**14
_AGED = 40503  # odd, so that ages do not cancel numbers
_NO_STEP = -1

_MOST_KINDS = 256  # of calls that are remembered


class Header(NamedTuple):
    """What goes before the numbers of each message.

    Attributes:
        magic: Says that this is one.
        version: Of this layout.
        sender: Its rank.
        age: How many messages the codec's memory has sent on this edge.
        size: How many numbers follow.
        number: Of the message on its edge.
        step: Of the call, -1 without one.
        weight: Of push-sum, the part of w that goes along.
        code: Hash of what the call is, besides its step.
        text: What the call is, in words.
    """

    magic: bytes
    version: int
    sender: int
    age: int
    size: int
    number: int
    step: int
    weight: float
    code: int
    text: bytes

    @property
    def words(self) -> str:
        """What the sender's call is."""
        text = self.text.rstrip(b"\0").decode(errors="replace")
        return text if self.step == _NO_STEP else f"{text} step {self.step}"


@lru_cache(maxsize=4096)
def _coded(what: tuple[Hashable, ...]) -> tuple[int, bytes]:
    digest = blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little"), str(Call(what)).encode()[:136]


class Exchange:
    """The messages of one call, whose receives and sends are posted at once.

    Attributes:
        waiting: The number of the message that has not arrived, for each rank that owes one.
        sent: The number of the message sent to each rank.
        held: Whether the caller waits, so that its numbers can be sent from where they lie.
    """

    def __init__(self, edges: Edges, call: Call, transport: Transport, step: int | None) -> None:
        self._edges, self.call, self._transport = edges, call, transport
        self._step = _NO_STEP if step is None else step
        self._code, self._text = _coded(call.what)
        self.rank: int = edges.rank
        self.buffers: Buffers = edges.buffers
        self.waiting: dict[int, int] = {}
        self.sent: dict[int, int] = {}
        self.held = False
        self._arriving: dict[int, tuple[Any, Request, Request | None, int, int]] = {}
        self._leaving: list[Request] = []

    def receive(self, peer: int, data: Any, count: int, age: int = 0) -> None:
        """Post the receive of a message of so many numbers into `data`."""
        edges = self._edges
        number = edges.received[peer]
        edges.received[peer] = number + 1
        self.waiting[peer] = number
        header = np.empty(_LAYOUT.size, np.uint8)
        first = edges.host.irecv(header, peer, _HEADERS + number % _COUNTED)
        second = None
        if len(data):
            second = self._transport.irecv(data, peer, self._tag(number, age))
        self._arriving[peer] = header, first, second, count, age

    def send(self, peer: int, data: Any, count: int, weight: float = 0.0, age: int = 0) -> None:
        """Post a message; `data` must not change until it has left."""
        edges = self._edges
        number = edges.sent[peer]
        edges.sent[peer] = number + 1
        self.sent[peer] = number
        packed = _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            edges.rank,
            age,
            count,
            number,
            self._step,
            weight,
            self._code,
            self._text,
        )
        header = np.frombuffer(packed, np.uint8)
        self._leaving.append(edges.host.announce(header, peer, _HEADERS + number % _COUNTED))
        if len(data):
            self._leaving.append(self._transport.isend(data, peer, self._tag(number, age)))

    def _tag(self, number: int, age: int) -> int:
        apart = self._edges.tags - _NUMBERS
        return _NUMBERS + (self._code + _AGED * age + number) % apart

    def arrived(self, peer: int) -> Flow[float]:
        """Wait for the message of a peer, which must fit this call, and return its weight."""
        header, first, second, count, age = self._arriving[peer]
        yield first
        said = _LAYOUT.unpack(header)
        _, _, _, their_age, size, _, step, weight, code, _ = said
        if (code, step, size, their_age) != (self._code, self._step, count, age):
            self._unfit(peer, Header._make(said), age)
        if second is not None:
            yield second
        del self.waiting[peer], self._arriving[peer]
        return weight  # type: ignore[no-any-return]

    def _unfit(self, peer: int, said: Header, age: int) -> None:
        me = self.rank
        if said.magic != _MAGIC or said.version != _VERSION:
            why = f"rank {peer} sends what is no message of this version of relaxmpi"
        elif (said.code, said.step) == (self._code, self._step):
            why = (
                f"{self}: the memory of rank {peer} has sent {said.age} messages on this edge, "
                f"that of rank {me} has received {age}: reset or restore both"
            )
        else:
            why = f"rank {me}: {self}; rank {peer}: {said.words}"
        self._edges.give_up(self, peer, why)
        raise MismatchError(f"the ranks disagree on their edge: {why}")

    def silent(self) -> list[int]:
        """Return the ranks that nothing has come from."""
        return [peer for peer in self.waiting if not self._arriving[peer][1].test()]

    def left(self) -> Request:
        """Return the request of all sends."""
        return Every(self._leaving)

    def leave(self) -> None:
        """Let the sends go on without anybody waiting."""
        self._edges.pool.leave(self._leaving)

    def __str__(self) -> str:
        return self._edges.words(self.call, self._step)


class Usual(NamedTuple):
    """What calls of one kind have in common."""

    topology: Topology
    what: tuple[Hashable, ...]
    device: Device
    dtype: str
    route: Route


class Edges:
    """The lane of a Comm's neighbour verbs.

    Attributes:
        sent: Messages sent to each rank so far; the peers count them, too.
        received: Messages of each rank that a receive was posted for.
        pool: The works.
        buffers: Memory of messages.
        known: The topologies that all ranks have agreed on.
        usual: Calls that need not be checked again, by kind.
        latest: The one that was used last, because to hash a topology takes as long as the rest.
        learning: What is kept of one that they are about to agree on.
        littered: Whether a call that failed has left messages that nobody takes.
        tags: How many tags messages can have.
    """

    def __init__(self, comm: Stream, board: NoticeBoard, host: Transport) -> None:
        self._comm, self.board, self.host = comm, board, host
        self.rank = comm.rank
        self.sent: Counter[int] = board.sent
        self.received: Counter[int] = Counter()
        self.pool = Pool(comm.stats, comm._world, comm.queue)
        self.buffers = Buffers()
        self.known: dict[Topology, Known] = {}
        self.usual: dict[Hashable, Usual] = {}
        self.latest: tuple[Topology | None, Known | None] = None, None
        self.learning: Known
        self.littered, self.tags = False, comm._world.tags
        self._failed: set[tuple[int, int]] = set()
        self._unfit: dict[tuple[int, int], str] = {}
        self._complaint: str | None = None
        self._numbered = 0

    def remember(self, kind: Hashable, topology: Topology, move: Move, route: Route) -> None:
        """Keep what a checked call says and where it goes, for others of its kind."""
        if len(self.usual) >= _MOST_KINDS:
            self.usual.clear()
        self.usual[kind] = Usual(topology, move.what, move.flat.device, move.flat.dtype, route)

    @staticmethod
    def words(call: Call, step: int) -> str:
        """What a call is."""
        return f"{call}" if step == _NO_STEP else f"{call} step {step}"

    def exchange(self, call: Call, transport: Transport, step: int | None) -> Exchange:
        """Begin the messages of one call."""
        if self._complaint is not None:
            why, self._complaint = self._complaint, None
            raise MismatchError(f"a message of an earlier call did not fit: {why}")
        return Exchange(self, call, transport, step)

    def patience(self, exchange: Exchange) -> EdgePatience:
        """Return who looks after a work that waits for these messages."""
        self._numbered += 1
        return EdgePatience(self, exchange, self._numbered)

    def skip(self, route: Route, why: str) -> None:
        """Count a call that this rank refuses, and tell its neighbours."""
        for peer in route.into:
            number = self.received[peer]
            self.received[peer] = number + 1
            self.board.refuse(peer, number, why)
        for peer in route.out:
            number = self.sent[peer]
            self.sent[peer] = number + 1
            self._failed.add((peer, number))
            self.board.unsend(peer, number, why)

    def give_up(self, exchange: Exchange, peer: int, why: str) -> None:
        """Tell a peer that its message does not fit."""
        self.board.refuse(peer, exchange.waiting[peer], why)
        self.failed(exchange)

    def failed(self, exchange: Exchange) -> None:
        """Note that this rank has seen an error of this call: its peers may see it, too."""
        self._failed.update(exchange.sent.items())
        self._comm._world.keep(exchange)
        self.littered = True

    def sort(self) -> None:
        """Take in what peers say of this rank's messages; keep what is too late for its call."""
        unfit = self.board.unfit
        while unfit:
            peer, number, why = unfit.pop()
            if (peer, number) in self._failed:
                self._failed.discard((peer, number))
                continue
            self.littered = True
            if any(call.sent.get(peer) == number for call in self._pending()):
                self._unfit[peer, number] = why
            else:
                self._complaint = f"rank {peer}: {why}"

    def _pending(self) -> list[Exchange]:
        patiences = [work.patience for work in self.pool.movable()]
        return [p.exchange for p in patiences if isinstance(p, EdgePatience)]

    def refusal(self, exchange: Exchange) -> str | None:
        """Return what a peer says against this call, if one does."""
        for known, edges in ((self.board.unsent, exchange.waiting), (self._unfit, exchange.sent)):
            for edge in edges.items():
                if edge in known:
                    return f"rank {edge[0]}: {known.pop(edge)}"
        return None
