"""Comm: a private, in-order stream of primitives between the ranks of a communicator."""

from __future__ import annotations

import os
import time
from collections import Counter
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.devices import Device
from relaxmpi.primitives.door import Door
from relaxmpi.primitives.errors import BrokenComm, RelaxError
from relaxmpi.primitives.schedules import FlatSchedule
from relaxmpi.primitives.settings import Settings
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.work import Flow, Queue, Work, running_queue

if TYPE_CHECKING:
    from mpi4py import MPI
    from typing_extensions import Self

    from relaxmpi.primitives.background import Background
    from relaxmpi.primitives.hierarchy import Hierarchy
    from relaxmpi.primitives.transport import Transport

__all__ = ["Comm", "open_comms"]

T = TypeVar("T")

# Every Comm that was not closed: at exit its peers are told.
open_comms: set[Comm] = set()


class Comm:
    """Ranks that communicate, a stream of calls between them, a timeout and counters.

    All calls on one Comm run in start order, which must be the same on every rank; use `dup()`
    for calls that may overtake each other. Make one by `Comm.world()`, `Comm.wrap()`, `split()`
    or `dup()`; all of these are collective.

    Attributes:
        rank: This process's number, 0 to size - 1.
        size: Number of ranks.
        mpi: The mpi4py communicator this Comm was made from, for objects and for MPI's own calls.
        nodes: For each rank, the number of the host it runs on.
        stats: Bytes, messages and seconds waited.
        mark: Told with every call, such as the number of the epoch: ranks that are at different
            places of a program get a MismatchError instead of each other's numbers.
        steps: How often each named call with a codec has run: the codecs' random numbers depend
            on it, so it is a part of what must be saved and restored.
    """

    def __init__(
        self, mpi: MPI.Intracomm, settings: Settings, nodes: tuple[int, ...], queue: Queue | None
    ) -> None:
        from relaxmpi.primitives.agreement import Lane
        from relaxmpi.primitives.notices import NoticeBoard
        from relaxmpi.primitives.transport_mpi import MpiTransport

        self.mpi, self.settings, self.nodes = mpi, settings, nodes
        self.rank, self.size = mpi.rank, mpi.size
        self.stats = Stats()
        self.steps: Counter[str] = Counter()
        data, started, ordered = mpi.Dup(), mpi.Dup(), mpi.Dup()
        self._private: tuple[MPI.Intracomm, ...] = data, started, ordered
        self._notices = NoticeBoard(ordered, settings.timeout, settings.warn_after, self.stats)
        if queue is None:
            crowded = nodes.count(nodes[self.rank]) > len(os.sched_getaffinity(0))
            queue = Queue(self.stats, crowded)
        self.queue = queue
        open_comms.add(self)
        self._started = Lane(started, ordered, self.stats)
        self._inside = Lane(ordered, ordered, self.stats)
        self._host = MpiTransport(data, settings, self.stats, len(set(nodes)))
        self._transports: dict[str, Transport] = {}
        self._scratch: dict[tuple[str, str, int], Any] = {}
        self._taken = 0
        self.door = Door()
        self.closed = False
        self.mark = ""

    @classmethod
    def world(cls, timeout: float | None = None) -> Comm:
        """Return a new Comm of all ranks of this job; starts MPI if nobody has.

        Args:
            timeout: Seconds any call may wait for the peers; default `RELAXMPI_TIMEOUT` or 60.

        Raises:
            RelaxError: The launcher says that there are several ranks and the MPI library
                says that there is one: they belong to different MPIs.
        """
        from relaxmpi.primitives.start import world

        return cls.wrap(world(), timeout)

    @classmethod
    def wrap(cls, mpi: MPI.Intracomm, timeout: float | None = None) -> Comm:
        """Return a new Comm of the ranks of an mpi4py communicator, which stays the caller's."""
        from relaxmpi.primitives.start import prepare

        settings, nodes = prepare(mpi, timeout)
        return cls(mpi, settings, nodes, None)

    def split(self, color: int | None, key: int = 0) -> Comm | None:
        """Return the Comm of the ranks that give the same colour, ordered by key, then rank.

        With `color=None` the rank takes part and gets None.
        """
        return self._split(color, key, None)

    def _split(self, color: int | None, key: int, queue: Queue | None) -> Comm | None:
        from mpi4py import MPI

        self._meet("split")
        group = cast(
            "MPI.Intracomm", self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        )
        if group == MPI.COMM_NULL:
            return None
        ranks = MPI.Group.Translate_ranks(group.group, None, self.mpi.group)
        comm = Comm(group, self.settings, tuple(self.nodes[r] for r in ranks), queue)
        comm._private = (*comm._private, group)
        return comm

    def dup(self) -> Comm:
        """Return a Comm of the same ranks with a stream of its own."""
        self._meet("dup")
        return Comm(self.mpi, self.settings, self.nodes, None)

    def by_node(self) -> Hierarchy:
        """Return a Hierarchy: full precision inside a node, codecs on the link between nodes."""
        from relaxmpi.primitives.hierarchy import Hierarchy

        self._meet("by_node")
        return Hierarchy(self)

    def _meet(self, what: str) -> None:
        """Wait for all ranks, as every call does, before MPI's own blocking calls."""
        with self.door(what):
            self.submit(Call((what,)), _nothing()).wait()

    def progress(self) -> None:
        """Move what can be moved without waiting; call it between pieces of computation."""
        self.queue.progress()

    def background(self) -> Background:
        """Start a thread that makes progress while this one computes; close it, or use `with`.

        Raises:
            RelaxError: The MPI library was not started with MPI_THREAD_MULTIPLE.
        """
        from relaxmpi.primitives.background import Background

        return Background(self)

    def now(self) -> float:
        """Return seconds on this world's clock; only differences have a meaning."""
        return time.perf_counter()

    def compute(self, seconds: float) -> None:
        """Take the time that a computation of `seconds` would take, leaving the cores free."""
        time.sleep(seconds)

    def close(self) -> None:
        """Give the private communicators back. Never communicates; a second call does nothing.

        Raises:
            RelaxError: Works are still pending: wait for them first.
        """
        if self.closed:
            return
        if self.queue.broken is None and not self.queue.idle:
            raise RelaxError(
                f"{len(self.queue)} works are pending, first {self.queue.first()}: wait for them "
                "before close()"
            )
        self.closed = True
        if self.queue.broken is None:
            open_comms.discard(self)
            for private in self._private:
                private.Free()

    def leave(self) -> None:
        """Tell the peers that this rank makes no more calls."""
        self._notices.leave()

    def left_alone(self) -> bool:
        """Whether all peers have said that they make no more calls either."""
        return self._notices.all_gone()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"<Comm rank {self.rank} of {self.size}{', closed' if self.closed else ''}>"

    def transport(self, device: Device) -> Transport:
        """Return the transport for the arrays of a device."""
        found = self._transports.get(device.name)
        if found is None:
            found = self._transports[device.name] = device.transport(self._host)
        return found

    def submit(self, call: Call, flow: Flow[T]) -> Work[T]:
        """Append a flow to the stream; its agreement is posted now."""
        queue = self.queue
        if self.closed or queue.broken is not None or running_queue() is queue:
            raise self._unusable(call)
        if self.mark:
            call.what = (*call.what, self.mark)
        flow = _after(self._started.post(call), flow)
        return queue.submit(flow, call.__str__, self._notices)

    def _unusable(self, call: Call) -> RelaxError:
        if self.closed:
            return RelaxError(f"{call}: this Comm is closed")
        if self.queue.broken is not None:
            return BrokenComm(f"{call}: this Comm broke earlier: {self.queue.broken}")
        return RelaxError(
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
        return (yield from _after(self._inside.post(call), flow))

    @property
    def layout(self) -> str:
        """Which ranks reduce which parts, in words: the memory of a codec belongs to it."""
        return f"{self.size} ranks"

    @cached_property
    def schedule(self) -> FlatSchedule:
        """The moves that make up a verb on this Comm."""
        return FlatSchedule(self)

    def begin(self) -> None:
        """Let the flow that starts now take the scratch of the one that has ended."""
        self._taken = 0

    def scratch(self, device: Device, count: int, dtype: str) -> Any:
        """Return memory that lasts until the running flow ends: fresh pages cost more than sums."""
        key = (device.name, dtype, self._taken)
        self._taken += 1
        held = self._scratch.get(key)
        if held is None or len(held) < count:
            held = self._scratch[key] = device.empty(count, dtype)
        return held[:count]

    def next_step(self, name: str) -> int:
        """Count a call of this name: the default step of a codec's random numbers."""
        step = self.steps[name]
        self.steps[name] = step + 1
        return step


def _after(agreement: Flow[None], flow: Flow[T]) -> Flow[T]:
    try:
        yield from agreement
    except BaseException:
        flow.close()
        raise
    return (yield from flow)


def _nothing() -> Flow[None]:
    yield from ()
