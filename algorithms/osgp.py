"""SGP and OSGP: stochastic gradient push, whose messages may be on their way for tau steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relaxmpi.algorithms.base import Rule
from relaxmpi.algorithms.mixing import MixingAlgorithm, Order
from relaxmpi.algorithms.osgp_async import BoundAsyncOSGP
from relaxmpi.algorithms.osgp_bound import BoundCombineFirst, BoundOSGP
from relaxmpi.algorithms.sgd import SGD
from relaxmpi.primitives import (
    Codec,
    Comm,
    DifferenceCompression,
    Hierarchy,
    OnePeerExponential,
    Topology,
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

    SGP in order COMBINE_WHILE_ADAPT (subgradient-push, Nedic and Olshevsky 2015) hides the
    exchange, too, but nothing is late and no step is longer: x <- y / w first, then y and w are
    sent, and what neighbours sent is folded in before y takes the step of the gradient at x.

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
        order: See `Order`; COMBINE_WHILE_ADAPT needs tau = 0.
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
    order: Order = Order.ADAPT_THEN_COMBINE
    rule: Rule = field(default_factory=SGD)

    def __post_init__(self) -> None:
        if self.tau is not None and self.tau < 0:
            raise ValueError(f"tau must be a number of steps, or None, not {self.tau}")
        if self.send_every is not None and self.send_every < 1:
            raise ValueError(f"send_every must be at least 1, not {self.send_every}")
        if not isinstance(self.order, Order):
            raise TypeError(f"order must be one of Order, not {self.order!r}")
        if self.combines_first and self.tau != 0:
            raise ValueError(
                f"order {self.order.name} needs tau=0: with tau={self.tau} messages travel while "
                "gradients are computed anyway"
            )
        if not (self.codec is None or isinstance(self.codec, Codec)):
            raise TypeError(
                f"codec must be a Codec, not {self.codec!r}: each buffer makes its own "
                "DifferenceCompression"
            )

    @property
    def combines_first(self) -> bool:
        """Whether shares travel while a gradient is computed, and are folded in before its step."""
        return self.order is Order.COMBINE_WHILE_ADAPT

    @property
    def period(self) -> int:
        """Steps from one message to the next."""
        return self.send_every or max(1, self.tau or 1)

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundOSGP | BoundAsyncOSGP:
        """See `Algorithm.bind`; collective if tau is None, and with a codec.

        Each in-neighbour's replica of x is then sent to it in full precision.
        """
        if (self.tau or self.combines_first) and isinstance(comm, Hierarchy) and comm.size > 1:
            raise ValueError(
                "on a Hierarchy a push ends when all of the node have its result, so nothing "
                "could overlap: use SGP() there, or a flat Comm"
            )
        self._check_kept(*comm.seat)
        if self.tau is not None:
            bound = BoundCombineFirst if self.combines_first else BoundOSGP
            return bound(self, comm, x, lr, name)
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
    order: Order = Order.ADAPT_THEN_COMBINE,
    rule: Rule | None = None,
) -> OSGP:
    """Return stochastic gradient push without overlap: `OSGP` with tau = 0.

    Example:
        >>> import relaxmpi as rx
        >>> rx.SGP(rx.Exponential()).tau
        0
    """
    graph = topology or OnePeerExponential()
    return OSGP(tau=0, topology=graph, codec=codec, gamma=gamma, order=order, rule=rule or SGD())
