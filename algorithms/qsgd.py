"""QSGD: SGD whose gradients travel in low precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relaxmpi.algorithms.base import Algorithm, Rule, rule_of
from relaxmpi.algorithms.sgd import SGD, BoundSGD
from relaxmpi.primitives import Codec, Comm, ErrorFeedback, MinMaxUInt8, OneBit, Quantizer

__all__ = ["QSGD", "ByteGrad"]


@dataclass(frozen=True)
class QSGD(Algorithm):
    """SGD with a quantised all-reduce (Alistarh et al. 2017, arXiv 1610.02132).

    With Q(u) what is left of u after encoding and decoding:

        g <- Q(mean_i Q(grad f_i(x)))        two quantisations, whatever the number of ranks
        x <- x - lr g                        or with momentum and weight decay, as in `SGD`

    Without feedback Q rounds at random, so that g is unbiased. With feedback Q rounds to nearest
    and what it loses is added to the next gradient: u = grad + e, e <- u - Q(u), on both sides
    (Seide et al. 2014, Karimireddy et al. 2019; see `ErrorFeedback`). Codecs that are biased
    by nature, such as one bit a number, need the feedback.

    Args:
        bits: Bits a number, 1 to 8: one bit is the sign, 2 to 8 a `Quantizer`.
        codec: Any codec instead.
        feedback: Remember what was lost.
        rule: The local rule.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> sign = rx.QSGD(codec=rx.OneBit(), feedback=True, rule=rx.SGD(momentum=0.9))
        >>> x = np.ones(4)
        >>> with rx.Comm.world() as comm:
        ...     opt = sign.bind(comm, x, lr=0.25)
        ...     opt.step(2 * x)
        >>> x
        array([0.5, 0.5, 0.5, 0.5])
    """

    bits: int = 8
    codec: Codec | None = None
    feedback: bool = False
    rule: Rule = field(default_factory=SGD)

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise ValueError(f"bits must be 1 to 8, not {self.bits}")
        if not (self.codec is None or isinstance(self.codec, Codec)):
            raise TypeError(
                f"codec must be a Codec, not {self.codec!r}: each buffer makes its own memory, "
                "with feedback=True"
            )

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundSGD:
        """See `Algorithm.bind`."""
        codec = self.codec or (OneBit() if self.bits == 1 else Quantizer(bits=self.bits))
        memory = ErrorFeedback(codec) if self.feedback else codec
        return BoundSGD(self.rule, comm, x, lr, name, memory)

    @property
    def own_rule(self) -> str:
        """The settings of the local rule that differ from plain descent."""
        return rule_of(self.rule).own_rule


def ByteGrad(*, feedback: bool = False, rule: Rule | None = None) -> QSGD:  # noqa: N802
    """Return the algorithm that BAGUA calls ByteGrad: QSGD with `MinMaxUInt8`.

    Example:
        >>> import relaxmpi as rx
        >>> rx.ByteGrad().codec
        MinMaxUInt8()
    """
    return QSGD(codec=MinMaxUInt8(), feedback=feedback, rule=rule or SGD())
