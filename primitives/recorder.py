"""What one rank did and when: calls, waits, computations, messages. See `Comm.trace`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from relaxmpi.primitives.stats import Stats
    from relaxmpi.primitives.stream import Stream
    from relaxmpi.primitives.work import Flow

__all__ = ["CallSpan", "Cause", "Compute", "Message", "Recorder", "Recording", "Wait"]

T = TypeVar("T")


class CallSpan:
    """One call, from its start to its end as this rank saw it.

    Attributes:
        what: What the ranks agreed on, without the mark and the step.
        mark: The mark of its Comm.
        inner: Whether it is a part of another primitive's call.
        begin: Seconds on the world's clock when it was started.
        turn: When it became the first of its queue and began to move; None: never.
        end: When it was done; None: it never was.
        sent: Payload bytes that this rank sent for it.
        error: The name of the error that ended it, or "".
    """

    __slots__ = ("begin", "end", "error", "inner", "mark", "sent", "turn", "what")

    def __init__(self, what: tuple[str, ...], mark: str, inner: bool, begin: float) -> None:
        self.what, self.mark, self.inner, self.begin = what, mark, inner, begin
        self.turn: float | None = None
        self.end: float | None = None
        self.sent, self.error = 0, ""

    @property
    def title(self) -> str:
        """The verb and the name that the user has given."""
        name = next((part for part in self.what if part.startswith("name ")), "")
        return f"{self.what[0]} {name[5:]}".strip()


class Cause(NamedTuple):
    """What ended a rest of a rank: `peer` had done its part, such as sending, at `sent`."""

    peer: int
    sent: float


class Wait(NamedTuple):
    """The caller was blocked in `wait`, or in a blocking call.

    Attributes:
        begin: Seconds on the world's clock.
        end: The same.
        call: What it waited for.
        rests: For each rank that was waited for, in a simulated world: seconds, and how many of
            them passed before that rank had sent.
    """

    begin: float
    end: float
    call: str
    rests: dict[int, tuple[float, float]]


class Compute(NamedTuple):
    """A `comm.compute`."""

    begin: float
    end: float


class Message(NamedTuple):
    """A message of a simulated world, and when it kept which link busy.

    Attributes:
        source: Sending rank, as numbered in the world.
        dest: Receiving rank.
        size: Bytes, scaled.
        sent: When it was given to the network.
        left: When its first byte went onto the link up.
        up: Seconds that it kept the link up.
        down: Seconds that it kept the link down.
        arrived: When its last byte was there; None: it was lost.
    """

    source: int
    dest: int
    size: float
    sent: float
    left: float
    up: float
    down: float
    arrived: float | None


class Recording(NamedTuple):
    """What one rank did between `begin` and `end`, seconds on its world's clock.

    Attributes:
        rank: As numbered in the world.
    """

    rank: int
    begin: float
    end: float
    calls: list[CallSpan]
    waits: list[Wait]
    computes: list[Compute]
    messages: list[Message]


class Recorder:
    """Listens to all Comms of one rank; its methods are called by them, in the rank's thread.

    Attributes:
        stats: The counters of every Comm that was made while it listened.
        keeps_messages: Whether it wants to hear of messages, which are many.
    """

    def __init__(self, index: int, now: Callable[[], float]) -> None:
        self.index, self.now = index, now
        self.keeps_messages = False
        self.calls: list[CallSpan] = []
        self.waits: list[Wait] = []
        self.computes: list[Compute] = []
        self.messages: list[Message] = []
        self.stats: list[Stats] = []
        self._rests: dict[int, tuple[float, float]] = {}
        self._unexplained: float | None = None

    def enter(self) -> None:
        """The caller's own computation ends: a call begins."""

    def leave(self) -> None:
        """The caller goes on."""

    def made(self, stats: Stats) -> None:
        """Note a new Comm by its counters."""
        self.stats.append(stats)
        self.leave()

    def call(self, comm: Stream, what: tuple[Hashable, ...], *, inner: bool = False) -> CallSpan:
        """Note a call that starts; nothing of it has been sent yet."""
        words = tuple(str(part) for part in what if part not in (None, ""))
        lasting = tuple(word for word in words if not word.startswith("step "))
        span = CallSpan(lasting, comm.mark, inner, self.now())
        self.calls.append(span)
        return span

    def until_done(self, span: CallSpan, comm: Stream, flow: Flow[T]) -> Flow[T]:
        """Return the flow of a call that notes its turn and its end."""
        before, span.turn = comm.sent(), self.now()
        try:
            result = yield from flow
        except Exception as error:
            span.error, span.end = type(error).__name__, self.now()
            raise
        span.sent, span.end = comm.sent() - before, self.now()
        return result

    def rested(self, begin: float, end: float, cause: Cause | None) -> None:
        """Note that the rank lay still; without a cause it only looked, and rests on."""
        if self._unexplained is not None:
            begin = self._unexplained
        if cause is None:
            self._unexplained = begin
            return
        self._unexplained = None
        seconds, late = self._rests.get(cause.peer, (0.0, 0.0))
        late += max(0.0, min(cause.sent, end) - begin)
        self._rests[cause.peer] = seconds + end - begin, late

    def waited(self, begin: float, end: float, call: Callable[[], str]) -> None:
        """Note that the caller was blocked."""
        rests, self._rests, self._unexplained = self._rests, {}, None
        if end > begin:
            self.waits.append(Wait(begin, end, call(), rests))
        self.leave()

    def computed(self, begin: float, end: float) -> None:
        """Note a `comm.compute`."""
        self.computes.append(Compute(begin, end))

    def lengths(self) -> tuple[int, int, int, int]:
        """Say how much is recorded, for `since`."""
        return len(self.calls), len(self.waits), len(self.computes), len(self.messages)

    def since(self, lengths: tuple[int, ...], begin: float) -> Recording:
        """Return what was recorded after `lengths` were."""
        parts: list[Any] = [self.calls, self.waits, self.computes, self.messages]
        kept = [part[skip:] for part, skip in zip(parts, lengths, strict=True)]
        return Recording(self.index, begin, self.now(), *kept)
