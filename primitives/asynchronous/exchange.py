"""What asynchronous push-sum does on its edges: give, take, acknowledge, send again, drain."""

from __future__ import annotations

from collections import deque
from math import fsum
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

from relaxmpi.primitives.agreement import nothing
from relaxmpi.primitives.asynchronous.carriers import Carrier, Differences, Share, Shares, Sums
from relaxmpi.primitives.asynchronous.edges import (
    ACK,
    GAVE_UP,
    HEADER,
    STEP,
    STOP,
    Flying,
    Header,
    InEdge,
    Note,
    OutEdge,
    neighbours,
)
from relaxmpi.primitives.asynchronous.endpoint import Endpoint
from relaxmpi.primitives.asynchronous.stats import AsyncStats
from relaxmpi.primitives.codecs import Key
from relaxmpi.primitives.devices import Device, Flat
from relaxmpi.primitives.errors import MismatchError
from relaxmpi.primitives.gossip.difference import DifferenceCompression
from relaxmpi.primitives.topology import Topology
from relaxmpi.primitives.transport import Every, Request
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm

__all__ = ["Options", "PushSumEdges"]

_RING = 2  # messages that may be outstanding on an edge
_UNSURE = 8  # the same, where each message may be lost and replaces those before it
# Seconds until a message that nobody acknowledges is sent again, where messages may be lost: so
# many times what acknowledgements took so far, doubled each time.
_AGAIN, _SOONEST, _LATEST = 4.0, 1e-3, 1.0

_Plan = tuple[dict[int, float], list[int], float]


class Options(NamedTuple):
    """What all ranks have agreed on, besides the format of x."""

    topology: Topology
    max_staleness: int | None
    codec: DifferenceCompression | None
    floor: float
    name: str


