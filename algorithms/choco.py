"""Decentralised SGD in low precision: neighbours exchange compressed differences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relaxmpi.algorithms.arrays import copy_of
from relaxmpi.algorithms.base import Rule
from relaxmpi.algorithms.decentralized import Averaging, bound_of
from relaxmpi.algorithms.mixing import BoundMixing, MixingAlgorithm, Order
from relaxmpi.algorithms.sgd import SGD
from relaxmpi.primitives import (
    DCD,
    Codec,
    Comm,
    DifferenceCompression,
    Hierarchy,
    Identity,
    MinMaxUInt8,
    Quantizer,
    Ring,
    Topology,
    Work,
    neighbor_allreduce,
)

__all__ = ["Choco", "LowPrecisionDecentralized"]


@dataclass(frozen=True)
class Choco(MixingAlgorithm):
    """CHOCO-SGD (Koloskova, Stich, Jaggi 2019, arXiv 1902.00340).

    Each rank keeps x_i and a replica h_j of what it knows of itself and of each neighbour:

        x_i <- x_i - lr u(grad f_i(x_i))                    u: the local rule
        q_i = Q(x_i - h_i), sent to all neighbours;  h_j <- h_j + q_j for itself and neighbours
        x_i <- x_i + gamma (sum_j W_ij h_j - h_i)

    The sum of all x_i is kept exactly, any codec will do, and errors vanish with the differences:
    without gradients all ranks reach the true mean. With Q = identity and gamma = 1 it is
    `Decentralized` in order ADAPT_THEN_COMBINE. Replicas begin as what x is when the state is
    made, so that no rank's model is coded as a whole.

    Args:
        codec: Q, biased or not.
        gamma: Consensus step: 0.5 for 4 bits and more, less for coarse codecs on big buckets.
        topology: Doubly stochastic and fixed, because replicas belong to neighbours.
        order: COMBINE_WHILE_ADAPT lets messages travel while the next gradient is computed, and
            mixes before the step that it makes.
        rule: The local rule.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def run():
        ...     with rx.Comm.world() as comm:
        ...         x = np.zeros(2)
        ...         opt = rx.Choco(rx.Quantizer(bits=4)).bind(comm, x, lr=0.1)
        ...         for _ in range(100):
        ...             opt.step(x - comm.rank)
        ...         return opt.mean()
        >>> rx.SimulatedWorld(4).run(run)[0].round(3)
        array([1.5, 1.5])
    """

    codec: Codec = field(default_factory=lambda: Quantizer(bits=4))
    gamma: float = 0.5
    topology: Topology = field(default_factory=Ring)
    order: Order = Order.ADAPT_THEN_COMBINE
    rule: Rule = field(default_factory=SGD)

    def __post_init__(self) -> None:
        _check_codec(self.codec)
        if not isinstance(self.order, Order):
            raise TypeError(f"order must be one of Order, not {self.order!r}")

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundMixing:
        """See `Algorithm.bind`; collective: neighbours get their replicas, in full precision."""
        memory = DifferenceCompression(Identity(), self.gamma)
        neighbor_allreduce(comm, copy_of(x), topology=self.topology, codec=memory, name=name)
        memory.codec = self.codec
        how = Averaging(self.topology, 1, memory)
        return bound_of(self.order)(self.rule, how, comm, x, lr, name)


@dataclass(frozen=True)
class LowPrecisionDecentralized(MixingAlgorithm):
    """DCD-PSGD (Tang et al. 2018, arXiv 1803.06443) on a ring; BAGUA's Decen-8bits.

    Every rank knows the exact x_i^0 of its neighbours, and after each step all move it alike:

        y_i = x_i - lr u(grad f_i(x_i))                     u: the local rule
        q_i = Q(y_i - x_i + sum_j W_ij x_j - x_i), sent to all neighbours
        x_i <- x_i + q_i, here and where a replica of x_i is kept

    A rank knows its new x when it has made its message, so messages travel while the next
    gradient is computed. With Q = identity it is `Decentralized` in order COMBINE_WHILE_ADAPT.
    The mean drifts by the rounding, so 8 bits are about the least, where `Choco` takes any codec.

    Args:
        codec: Q, unbiased or fine.
        topology: Doubly stochastic and fixed, because replicas belong to neighbours.
        rule: The local rule.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def run():
        ...     with rx.Comm.world() as comm:
        ...         x = np.zeros(2)
        ...         opt = rx.LowPrecisionDecentralized().bind(comm, x, lr=0.1)
        ...         for _ in range(100):
        ...             opt.step(x - comm.rank)
        ...         return opt.mean()
        >>> rx.SimulatedWorld(4).run(run)[0].round(1)
        array([1.5, 1.5])
    """

    codec: Codec = field(default_factory=MinMaxUInt8)
    topology: Topology = field(default_factory=Ring)
    rule: Rule = field(default_factory=SGD)

    def __post_init__(self) -> None:
        _check_codec(self.codec)

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundDCD:
        """See `Algorithm.bind`; collective: neighbours get their replicas, in full precision."""
        memory = DCD(self.codec)
        neighbor_allreduce(comm, x, topology=self.topology, codec=memory, name=name)
        return BoundDCD(self, memory, comm, x, lr, name)


def _check_codec(codec: object) -> None:
    if not isinstance(codec, Codec):
        raise TypeError(f"codec must be a Codec, not {codec!r}: each buffer makes its own replicas")


class BoundDCD(BoundMixing):
    """The state of LowPrecisionDecentralized for one buffer.

    What the neighbours will make of x is known when the message is made. So x moves at once, and
    the messages travel while the next gradient is computed: only the step after needs theirs.
    """

    def __init__(
        self,
        spec: LowPrecisionDecentralized,
        memory: DCD,
        comm: Comm,
        x: Any,
        lr: float,
        name: str,
    ) -> None:
        super().__init__(spec.rule, comm, x, lr, name)
        self.topology, self.memory = spec.topology, memory
        self.work: Work[Any] | None = None

    def before_step(self) -> bool:
        """Wait for what neighbours sent in the step before."""
        self.quiesce()
        return False

    def on_params(self) -> None:
        """Send a compressed difference, and make it this rank's own move."""
        graph, memory = self.topology, self.memory
        self.work = neighbor_allreduce.start(
            self.comm, self.x, topology=graph, step=self.t, codec=memory, name=self.name
        )
        if isinstance(self.comm, Hierarchy):  # what the node says is known at the end
            self.quiesce()
        self.t += 1

    def quiesce(self) -> None:
        """See `Bound`."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def finish(self) -> None:
        """See `Bound`."""
        self.quiesce()

    def state_dict(self) -> dict[str, Any]:
        """The replicas, too."""
        self.quiesce()
        return {**super().state_dict(), "replicas": self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; the parameters are the caller's to restore, before this."""
        self.quiesce()
        super().load_state_dict(state)
        self.memory.load_state_dict(state["replicas"])

    def load_resized(self, state: dict[str, Any]) -> None:
        """Go on from x, which is equal on all ranks, with no replicas."""
        super().load_resized(state)
        self.memory.reset()
