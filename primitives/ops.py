"""Reduction operations."""

from enum import Enum

__all__ = ["MAX", "MEAN", "MIN", "SUM", "Op"]


class Op(Enum):
    """How ranks' numbers become one: MPI's SUM, MAX and MIN, and MEAN, which MPI lacks."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"

    @property
    def additive(self) -> bool:
        """Whether the operation is a sum, possibly divided."""
        return self in (Op.SUM, Op.MEAN)


SUM, MEAN, MAX, MIN = Op.SUM, Op.MEAN, Op.MAX, Op.MIN
