"""AD-PSGD: ranks descend at their own pace and average with one other at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relaxmpi.algorithms.arrays import copy_of
from relaxmpi.algorithms.base import Rule
from relaxmpi.algorithms.mixing import BoundMixing, MixingAlgorithm
from relaxmpi.algorithms.sgd import SGD
from relaxmpi.primitives import AsyncPairwise, Comm

__all__ = ["ADPSGD"]


@dataclass(frozen=True)
class ADPSGD(MixingAlgorithm):
    """Asynchronous decentralised parallel SGD (Lian et al. 2018, arXiv 1710.06952).

    Each rank, at its own pace:

        g <- grad f_i(x_i)                     at what x_i was when the gradient began
        x_i <- x_i - lr u(g)                   applied to what x_i is by then; u: the local rule
        and meanwhile, with a neighbour j, x_i, x_j <- (x_i + x_j) / 2 in one piece

    The sum of all x changes by the gradient steps alone. Even ranks choose an odd one at random
    and ask it; odd ranks answer, so nobody waits in a circle, and an odd number of ranks has one
    more that asks. A rank asks in a step in which its last question has been answered, and goes
    on without waiting in one where it has not: a slow rank slows nobody.

    Questions are answered between steps, and through `attach` also in the hooks of backward.

    The ranks may take different numbers of steps. Making, `mean`, `finish`, `state_dict` and
    `load_state_dict` are collective: they wait until no question is open.

    Args:
        seed: Of the choice of neighbours.
        rule: The local rule.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def run():
        ...     with rx.Comm.world() as comm:
        ...         x = np.zeros(2)
        ...         opt = rx.ADPSGD().bind(comm, x, lr=0.05)
        ...         for _ in range(200):
        ...             comm.compute(1e-3)
        ...             opt.step(x - comm.rank)
        ...         opt.finish()
        ...         return x
        >>> bool(abs(rx.SimulatedWorld(4).run(run)[0] - 1.5).max() < 0.2)
        True
    """

    seed: int = 0
    rule: Rule = field(default_factory=SGD)

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundADPSGD:
        """See `Algorithm.bind`; collective."""
        return BoundADPSGD(self, comm, x, lr, name)

    @property
    def lockstep(self) -> bool:
        """See `Algorithm`."""
        return False


class BoundADPSGD(BoundMixing):
    """The state of AD-PSGD for one buffer.

    Attributes:
        pairs: The endpoint; None after `finish`.
    """

    def __init__(self, spec: ADPSGD, comm: Comm, x: Any, lr: float, name: str) -> None:
        super().__init__(spec.rule, comm, x, lr, name)
        self.seed = spec.seed
        self.pairs: AsyncPairwise | None = self._open()

    def _open(self) -> AsyncPairwise:
        self._seen = 0  # exchanges when somebody last asked whether x had changed
        return AsyncPairwise(self.comm, self.x, name=self.name)

    def before_step(self) -> bool:
        """Let x be what it is by now."""
        return self._changed()

    def on_params(self) -> bool:
        """Answer, and ask a neighbour chosen at random."""
        if self.pairs is None:
            self.pairs = self._open()
        changed = self._changed()
        pairs = self.pairs
        if pairs.active and pairs.peers and pairs.fold(wait=False):
            draw = np.random.default_rng((self.seed, self.comm.rank, self.t))
            pairs.ask(int(draw.choice(pairs.peers)))
        self.t += 1
        return changed

    def poll(self) -> None:
        """Answer, or take an answer."""
        if self.pairs is None:
            return
        if self.pairs.active:
            self.pairs.fold(wait=False)
        else:
            self.pairs.serve()

    @property
    def restless(self) -> bool:
        """A peer may ask at any moment, and the answer moves x."""
        return True

    def _changed(self) -> bool:
        self.poll()
        before, self._seen = self._seen, 0 if self.pairs is None else self.pairs.exchanges
        return before != self._seen

    def mean(self) -> Any:
        """See `Bound`; no question is open meanwhile."""
        if self.pairs is not None:
            self.pairs.drain()
        return super().mean()

    def finish(self) -> None:
        """Wait until all ranks have come, and answer what they ask until then."""
        if self.pairs is not None:
            self.pairs.close()
            self.pairs = None

    def quiesce(self) -> None:
        """See `Bound`."""
        if self.pairs is not None:
            self.pairs.drain()

    def state_dict(self) -> dict[str, Any]:
        """x, too: it is another one when no question is open any more."""
        if self.pairs is not None:
            self.pairs.drain()
        return {**super().state_dict(), "x": copy_of(self.x)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore, x too."""
        super().load_state_dict(state)
        if self.pairs is not None:
            self.pairs.drain()
        self.x[...] = state["x"]
