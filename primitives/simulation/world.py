"""The simulated world: the code that runs on MPI, on a network of your choice, in one process."""

from __future__ import annotations

from collections.abc import Iterator, MutableSet, Sequence
from math import inf
from threading import current_thread
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from relaxmpi.primitives.errors import PeerTimeout, RelaxError
from relaxmpi.primitives.schedules import FlatSchedule
from relaxmpi.primitives.settings import Settings
from relaxmpi.primitives.simulation.channel import Channel
from relaxmpi.primitives.simulation.faults import draw
from relaxmpi.primitives.simulation.grouped import GroupedSchedule
from relaxmpi.primitives.simulation.link import SimulatedLink
from relaxmpi.primitives.simulation.priced import priced
from relaxmpi.primitives.simulation.rank import Rank, Ticket
from relaxmpi.primitives.transport import Every, Request, Turn

if TYPE_CHECKING:
    from relaxmpi.primitives.queue import Queue
    from relaxmpi.primitives.recorder import Recorder
    from relaxmpi.primitives.simulation.fabric import Fabric
    from relaxmpi.primitives.stream import Stream
    from relaxmpi.primitives.world import Link

__all__ = ["RankWorld"]

T = TypeVar("T")

_POLL = 1e-6
# A rank that looks in vain for long looks less often, or a timeout would take a million looks.
_LAZY = 1e-3  # of the time it has looked
_LAZIEST = 1e-2
# A queue counts at most so much between two looks as waiting; the time at rest comes on top.
_LOOK = 0.1
# From when on, and how often at most, a queue looks after its head; a little more than that.
_WORTH = 0.0101
_EVERY = 1.1e-3


class OpenComms(MutableSet["Stream"]):
    """A set in the order of insertion, so that a rank's end does not depend on addresses."""

    def __init__(self) -> None:
        self._held: dict[Stream, None] = {}

    def __contains__(self, comm: object) -> bool:
        return comm in self._held

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, value: Stream) -> None:
        """Add."""
        self._held[value] = None

    def discard(self, value: Stream) -> None:
        """Remove, if it is there."""
        self._held.pop(value, None)


class Group:
    """Ranks that have a World together, and what their links share."""

    def __init__(self, fabric: Fabric, members: tuple[Rank, ...], grouped_above: int) -> None:
        self.fabric, self.members, self.grouped_above = fabric, members, grouped_above
        self.nodes = tuple(fabric.nodes[rank.index] for rank in members)
        self._channels: dict[int, Channel] = {}
        self._parts: dict[tuple[Any, ...], Group] = {}
        self.gathering = self.channel(-1)

    def channel(self, number: int) -> Channel:
        """Return the channel that the ranks' links of this number share."""
        found = self._channels.get(number)
        if found is None:
            found = self._channels[number] = Channel(
                self.fabric, self.members, self.nodes, lambda: self._channels.pop(number)
            )
        return found

    def part(self, number: int, color: int, members: tuple[Rank, ...]) -> Group:
        """Return the group of the ranks with this colour in this split."""
        found = self._parts.get((number, color))
        if found is None:
            found = self._parts[number, color] = Group(self.fabric, members, self.grouped_above)
        return found


class Life:
    """What the Worlds of one rank have in common."""

    def __init__(self, rank: Rank, seed: int, jitter: float) -> None:
        self.comms = OpenComms()
        self.backgrounds: list[Queue] = []
        self.busy = False
        self.rested = 0.0
        self.calls = self.computed = 0
        self.kept: list[Any] = []
        self.recorder: Recorder | None = None
        self.fatal: list[int] = []  # calls before which it is killed
        self._seed, self._jitter, self._index = seed, jitter, rank.index

    def jitter(self) -> float:
        """Return how many times longer the next computation takes."""
        if not self._jitter:
            return 1.0
        self.computed += 1
        return 1.0 + self._jitter * draw(self._seed, -1, self._index, self.computed)


