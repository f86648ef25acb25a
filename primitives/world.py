"""Where ranks live: MPI processes, or threads on a simulated network. A Comm stands on a World."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from relaxmpi.primitives.transport import Request, Transport

if TYPE_CHECKING:
    import contextlib
    from collections.abc import MutableSet, Sequence

    from relaxmpi.primitives.queue import Queue
    from relaxmpi.primitives.recorder import Recorder
    from relaxmpi.primitives.schedules import FlatSchedule
    from relaxmpi.primitives.settings import Settings
    from relaxmpi.primitives.shared import Shared
    from relaxmpi.primitives.stats import Stats
    from relaxmpi.primitives.stream import Stream

__all__ = ["Link", "Mailbox", "World", "enter", "entered"]

T = TypeVar("T")

_here = threading.local()


class Link(Protocol):
    """A private lane between the ranks of a World: what is said here meets nothing else."""

    rank: int
    size: int

    def imax(self, mine: Any, all_: Any) -> Request:
        """Start to fill `all_` with the element-wise maximum of all ranks' int64 `mine`."""

    def igather(self, mine: Any, all_: Any) -> Request:
        """Start to fill row r of `all_` with the bytes of rank r's `mine`."""

    def notify(self, peer: int, message: bytes) -> Request:
        """Send a short message that arrives without the peer's help; keeps it alive."""

    def heard(self, length: int) -> tuple[int, bytes] | None:
        """Return the sender and text of a message that has arrived, if there is one."""

    def transport(self, settings: Settings, stats: Stats, nodes: int) -> Transport:
        """Return what moves arrays of host memory here, between ranks on so many nodes."""

    def mailbox(
        self,
        length: int,
        peers: tuple[Collection[int], Collection[int]],
        ring: int,
        settings: Settings,
        stats: Stats,
        nodes: int,
    ) -> Mailbox:
        """Return the mailbox of this link; all ranks make theirs.

        Args:
            length: Bytes of every message.
            peers: The ranks that may send here, and those that may be sent to.
            ring: How many messages of each sender may be here, or on their way, unread.
            settings: Of the Comm.
            stats: Of the Comm.
            nodes: On how many hosts its ranks are.
        """

    def nudge(self) -> None:
        """Let messages move, of whatever Comm, while this one waits for something else."""

    def free(self) -> None:
        """Give it back; nothing is under way."""


class Mailbox(Protocol):
    """Messages of one length from given ranks, which come when they come.

    The receiver has room for `ring` messages of each sender, and a sender must know that there
    is some left. What is short goes as a note: notes always arrive, in order, apart from messages.

    Attributes:
        reliable: Whether each message arrives, once, in the order of sending. Where it is false,
            messages may be lost, repeated and overtaken.
    """

    reliable: bool

    def send(self, dest: int, message: Any) -> Request:
        """Start sending; the bytes are read until the request is done."""

    def take(self, read: Callable[[int, Any], None]) -> bool:
        """Have one message read, if one has arrived: sender and bytes, lent for that call."""

    def tell(self, dest: int, note: bytes) -> None:
        """Send a note."""

    def told(self) -> tuple[int, bytes] | None:
        """Return sender and text of the next note, if one has arrived."""

    def arrival(self) -> Request:
        """Return what is done when something is here to be read, or has come and been read since.

        There is one at a time.
        """

    def alarm(self, seconds: float) -> None:
        """Let what `arrival` returns next be done after so many seconds, too."""

    def end(self) -> Request:
        """Start to end it, after all messages between all ranks have been taken."""


class World(Protocol):
    """Ranks that can reach each other, and the clock they share.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        nodes: For each rank, the number of the host it runs on.
        comms: Comms of this process or simulated rank that are open, for its exit.
        look: Seconds between two looks that count as waiting: a peer must not be blamed for a
            pause on this rank.
        tags: How many tags a message can have.
        brisk: Seconds that a blocking call may look on before others must be seen to, too.
        recorder: Who listens to all Comms of this process or simulated rank, if anybody does.
    """

    rank: int
    size: int
    nodes: tuple[int, ...]
    comms: MutableSet[Stream]

    @property
    def tags(self) -> int:
        """See above."""

    @property
    def look(self) -> float:
        """See above."""

    @property
    def brisk(self) -> float:
        """See above."""

    @property
    def recorder(self) -> Recorder | None:
        """See above."""

    def record(self, recorder: Recorder | None) -> None:
        """Have a recorder listen from now on, or nobody."""

    def gather(self, thing: Any) -> list[Any] | None:
        """Return on rank 0 what every rank gives, by rank; collective, and not for data."""

    def clock_offset(self) -> float:
        """Return the seconds by which rank 0's clock is ahead of this rank's; collective."""

    @property
    def mpi(self) -> Any:
        """The mpi4py communicator of these ranks; RelaxError where there is none."""

    def link(self) -> Link:
        """Return a new private lane of all ranks; collective."""

    def share(self, settings: Settings, link: Link) -> Shared | None:
        """Return memory that all ranks see, or on all ranks None; collective.

        Args:
            settings: Whether this rank wants any.
            link: What must not stand still while somebody waits for that memory.
        """

    def split(self, color: int | None, key: int) -> World | None:
        """Return the World of the ranks with the same colour, ordered by key; collective."""

    def free(self) -> None:
        """Give back what `split` made."""

    def now(self) -> float:
        """Return seconds; only differences have a meaning."""

    def listen(self, until: float) -> None:
        """Let some time pass, at most until then: there is nothing to do but hear notices."""

    def compute(self, seconds: float) -> None:
        """Take the time that a computation of `seconds` takes."""

    def priced(self, thing: T) -> T:
        """Return a codec or a device whose work takes the time that it takes here."""

    def polled(self) -> None:
        """Take note that this rank has looked whether something had moved."""

    def rest(self, queue: Queue, waited: float, timeout: float | None) -> None:
        """Let others run: after `waited` of at most `timeout` seconds the head has not moved."""

    def keep(self, something: Any) -> None:
        """Keep what a message under way may still write to, although nobody waits for it."""

    def called(self) -> None:
        """Count a call of a verb: faults of a simulated world go by it."""

    def began(self) -> None:
        """Take note that a verb begins to move numbers: its own code takes time."""

    def outlive(self, sends: Sequence[Request]) -> None:
        """Look after sends that nobody waits for, when their Comm is closed."""

    def schedule(self, comm: Stream) -> FlatSchedule:
        """Return the moves that make up a verb among the ranks of a Comm."""

    def background(self, queue: Queue) -> contextlib.AbstractContextManager[Any]:
        """Return the running thread that advances `queue` while this one computes."""


def enter(world: World | None) -> None:
    """Make this thread a rank of a World that is not MPI's; None takes it back."""
    _here.world = world


def entered() -> World | None:
    """Return the World that this thread is a rank of, unless it is MPI's."""
    return getattr(_here, "world", None)
