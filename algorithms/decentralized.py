"""Decentralised parallel SGD: each rank averages its parameters with those of neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relaxmpi.algorithms.arrays import copy_of
from relaxmpi.algorithms.base import Rule
from relaxmpi.algorithms.mixing import BoundMixing, MixingAlgorithm, Order
from relaxmpi.algorithms.sgd import SGD
from relaxmpi.primitives import (
    Comm,
    DifferenceCompression,
    Ring,
    Topology,
    Work,
    neighbor_allreduce,
)
from relaxmpi.primitives.devices import device_of

__all__ = ["Averaging", "Decentralized", "bound_of"]


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
        how = Averaging(self.topology, self.interval, None)
        return bound_of(self.order)(self.rule, how, comm, x, lr, name)


class Averaging(NamedTuple):
    """With whom to average, how often, and the memory of what was sent in low precision."""

    topology: Topology
    interval: int
    memory: DifferenceCompression | None


def bound_of(order: Order) -> type[AdaptFirst | CombineFirst]:
    """Return what carries an order out."""
    return CombineFirst if order is Order.COMBINE_WHILE_ADAPT else AdaptFirst


class AdaptFirst(BoundMixing):
    """Adapt, then combine."""

    def __init__(
        self, rule: Rule, how: Averaging, comm: Comm, x: Any, lr: float, name: str
    ) -> None:
        super().__init__(rule, comm, x, lr, name)
        self.how = how

    @property
    def kind(self) -> str:
        """See `Bound`; replicas, and a mean on its way, are a part of the state."""
        return ("Decentralized" if self.how.memory is None else "Choco") + self.with_rule

    def on_params(self) -> bool:
        """Combine."""
        self.t += 1
        step, rest = divmod(self.t, self.how.interval)
        if rest:
            return False
        graph, _, memory = self.how
        neighbor_allreduce(
            self.comm, self.x, topology=graph, step=step - 1, codec=memory, name=self.name
        )
        return True

    def state_dict(self) -> dict[str, Any]:
        """The replicas, too."""
        memory = self.how.memory
        replicas = None if memory is None else memory.state_dict()
        return {**super().state_dict(), "replicas": replicas}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; the parameters are the caller's to restore, before this."""
        super().load_state_dict(state)
        if self.how.memory is not None:
            self.how.memory.load_state_dict(state["replicas"])

    def load_resized(self, state: dict[str, Any]) -> None:
        """Go on from x, which is equal on all ranks, with no replicas."""
        super().load_resized(state)
        if self.how.memory is not None:
            self.how.memory.reset()


class CombineFirst(AdaptFirst):
    """Combine while adapting: x travels during the gradient, and its mean takes the step."""

    def __init__(
        self, rule: Rule, how: Averaging, comm: Comm, x: Any, lr: float, name: str
    ) -> None:
        super().__init__(rule, how, comm, x, lr, name)
        self.mixed = device_of(x).like(x, tuple(x.shape))
        self.work: Work[Any] | None = None
        self.arrived = False  # whether `mixed` has been restored, and waits for its step

    @property
    def kind(self) -> str:
        """See `Bound`."""
        return f"{super().kind} in order {Order.COMBINE_WHILE_ADAPT.name}"

    def before_step(self) -> bool:
        """Combine what was sent when the step before ended."""
        if self.work is None and not self.arrived:
            self.work = self._start()  # the first step, or the first after `finish`
        arrived = self._arrived()
        if arrived:
            self.x[...] = self.mixed
        self.work, self.arrived = None, False
        return arrived

    def on_params(self) -> bool:
        """Send x on its way, for the next step."""
        self.t += 1
        self.work = self._start()
        return False

    def _start(self) -> Work[Any] | None:
        step, rest = divmod(self.t, self.how.interval)
        if rest:
            return None
        graph, _, memory = self.how
        return neighbor_allreduce.start(
            self.comm, self.x, self.mixed, topology=graph, step=step, codec=memory, name=self.name
        )

    def _arrived(self) -> bool:
        """Wait for what is on its way, and say whether `mixed` is to be used."""
        if self.work is not None:
            self.work.wait()
        return self.arrived or self.work is not None

    def quiesce(self) -> None:
        """See `Bound`."""
        self._arrived()

    def finish(self) -> None:
        """Drop what is on its way: models are complete without."""
        self._arrived()
        self.work, self.arrived = None, False

    def replace(self, x: Any) -> None:
        """See `Bound`; what neighbours have heard of the old x is dropped."""
        self.finish()
        super().replace(x)

    def state_dict(self) -> dict[str, Any]:
        """The mean that is on its way, too."""
        mixed = copy_of(self.mixed) if self._arrived() else None
        return {**super().state_dict(), "mixed": mixed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; what was on its way before is dropped."""
        self.finish()
        super().load_state_dict(state)
        if state["mixed"] is not None:
            self.mixed[...], self.arrived = state["mixed"], True