class RankWorld:
    """See `World`. Each method is called in the thread of the rank, which holds the baton."""

    def __init__(self, group: Group, me: Rank, life: Life) -> None:
        self._group, self.me, self._life = group, me, life
        self._fabric, self._scheduler = group.fabric, group.fabric.scheduler
        self.rank, self.size = group.members.index(me), len(group.members)
        self.nodes = group.nodes
        self.comms: MutableSet[Stream] = life.comms
        self._links = self._meetings = 0

    @property
    def recorder(self) -> Recorder | None:
        """See `World`: of this rank."""
        return self._life.recorder

    def record(self, recorder: Recorder | None) -> None:
        """See `World`."""
        self._life.recorder = recorder
        if recorder is not None and recorder.keeps_messages:
            self._fabric.recorders[self.me.index] = recorder
        else:
            self._fabric.recorders.pop(self.me.index, None)

    @property
    def mpi(self) -> NoReturn:
        """There is none."""
        raise RelaxError(
            "a simulated world has no MPI communicator: what a program does through comm.mpi and "
            "mpi4py needs real ranks, under mpirun"
        )

    def link(self) -> SimulatedLink:
        """See `World`."""
        self._links += 1
        return SimulatedLink(self, self._group.channel(self._links))

    def share(self, settings: Settings, link: Link) -> None:
        """See `World`: all that passes between simulated ranks is a message."""

    def split(self, color: int | None, key: int) -> RankWorld | None:
        """See `World`."""
        number = self._meetings
        brought = self._meet("split", (color, key))
        if color is None:
            return None
        order = sorted((k, r) for r, (c, k) in brought.items() if c == color)
        members = tuple(self._group.members[r] for _, r in order)
        return RankWorld(self._group.part(number, color, members), self.me, self._life)

    def gather(self, thing: Any) -> list[Any] | None:
        """See `World`: the very things, which take no time to travel."""
        brought = self._meet("gather", thing)
        return None if self.rank else [brought[r] for r in range(self.size)]

    def _meet(self, what: str, mine: Any) -> dict[int, Any]:
        me, scheduler, gathering = self.me, self._scheduler, self._group.gathering
        ticket = Ticket(me)
        meeting = gathering.meet(what, self._meetings, self.rank, ticket, mine, gathering.tell)
        self._meetings += 1
        self._here()
        end = me.clock + Settings.read().timeout
        while not ticket.done:
            me.resting, me.awaits, me.queue = True, [ticket], None
            scheduler.sleep(me, end, hopeful=False)
            if me.clock >= end:
                raise PeerTimeout(f"not all {self.size} ranks took part in {what}()")
        return meeting.brought

    def free(self) -> None:
        """See `World`."""

    def clock_offset(self) -> float:
        """See `World`: all have the same virtual time."""
        return 0.0

    def now(self) -> float:
        """Return the virtual time of this rank."""
        return self.me.clock

    def listen(self, until: float) -> None:
        """See `World`: sleep until a notice arrives."""
        self.me.listening = True
        self._scheduler.sleep(self.me, until)

    def called(self) -> None:
        """Count a call of a verb."""
        if self._life.calls in self._life.fatal:
            self._scheduler.doom(self.me)
        self._life.calls += 1

    def began(self) -> None:
        """See `World`: what the network says of a call."""
        self._fabric.cost(self.me, self._fabric.network.call_cost)

    def compute(self, seconds: float) -> None:
        """See `World`: the clock advances; messages that need this rank wait."""
        if not 0 <= seconds < inf:
            raise ValueError(f"a computation takes zero or more seconds, not {seconds!r}")
        me, life = self.me, self._life
        self._here()
        life.rested = me.spun = 0.0
        end = me.clock + seconds * life.jitter() * self._fabric.fates.slowness(me.index, me.clock)
        if life.backgrounds:
            self._compute_and_progress(end)
            return
        me.inside, lost = False, me.lost
        self._scheduler.sleep(me, end)
        while me.lost > lost:  # a pause in the middle
            end, lost = end + me.lost - lost, me.lost
            self._scheduler.sleep(me, end)
        me.inside = True

    def _compute_and_progress(self, end: float) -> None:
        me, life = self.me, self._life
        me.stolen, lost = 0.0, me.lost
        while True:
            before, life.busy = me.clock, True
            try:
                for queue in life.backgrounds:
                    queue.progress()
            finally:
                life.busy = False
            # What messages cost the processor is taken from the computation.
            end += me.clock - before + me.stolen + me.lost - lost
            me.stolen, lost = 0.0, me.lost
            if me.clock >= end:
                return
            me.resting, me.awaits, me.queue = True, [], None
            self._scheduler.sleep(me, end)

    def priced(self, thing: T) -> T:
        """See `World`: what the network's `work` says."""
        fabric, me = self._fabric, self.me
        return priced(thing, fabric.network, lambda seconds: fabric.cost(me, seconds))

    def polled(self) -> None:
        """See `World`: a look takes a microsecond, so that loops around `test()` advance."""
        if self._life.busy:
            return
        self._here()
        me, recorder = self.me, self._life.recorder
        if recorder is not None:
            recorder.enter()
        step = max(_POLL, min(_LAZY * me.spun, _LAZIEST))
        self._scheduler.sleep(me, me.clock + step)
        me.spun += step
        if recorder is not None:
            recorder.leave()

    # All that waits is to be seen by the scheduler.
    brisk = 0.0
    tags = 2**31

    @property
    def look(self) -> float:
        """See `World`."""
        return _LOOK + self._life.rested

    def rest(self, queue: Queue, waited: float, timeout: float | None) -> None:
        """See `World`: sleep until a head can have moved, or wants to be looked after."""
        self._here()
        me = self.me
        begin, lost = me.clock, me.lost
        hopeful = begin + timeout - waited + _POLL if timeout is not None else inf
        patient, tickets = inf, []
        beside = [other for other in queue.together if other is not queue and not other.idle]
        for head in (work for moving in (queue, *beside) for work in moving.movable()):
            if me.unheard and (me.news or head.waited < _WORTH):
                hopeful = min(hopeful, begin + max(_WORTH - head.waited, 0.0) + _EVERY)
            awaits = head.request
            while isinstance(awaits, Every):
                awaits = awaits.first()
            if isinstance(awaits, Ticket):
                if awaits.done:
                    return  # by what this call has caught up with: nobody would wake this rank
                tickets.append(awaits)
            elif not isinstance(awaits, Turn):  # somebody else's kind of request: look again
                step = max(_POLL, min(_LAZY * me.spun, _LAZIEST))
                me.spun += step
                hopeful = min(hopeful, begin + step)
            due = max(head.patience.due(head) - head.waited, 0.0)
            patient = min(patient, begin + due + _EVERY)
        me.resting, me.awaits, me.queue, me.cause = True, tickets, queue, None
        self._scheduler.sleep(me, min(hopeful, patient), hopeful=hopeful <= patient)
        self._life.rested = max(0.0, me.clock - begin - (me.lost - lost))
        if self._life.recorder is not None:
            self._life.recorder.rested(begin, me.clock, me.cause)

    def _here(self) -> None:
        """Take part in what has waited for a call; other threads have no virtual time."""
        if self.me.thread is not current_thread():
            raise RelaxError(
                f"a thread of simulated rank {self.me.index}'s own calls: in a simulated world "
                "only the rank itself does; use comm.background() for progress"
            )
        self.me.catch_up()

    def keep(self, something: Any) -> None:
        """See `World`; kept as long as the world."""
        self._life.kept.append(something)

    def outlive(self, sends: Sequence[Request]) -> None:
        """See `World`: what was sent has been copied."""

    def background(self, queue: Queue) -> Progress:
        """See `World`."""
        return Progress(self._life.backgrounds, queue)

    def schedule(self, comm: Stream) -> FlatSchedule:
        """See `World`."""
        if self.size > self._group.grouped_above and not self._fabric.fates.of_messages:
            return GroupedSchedule(comm)
        return FlatSchedule(comm)


class Progress:
    """A queue advances while its rank computes, until this is closed."""

    def __init__(self, backgrounds: list[Queue], queue: Queue) -> None:
        if queue in backgrounds:
            raise RelaxError("this Comm has a background thread already")
        self._backgrounds, self._queue = backgrounds, queue
        self._closed = False
        backgrounds.append(queue)

    def close(self) -> None:
        """Stop; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._backgrounds.remove(self._queue)

    def __enter__(self) -> Progress:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
