"""Messages that come when they come, in a simulated world: also lost, repeated and overtaken."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from relaxmpi.primitives.simulation.channel import DONE, Channel, Parcel, Receive
from relaxmpi.primitives.simulation.fabric import Fabric
from relaxmpi.primitives.simulation.faults import Drop, Duplicate, Reorder
from relaxmpi.primitives.simulation.rank import Rank, Ticket
from relaxmpi.primitives.simulation.scheduler import Scheduler
from relaxmpi.primitives.simulation.transport import SimulatedTransport
from relaxmpi.primitives.transport import Request

__all__ = ["SimulatedMailbox"]


class _Inbox(Ticket):
    """What has arrived for one rank; as a ticket, done when there is something new."""

    __slots__ = ("alarm", "full", "notes", "scheduler", "unread")

    def __init__(self, rank: Rank, scheduler: Scheduler) -> None:
        super().__init__(rank)
        self.scheduler = scheduler
        self.full: deque[_Mail] = deque()
        self.notes: deque[tuple[int, bytes]] = deque()
        self.unread: Counter[int] = Counter()
        self.alarm = float("inf")

    def news(self, time: float) -> None:
        """Something is here from this time on: whatever the rank waits in, it takes a look."""
        self.done, self.rank.spun = True, 0.0
        if self.rank.resting:
            self.scheduler.wake(self.rank, time)

    def forget(self, sender: int) -> None:
        """Drop the oldest message of a sender: there is no room."""
        self.full.remove(next(mail for mail in self.full if mail.sender == sender))
        self.unread[sender] -= 1


class _Mail(Receive):
    """One message, before or after it has arrived."""

    __slots__ = ("bytes", "inbox", "sender")

    def __init__(self, inbox: _Inbox, sender: int, data: Any, fabric: Fabric) -> None:
        super().__init__(inbox.rank, data, fabric)
        self.inbox, self.sender, self.bytes = inbox, sender, data

    def fill(self, time: float, parcel: Parcel, spread: float = 0.0) -> None:
        """It has arrived."""
        super().fill(time, parcel, spread)
        self.inbox.full.append(self)
        self.inbox.news(max(time, self._finish))


class SimulatedMailbox:
    """See `Mailbox`.

    It is reliable, over the ordered pipes of all other messages, unless the world has faults that
    lose, repeat or reorder messages: then each goes by itself, and the oldest is lost where the
    receiver has no room. Notes are small, cost latency only, and are lost with killed ranks only.
    """

    def __init__(
        self,
        channel: Channel,
        transport: SimulatedTransport,
        rank: int,
        length: int,
        sources: Collection[int],
        ring: int,
    ) -> None:
        self._channel, self._transport, self._rank = channel, transport, rank
        self._fabric, self._me = channel.fabric, channel.members[rank]
        self._length, self._ring = length, ring
        lossy = (Drop, Duplicate, Reorder)
        self.reliable = not any(isinstance(f, lossy) for f in self._fabric.fates.of_messages)
        self._inbox = self._inbox_of(rank)
        self._told: defaultdict[int, deque[bytes]] = defaultdict(deque)
        if self.reliable:
            for source in sources:
                for _ in range(ring):
                    self._post(source)

    def _inbox_of(self, rank: int) -> _Inbox:
        # Whoever comes first makes it: messages may be here before the mailbox is.
        found: _Inbox | None = self._channel.mail.get(rank)
        if found is None:
            found = self._channel.mail[rank] = _Inbox(
                self._channel.members[rank], self._fabric.scheduler
            )
        return found

    def _post(self, source: int) -> None:
        mail = _Mail(self._inbox, source, np.empty(self._length, np.uint8), self._fabric)
        self._channel.pipe(source, self._rank).receive(mail, self._me.clock)

    def send(self, dest: int, message: Any) -> Request:
        """See `Mailbox`."""
        if self.reliable or self._me.dead:
            return self._transport.isend(message, dest)
        parcel = self._transport.parcel(message, dest)._replace(sent=None)
        time, fabric = self._me.clock, self._fabric
        fabric.cost(self._me, parcel.load.send)
        inbox, arrived = self._inbox_of(dest), []

        def land(now: float) -> bool:
            if inbox.rank.over:
                return False
            inbox.unread[self._rank] += 1
            if inbox.unread[self._rank] > self._ring:
                inbox.forget(self._rank)
            mail = _Mail(inbox, self._rank, np.empty(len(parcel.data), np.uint8), fabric)
            mail.fill(now, parcel)
            arrived.append(now)
            return len(arrived) == 1

        fabric.send(self._me, inbox.rank, parcel.load, time, land)
        return DONE

    def take(self, read: Callable[[int, Any], None]) -> bool:
        """See `Mailbox`."""
        if not self._inbox.full:
            return False
        mail = self._inbox.full.popleft()
        mail.test()
        self._inbox.unread[mail.sender] -= 1
        read(mail.sender, mail.bytes)
        if self.reliable:
            self._post(mail.sender)
        return True

    def tell(self, dest: int, note: bytes) -> None:
        """See `Mailbox`."""
        if not self._me.dead:
            latency = self._fabric.latency(self._me.index, self._channel.members[dest].index)
            self._told[dest].append(note)
            self._fabric.scheduler.at(self._me.clock + latency, self._deliver, dest)

    def _deliver(self, time: float, dest: int) -> None:
        note = self._told[dest].popleft()  # two at one time keep their order
        inbox = self._inbox_of(dest)
        inbox.notes.append((self._rank, note))
        inbox.rank.owes(self._me.index, time)
        inbox.news(time)

    def told(self) -> tuple[int, bytes] | None:
        """See `Mailbox`."""
        return self._inbox.notes.popleft() if self._inbox.notes else None

    def arrival(self) -> Request:
        """See `Mailbox`."""
        self._inbox.done = bool(self._inbox.full or self._inbox.notes)
        return self._inbox

    def alarm(self, seconds: float) -> None:
        """See `Mailbox`."""
        time, inbox = self._me.clock + seconds, self._inbox
        if time < inbox.alarm:
            inbox.alarm = time
            self._fabric.scheduler.at(time, self._ring_bell)

    def _ring_bell(self, time: float) -> None:
        inbox = self._inbox
        if time >= inbox.alarm:
            inbox.alarm = float("inf")
            inbox.news(time)

    def end(self) -> Request:
        """See `Mailbox`: what was never sent needs no receive here."""
        return DONE
