"""One event in the place of n^2 messages: payloads change hands, and links are reckoned at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from relaxmpi.primitives.recorder import Message
from relaxmpi.primitives.simulation.channel import Channel, Meeting, Parcel
from relaxmpi.primitives.simulation.load import Load
from relaxmpi.primitives.simulation.rank import Rank, Ticket

__all__ = ["Exchange"]


class _Part(NamedTuple):
    parcels: dict[int, Parcel]  # by receiver, in the order of sending
    begin: float
    ready: float  # when the sender's processor has done its part
    slowness: float


class Exchange(Ticket):
    """One rank's part in an exchange of messages between all ranks of a channel.

    The links see the same messages in the same order as if each were an event, except that what
    else travels meanwhile comes before or after all of them.
    """

    __slots__ = ("_channel", "_expected", "_me", "_meeting", "_tail", "last")

    def __init__(self, channel: Channel, rank: Rank, me: int, expected: int) -> None:
        super().__init__(rank)
        self._channel, self._me, self._expected = channel, me, expected
        self._meeting: Meeting | None = None
        self._tail = 0.0
        self.last: Message | None = None  # for this rank, to arrive

    def start(self, number: int, parcels: dict[int, Parcel]) -> None:
        """Hand in this rank's messages; they are copies already."""
        fabric, rank = self._channel.fabric, self.rank
        begin, slowness = rank.clock, fabric.fates.slowness(rank.index, rank.clock)
        fabric.cost(rank, sum(parcel.load.send for parcel in parcels.values()))
        fabric.sent += len(parcels)
        fabric.grouped += len(parcels)
        part = _Part(parcels, begin, rank.clock, slowness)
        self._meeting = self._channel.meet("exchange", number, self._me, self, part, _close)
        self.done = not self._expected

    def arrive(self, time: float, tail: float) -> None:
        """All messages for this rank have arrived; `tail` is left for its processor to do."""
        fabric = self._channel.fabric
        fabric.grouped -= self._expected
        if self.rank.dead:
            fabric.dropped += self._expected
        else:
            fabric.received += self._expected
        self._tail, self.done = tail, True
        if self.last is not None:
            self.rank.owes(self.last.source, self.last.sent)
            if self.last.source in fabric.recorders:
                fabric.recorders[self.last.source].messages.append(self.last)
        fabric.scheduler.completed(self.rank, self, time)

    def test(self) -> bool:
        """Whether all messages are here."""
        if self.done and self._tail:
            self.rank.clock += self._tail
            self._tail = 0.0
        return self.done

    def missing(self) -> list[int]:
        """The ranks that have not handed in."""
        return [] if self._meeting is None else self._meeting.missing()

    @property
    def common(self) -> Any:
        """What a rank has shared of this exchange; None before."""
        assert self._meeting is not None  # start() has been called
        return self._meeting.answer

    def share(self, made: Any) -> None:
        """Spare the other ranks of making the same of the same messages; nobody changes it."""
        assert self._meeting is not None
        self._meeting.answer = made

    def take(self, source: int) -> Any:
        """Return what a rank has sent here: not a copy, and read by others, too, in a gather."""
        assert self._meeting is not None  # start() has been called
        return self._meeting.brought[source].parcels[self._me].data


def _close(meeting: Meeting) -> None:
    tickets = {ticket._me: ticket for ticket in meeting.tickets if isinstance(ticket, Exchange)}
    channel = next(iter(tickets.values()))._channel
    parts = [meeting.brought[r] for r in range(len(tickets))]
    arrivals, tails, lasts = _reckon(channel, parts)
    for last in lasts:
        tickets[last.dest].last = last._replace(
            source=channel.members[last.source].index, dest=channel.members[last.dest].index
        )
    for r, ticket in sorted(tickets.items()):
        time = max(arrivals[r], meeting.time)
        channel.fabric.scheduler.at(time, ticket.arrive, max(0.0, arrivals[r] + tails[r] - time))


