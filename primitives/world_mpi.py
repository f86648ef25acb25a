"""The World of MPI processes."""

from __future__ import annotations

import os
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mpi4py import MPI

from relaxmpi.primitives.mailbox_mpi import MpiMailbox
from relaxmpi.primitives.schedules import FlatSchedule
from relaxmpi.primitives.shared import Shared, share
from relaxmpi.primitives.shared_schedule import SharedSchedule
from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.transport_mpi import MpiTransport

if TYPE_CHECKING:
    from collections.abc import Collection, MutableSet, Sequence

    from relaxmpi.primitives.background import Background
    from relaxmpi.primitives.queue import Queue
    from relaxmpi.primitives.recorder import Recorder
    from relaxmpi.primitives.settings import Settings
    from relaxmpi.primitives.stats import Stats
    from relaxmpi.primitives.stream import Stream
    from relaxmpi.primitives.world import Link

__all__ = ["MpiWorld", "open_comms", "outliving"]

_NOTICE = 2
_COMPARISONS = 20

# Sleeping costs a wake-up per step of a collective; yielding costs nobody who has work to do.
_SPIN = 2e-3
# Where every rank has a core, giving it away while the peer answers only costs.
_ALONE = 1e-4
_YIELD = "OMPI_MCA_mpi_yield_when_idle"
_SLEEP = 2e-3  # of the time waited so far
_LONGEST_SLEEP = 5e-4
_LISTEN = 1e-3

T = TypeVar("T")

# Every Comm that was not closed: at exit its peers are told.
open_comms: set[Stream] = set()

# Whatever MPI may still write to when a Comm broke: kept until the process ends.
_kept: list[object] = []


# Sends under way whose Comm was closed.
outliving: list[Request] = []


class _Asked:
    __slots__ = ("_data", "_request")

    def __init__(self, request: MPI.Request, data: Any) -> None:
        self._request, self._data = request, data

    def test(self) -> bool:
        return self._request.Test()


class MpiLink:
    """A duplicate of a communicator."""

    def __init__(self, mpi: MPI.Intracomm) -> None:
        self._mpi = mpi.Dup()
        self.rank, self.size = mpi.rank, mpi.size

    def imax(self, mine: Any, all_: Any) -> Request:
        """See `Link`."""
        return _Asked(self._mpi.Iallreduce(mine, all_, MPI.MAX), (mine, all_))

    def igather(self, mine: Any, all_: Any) -> Request:
        """See `Link`."""
        return _Asked(self._mpi.Iallgather(mine, all_), (mine, all_))

    def notify(self, peer: int, message: bytes) -> Request:
        """See `Link`."""
        return _Asked(self._mpi.Isend([message, MPI.BYTE], peer, _NOTICE), message)

    def heard(self, length: int) -> tuple[int, bytes] | None:
        """See `Link`."""
        status = MPI.Status()
        if not self._mpi.Iprobe(MPI.ANY_SOURCE, _NOTICE, status):
            return None
        message = bytearray(length)
        self._mpi.Recv([message, MPI.BYTE], status.source, _NOTICE)
        return status.source, bytes(message)

    def transport(self, settings: Settings, stats: Stats, nodes: int) -> MpiTransport:
        """See `Link`."""
        return MpiTransport(self._mpi, settings, stats, nodes)

    def mailbox(
        self,
        length: int,
        peers: tuple[Collection[int], Collection[int]],
        ring: int,
        settings: Settings,
        stats: Stats,
        nodes: int,
    ) -> MpiMailbox:
        """See `Link`."""
        transport = MpiTransport(self._mpi, settings, stats, nodes)
        return MpiMailbox(self._mpi, transport, length, peers, ring)

    def nudge(self) -> None:
        """See `Link`: MPI may also tell of a rank that died."""
        self._mpi.Iprobe()

    def free(self) -> None:
        """See `Link`."""
        self._mpi.Free()


