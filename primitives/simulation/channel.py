"""What is said on one private lane: ordered pipes between pairs, and meetings of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from relaxmpi.primitives.errors import RelaxError
from relaxmpi.primitives.simulation.fabric import Fabric
from relaxmpi.primitives.simulation.load import Load
from relaxmpi.primitives.simulation.rank import Rank, Ticket
from relaxmpi.primitives.simulation.tree import told
from relaxmpi.primitives.transport import TAG

__all__ = ["DONE", "Channel", "Meeting", "Never", "Parcel", "Pipe", "Receive"]


_T = TypeVar("_T", "Receive", "Parcel")


class _Done:
    """The request of what is done at once."""

    def test(self) -> bool:
        """True."""
        return True


class Never:
    """The request of a rank that is dead."""

    def test(self) -> bool:
        """False."""
        return False


DONE = _Done()


class Truncated(RelaxError):
    """A message has not the length that its receiver gave."""

    def Get_error_class(self) -> int:  # noqa: N802 - as mpi4py spells it
        """MPI_ERR_TRUNCATE: like MPI's own errors it is thrown into the flow that waits."""
        return 15


class Receive(Ticket):
    """A receive: the bytes are put in place when the rank looks.

    What the message costs the processor is done when it arrives, if the rank is in a call, one
    message after the other; otherwise when the rank looks.
    """

    __slots__ = ("_data", "_fabric", "_finish", "_parcel", "extra", "source", "tag")

    def __init__(self, rank: Rank, data: Any, fabric: Fabric, tag: int = TAG) -> None:
        super().__init__(rank)
        self._data, self._fabric, self.tag = data, fabric, tag
        self._parcel: Parcel | None = None
        self._finish = self.extra = 0.0
        self.source: Rank | None = None

    def fill(self, time: float, parcel: Parcel, spread: float = 0.0) -> None:
        """The bytes have arrived, the first batch `spread` seconds before the last."""
        self._parcel, self.done = parcel, True
        rank, fabric = self.rank, self._fabric
        if rank.inside:
            load, slowness = parcel.load, fabric.fates.slowness(rank.index, time)
            cost = (load.receive + self.extra) * slowness
            last = (load.last + self.extra / load.batches) * slowness
            rank.stolen += cost
            begin = max(time - spread, rank.busy, rank.clock, rank.held)
            time = self._finish = rank.busy = max(begin + cost, time + last)
        fabric.scheduler.completed(rank, self, time)

    def missing(self) -> list[int]:
        """The rank that has not sent."""
        return [] if self.source is None else [self.source.index]

    def test(self) -> bool:
        """Whether the bytes are in place."""
        parcel = self._parcel
        if parcel is not None:
            self._parcel = None
            rank = self.rank
            if self._finish:
                rank.clock = max(rank.clock, self._finish)
            else:
                self._fabric.cost(rank, parcel.load.receive + self.extra)
            if len(parcel.data) != len(self._data):
                raise Truncated(
                    f"a message of {len(parcel.data)} bytes met a receive of {len(self._data)}"
                )
            self._data[:] = parcel.data
        return self.done


class Parcel(NamedTuple):
    """A message: its bytes, what they cost, and whether they wait for the receiver's word."""

    data: Any
    load: Load
    sent: Ticket | None  # of a message that waits: done when it has left
    tag: int = TAG


class Pipe:
    """Messages from one rank to another; those of one tag are received as they were sent."""

    __slots__ = ("_arrived", "_count", "_dest", "_early", "_expected", "_fabric", "_posted", "_src")

    def __init__(self, fabric: Fabric, source: Rank, dest: Rank) -> None:
        self._fabric, self._src, self._dest = fabric, source, dest
        self._count = self._expected = 0
        self._early: dict[int, Parcel] = {}
        self._arrived: deque[Parcel] = deque()
        self._posted: deque[Receive] = deque()

    def send(self, parcel: Parcel, time: float) -> None:
        """Send a message now, or, where it must wait, announce it."""
        number = self._count
        self._count = number + 1
        if parcel.sent is None:
            self._fabric.send(
                self._src,
                self._dest,
                parcel.load,
                time,
                lambda t: self._land(t, number, parcel),
            )
        else:
            latency = self._fabric.latency(self._src.index, self._dest.index)
            self._fabric.scheduler.at(time + latency, self._announced, number, parcel)

    def _announced(self, time: float, number: int, parcel: Parcel) -> None:
        self._land(time, number, parcel)

    def _land(self, time: float, number: int, parcel: Parcel) -> bool:
        """Put a message in order; False for a copy of one that was here before."""
        if number < self._expected or number in self._early:
            return False
        self._early[number] = parcel
        while (following := self._early.pop(self._expected, None)) is not None:
            self._expected += 1
            request = _taken(self._posted, following.tag)
            if request is not None:
                self._match(time, request, following, new=True)
            else:
                self._arrived.append(following)
        return True

    def receive(self, request: Receive, time: float) -> None:
        """Take the next message of this tag, now or when it comes."""
        request.source = self._src
        parcel = _taken(self._arrived, request.tag)
        if parcel is not None:
            self._match(time, request, parcel)
        else:
            self._posted.append(request)

    def _match(self, time: float, request: Receive, parcel: Parcel, *, new: bool = False) -> None:
        sent = parcel.sent
        if sent is None:
            request.fill(time, parcel, parcel.load.spread if new else 0.0)
            return
        # Rendezvous: the receiver, in a call, asks for the bytes; the sender, in a call, sends.
        scheduler, src, dest = self._fabric.scheduler, self._src, self._dest
        back = self._fabric.latency(dest.index, src.index)

        def start(now: float) -> None:
            self._fabric.send(
                src,
                dest,
                parcel.load,
                now,
                lambda t: self._end(t, request, parcel),
            )
            sent.done = True
            src.owes(dest.index, now - back)
            scheduler.completed(src, sent, now)

        def asked(now: float) -> None:
            scheduler.help(src, now, start)

        scheduler.help(dest, time, lambda now: scheduler.at(now + back, asked))

    def _end(self, time: float, request: Receive, parcel: Parcel) -> bool:
        if request.done:
            return False
        request.fill(time, parcel, parcel.load.spread)
        return True


