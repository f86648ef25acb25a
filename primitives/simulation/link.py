"""One rank's end of a private lane in a simulated world."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.simulation.channel import DONE, Channel, Meeting, Never
from relaxmpi.primitives.simulation.mailbox import SimulatedMailbox
from relaxmpi.primitives.simulation.rank import Rank, Ticket
from relaxmpi.primitives.simulation.transport import SimulatedTransport
from relaxmpi.primitives.transport import Request

if TYPE_CHECKING:
    from collections.abc import Collection

    from relaxmpi.primitives.settings import Settings
    from relaxmpi.primitives.simulation.world import RankWorld
    from relaxmpi.primitives.stats import Stats

__all__ = ["SimulatedLink"]


class _Told(Ticket):
    """A part in an agreement; the answer is put in place when the rank looks."""

    __slots__ = ("_all", "_meeting")

    def __init__(self, rank: Rank, all_: Any) -> None:
        super().__init__(rank)
        self._all = all_
        self._meeting: Meeting | None = None

    def of(self, meeting: Meeting) -> _Told:
        """Remember where the answer will be."""
        self._meeting = meeting
        return self

    def test(self) -> bool:
        """Whether all have come and the answer is here."""
        if self.done and self._meeting is not None:
            self._all[:] = self._meeting.answer
            self._meeting = None
        return self.done

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [] if self._meeting is None else self._meeting.missing()


class SimulatedLink:
    """See `Link`. An agreement and a gathering are one event each, with the cost of a tree."""

    def __init__(self, world: RankWorld, channel: Channel) -> None:
        self.rank, self.size = world.rank, world.size
        self._world, self._channel, self._me = world, channel, world.me
        self._counts: Counter[str] = Counter()
        self._told: defaultdict[int, deque[bytes]] = defaultdict(deque)

    def _join(self, kind: str, mine: Any, all_: Any, seconds: float) -> Request:
        if self._me.dead:
            return Never()
        channel, me = self._channel, self._me
        number = self._counts[kind]
        self._counts[kind] = number + 1

        def close(meeting: Meeting) -> None:
            rows = np.stack([meeting.brought[r] for r in range(self.size)])
            meeting.answer = rows.max(axis=0) if kind == "max" else rows
            channel.tell(meeting, seconds)

        told = _Told(me, all_)
        return told.of(channel.meet(kind, number, self.rank, told, mine.copy(), close))

    def imax(self, mine: Any, all_: Any) -> Request:
        """See `Link`."""
        self._world.called()
        return self._join("max", mine, all_, 0.0)

    def igather(self, mine: Any, all_: Any) -> Request:
        """See `Link`."""
        net = self._channel.fabric.network
        seconds = (self.size - 1) * mine.nbytes / min(net.bandwidth, net.down_bandwidth)
        return self._join("gather", mine, all_, seconds)

    def notify(self, peer: int, message: bytes) -> Request:
        """See `Link`."""
        fabric, me = self._channel.fabric, self._me
        if not me.dead:
            latency = fabric.latency(me.index, self._channel.members[peer].index)
            self._told[peer].append(message)
            fabric.scheduler.at(me.clock + latency, self._deliver, peer)
        return DONE

    def _deliver(self, time: float, peer: int) -> None:
        message = self._told[peer].popleft()  # two at one time keep their order
        rank = self._channel.members[peer]
        if rank.over or rank.dead:
            return
        self._channel.notices[peer].append((self.rank, message))
        rank.unheard += 1
        rank.news = True
        if rank.resting or rank.listening:
            self._channel.fabric.scheduler.wake(rank, time)

    def nudge(self) -> None:
        """See `Link`: simulated messages need no help."""

    def heard(self, length: int) -> tuple[int, bytes] | None:
        """See `Link`."""
        inbox = self._channel.notices[self.rank]
        if not inbox:
            self._me.news = False
            return None
        self._me.unheard -= 1
        return inbox.popleft()

    def transport(self, settings: Settings, stats: Stats, nodes: int) -> SimulatedTransport:
        """See `Link`."""
        return SimulatedTransport(self._world, self._channel, settings, stats, nodes)

    def mailbox(
        self,
        length: int,
        peers: tuple[Collection[int], Collection[int]],
        ring: int,
        settings: Settings,
        stats: Stats,
        nodes: int,
    ) -> SimulatedMailbox:
        """See `Link`."""
        transport = self.transport(settings, stats, nodes)
        return SimulatedMailbox(self._channel, transport, self.rank, length, peers[0], ring)

    def free(self) -> None:
        """See `Link`."""
        self._me.unheard -= len(self._channel.notices[self.rank])
        self._channel.notices[self.rank].clear()
        self._channel.free()
