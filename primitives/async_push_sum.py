"""Asynchronous push-sum: ranks that mix numbers at their own pace, and lose nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import fsum
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from relaxmpi.primitives.agreement import nothing
from relaxmpi.primitives.async_edges import (
    ACK,
    GAVE_UP,
    HEADER,
    STEP,
    STOP,
    Carrier,
    Flying,
    Header,
    InEdge,
    Note,
    OutEdge,
    Shares,
    Sums,
)
from relaxmpi.primitives.devices import Flat, device_of
from relaxmpi.primitives.endpoint import Endpoint, agree
from relaxmpi.primitives.errors import MismatchError
from relaxmpi.primitives.topology import Topology
from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm

__all__ = ["AsyncPushSum", "AsyncStats"]

_RING = 2  # messages that may be outstanding on an edge
_UNSURE = 8  # the same, where each message may be lost and replaces those before it
_PERIOD = 64  # steps of a schedule that are looked at to find all edges
_FLOOR = 0.1
# Seconds until an unacknowledged message is sent again, where messages may be lost: this many
# times as long as acknowledgements took so far, doubled each time.
_AGAIN, _SOONEST, _LATEST = 4.0, 1e-3, 1.0


@dataclass
class AsyncStats:
    """What an endpoint did so far.

    Attributes:
        messages: Sent, those sent again included.
        bytes: Of them, with headers.
        folded: Messages that were added to x.
        discarded: Messages that brought nothing new: repeated or overtaken ones.
        skipped: Shares that were kept, because the peer had not taken the earlier ones.
        low_weight: Shares that were kept, because w would have become too small.
        largest_staleness: Of any edge after any `fold()`, in steps.
    """

    messages: int = 0
    bytes: int = 0
    folded: int = 0
    discarded: int = 0
    skipped: int = 0
    low_weight: int = 0
    largest_staleness: int = 0


class AsyncPushSum(Endpoint):
    """Free-running push-sum of an array: every rank gives shares away at its own pace.

    Rank i holds the numerator x_i and a weight w_i, 1 at the start. `send()` gives each out-peer
    j of a step the share (p_ji x_i, p_ji w_i) and scales x_i and w_i by what is left; `fold()`
    adds what has arrived. Whatever the delays, sum_i x_i + what is in flight and sum_i w_i +
    what is in flight never change, so `debiased` = x_i / w_i goes to mean_i x_i on every strongly
    connected topology (Kempe, Dobra and Gehrke 2003; Assran and Rabbat, arXiv 1803.08950).

    On the wire, where messages arrive once and in order, as over MPI: a header of 64 bytes and
    the share in the format of x. Where they may be lost, repeated or overtaken, as in a simulated
    world with such faults: the sum of all shares so far in float64, twice the bytes of float32,
    of which the receiver adds what is new (Spiridonoff, Olshevsky and Paschalidis 2020). Each
    message taken is acknowledged by a note of 32 bytes.

    Two messages of an edge may be outstanding; beyond that a share is not sent and stays in x,
    where it is not lost. Neither is it sent where w would fall below `floor` and nothing has come
    since the last push: the step of an optimizer on x moves x / w by 1 / w as much. What arrives
    between two calls (`comm.progress()`, `comm.background()`, other waits) is put aside, and x is
    touched in `send`, `fold`, `close` and `state_dict` only. Memory: two messages an in-edge, up
    to two an out-edge, one more put aside; a topology that varies has all its edges.

    Args:
        comm: A Comm. Making, closing, saving and loading are collective calls on its stream.
        x: The numerator: float32 or float64 in host memory, changed in place.
        topology: Who sends to whom; its own step is each rank's own.
        max_staleness: tau: `fold()` waits while a message has been due for tau of the own steps
            since, so a rank whose neighbour stands still makes tau more steps; 0: every message
            that is due in a step is waited for; None: it never waits. A message is due in each
            own step in which the peer is an in-peer, unless its sender is further than this rank.
            Any message of the peer that is taken later, or word that it has nothing to give,
            makes up for it.
        floor: See above.
        name: Tells endpoints apart, in errors and between ranks.

    Attributes:
        stats: An AsyncStats.
        step: The step that the next `send()` makes.

    Raises:
        MismatchError: On all ranks: they differ in format, length, topology or options.
        TypeError: On all ranks: x or an option is not what it must be.
        PeerTimeout: In `fold()`: nothing came on an edge, which it names.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def program():
        ...     with rx.Comm.world() as comm:
        ...         x = np.full(3, float(comm.rank))
        ...         mix = rx.AsyncPushSum(comm, x, rx.Ring())
        ...         for _ in range(40):
        ...             comm.compute(1e-3 * (1 + comm.rank))       # each at its own pace
        ...             mix.send()
        ...             mix.fold()
        ...         mix.close()
        ...         return mix.debiased.round(2).tolist(), round(mix.w, 3)
        >>> values = rx.SimulatedWorld(4).run(program)
        >>> values[0][0], round(sum(w for _, w in values), 2)
        ([1.5, 1.5, 1.5], 4.0)
    """

    kind = "AsyncPushSum"

    def __init__(
        self,
        comm: Comm,
        x: Any,
        topology: Topology,
        *,
        max_staleness: int | None = None,
        floor: float = _FLOOR,
        name: str = "",
    ) -> None:
        def what() -> tuple[Hashable, ...]:
            self._flat = _checked(x, topology, max_staleness, floor, name)
            topology.check(comm.size)
            bound = f"max_staleness {max_staleness}"
            shape = str(self._flat.shape)
            return (self._flat.dtype, shape, repr(topology), bound, f"floor {floor}", name)

        agree(comm, self.kind, what)
        self._user, self._x = x, self._flat.data
        self._topology, self._tau, self._floor = topology, max_staleness, floor
        self._hash = crc32(repr((self._flat.dtype, topology, name)).encode())
        sources, dests = _edges(topology, comm.rank, comm.size)
        self._in = {r: InEdge() for r in sources}
        self._out = {r: OutEdge() for r in dests}
        self.stats = AsyncStats()
        self.step = self._calls = self._epoch = 0
        self._w = 1.0
        self._news = True  # whether something was taken since the last push
        self._folding = False
        self._aside: Any = None
        self._aside_w = 0.0
        self._put_aside = self._folded = 0
        self._debiased: Any = None
        self._spare: list[Any] = []
        self._leaving: deque[Flying] = deque()  # taken, but MPI may not have noted it
        self._again = 10 * _SOONEST
        shares, sums = Shares(self._x), Sums(self._x)
        lossless = HEADER + shares.nbytes
        super().__init__(comm, name, lossless, (sources, dests), _RING)
        self._carrier: Carrier = shares if self._box.reliable else sums

    # ------------------------------------------------------------------- what users call

    def send(self, step: int | None = None) -> None:
        """Give the out-peers of a step their shares.

        Args:
            step: The step, which may vary the topology; at least `self.step`, the default.
        """
        now = self.step if step is None else step
        if now < self.step:
            raise ValueError(f"step {now} after step {self.step - 1}: steps must not go back")
        self._run("send", self._sending(now))

    def fold(self, *, wait: bool = True) -> int:
        """Add what has arrived to x and w, and wait where an edge is too stale.

        Args:
            wait: False: never wait.

        Returns:
            How many messages were added.
        """
        count: int = self._run("fold", self._folded_flow(wait))
        self.comm.polled()
        return count

    @property
    def w(self) -> float:
        """The push-sum weight."""
        return self._w

    @property
    def debiased(self) -> Any:
        """x / w, in a buffer of the kind of x that the next use overwrites."""
        flat = self._flat
        if self._debiased is None:
            self._debiased = flat.device.like(self._user, flat.shape)
        out = flat.device.flat(self._debiased)
        np.divide(self._x, self._x.dtype.type(self._w), out=out.data)
        return self._debiased

    @property
    def staleness(self) -> dict[int, int]:
        """For each in-peer: own steps, with this one, since something of it is due; 0: nothing."""
        now = self._calls
        return {
            peer: 0 if edge.missing is None or edge.stop is not None else now - edge.missing
            for peer, edge in self._in.items()
        }

    @property
    def in_flight(self) -> float:
        """Weight that was given away and is not known to have been taken."""
        return fsum(edge.given - edge.taken for edge in self._out.values())

    def close(self) -> None:
        """Take all that is in flight and end; collective, a second call does nothing.

        Ranks may come seconds apart: one that has come gives nothing any more, takes what still
        arrives and is waited for by no one. Afterwards x and w are final, and their sums over the
        ranks are what they were at the start, to rounding, and what was added to x since.
        """
        if self.closed or self._abandoned():
            return
        self._stop("close")

        def flow() -> Flow[None]:
            yield from self._draining()
            yield from self._end()

        self._collective("close", flow())
        self._release()

    def state_dict(self) -> dict[str, Any]:
        """Drain, and return all of this rank's state but x, which is the caller's; collective."""
        self._drain("state_dict")
        edges = {r: (e.heard, e.missing) for r, e in self._in.items()}
        return {"w": self._w, "step": self.step, "calls": self._calls, "edges": edges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Drain, and go on from what `state_dict` returned on this rank; collective."""
        self._drain("load_state_dict")
        self._w, self.step, self._calls = state["w"], state["step"], state["calls"]
        for r, (heard, missing) in state["edges"].items():
            self._in[r].heard = self._in[r].fresh = heard
            self._in[r].missing = missing

    # --------------------------------------------------------------------------- giving

    def _sending(self, step: int) -> Flow[None]:
        self._look()
        out = self._topology.out(self.comm.rank, self.comm.size, step)
        given = self._allowed(out)
        rest = 1.0
        if given:
            self._news = False
            w = self._w
            for peer, p in given.items():
                edge = self._out[peer]
                message = self._message()
                part = self._carrier.give(edge, self._x, p, message[HEADER:])
                edge.given += part * w
                edge.sent += 1
                edge.step = step
                self._w -= part * w
                rest -= p
                edge.patience = self._again
                self._post(peer, edge, message, part * w)
            if len(given) == len(out):
                rest = self._topology.self_weight(self.comm.rank, self.comm.size, step)
            self._carrier.keep(self._x, rest)
        if self._tau is not None:
            for peer in out.keys() - given.keys():
                self._note(peer, STEP, self._out[peer].sent, step)
        for peer in self._topology.into(self.comm.rank, self.comm.size, step):
            source = self._in[peer]
            if source.missing is None and source.heard < step:
                source.missing = self._calls
        self._calls += 1
        self.step = step + 1
        return
        yield

    def _allowed(self, out: dict[int, float]) -> dict[int, float]:
        """Return the shares that can be given now."""
        given = {peer: p for peer, p in out.items() if self._has_room(self._out[peer])}
        self.stats.skipped += len(out) - len(given)
        if given and not self._news and self._w * (1 - fsum(given.values())) < self._floor:
            self.stats.low_weight += len(given)
            return {}
        return given

    def _has_room(self, edge: OutEdge) -> bool:
        if edge.stopped:
            return False
        flying = edge.flying
        if not self._box.reliable:
            while flying and self.comm.now() - flying[0].time > edge.patience:
                flying.popleft()
        return len(flying) < (_UNSURE if self._carrier.replaces else _RING)

    def _message(self) -> Any:
        """Return room for a message."""
        spare = self._spare
        return spare.pop() if spare else np.empty(HEADER + self._carrier.nbytes, np.uint8)

    def _post(self, peer: int, edge: OutEdge, message: Any, w: float) -> None:
        carrier = self._carrier
        w = edge.given if carrier.replaces else w
        count = len(self._x)
        Header(carrier.form, self._epoch, edge.sent, edge.step, count, w, self._hash).write(message)
        request = self._box.send(peer, message)
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
            self._gave_up[peer] = "gave up"
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
            if not self._box.reliable:
                took = self.comm.now() - flying.time
                self._again = min(max(_AGAIN * took, 0.9 * self._again, _SOONEST), _LATEST)
            else:
                self._leaving.append(flying)

    def _read(self, source: int, message: Any) -> None:
        header = Header.read(message, source)
        edge = self._in[source]
        expected = (self._carrier.form, len(self._x), self._hash)
        if (header.form, header.count, header.name) != expected:
            raise MismatchError(
                f"edge {source} -> {self.comm.rank} of {self._title}: a message of "
                f"{header.count} numbers, form {header.form}, met {expected[1]}, form {expected[0]}"
            )
        if header.epoch != self._epoch or header.stamp <= edge.taken:
            self.stats.discarded += 1
            if header.epoch == self._epoch:
                self._note(source, ACK, edge.taken, 0, edge.w)
            return
        into = self._x
        if not self._folding:
            if self._aside is None:
                self._aside = np.zeros_like(self._x)
            into = self._aside
        self._carrier.take(edge, message[HEADER : HEADER + self._carrier.nbytes], into)
        w = header.w - edge.w if self._carrier.replaces else header.w
        edge.w = header.w if self._carrier.replaces else edge.w + w
        edge.taken = header.stamp
        edge.fresh = max(edge.fresh, header.step)
        self._heard(edge)
        self._note(source, ACK, header.stamp, 0, edge.w)
        self.stats.folded += 1
        if self._folding:
            self._w += w
            self._folded += 1
            self._caught_up(edge)
            self._news = True
        else:
            self._aside_w += w
            self._put_aside += 1

    def _heard(self, edge: InEdge) -> None:
        """The sender made a step without a message, and all messages before it are here."""
        if edge.passed is not None and edge.passed[1] <= edge.taken:
            edge.fresh = max(edge.fresh, edge.passed[0])
            edge.passed = None
            if self._folding:
                self._caught_up(edge)

    def _caught_up(self, edge: InEdge) -> None:
        edge.heard = max(edge.fresh, edge.heard)
        edge.missing = None

    def _resend(self) -> None:
        """Send sums again that nobody has acknowledged in time."""
        now = self.comm.now()
        for peer, edge in self._out.items():
            if edge.acked < edge.sent and now - edge.last > edge.patience:
                edge.patience = min(2 * edge.patience, _LATEST)
                edge.flying.clear()
                message = self._message()
                self._carrier.again(edge, message[HEADER:])
                self._post(peer, edge, message, 0.0)

    def _arrival(self) -> Request:
        if not self._box.reliable:
            unsure = [e.last + e.patience for e in self._out.values() if e.acked < e.sent]
            if unsure:
                self._box.alarm(max(min(unsure) - self.comm.now(), 0.0) + 1e-6)
        return self._box.arrival()

    # -------------------------------------------------------------------------- folding

    def _folded_flow(self, wait: bool) -> Flow[int]:
        self._begin_fold()
        try:
            self._look()
            while wait and self._late():
                yield self._arrival()
                self._look()
        finally:
            self._folding = False
        stale = max(self.staleness.values(), default=0)
        self.stats.largest_staleness = max(self.stats.largest_staleness, stale)
        return self._folded

    def _begin_fold(self) -> None:
        """From now on what arrives goes to x; what was put aside goes first."""
        self._folding = True
        self._folded = self._put_aside
        if self._put_aside:
            self._x += self._aside
            self._aside[:] = 0
            self._w += self._aside_w
            self._aside_w, self._put_aside = 0.0, 0
            self._news = True
        for edge in self._in.values():
            if edge.fresh > edge.heard:
                self._caught_up(edge)

    def _late(self) -> list[int]:
        if self._tau is None:
            return []
        return [peer for peer, stale in self.staleness.items() if stale > self._tau]

    def _missing(self) -> dict[int, str]:
        return {
            peer: f"nothing for {self.staleness[peer]} steps, last heard of its step "
            f"{self._in[peer].heard}"
            for peer in self._late()
        }

    def _say_broken(self) -> None:
        for peer in self._out.keys() | self._in.keys():
            self._note(peer, GAVE_UP)

    # ------------------------------------------------------------------------- draining

    def _stop(self, what: str) -> None:
        """Tell the neighbours that nothing more will come until all have drained."""

        def flow() -> Flow[None]:
            for peer in self._out.keys() | self._in.keys():
                stamp = self._out[peer].sent if peer in self._out else 0
                self._note(peer, STOP, stamp)
            return
            yield

        self._run(what, flow())

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
        self._stop(what)

        def flow() -> Flow[None]:
            yield from self._draining()
            self._epoch += 1
            for peer, out in self._out.items():
                self._carrier.level(out)
                self._out[peer] = replace(OutEdge(), phi=out.phi)
            for peer, edge in self._in.items():
                self._carrier.level(edge)
                heard, missing = edge.heard, edge.missing
                self._in[peer] = InEdge(rho=edge.rho, heard=heard, fresh=heard, missing=missing)

        self._collective(what, flow())
        # Nobody gives anything before all have drained.
        self._collective(f"{what} done", nothing())


def _checked(x: Any, topology: Topology, tau: int | None, floor: float, name: str) -> Flat:
    flat = device_of(x).flat(x)
    if flat.device.name != "cpu" or flat.dtype not in ("float32", "float64"):
        raise TypeError(
            f"x must be float32 or float64 in host memory, not {flat.dtype} on {flat.device.name}"
        )
    if not isinstance(topology, Topology):
        raise TypeError(f"topology must be a Topology, such as Ring(), not {topology!r}")
    if tau is not None and not (isinstance(tau, int) and tau >= 0):
        raise ValueError(f"max_staleness must be None, 0 or more steps, not {tau!r}")
    if not 0 <= floor < 1:
        raise ValueError(f"floor must be in [0, 1), not {floor!r}")
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    return flat


def _edges(topology: Topology, rank: int, n: int) -> tuple[list[int], list[int]]:
    """Return all ranks that may send to this one in some step, and those it may send to."""
    period = topology.period(n)
    if period is None or period > _PERIOD:
        others = [r for r in range(n) if r != rank]
        return others, others
    steps = range(period)
    sources = sorted({r for k in steps for r in topology.into(rank, n, k)})
    dests = sorted({r for k in steps for r in topology.out(rank, n, k)})
    return sources, dests
