"""Comm: a private, in-order stream of primitives between the ranks of a communicator."""

from __future__ import annotations

import os
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from relaxmpi.primitives.agreement import nothing
from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.errors import RelaxError
from relaxmpi.primitives.queue import Queue
from relaxmpi.primitives.settings import Settings
from relaxmpi.primitives.stream import Stream
from relaxmpi.primitives.world import entered

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mpi4py import MPI
    from typing_extensions import Self

    from relaxmpi.primitives.hierarchy import Hierarchy
    from relaxmpi.primitives.trace import Trace

__all__ = ["Comm"]

T = TypeVar("T")


class Comm(Stream):
    """Ranks that communicate, a stream of calls between them, a timeout and counters.

    All calls on one Comm run in start order, which must be the same on every rank; use `dup()`
    for calls that may overtake each other. Make one by `Comm.world()`, `Comm.wrap()`, `split()`
    or `dup()`; all of these are collective.

    Attributes:
        rank: This process's number, 0 to size - 1.
        size: Number of ranks.
        nodes: For each rank, the number of the host it runs on.
        stats: Bytes, messages and seconds waited.
        mark: Told with every call, such as the number of the epoch: ranks that are at different
            places of a program get a MismatchError instead of each other's numbers.
        rehearsed: Set on all ranks that have agreed on the calls to come and their order: data
            need not wait for the agreement of each call, which still ends it. Where the ranks
            differ nevertheless the Comm breaks and buffers may have been written to; where the
            sizes differ, MPI itself may crash.
        steps: How often each named call with a codec has run: the codecs' random numbers depend
            on it, so it is a part of what must be saved and restored.
    """

    @classmethod
    def world(cls, timeout: float | None = None) -> Comm:
        """Return a new Comm of all ranks of this job; starts MPI if nobody has.

        Args:
            timeout: Seconds any call may wait for the peers; default `RELAXMPI_TIMEOUT` or 60.

        Raises:
            RelaxError: The launcher says that there are several ranks and the MPI library
                says that there is one: they belong to different MPIs.
        """
        inside = entered()
        if inside is not None:
            return cls(inside, Settings.read(timeout=timeout))
        from relaxmpi.primitives.start import world

        return cls.wrap(world(), timeout)

    @classmethod
    def wrap(cls, mpi: MPI.Intracomm, timeout: float | None = None) -> Comm:
        """Return a new Comm of the ranks of an mpi4py communicator, which stays the caller's."""
        from relaxmpi.primitives.start import prepare

        return cls(*prepare(mpi, Settings.read(timeout=timeout)))

    @property
    def mpi(self) -> MPI.Intracomm:
        """The mpi4py communicator this Comm was made from, for objects and MPI's own calls."""
        return self._world.mpi  # type: ignore[no-any-return]

    def split(self, color: int | None, key: int = 0) -> Comm | None:
        """Return the Comm of the ranks that give the same colour, ordered by key, then rank.

        With `color=None` the rank takes part and gets None.
        """
        return self._split(color, key, None)

    def _split(self, color: int | None, key: int, queue: Queue | None) -> Comm | None:
        self._meet("split")
        part = self._world.split(color, key)
        return None if part is None else Comm(part, self.settings, queue)

    def dup(self, *, together: bool = False) -> Comm:
        """Return a Comm of the same ranks with a stream of its own.

        Args:
            together: Whoever waits for one of the two, or makes progress, moves both.
        """
        self._meet("dup")
        return Comm(self._world, self.settings, None, self.queue if together else None)

    def by_node(self) -> Hierarchy:
        """Return a Hierarchy: full precision inside a node, codecs on the link between nodes."""
        from relaxmpi.primitives.hierarchy import Hierarchy

        self._meet("by_node")
        return Hierarchy(self)

    def _meet(self, what: str) -> None:
        """Wait for all ranks, as every call does, before MPI's own blocking calls."""
        with self.door(what):
            self.submit(Call((what,)), nothing()).wait()

    def progress(self) -> None:
        """Move what can be moved without waiting; call it between pieces of computation."""
        self.queue.progress()

    def background(self) -> AbstractContextManager[Any]:
        """Start a thread that makes progress while this one computes; close it, or use `with`.

        Raises:
            RelaxError: The MPI library was not started with MPI_THREAD_MULTIPLE.
        """
        return self._world.background(self.queue)

    def now(self) -> float:
        """Return seconds on this world's clock; only differences have a meaning."""
        return self._world.now()

    def compute(self, seconds: float) -> None:
        """Take the time that a computation of `seconds` would take, leaving the cores free."""
        recorder = self._world.recorder
        if recorder is None:
            self._world.compute(seconds)
            return
        recorder.enter()
        begin = self._world.now()
        self._world.compute(seconds)
        recorder.computed(begin, self._world.now())
        recorder.leave()

    def trace(self, path: str | os.PathLike[str] | None = None) -> Trace:
        """Return a context manager that records what the ranks do; see `Trace`.

        Args:
            path: Where to draw a timeline of it; None draws none.
        """
        from relaxmpi.primitives.trace import Trace

        return Trace(self._world, lambda: self._meet("trace"), path)

    def close(self) -> None:
        """Give the private communicators back. Never communicates; a second call does nothing.

        Raises:
            RelaxError: Works are still pending: wait for them first.
        """
        if self.closed:
            return
        queues = [self.queue, *([self.edges.pool] if "edges" in self.__dict__ else [])]
        for queue in queues:
            if self.queue.broken is None and len(queue):
                raise RelaxError(
                    f"{len(queue)} works are pending, first {queue.first()}: wait for them "
                    "before close(), or call finish() of the algorithm that they are part of, "
                    "on all ranks"
                )
        if self.queue.broken is None and self._mail:
            user = next(iter(self._mail.values()))[0]
            raise RelaxError(f"{user} of this Comm is open: close it first, on all ranks")
        self.closed = True
        if self.queue.broken is None:
            self._world.comms.discard(self)
            self._let_go()
            for queue in queues:
                queue.close()
            if "edges" in self.__dict__ and self.edges.littered:
                self._world.keep(self._links)
                return
            for link in self._links:
                link.free()
            if self.shared is not None:
                self.schedule.forget()
                self.shared.free()
            self._world.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"<Comm rank {self.rank} of {self.size}{', closed' if self.closed else ''}>"

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved so that codecs go on with the same random numbers."""
        return {"steps": dict(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.steps = Counter(state["steps"])
