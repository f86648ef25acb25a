"""Links and what travels on them: first come, first served, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from relaxmpi.primitives.recorder import Message, Recorder
from relaxmpi.primitives.simulation.faults import Fates
from relaxmpi.primitives.simulation.load import Load
from relaxmpi.primitives.simulation.network import Network
from relaxmpi.primitives.simulation.rank import Rank
from relaxmpi.primitives.simulation.scheduler import Scheduler

__all__ = ["Counts", "Fabric", "Flight"]


class Counts(NamedTuple):
    """What became of the messages with data.

    sent + duplicated = received + discarded + dropped + in_flight, at any time.

    Attributes:
        sent: Given to the network.
        duplicated: Copies that the network made.
        received: Arrived for the first time.
        discarded: Copies that the receiver threw away.
        dropped: Lost in the network, or arrived where the rank was dead.
        in_flight: On their way.
    """

    sent: int
    duplicated: int
    received: int
    discarded: int
    dropped: int
    in_flight: int


class Flight:
    """One message under way, or a copy of it."""

    __slots__ = (
        "arrive",
        "delay",
        "dest",
        "dropped",
        "left",
        "load",
        "sent",
        "source",
    )

    def __init__(
        self,
        source: int,
        dest: int,
        load: Load,
        arrive: Callable[[float], bool],
        dropped: bool,
        delay: float,
        sent: float,
    ) -> None:
        self.source, self.dest, self.load = source, dest, load
        self.arrive, self.dropped, self.delay, self.sent = arrive, dropped, delay, sent
        self.left = 0.0  # when its first byte left


class Fabric:
    """The links of all nodes. All times are virtual seconds, all sizes scaled bytes."""

    def __init__(
        self, scheduler: Scheduler, network: Network, nodes: tuple[int, ...], fates: Fates
    ) -> None:
        self.scheduler, self.network, self.nodes, self.fates = scheduler, network, nodes, fates
        n, hosts = len(nodes), max(nodes) + 1
        self._shared = [nodes.count(node) > 1 for node in range(hosts)]
        self.up, self.down = [0.0] * hosts, [0.0] * hosts
        self.out, self.into = [0.0] * n, [0.0] * n
        self.sent = self.duplicated = self.received = self.discarded = self.dropped = 0
        self.grouped = 0  # messages of exchanges that are handed in, but not out
        self.recorders: dict[int, Recorder] = {}

    def counts(self) -> Counts:
        """Count now; what is in flight is counted on the heap itself."""
        travels = (self._leave, self._enter, self._arrive)
        flying = sum(1 for event in self.scheduler.heap if event[3] in travels)
        return Counts(
            self.sent,
            self.duplicated,
            self.received,
            self.discarded,
            self.dropped,
            flying + self.grouped,
        )

    def send(
        self,
        source: Rank,
        dest: Rank,
        load: Load,
        time: float,
        arrive: Callable[[float], bool],
    ) -> None:
        """Send a message; `arrive(time)` says whether it was new to the receiver."""
        fate = self.fates.of(source.index, dest.index, time)
        self.sent += 1
        for later in fate.copies:
            self.duplicated += 1
            copy = Flight(source.index, dest.index, load, arrive, False, fate.delay, time + later)
            self._start(time + later, copy, later > 0)
        flight = Flight(source.index, dest.index, load, arrive, fate.dropped, fate.delay, time)
        if fate.dropped:
            self.scheduler.lossy = True
        self._start(time, flight, False)

    def _start(self, time: float, flight: Flight, later: bool) -> None:
        # Where a link has one rank only, that rank's own messages come in the order of time.
        if later or self._shared[self.nodes[flight.source]]:
            self.scheduler.at(time, self._leave, flight)
        else:
            self._leave(time, flight)

    def _leave(self, time: float, flight: Flight) -> None:
        """The first byte asks for the link up."""
        net, here = self.network, self.nodes[flight.source]
        if here == self.nodes[flight.dest]:
            port, links, latency = flight.source, self.out, net.local_latency
        else:
            port, links, latency = here, self.up, net.latency
        begin = max(time, links[port])
        flight.left = begin
        links[port] = end = begin + flight.load.up
        self.scheduler.at(begin + latency, self._enter, flight, end + latency)

    def _enter(self, time: float, flight: Flight, last: float) -> None:
        """The first byte asks for the link down; the last one cannot be there before `last`."""
        if flight.dropped:
            self.dropped += 1
            self._record(flight, 0.0, None)
            return
        load, there = flight.load, self.nodes[flight.dest]
        if there == self.nodes[flight.source]:
            port, links = flight.dest, self.into
        else:
            port, links = there, self.down
        end = max(time, links[port]) + load.down
        links[port] = end
        end = max(end, last) + load.delay + flight.delay
        self.scheduler.at(end, self._arrive, flight)
        if self.recorders:
            self._record(flight, load.down, end)

    def _record(self, flight: Flight, down: float, arrives: float | None) -> None:
        recorder = self.recorders.get(flight.source)
        if recorder is not None:
            source, dest, load = flight.source, flight.dest, flight.load
            times = flight.sent, flight.left, load.up, down, arrives
            recorder.messages.append(Message(source, dest, load.size, *times))

    def _arrive(self, time: float, flight: Flight) -> None:
        dest = self.scheduler.ranks[flight.dest]
        dest.owes(flight.source, flight.sent)
        if dest.dead:
            self.dropped += 1
        elif flight.arrive(time):
            self.received += 1
        else:
            self.discarded += 1

    def latency(self, source: int, dest: int) -> float:
        """Return the seconds that a small message takes."""
        near = self.nodes[source] == self.nodes[dest]
        return self.network.local_latency if near else self.network.latency

    def cost(self, rank: Rank, seconds: float) -> None:
        """Charge a rank's processor."""
        rank.clock += seconds * self.fates.slowness(rank.index, rank.clock)
