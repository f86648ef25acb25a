"""What primitives ask of a Comm: lanes, transports, scratch, and the calls in their order."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from relaxmpi.primitives.agreement import ByMaximum, Lane, Table
from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.devices import Device
from relaxmpi.primitives.door import Door
from relaxmpi.primitives.errors import BrokenComm, RelaxError
from relaxmpi.primitives.gossip.edges import Edges, Exchange
from relaxmpi.primitives.learned import Again
from relaxmpi.primitives.notices import NoticeBoard
from relaxmpi.primitives.queue import Once, Queue
from relaxmpi.primitives.schedules import FlatSchedule
from relaxmpi.primitives.settings import Settings
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.work import Flow, Patience, Work, running_queue
from relaxmpi.primitives.world import Link, Mailbox, World

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

    from relaxmpi.primitives.gossip.routes import Route
    from relaxmpi.primitives.gossip.verb import Move
    from relaxmpi.primitives.primitive import Plan
    from relaxmpi.primitives.transport import Transport

__all__ = ["Stream"]

T = TypeVar("T")


class Stream:
    """The inside of a `Comm`: calls run in start order on every rank, neighbour verbs beside them.

    Attributes: those of `Comm`.
    """

    def __init__(
        self,
        world: World,
        settings: Settings,
        queue: Queue | None = None,
        beside: Queue | None = None,
    ) -> None:
        self._world, self.settings = world, settings
        self.rank, self.size, self.nodes = world.rank, world.size, world.nodes
        self.stats = Stats()
        self.steps: Counter[str] = Counter()
        data, started, ordered = world.link(), world.link(), world.link()
        self._links: tuple[Link, ...] = data, started, ordered
        self.shared = world.share(settings, ordered)
        self._notices = NoticeBoard(
            world, ordered, settings.timeout, settings.warn_after, self.stats
        )
        self.queue = Queue(self.stats, world, beside) if queue is None else queue
        if self.shared is not None:
            self.queue.withdrawals.append(self.shared.slots.withdraw)
        world.comms.add(self)
        if world.recorder is not None:
            world.recorder.made(self.stats)
        tables: Sequence[Table] = [ByMaximum(started), ByMaximum(ordered)]
        if self.shared is not None:
            tables = self.shared.boards
        self._started, self._inside = (Lane(table, ordered, self.stats) for table in tables)
        self._host = data.transport(settings, self.stats, len(set(self.nodes)))
        self._transports: dict[str, Transport] = {}
        self._scratch: dict[tuple[str, str, int], Any] = {}
        self._taken, self._running = 0, False
        self._parts: list[Stream] = []
        self._mail: dict[Mailbox, tuple[str, Link]] = {}
        self.door = Door()
        self.closed = False
        self.mark = ""
        self.rehearsed = False

    def sent(self) -> int:
        """Return the payload bytes that this rank has sent, also by the parts of a Hierarchy."""
        return self.stats.payload_bytes + sum(part.sent() for part in self._parts)

    def mailbox(
        self, user: str, length: int, peers: tuple[Collection[int], Collection[int]], ring: int
    ) -> Mailbox:
        """Return a new mailbox, which `free_mailbox` takes back; collective. See `Link`."""
        link = self._world.link()
        nodes = len(set(self.nodes))
        box = link.mailbox(length, peers, ring, self.settings, self.stats, nodes)
        self._mail[box] = user, link
        return box

    def free_mailbox(self, box: Mailbox) -> None:
        """Take back a mailbox whose end is done."""
        self._mail.pop(box)[1].free()

    def keep_mailbox(self, box: Mailbox) -> None:
        """Keep a mailbox on which something may be under way until the process ends."""
        self._world.keep((box, self._mail.pop(box)))

    def lane(self) -> Queue:
        """Return a queue beside the stream: what moves one moves both, in no order."""
        return Queue(self.stats, self._world, self.queue)

    def recorded(self, title: str, flow: Flow[T]) -> Flow[T]:
        """Return a flow of a lane as one that is seen in traces."""
        recorder = self._world.recorder
        if recorder is None:
            return flow
        return recorder.until_done(recorder.call(self, (title,)), self, flow)

    def polled(self) -> None:
        """Take note that this rank has looked whether something had come."""
        self._world.polled()

    def priced(self, thing: T) -> T:
        """Return a codec or a device whose work takes the time that it takes in this world."""
        return self._world.priced(thing)

    def _let_go(self) -> None:
        """Hand over the sends that are still under way."""
        if "edges" in self.__dict__:
            self._world.outlive(self.edges.pool.left())

    def leave(self) -> None:
        """Tell the peers that this rank makes no more calls."""
        self._let_go()
        self._notices.leave()

    def left(self) -> set[int]:
        """Return the ranks whose programs have ended."""
        return self._notices.left()

    def left_alone(self) -> bool:
        """Whether all peers have said that they make no more calls either."""
        return self._notices.all_gone()

    def transport(self, device: Device) -> Transport:
        """Return the transport for the arrays of a device."""
        found = self._transports.get(device.name)
        if found is None:
            found = self._transports[device.name] = device.transport(self._host)
        return found

    def submit(self, call: Call, flow: Flow[T], patience: Patience | None = None) -> Work[T]:
        """Append a flow to the stream; its agreement is posted now."""
        recorder, span = self._world.recorder, None
        self.usable(call)
        if recorder is not None:
            recorder.enter()
            span = recorder.call(self, call.what)
        call = call.marked(self.mark)
        flow = self._behind(call, flow)
        if recorder is not None and span is not None:
            flow = recorder.until_done(span, self, flow)
        work = self.queue.submit(flow, call.__str__, patience or self._notices)
        if recorder is not None:
            recorder.leave()
        return work

    def run(self, plan: Plan[T]) -> T:
        """Do the same in a blocking call, and return the result."""
        if self._world.recorder is not None:
            return self.submit(plan.call, plan.flow).wait()
        call, queue = plan.call.marked(self.mark), self.queue
        self.usable(call)
        if plan.take_back is not None and not self.rehearsed and queue.alone:
            if isinstance(plan, Again):
                plan.call, plan.lane = call, self._started
                once: Once[T] = plan
                return queue.run_once(once, call.__str__, self._notices)
            flow = self._started.around(call, plan.flow, plan.take_back)
        else:
            flow = self._behind(call, plan.flow)
        return queue.run(flow, call.__str__, self._notices)

    def _behind(self, call: Call, flow: Flow[T]) -> Flow[T]:
        """Post the agreement and return the flow behind it, or, when rehearsed, before it."""
        if self.rehearsed:
            return self._started.before(call, flow)
        return self._started.after(call, flow)

    @property
    def seat(self) -> tuple[int, int]:
        """This rank and the number of ranks, as topologies count them."""
        return self.rank, self.size

    def exchange(
        self, move: Move, route: Route, step: int | None, *, held: bool = False
    ) -> Work[Any]:
        """Post the messages of a neighbour verb; the work is done when its own have come."""
        recorder, edges, span = self._world.recorder, self.edges, None
        if recorder is not None:
            recorder.enter()
            span = recorder.call(self, self._marked(move.what))
        exchange, flow = self._posted(move, route, step, held)
        if recorder is not None and span is not None:
            flow = recorder.until_done(span, self, flow)
        work = edges.pool.submit(flow, exchange.__str__, edges.patience(exchange))
        if recorder is not None:
            recorder.leave()
        return work

    def exchanged(self, move: Move, route: Route, step: int | None) -> Any:
        """Do the same in a blocking call, and return the result."""
        if self._world.recorder is not None:
            return self.exchange(move, route, step, held=True).wait()
        exchange, flow = self._posted(move, route, step, held=True)
        edges = self.edges
        return edges.pool.run(flow, exchange.__str__, edges.patience(exchange))

    def _posted(
        self, move: Move, route: Route, step: int | None, held: bool
    ) -> tuple[Exchange, Flow[Any]]:
        self._world.called()
        self._world.began()
        call, transport = Call(self._marked(move.what)), self.transport(move.flat.device)
        exchange = self.edges.exchange(call, transport, step)
        exchange.held = held
        return exchange, move.alone() if self.size == 1 else move.start(exchange, route)

    def _marked(self, what: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
        return (*what, self.mark) if self.mark else what

    def meeting(self, move: Move, route: Route, step: int | None) -> Flow[Any]:
        """Return the flow of a neighbour verb inside a primitive."""
        if self.size == 1:
            return move.alone()
        exchange = self.edges.exchange(Call(move.what), self.transport(move.flat.device), step)
        return move.start(exchange, route)

    def decline(self, route: Route, call: Call) -> None:
        """Tell the neighbours of a call that this rank refuses."""
        self.edges.skip(route, str(call))

    def usable(self, call: object) -> None:
        """Refuse a call where none can be made.

        Raises:
            RelaxError: The Comm is closed, or the caller is inside a primitive.
            BrokenComm: It broke earlier.
        """
        queue = self.queue
        if self.closed:
            raise RelaxError(f"{call}: this Comm is closed")
        if queue.broken is not None:
            raise BrokenComm(f"{call}: this Comm broke earlier: {queue.broken}")
        if queue.inside():
            raise RelaxError(
                f"{call}: a call inside a primitive would wait for itself; write "
                "`yield from verb.flow(...)` there"
            )

    def agreed(self, call: Call, flow: Flow[T]) -> Flow[T]:
        """Return the flow behind an agreement that happens when it runs."""
        if running_queue() is not self.queue:
            raise RelaxError(
                f"{call} inside a primitive of another Comm would hang: the two streams know "
                "nothing of each other; use one Comm, or comm.by_node()"
            )
        recorder = self._world.recorder
        if recorder is None:
            return (yield from self._inside.after(call, flow))
        span = recorder.call(self, call.what, inner=True)
        return (yield from recorder.until_done(span, self, self._inside.after(call, flow)))

    @cached_property
    def edges(self) -> Edges:
        """The lane of the neighbour verbs, beside the stream of all others."""
        return Edges(self, self._notices, self._host)

    @property
    def layout(self) -> str:
        """Which ranks reduce which parts, in words: the memory of a codec belongs to it."""
        return f"{self.size} ranks"

    @cached_property
    def schedule(self) -> FlatSchedule:
        """The moves that make up a verb on this Comm."""
        return self._world.schedule(self)

    def begin(self) -> None:
        """Let the flow that starts now take the scratch of the one that has ended.

        Raises:
            RelaxError: It has not.
        """
        if self._running:
            raise RelaxError(
                "parts of a primitive that move numbers run one after the other: end one (`yield "
                "from verb.flow(...)`) before the next begins, or start both as calls"
            )
        self._running, self._taken = True, 0
        self._world.began()

    def end(self) -> None:
        """Take note that the flow has ended, well or badly."""
        self._running = False

    def scratch(self, device: Device, count: int, dtype: str) -> Any:
        """Return memory that lasts until the running flow ends: fresh pages cost more than sums."""
        key = (device.name, dtype, self._taken)
        self._taken += 1
        held = self._scratch.get(key)
        if held is None or len(held) < count:
            held = self._scratch[key] = device.empty(count, dtype)
        return held[:count]

    def free_scratch(self) -> None:
        """Let go of that memory, where calls to come need less."""
        self._scratch.clear()
        for part in self._parts:
            part.free_scratch()

    def next_step(self, name: str) -> int:
        """Count a call of this name: the default step of a codec's random numbers."""
        step = self.steps[name]
        self.steps[name] = step + 1
        return step