class PushSumEdges(Endpoint):
    """All edges of one rank. `AsyncPushSum` says what they are for, and is what users call."""

    kind = "AsyncPushSum"

    def __init__(self, comm: Comm, flat: Flat, options: Options) -> None:
        self._x, self._options = flat.data, options
        self._topology, self._tau = options.topology, options.max_staleness
        told = None if options.codec is None else options.codec.describe()
        agreed = (flat.dtype, options.topology, options.max_staleness, told, options.name)
        self._hash = crc32(repr(agreed).encode())
        self._period = options.topology.period(comm.size)
        self._plans: dict[int, _Plan] = {}
        sources, dests = neighbours(options.topology, comm.rank, comm.size)
        self._in = {r: InEdge() for r in sources}
        self._out = {r: OutEdge(r) for r in dests}
        self.stats = AsyncStats()
        self.step = self._calls = self._epoch = 0
        self._w = 1.0
        self._news = 0  # messages taken since the last push
        self._folding = False
        self._aside: Any = None  # what arrived outside of calls that fold, and its weight
        self._aside_w = 0.0
        self._put_aside = self._folded = 0
        self._spare: list[Any] = []
        self._leaving: deque[Flying] = deque()  # taken, but MPI may not have noted it
        self._again = 10 * _SOONEST
        device = comm.priced(flat.device)
        lossless: Carrier
        if options.codec is None:
            lossless = Shares(device, self._x)
        else:
            codec, gamma = comm.priced(options.codec.codec), options.codec.gamma
            key = Key(name=options.name, rank=comm.rank)
            lossless = Differences(device, self._x, codec, gamma, key)
        super().__init__(comm, options.name, HEADER + lossless.nbytes, (sources, dests), _RING)
        sums = options.codec is None and not self._box.reliable
        self._carrier: Carrier = Sums(self._x) if sums else lossless
        if options.codec is not None and self._box.reliable:
            self._open = False  # messages of a peer may be here before its replica is
            self._collective("replicas", self._replicas(flat.device))

    def _replicas(self, device: Device) -> Flow[None]:
        """Let all replicas be what x is now, or the first messages would code x as a whole."""
        transport, moving = self.comm.transport(device), list[Request]()
        for peer, into in self._in.items() if len(self._x) else ():
            into.rho = np.empty_like(self._x)
            moving.append(transport.irecv(into.rho, peer))
        for peer, out in self._out.items() if len(self._x) else ():
            out.phi = self._x.copy()
            moving.append(transport.isend(out.phi, peer))
        yield Every(moving)
        self._open = True

    # --------------------------------------------------------------------------- giving

    def _sending(self, step: int) -> Flow[None]:
        self._look()
        out, into, alone = self._plan(step)
        given = self._allowed(out)
        if given:
            self._news = 0
            w, last = self._w, next(reversed(given))
            rest = alone if len(given) == len(out) else 1 - fsum(given.values())
            for peer, p in given.items():
                keep = rest if peer == last else None
                self._give(self._out[peer], p, keep, w, step)
        if self._tau is not None:
            for peer in out.keys() - given.keys():
                self._note(peer, STEP, self._out[peer].sent, step)
        for peer in into:
            edge = self._in[peer]
            if edge.missing is None and edge.heard < step:
                edge.missing = self._calls
        self._calls += 1
        self.step = step + 1
        return
        yield

    def _plan(self, step: int) -> _Plan:
        """Return the shares of a step, who gives here, and what is kept if all are given."""
        when = step % self._period if self._period else step
        plan = self._plans.get(when)
        if plan is None:
            where = self.comm.rank, self.comm.size, when
            topology = self._topology
            plan = topology.out(*where), list(topology.into(*where)), topology.self_weight(*where)
            if self._period:
                self._plans[when] = plan
        return plan

    def _allowed(self, out: dict[int, float]) -> dict[int, float]:
        """Return the shares that can be given now."""
        given = {peer: p for peer, p in out.items() if self._has_room(self._out[peer])}
        self.stats.skipped += len(out) - len(given)
        # Where nothing is on its way some rank has w >= 1 > floor, so that not all are stuck.
        if self._news < len(out) and self._w < self._options.floor:
            self.stats.low_weight += len(given)
            return {}
        return given

    def _has_room(self, edge: OutEdge) -> bool:
        if edge.stopped:
            return False
        if self._box.reliable:
            return len(edge.flying) < _RING
        if not self._carrier.replaces:
            return not edge.flying
        while edge.flying and self.comm.now() - edge.flying[0].time > edge.patience:
            self._spare.append(edge.flying.popleft().message)  # lost, most likely
        return len(edge.flying) < _UNSURE

    def _give(self, edge: OutEdge, p: float, keep: float | None, w: float, step: int) -> None:
        """Send the share p of x and of w, which this rank held when the step began."""
        message = self._message()
        edge.step, edge.patience = step, self._again
        share = Share(p, self._carrier.part(p) * w, self._w, keep)
        self._carrier.give(edge, self._x, share, message[HEADER:])
        self._w -= share.w
        edge.given += share.w
        edge.sent += 1
        self._post(edge, message, share.w)

    def _message(self) -> Any:
        """Return room for a message."""
        spare = self._spare
        return spare.pop() if spare else np.empty(HEADER + self._carrier.nbytes, np.uint8)

    def _post(self, edge: OutEdge, message: Any, given: float) -> None:
        carrier, count = self._carrier, len(self._x)
        w = edge.given if carrier.replaces else given
        stamp, step = edge.sent, edge.step
        Header(carrier.form, self._epoch, stamp, step, count, w, self._hash).write(message)
        self._launch(edge, message)

    def _launch(self, edge: OutEdge, message: Any) -> None:
        request = self._box.send(edge.peer, message)
        edge.last = self.comm.now()
        edge.flying.append(Flying(edge.sent, message, request, edge.last))
        self.stats.messages += 1
        self.stats.bytes += len(message)
        self.comm.stats.payload_bytes -= HEADER
        self.comm.stats.header_bytes += HEADER

    def _note(self, peer: int, kind: int, stamp: int = 0, step: int = 0, w: float = 0.0) -> None:
        self._tell(peer, Note(kind, self._epoch, stamp, step, w).pack())

    # --------------------------------------------------------------------------- taking

    def _look(self) -> None:
        """Take what has arrived: into x in a call that folds, aside otherwise."""
        while (told := self._box.told()) is not None:
            self._noted(told[0], Note.unpack(told[1]))
        while self._box.take(self._read):
            pass
        while self._leaving and self._leaving[0].request.test():
            self._spare.append(self._leaving.popleft().message)
        if not self._box.reliable:
            self._resend()

    def _noted(self, peer: int, note: Note) -> None:
        if note.kind == GAVE_UP:
            self._gave_up.add(peer)
        elif note.epoch != self._epoch:
            return
        elif note.kind == ACK:
            self._acknowledged(self._out[peer], note)
        elif note.kind == STEP:
            self._in[peer].passed = note.step, note.stamp
            self._heard(self._in[peer])
        elif note.kind == STOP:
            if peer in self._in:
                self._in[peer].stop = note.stamp
            if peer in self._out:
                self._out[peer].stopped = True

    def _acknowledged(self, edge: OutEdge, note: Note) -> None:
        if note.stamp > edge.acked:
            edge.acked, edge.taken = note.stamp, note.w
        while edge.flying and edge.flying[0].stamp <= note.stamp:
            flying = edge.flying.popleft()
            self._leaving.append(flying)
            if not self._box.reliable:
                took = self.comm.now() - flying.time
                self._again = min(max(_AGAIN * took, 0.9 * self._again, _SOONEST), _LATEST)

    def _read(self, source: int, message: Any) -> None:
        header = Header.read(message, source)
        edge, carrier = self._in[source], self._carrier
        expected = carrier.form, len(self._x), self._hash
        if (header.form, header.length, header.name) != expected:
            raise MismatchError(
                f"edge {source} -> {self.comm.rank} of {self._title}: a message of "
                f"{header.length} numbers, form {header.form}, met {len(self._x)}, form "
                f"{carrier.form}"
            )
        if header.epoch != self._epoch or header.stamp <= edge.taken:
            self.stats.discarded += 1
            if header.epoch == self._epoch:
                self._note(source, ACK, edge.taken, 0, edge.w)
            return
        if not carrier.replaces and header.stamp != edge.taken + 1:
            raise MismatchError(
                f"edge {source} -> {self.comm.rank} of {self._title}: message {header.stamp} "
                f"came after message {edge.taken}"
            )
        payload = message[HEADER : HEADER + carrier.nbytes]
        carrier.take(edge, payload, self._x if self._folding else self._room_aside(), header.w)
        w = header.w - edge.w if carrier.replaces else header.w
        edge.w = header.w if carrier.replaces else edge.w + w
        edge.taken, edge.fresh = header.stamp, max(edge.fresh, header.step)
        self._taken(edge, w)
        self._heard(edge)
        self._note(source, ACK, header.stamp, 0, edge.w)

    def _room_aside(self) -> Any:
        if self._aside is None:
            self._aside = np.zeros_like(self._x)
        return self._aside

    def _taken(self, edge: InEdge, w: float) -> None:
        self.stats.folded += 1
        if self._folding:
            self._w += w
            self._folded += 1
            self._news += 1
            edge.catch_up()
        else:
            self._aside_w += w
            self._put_aside += 1

    def _heard(self, edge: InEdge) -> None:
        """Note a step that the sender made without a message, once all before it are here."""
        if edge.passed is not None and edge.passed[1] <= edge.taken:
            edge.fresh = max(edge.fresh, edge.passed[0])
            edge.passed = None
            if self._folding:
                edge.catch_up()

    def _resend(self) -> None:
        """Send again what nobody has acknowledged in time."""
        now = self.comm.now()
        for edge in self._out.values():
            if edge.acked < edge.sent and now - edge.last > edge.patience:
                edge.patience = min(2 * edge.patience, _LATEST)
                newest = edge.flying.pop().message
                if self._carrier.replaces:
                    self._spare += [flying.message for flying in edge.flying]
                    edge.flying.clear()
                self._launch(edge, newest)

    def _arrival(self) -> Request:
        if not self._box.reliable:
            unsure = [e.last + e.patience for e in self._out.values() if e.acked < e.sent]
            if unsure:
                self._box.alarm(max(min(unsure) - self.comm.now(), 0.0) + 1e-6)
        return self._box.arrival()

    # -------------------------------------------------------------------------- folding

    def _begin_fold(self) -> None:
        """From now on what arrives goes to x; what was put aside goes first."""
        self._folding = True
        self._folded = self._put_aside
        if self._put_aside:
            self._x += self._aside
            self._aside[:] = 0
            self._w += self._aside_w
            self._news += self._put_aside
            self._aside_w, self._put_aside = 0.0, 0
        for edge in self._in.values():
            if edge.fresh > edge.heard:
                edge.catch_up()

    def _say_broken(self) -> None:
        for peer in self._out.keys() | self._in.keys():
            self._note(peer, GAVE_UP)

    # ------------------------------------------------------------------------- draining

    def _stop(self) -> Flow[None]:
        """Tell the neighbours that nothing more will come until all have drained."""
        for peer in self._out.keys() | self._in.keys():
            self._note(peer, STOP, self._out[peer].sent if peer in self._out else 0)
        return
        yield

    def _draining(self) -> Flow[None]:
        """Fold until all that was given on this rank's edges has been taken; all have stopped."""
        self._begin_fold()
        try:
            self._look()
            while not self._drained():
                yield self._arrival()
                self._look()
        finally:
            self._folding = False

    def _drained(self) -> bool:
        return all(
            edge.stop is not None and edge.taken >= edge.stop for edge in self._in.values()
        ) and all(edge.stopped and edge.acked >= edge.sent for edge in self._out.values())

    def _drain(self, what: str) -> None:
        self._run(what, self._stop())

        def flow() -> Flow[None]:
            yield from self._draining()
            self._epoch += 1
            edges: list[InEdge | OutEdge] = [*self._in.values(), *self._out.values()]
            for edge in edges:
                self._carrier.level(edge)
            self._in = {peer: edge.levelled() for peer, edge in self._in.items()}
            self._out = {peer: edge.levelled() for peer, edge in self._out.items()}

        self._collective(what, flow())
        # Nobody gives anything before all have drained.
        self._collective(f"{what} (drained)", nothing())
