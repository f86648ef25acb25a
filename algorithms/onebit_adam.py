"""1-bit Adam: after a warm-up the variance is frozen, and the momentum travels as signs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relaxmpi.algorithms.adamw import AdamW, work_format
from relaxmpi.algorithms.base import Algorithm
from relaxmpi.algorithms.freezing import VarianceRatio, check_freeze
from relaxmpi.algorithms.onebit_bound import BoundOneBitAdam, Segment
from relaxmpi.primitives import Codec, Comm, OneBit
from relaxmpi.primitives.devices import device_of

__all__ = ["OneBitAdam"]


@dataclass(frozen=True)
class OneBitAdam(Algorithm):
    """1-bit Adam (Tang et al. 2021, arXiv 2102.02888).

    Warm-up, to step T: `AdamW` along the mean gradient. T is given, or found by `VarianceRatio`.
    Afterwards v = v_T stays, and with f_i the loss on rank i each step is

        m_i <- m + (1 - b_1) (grad f_i(x) - m)
        m <- mean_i m_i                            as signs, with two-sided `ErrorFeedback`,
                                                   in units of about sqrt(v) (see `normalise`)
        x <- x - lr w x
        x <- x - lr / (1 - b_1^t) m / (sqrt(v) / sqrt(1 - b_2^T) + eps)

    (for weight decay that is a part of the gradient, grad f_i(x) + w x). So the bias correction of
    m goes on, and that of v is the one of step T for ever. All ranks hold the same m and x.

    - Coordinates with v = 0 at step T have had no gradient: from then on they are not sent, have no
      part in scales, no residual, and stay as they are, but for decoupled weight decay. Where v is
      0 everywhere the warm-up goes on until it has been otherwise for as many steps.
    - A gradient that is not finite on some rank leaves the step out on all, as if it had not been.
    - On one rank nothing needs to be sent: v stays alive, and this is `AdamW`.
    - On a Hierarchy momenta are averaged in full precision inside nodes.
    - lr may change at will: residuals do not depend on it.

    Args:
        freeze: T, or the rule that finds it. The paper takes 15 to 25 % of all steps; lr should be
            past its warm-up.
        codec: How momenta are encoded. The paper's scale is `OneBit(scale="l2")`; l1 is a
            contraction for all numbers. `OneBit` is exchanged in place and fused with the step, any
            other codec by `allreduce`.
        normalise: Encode momenta in units of sqrt(v), rounded down to a power of two and not below
            eps, so that those which share a scale are alike in size. False is the published form:
            there a coordinate whose v is far below its neighbours' takes steps of their size
            divided by its own sqrt(v), which can diverge (a small network on images of digits
            does). Without a lossy codec the two are equal bit for bit.
        max_norm: Scale gradients down to this norm: in the warm-up that of the mean gradient;
            afterwards, where nobody has it, sqrt(mean_i |grad f_i|^2), which is no smaller.
        rule: betas, eps and weight decay.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> x = np.ones(3)
        >>> with rx.Comm.world() as comm:
        ...     opt = rx.OneBitAdam(freeze=2).bind(comm, x, lr=0.25)
        ...     for _ in range(4):
        ...         opt.step(2 * x)
        >>> bool((abs(x) < 0.25).all())
        True
    """

    freeze: int | VarianceRatio
    codec: Codec = field(default_factory=OneBit)
    normalise: bool = True
    max_norm: float | None = None
    rule: AdamW = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        check_freeze(self.freeze)
        if not isinstance(self.codec, Codec):
            raise TypeError(
                f"codec must be a Codec, not {self.codec!r}: each buffer makes its own memory"
            )
        if not isinstance(self.rule, AdamW):
            raise TypeError(f"1-bit Adam is made for the rule AdamW(...), not {self.rule!r}")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive, not {self.max_norm}")

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundOneBitAdam:
        """See `Algorithm.bind`."""
        if x is None:
            raise TypeError("1-bit Adam is the local rule itself: it needs the parameters")
        flat = device_of(x).flat(x)
        whole = [Segment(0, len(flat.data), x)]
        bound = BoundOneBitAdam(self, comm, whole, work_format(flat), flat.device, lr, name)
        bound.x = x
        return bound

    def refuses(self, optimizer: Any) -> str:
        """An optimizer with another rule would step along what are no gradients."""
        if getattr(optimizer, "algorithm", None) == self:
            return ""
        return (
            f"1-bit Adam is the optimizer itself, and cannot feed a {type(optimizer).__name__}: "
            "make rx.OneBitAdamOptimizer(model.parameters(), algorithm, lr=..., comm=comm), and "
            "attach that with the same algorithm"
        )
