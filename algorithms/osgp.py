"""SGP and OSGP: stochastic gradient push, whose messages may be on their way for tau steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relaxmpi.algorithms.arrays import copy_of
from relaxmpi.algorithms.base import Rule
from relaxmpi.algorithms.mixing import BoundMixing, MixingAlgorithm
from relaxmpi.algorithms.osgp_async import BoundAsyncOSGP
from relaxmpi.algorithms.sgd import SGD
from relaxmpi.primitives import (
    SUM,
    Codec,
    Comm,
    DifferenceCompression,
    Hierarchy,
    Identity,
    OnePeerExponential,
    Topology,
    Work,
    allreduce,
    push_sum,
)

__all__ = ["OSGP", "SGP"]


@dataclass(frozen=True)
class OSGP(MixingAlgorithm):
    """Overlap stochastic gradient push (Assran et al. 2019, arXiv 1811.10792, algorithm 2).

    On rank i, with the numerator y (at first x), the push-sum weight w (at first 1), and p_ji the
    weight that i puts on what it sends to j in step k:

        y <- y - lr u(grad f_i(x))                 u: the local rule, with momentum of its own
        send (p_ji y, p_ji w) to all j of out(i, k);  y <- p_ii y;  w <- p_ii w
        (y, w) <- (y, w) + what neighbours sent in step k - tau
        x <- y / w                                 where the next gradient is taken

    Messages travel while the next tau gradients are computed. sum_i y and sum_i w, what is on its
    way included, change by the gradient steps alone, so the mean model y / w follows mean
    gradients whatever the topology and the delays. With tau = 0 this is SGP (algorithm 1): on the
    complete graph AllReduce SGD, on a symmetric one D-PSGD in the order adapt, then combine.

    Between send and fold a rank holds less than its share (w = 2/3 for tau = 1 and one peer, in
    general 1 / (1 + tau d / (d + 1)) with d peers), so its own gradient moves x by lr / w. The
    learning rate that is best for tau = 0 is therefore about the largest that is sensible.

    Args:
        tau: After how many steps a message is folded in, exactly: the run is deterministic. None
            folds messages whenever they come and waits for nobody (`AsyncPushSum`): ranks then
            may take different numbers of steps.
        topology: Who sends to whom; it may be directed.
        send_every: s, sends in steps 0, s, 2 s, ...; tau still counts steps. None: s = tau as in
            algorithm 2, at least 1. With s < tau a rank gives away shares before any comes back,
            up to all but 2^-tau of its weight, and its own gradients move x by as much more.
        biased: Ignore w, x = y (an ablation: delayed mass is missing from x).
        codec: Compresses messages through `DifferenceCompression`, whose errors are sent later.
        gamma: How much of what is compressed is mixed in a step (with a codec).
        early: Fold a message in as soon as it is there, in order; after tau steps at the latest.
            Not deterministic.
        floor: With tau=None, the w below which nothing is sent (see `AsyncPushSum`): with d peers w
            stays above floor / (1 + d), so that a step moves x by at most (1 + d) lr / floor.
        rule: The local rule.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def run():
        ...     with rx.Comm.world() as comm:
        ...         x = np.zeros(2)
        ...         opt = rx.OSGP(tau=1).bind(comm, x, lr=0.1)
        ...         for _ in range(100):
        ...             opt.step(x - comm.rank)
        ...         return opt.mean()
        >>> rx.SimulatedWorld(4).run(run)[0].round(3)
        array([1.5, 1.5])
    """

    tau: int | None = 1
    topology: Topology = field(default_factory=OnePeerExponential)
    send_every: int | None = None
    biased: bool = False
    codec: Codec | None = None
    gamma: float = 0.5
    early: bool = False
    floor: float = 0.5
    rule: Rule = field(default_factory=SGD)

    def __post_init__(self) -> None:
        if self.tau is not None and self.tau < 0:
            raise ValueError(f"tau must be a number of steps, or None, not {self.tau}")
        if self.send_every is not None and self.send_every < 1:
            raise ValueError(f"send_every must be at least 1, not {self.send_every}")
        if not (self.codec is None or isinstance(self.codec, Codec)):
            raise TypeError(
                f"codec must be a Codec, not {self.codec!r}: each buffer makes its own "
                "DifferenceCompression"
            )

    @property
    def period(self) -> int:
        """Steps from one message to the next."""
        return self.send_every or max(1, self.tau or 1)

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundOSGP | BoundAsyncOSGP:
        """See `Algorithm.bind`; collective if tau is None, and with a codec.

        Each in-neighbour's replica of x is then sent to it in full precision.
        """
        if self.tau and isinstance(comm, Hierarchy) and comm.size > 1:
            raise ValueError(
                "on a Hierarchy a push ends when all of the node have its result, so nothing "
                f"could overlap: use SGP() there, or OSGP(tau={self.tau}) on a flat Comm"
            )
        self._check_kept(*comm.seat)
        if self.tau is not None:
            return BoundOSGP(self, comm, x, lr, name)
        codec = None if self.codec is None else DifferenceCompression(self.codec, self.gamma)
        how = self.rule, self.topology, self.period, self.biased, codec, self.floor
        return BoundAsyncOSGP(*how, comm, x, lr, name)

    def _check_kept(self, _rank: int, n: int) -> None:
        """Refuse a rank that has nothing left while its messages are on their way: x = 0 / 0."""
        all_given = self.codec is None or self.gamma == 1
        if n > 1 and self.tau != 0 and all_given and not self.biased and not self.topology.keeps(n):
            raise ValueError(
                f"over {self.topology!r} some rank gives all it has away, so that nothing is left "
                "of x until the messages of others are folded in: let each rank keep a part, or "
                "use SGP()"
            )

    @property
    def lockstep(self) -> bool:
        """See `Algorithm`."""
        return self.tau is not None


def SGP(  # noqa: N802
    topology: Topology | None = None,
    *,
    codec: Codec | None = None,
    gamma: float = 0.5,
    rule: Rule | None = None,
) -> OSGP:
    """Return stochastic gradient push without overlap: `OSGP` with tau = 0.

    Example:
        >>> import relaxmpi as rx
        >>> rx.SGP(rx.Exponential()).tau
        0
    """
    graph = topology or OnePeerExponential()
    return OSGP(tau=0, topology=graph, codec=codec, gamma=gamma, rule=rule or SGD())


class _Arrived:
    """A message that has arrived and waits for its step."""

    def __init__(self, dx: Any, dw: float) -> None:
        self._message = dx, dw

    def test(self) -> bool:
        return True

    def wait(self) -> tuple[Any, float]:
        return self._message


class BoundOSGP(BoundMixing):
    """The state of OSGP for one buffer.

    Attributes:
        y: The numerator.
        w: The push-sum weight, an array of one.
        flight: Steps in which messages were sent that are not folded in yet, and the messages.
    """

    def __init__(self, spec: OSGP, comm: Comm, x: Any, lr: float, name: str) -> None:
        super().__init__(spec.rule, comm, x, lr, name)
        self.spec = spec
        self.y = x if spec.biased else copy_of(x)
        self.w = np.ones(1)
        self.flight: deque[tuple[int, Work[Any] | _Arrived]] = deque()
        self.codec = None if spec.codec is None else self._replicas(spec.codec)

    def _replicas(self, codec: Codec) -> DifferenceCompression:
        """Let both ends of each edge begin with x itself, so that only differences are coded."""
        memory, graph = DifferenceCompression(Identity(), self.spec.gamma), self.spec.topology
        for step in range(graph.period(self.comm.size) or 0):
            push_sum(
                self.comm,
                copy_of(self.y),
                np.ones(1),
                topology=graph,
                step=step,
                codec=memory,
                name=self.name,
            )
        memory.codec = codec
        return memory

    @property
    def kind(self) -> str:
        """See `Bound`; replicas are a part of the state."""
        return super().kind if self.codec is None else f"{super().kind} with a codec"

    @property
    def stepped(self) -> Any:
        """The numerator."""
        return self.y

    def on_params(self) -> None:
        """Push, and fold in what is due."""
        if self.t % self.spec.period == 0:
            self.flight.append((self.t, self._push()))
        while self.flight and self._due(*self.flight[0]):
            self._fold()
        self.t += 1

    def _push(self) -> Work[Any]:
        spec = self.spec
        return push_sum.start(
            self.comm,
            self.y,
            self.w,
            topology=spec.topology,
            step=self.t // spec.period,
            codec=self.codec,
            name=self.name,
        )

    def _due(self, sent: int, message: Work[Any] | _Arrived) -> bool:
        assert self.spec.tau is not None  # there would be no flight
        return self.t - sent >= self.spec.tau or (self.spec.early and message.test())

    def _fold(self) -> None:
        dx, dw = self.flight.popleft()[1].wait()
        self.y += dx
        self.w += dw

    def model(self) -> tuple[Any, float]:
        """Y / w."""
        return self.y, 1.0 if self.spec.biased else self.w[0].item()

    def _land(self) -> list[tuple[int, Any, float]]:
        """Wait for all messages, and let them wait for their steps."""
        landed = [(sent, *message.wait()) for sent, message in self.flight]
        self.flight = deque((sent, _Arrived(dx, dw)) for sent, dx, dw in landed)
        return landed

    def mean(self) -> Any:
        """Return sum_i y / sum_i w, with what is on its way; the run goes on as if never asked."""
        total, weight = copy_of(self.y), float(self.w[0])
        for _, dx, dw in self._land():
            total += dx
            weight += float(dw)
        allreduce(self.comm, total, op=SUM, name="sum of numerators")
        total /= allreduce(self.comm, weight, op=SUM, name="sum of weights")
        return total

    def finish(self) -> None:
        """Fold in all messages at once."""
        while self.flight:
            self._fold()
        self.settle()

    def replace(self, x: Any) -> None:
        """See `Bound`."""
        self.x[...] = x
        if self.y is not self.x:
            self.y[...] = x
            self.y *= self.w[0].item()

    def state_dict(self) -> dict[str, Any]:
        """Numerator, weight, messages on their way, and what the codec remembers."""
        flight = [(sent, copy_of(dx), float(dw)) for sent, dx, dw in self._land()]
        codec = None if self.codec is None else self.codec.state_dict()
        ours = {"y": copy_of(self.y), "w": self.w.copy(), "flight": flight, "codec": codec}
        return {**super().state_dict(), **ours}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; what was on its way before is dropped."""
        super().load_state_dict(state)
        self._land()
        self.y[...] = state["y"]
        self.w[...] = state["w"]
        self.settle()
        self.flight = deque((t, _Arrived(copy_of(dx), dw)) for t, dx, dw in state["flight"])
        if self.codec is not None:
            self.codec.load_state_dict(state["codec"])