def _taken(waiting: deque[_T], tag: int) -> _T | None:
    """Take out the first of this tag."""
    for k, found in enumerate(waiting):
        if found.tag == tag:
            del waiting[k]
            return found
    return None


class Meeting:
    """One occasion to which every rank of a channel brings something."""

    def __init__(self, members: tuple[Rank, ...]) -> None:
        self._members = members
        self.brought: dict[int, Any] = {}
        self.tickets: list[Ticket] = []
        self.came: list[tuple[int, float]] = []  # who brought a ticket, and when
        self.answer: Any = None
        self.time, self.last = 0.0, 0

    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        return [m.index for r, m in enumerate(self._members) if r not in self.brought]


class Channel:
    """The state that the ranks' links of one number share."""

    def __init__(
        self,
        fabric: Fabric,
        members: tuple[Rank, ...],
        nodes: tuple[int, ...],
        forget: Callable[[], object],
    ) -> None:
        self.fabric, self.members, self.nodes = fabric, members, nodes
        self.notices: list[deque[tuple[int, bytes]]] = [deque() for _ in members]
        self.mail: dict[int, Any] = {}  # what the ranks' mailboxes share, by receiver
        self._freed = 0
        self._forget = forget
        self._pipes: dict[tuple[int, int, str], Pipe] = {}
        self._meetings: dict[tuple[str, int], Meeting] = {}

    def free(self) -> None:
        """Count a rank that has given its end back; after the last one nothing is kept."""
        self._freed += 1
        if self._freed == len(self.members):
            self._forget()

    def pipe(self, source: int, dest: int, lane: str = "") -> Pipe:
        """Return the messages from one member to another of one lane.

        Lanes are primitives in order, broadcasts ("tree") and neighbour verbs ("edge").
        """
        found = self._pipes.get((source, dest, lane))
        if found is None:
            members = self.members
            found = self._pipes[source, dest, lane] = Pipe(
                self.fabric, members[source], members[dest]
            )
        return found

    def meet(
        self,
        kind: str,
        number: int,
        me: int,
        ticket: Ticket,
        what: Any,
        close: Callable[[Meeting], None],
    ) -> Meeting:
        """Bring something to a meeting; the last rank to come closes it."""
        meeting = self._meetings.get((kind, number))
        if meeting is None:
            meeting = self._meetings[kind, number] = Meeting(self.members)
        meeting.brought[me] = what
        meeting.tickets.append(ticket)
        meeting.came.append((me, self.members[me].clock))
        if self.members[me].clock >= meeting.time:
            meeting.time, meeting.last = self.members[me].clock, self.members[me].index
        if len(meeting.brought) == len(self.members):
            del self._meetings[kind, number]
            close(meeting)
        return meeting

    def tell(self, meeting: Meeting, seconds: float = 0.0) -> None:
        """Complete a meeting to which all have come: for each rank when the tree reaches it."""
        scheduler = self.fabric.scheduler
        arrivals = [time for _, time in sorted(meeting.came)]
        ends = told(self.fabric.network, self.nodes, arrivals)
        groups: dict[float, list[Ticket]] = {}
        for (me, _), ticket in zip(meeting.came, meeting.tickets, strict=True):
            groups.setdefault(ends[me] + seconds, []).append(ticket)
        for time, tickets in groups.items():
            scheduler.at(max(time, meeting.time), self._complete, tickets, meeting)

    def _complete(self, time: float, tickets: list[Ticket], meeting: Meeting) -> None:
        for ticket in tickets:
            ticket.done = True
            ticket.rank.owes(meeting.last, meeting.time)
            self.fabric.scheduler.completed(ticket.rank, ticket, time)
