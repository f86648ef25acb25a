"""Asynchronous push-sum: ranks that mix numbers at their own pace, and lose nothing."""

from __future__ import annotations

from collections.abc import Hashable
from math import fsum
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.asynchronous.edges import steps_of
from relaxmpi.primitives.asynchronous.endpoint import agree, numbers_of
from relaxmpi.primitives.asynchronous.exchange import Options, PushSumEdges
from relaxmpi.primitives.gossip.difference import DifferenceCompression
from relaxmpi.primitives.topology import Topology
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm

__all__ = ["AsyncPushSum"]

_FLOOR = 0.2


class AsyncPushSum(PushSumEdges):
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
    where it is not lost. Neither are shares sent while w is below `floor`, unless as many
    messages have come since the last push as there are peers: the step of an optimizer on x moves
    x / w by 1 / w as much. So w stays above floor / (1 + d) where d peers get equal shares and the
    rank keeps one. What arrives between two calls (`comm.progress()`, `comm.background()`, other
    waits) is put aside, and x is touched in `send`, `fold`, `close` and `state_dict` only. Memory:
    two messages an in-edge, up to two an out-edge, one more put aside; a topology that varies has
    all its edges.

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
        floor: See above. Where all keep pace and messages are tau steps late, w is
            1 / (1 + tau d / (1 + d)): a floor above that holds the mixing up.
        codec: A DifferenceCompression: low precision. Each edge has a replica h of z = x / w, the
            same at both ends: what z is when the endpoint is made (0 where messages may be lost).
            q = C(z - h) goes over the wire, both ends add it to h, and what is given is gamma p w
            and gamma p w h, the same numbers at both ends: the mass is as exact as without. The
            replicas are the endpoint's, in the format of x, and a part of its state.
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

    def __init__(
        self,
        comm: Comm,
        x: Any,
        topology: Topology,
        *,
        max_staleness: int | None = None,
        codec: DifferenceCompression | None = None,
        floor: float = _FLOOR,
        name: str = "",
    ) -> None:
        def what() -> tuple[Hashable, ...]:
            self._flat = numbers_of(x, name)
            _check(topology, max_staleness, codec, floor)
            for step in steps_of(topology, comm.size):
                topology.check(comm.size, step)
            if comm.size > 1 and (codec is None or codec.gamma == 1):
                _check_kept(topology, comm.size)
            told = None if codec is None else f"codec {codec.describe()}"
            words = (f"max_staleness {max_staleness}", told, f"floor {floor}")
            shape, title = str(self._flat.shape), name and f"name {name!r}"
            return (self._flat.dtype, shape, repr(topology), *words, title)

        agree(comm, self.kind, what)
        self._user, self._debiased = x, None
        super().__init__(comm, self._flat, Options(topology, max_staleness, codec, floor, name))

    def send(self, step: int | None = None) -> None:
        """Give the out-peers of a step their shares.

        Args:
            step: The step, which may vary the topology; at least `self.step`, the default.
        """
        now = self.step if step is None else index(step)
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
        """The estimate x / w, in a buffer of the kind of x that the next use overwrites."""
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
        self._run("close", self._stop())

        def flow() -> Flow[None]:
            yield from self._draining()
            yield from self._end()

        self._collective("close", flow())
        self._release()

    def state_dict(self) -> dict[str, Any]:
        """Drain, and return all of this rank's state but x, which is the caller's; collective."""
        self._drain("state_dict")
        save = self._carrier.save
        return {
            "w": self._w,
            "step": self.step,
            "calls": self._calls,
            "in": {r: (e.heard, e.missing, save(e)) for r, e in self._in.items()},
            "out": {r: save(e) for r, e in self._out.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Drain, and go on from what `state_dict` returned on this rank; collective."""
        self._drain("load_state_dict")
        self._w, self.step, self._calls = state["w"], state["step"], state["calls"]
        for r, (heard, missing, saved) in state["in"].items():
            edge = self._in[r]
            edge.heard = edge.fresh = heard
            edge.missing = missing
            self._carrier.load(edge, saved)
        for r, saved in state["out"].items():
            self._carrier.load(self._out[r], saved)

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


def _check_kept(topology: Topology, n: int) -> None:
    if not topology.keeps(n):
        raise ValueError(
            f"over {topology!r} some rank gives all it has away, so that x / w is 0 / 0 until "
            "something comes: let each rank keep a part"
        )


def _check(topology: object, tau: object, codec: object, floor: float) -> None:
    if not isinstance(topology, Topology):
        raise TypeError(f"topology must be a Topology, such as Ring(), not {topology!r}")
    if tau is not None and not (isinstance(tau, int) and tau >= 0):
        raise ValueError(f"max_staleness must be None, 0 or more steps, not {tau!r}")
    if not isinstance(codec, (DifferenceCompression, type(None))):
        raise TypeError(
            "codec must be a DifferenceCompression, such as DifferenceCompression(Quantizer(8)), "
            f"not {codec!r}: what goes over the wire must add up to what was given"
        )
    if not 0 <= floor < 1:
        raise ValueError(f"floor must be in [0, 1), not {floor!r}")