class MpiWorld:
    """The ranks of an mpi4py communicator."""

    comms: MutableSet[Stream] = open_comms
    look = 0.1
    brisk = _SPIN
    recorder: Recorder | None = None

    def __init__(self, mpi: MPI.Intracomm, nodes: tuple[int, ...], *, owned: bool = False) -> None:
        self.mpi, self.nodes, self._owned = mpi, nodes, owned
        self.rank, self.size = mpi.rank, mpi.size

    @cached_property
    def tags(self) -> int:
        """See `World`: MPI promises 32768."""
        return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 2**15 - 1) + 1

    @cached_property
    def _yielding(self) -> bool:
        return os.environ.get(_YIELD) == "1"

    @cached_property
    def _patient(self) -> float:
        """Seconds to look without giving the core away.

        Emulated hosts, and containers, share cores that none of them knows of: there Open MPI's
        own setting says what to do.
        """
        crowded = self.nodes.count(self.nodes[self.rank]) > len(os.sched_getaffinity(0))
        return 0.0 if crowded or self._yielding else _ALONE

    def link(self) -> MpiLink:
        """See `World`."""
        return MpiLink(self.mpi)

    def share(self, settings: Settings, link: Link) -> Shared | None:
        """See `World`: there is some inside one host."""
        if self.size == 1 or len(set(self.nodes)) > 1:
            return None
        return share(self.mpi, settings, link.nudge)

    def split(self, color: int | None, key: int) -> MpiWorld | None:
        """See `World`."""
        group = cast(
            "MPI.Intracomm", self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        )
        if group == MPI.COMM_NULL:
            return None
        ranks = MPI.Group.Translate_ranks(group.group, None, self.mpi.group)
        return MpiWorld(group, tuple(self.nodes[r] for r in ranks), owned=True)

    def free(self) -> None:
        """See `World`."""
        if self._owned:
            self.mpi.Free()

    def record(self, recorder: Recorder | None) -> None:
        """See `World`: of this process."""
        MpiWorld.recorder = recorder

    def gather(self, thing: Any) -> list[Any] | None:
        """See `World`."""
        return self.mpi.gather(thing)

    def clock_offset(self) -> float:
        """See `World`: the ranks of one host share a clock, so the first rank of each asks."""
        mpi, offset = self.mpi.Dup(), 0.0
        firsts = [self.nodes.index(node) for node in self.nodes]
        for first in sorted(set(firsts) - {0}):
            if self.rank == first:
                offset = self._compared(mpi)
            elif self.rank == 0:
                for _ in range(_COMPARISONS):
                    mpi.recv(source=first)
                    mpi.send(self.now(), first)
        offsets: list[float] = mpi.allgather(offset)
        mpi.Free()
        return offsets[firsts[self.rank]]

    def _compared(self, mpi: MPI.Intracomm) -> float:
        """Ask rank 0 for its time: it is that of halfway between the question and the answer."""
        fastest, offset = float("inf"), 0.0
        for _ in range(_COMPARISONS):
            begin = self.now()
            mpi.send(None, 0)
            theirs: float = mpi.recv(source=0)
            end = self.now()
            if end - begin < fastest:
                fastest, offset = end - begin, theirs - (begin + end) / 2
        return offset

    now = staticmethod(time.perf_counter)

    def listen(self, until: float) -> None:
        """See `World`."""
        time.sleep(_LISTEN)

    def compute(self, seconds: float) -> None:
        """Sleep as long as the computation takes, leaving the cores free."""
        time.sleep(seconds)

    def priced(self, thing: T) -> T:
        """See `World`: the real thing takes real time."""
        return thing

    def polled(self) -> None:
        """Real time passes by itself."""

    def rest(self, queue: Queue, waited: float, timeout: float | None) -> None:
        """Look on, then yield, then sleep.

        Where cores are scarce the whole call counts, elsewhere the wait for what is next.
        """
        if waited < self._patient:
            return
        if waited > _SPIN and not self._yielding:
            waited = self.now() - queue.moved
        if waited > _SPIN:
            time.sleep(min(_SLEEP * waited, _LONGEST_SLEEP))
        else:
            os.sched_yield()

    def keep(self, something: Any) -> None:
        """See `World`."""
        _kept.append(something)

    def called(self) -> None:
        """See `World`: nobody asks."""

    def began(self) -> None:
        """See `World`: real code takes real time."""

    def outlive(self, sends: Sequence[Request]) -> None:
        """See `World`: the process does not end before them."""
        outliving[:] = [send for send in (*outliving, *sends) if not send.test()]

    def schedule(self, comm: Stream) -> FlatSchedule:
        """See `World`."""
        if comm.shared is None:
            return FlatSchedule(comm)
        shared = comm.shared
        return SharedSchedule(comm, shared.slots, shared.pulls, not self._patient)

    def background(self, queue: Queue) -> Background:
        """See `World`."""
        from relaxmpi.primitives.background import Background

        return Background(queue)