def _reckon(channel: Channel, parts: list[_Part]) -> tuple[list[float], list[float], list[Message]]:
    """Return when each rank has all messages, its processor's work then, and the last of them."""
    fabric, net = channel.fabric, channel.fabric.network
    begins = np.array([part.begin for part in parts])
    ready = np.array([part.ready for part in parts])
    slow = np.array([part.slowness for part in parts])
    source = np.repeat(np.arange(len(parts)), [len(part.parcels) for part in parts])
    dest = np.array([r for part in parts for r in part.parcels], "i8")
    sent = [parcel for part in parts for parcel in part.parcels.values()]
    arrivals, done = ready.copy(), ready.copy()
    lasts = []
    if sent:
        loads: Any = Load(*np.array([parcel.load for parcel in sent]).T)
        costs = loads.send * slow[source]
        inject = begins[source] + _running(costs, source) - costs + loads.first * slow[source]
        index = np.array([rank.index for rank in channel.members])
        node = np.array(fabric.nodes)[index]
        near = node[source] == node[dest]
        latency = np.where(near, net.local_latency, net.latency)
        waits = np.array([parcel.sent is not None for parcel in sent])
        asked = np.maximum(inject + latency, begins[dest]) + latency
        given, inject = inject, np.where(waits, asked, inject)
        begin = inject.copy()
        for mask, port, links in (
            (~near, node[source], fabric.up),
            (near, index[source], fabric.out),
        ):
            _queue(mask, port, inject, loads.up, links, begin)
        left = begin
        first, last = begin + latency, begin + loads.up + latency
        begin = first.copy()
        for mask, port, links in (
            (~near, node[dest], fabric.down),
            (near, index[dest], fabric.into),
        ):
            _queue(mask, port, first, loads.down, links, begin)
        arrive = np.maximum(begin + loads.down, last) + loads.delay
        np.maximum.at(arrivals, dest, arrive)
        order = np.lexsort((arrive, dest))
        work = loads.receive * slow[dest]
        first = arrive - loads.spread
        last = arrive + loads.last * slow[dest]
        for r, lo, hi in _runs(dest[order]):
            here = order[lo:hi]
            after = np.cumsum(work[here])
            start = np.maximum.accumulate(np.maximum(first[here], ready[r]) - (after - work[here]))
            done[r] = max(start[-1] + after[-1], last[here].max())
            times = (loads.size, given, left, loads.up, loads.down, arrive)
            k = here[-1]
            lasts.append(Message(int(source[k]), r, *(float(which[k]) for which in times)))
    return arrivals.tolist(), np.maximum(done - arrivals, 0.0).tolist(), lasts


def _running(values: Any, group: Any) -> Any:
    """Sums of `values` up to and with each one, begun anew where the (sorted) group changes."""
    sums = np.cumsum(values)
    for _, lo, hi in _runs(group):
        if lo:
            sums[lo:hi] = np.cumsum(values[lo:hi])
    return sums


def _runs(sorted_: Any) -> list[tuple[int, int, int]]:
    """Value, begin and end of each run of equal values."""
    if not len(sorted_):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(sorted_)) + 1).tolist(), len(sorted_)]
    return [(int(sorted_[lo]), lo, hi) for lo, hi in pairwise(cuts)]


def _queue(mask: Any, port: Any, asks: Any, takes: Any, links: list[float], begin: Any) -> None:
    """First come, first served at each port: fill `begin` and move the links' ends."""
    chosen = np.flatnonzero(mask)
    order = chosen[np.lexsort((asks[chosen], port[chosen]))]
    for number, lo, hi in _runs(port[order]):
        here = order[lo:hi]
        after = np.cumsum(takes[here])
        before = after - takes[here]
        begin[here] = np.maximum.accumulate(np.maximum(asks[here], links[number]) - before) + before
        links[number] = float(begin[here[-1]] + takes[here[-1]])
