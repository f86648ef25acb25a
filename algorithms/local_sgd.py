"""Local SGD: steps without communication, and now and then the mean of the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relaxmpi.algorithms.base import Rule
from relaxmpi.algorithms.mixing import BoundMixing, MixingAlgorithm
from relaxmpi.algorithms.sgd import SGD
from relaxmpi.primitives import MEAN, Comm, Identity, Work, allreduce

__all__ = ["BoundLocalSGD", "LocalSGD"]


@dataclass(frozen=True)
class LocalSGD(MixingAlgorithm):
    """Local SGD (Stich 2019, arXiv 1805.09767), which sends 1/H of the bytes of AllReduce SGD.

    With f_i the loss on rank i and H the period:

        x_i <- x_i - lr grad f_i(x_i)        or another rule, with a state of each rank's own
        x_i <- mean_j x_j                    after every H-th step, in the order of the ranks

    With H = 1 and a rule that is linear in the gradient this is AllReduce SGD. Post-local SGD
    (Lin et al. 2020, arXiv 1808.07217) begins with that: until step `start` all ranks step along
    the mean gradient. Under `attach` the parameters are averaged after each of these steps instead.

    All ranks begin with the same parameters, and hold the same bytes after each mean.

    Args:
        every: H.
        start: The first `start` steps are those of AllReduce SGD.
        rule: The local rule.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> x = np.ones(3)
        >>> with rx.Comm.world() as comm:
        ...     opt = rx.LocalSGD(every=8).bind(comm, x, lr=0.25)
        ...     for _ in range(8):
        ...         opt.step(2 * x)
        >>> x
        array([0.00390625, 0.00390625, 0.00390625])
    """

    every: int
    start: int = 0
    rule: Rule = field(default_factory=SGD)

    def __post_init__(self) -> None:
        if self.every < 1 or self.start < 0:
            raise ValueError(
                f"every must be 1 or more and start 0 or more, not {self.every} and {self.start}"
            )

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundLocalSGD:
        """See `Algorithm.bind`."""
        return BoundLocalSGD(self, comm, x, lr, name)


class BoundLocalSGD(BoundMixing):
    """The state of local SGD for one buffer."""

    def __init__(self, spec: LocalSGD, comm: Comm, x: Any, lr: float, name: str) -> None:
        super().__init__(spec.rule, comm, x, lr, name)
        self.spec = spec
        self._equal = False

    def on_grads(self, g: Any) -> Work[Any] | None:
        """Before `start` replace `g` by its mean, so that the ranks stay equal."""
        if self.t >= self.spec.start:
            return None
        self._equal = True
        return allreduce.start(self.comm, g, op=MEAN, codec=Identity(), name=self.name)

    def on_params(self) -> bool:
        """Average, if it is time."""
        self.t += 1
        equal, self._equal = self._equal, False
        local = self.t - self.spec.start
        if equal or (local > 0 and local % self.spec.every):
            return False
        allreduce(self.comm, self.x, op=MEAN, codec=Identity(), name=self.name)
        return True
