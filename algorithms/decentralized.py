"""Decentralised parallel SGD: each rank averages its parameters with those of neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from relaxmpi.algorithms.base import Rule
from relaxmpi.algorithms.mixing import BoundMixing, MixingAlgorithm
from relaxmpi.algorithms.sgd import SGD
from relaxmpi.primitives import Comm, Ring, Topology, Work, neighbor_allreduce
from relaxmpi.primitives.devices import device_of

__all__ = ["Decentralized", "Order"]


class Order(Enum):
    """When parameters are mixed.

    Attributes:
        ADAPT_THEN_COMBINE: x_i <- sum_j W_ij (x_j - lr g_j): neighbours get the step at once.
        COMBINE_WHILE_ADAPT: x_i <- sum_j W_ij x_j - lr g_i: parameters travel while the gradient
            is computed at the rank's own.
    """

    ADAPT_THEN_COMBINE = "adapt, then combine"
    COMBINE_WHILE_ADAPT = "combine while adapting"


@dataclass(frozen=True)
class Decentralized(MixingAlgorithm):
    """D-PSGD (Lian et al. 2017, arXiv 1705.09056); BAGUA's Decen-32bits.

    With W the mixing matrix of the topology, symmetric or at least doubly stochastic, in order
    COMBINE_WHILE_ADAPT

        x_i <- sum_j W_ij x_j - lr u(grad f_i(x_i))           u: the local rule

    and in order ADAPT_THEN_COMBINE

        x_i <- sum_j W_ij (x_j - lr u(grad f_j(x_j))).

    Either way the mean follows mean gradients: mean x <- mean x - lr mean u. With constant lr
    both end beside the optimum unless all f_i are alike: for f_i = (x - b_i)^2 / 2 the first at
    lr (I - W + lr I)^-1 b, the second at lr (I - (1 - lr) W)^-1 W b, whose mean is that of b.
    The first hides the exchange behind the gradient, the second is closer to consensus.

    BAGUA's modes are the topologies `Complete` (all), `ShiftOne` and `Ring`.

    Args:
        topology: Who averages with whom.
        order: See `Order`.
        interval: Mix in every so-manieth step: COMBINE_WHILE_ADAPT in steps 0, s, 2 s, ...,
            ADAPT_THEN_COMBINE at the end of steps s - 1, 2 s - 1, ...
        rule: The local rule.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def run():
        ...     with rx.Comm.world() as comm:
        ...         x = np.zeros(2)
        ...         opt = rx.Decentralized(rx.Ring()).bind(comm, x, lr=0.1)
        ...         for _ in range(100):
        ...             opt.step(x - comm.rank)
        ...         return opt.mean()
        >>> rx.SimulatedWorld(4).run(run)[0].round(3)
        array([1.5, 1.5])
    """

    topology: Topology = field(default_factory=Ring)
    order: Order = Order.ADAPT_THEN_COMBINE
    interval: int = 1
    rule: Rule = field(default_factory=SGD)

    def __post_init__(self) -> None:
        if not isinstance(self.order, Order):
            raise TypeError(f"order must be one of Order, not {self.order!r}")
        if self.interval < 1:
            raise ValueError(f"interval must be at least 1, not {self.interval}")

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundMixing:
        """See `Algorithm.bind`."""
        kind = _CombineFirst if self.order is Order.COMBINE_WHILE_ADAPT else _AdaptFirst
        return kind(self, comm, x, lr, name)


class _AdaptFirst(BoundMixing):
    """Adapt, then combine."""

    def __init__(self, spec: Decentralized, comm: Comm, x: Any, lr: float, name: str) -> None:
        super().__init__(spec.rule, comm, x, lr, name)
        self.spec = spec

    def on_params(self) -> bool:
        """Combine."""
        self.t += 1
        if self.t % self.spec.interval:
            return False
        step = self.t // self.spec.interval - 1
        neighbor_allreduce(
            self.comm, self.x, topology=self.spec.topology, step=step, name=self.name
        )
        return True


class _CombineFirst(BoundMixing):
    """Combine while adapting: x travels during the gradient, and its mean takes the step."""

    def __init__(self, spec: Decentralized, comm: Comm, x: Any, lr: float, name: str) -> None:
        super().__init__(spec.rule, comm, x, lr, name)
        self.spec = spec
        self.mixed = device_of(x).like(x, tuple(x.shape))
        self.work: Work[Any] | None = None

    def before_step(self) -> bool:
        """Combine what was sent when the step before ended."""
        work = self.work or self._start()  # nobody was asked before the first step
        if work is None:
            return False
        self.x[...] = work.wait()
        self.work = None
        return True

    def on_params(self) -> bool:
        """Send x on its way, for the next step."""
        self.t += 1
        self.work = self._start()
        return False

    def _start(self) -> Work[Any] | None:
        step, rest = divmod(self.t, self.spec.interval)
        if rest:
            return None
        graph = self.spec.topology
        return neighbor_allreduce.start(
            self.comm, self.x, self.mixed, topology=graph, step=step, name=self.name
        )

    def finish(self) -> None:
        """Drop what is on its way: copies of models that are complete."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def replace(self, x: Any) -> None:
        """See `Bound`."""
        self.finish()
        super().replace(x)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; the next step sends x as it is then."""
        self.finish()
        super().load_state_dict(state)
