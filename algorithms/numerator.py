"""What push-sum algorithms have in common: the model is a numerator over a weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from relaxmpi.algorithms.mixing import BoundMixing
from relaxmpi.primitives import SUM, DifferenceCompression, allreduce

__all__ = ["BoundPush"]


class BoundPush(BoundMixing, ABC):
    """The state of such an algorithm.

    Attributes:
        y: The numerator, which the local rule moves; x itself where the weight is ignored.
        codec: What remembers what was sent in low precision, if anything was.
    """

    y: Any
    codec: DifferenceCompression | None

    @property
    @abstractmethod
    def weight(self) -> float:
        """This rank's part of the sum of all weights."""

    @property
    def kind(self) -> str:
        """See `Bound`; replicas are a part of the state."""
        return super().kind if self.codec is None else f"{super().kind} with a codec"

    @property
    def stepped(self) -> Any:
        """The numerator."""
        return self.y

    @property
    def divisor(self) -> float:
        """What makes a model of the numerator."""
        return 1.0 if self.y is self.x else self.weight

    def model(self) -> tuple[Any, float]:
        """Y / w."""
        return self.y, self.divisor

    def replace(self, x: Any) -> None:
        """See `Bound`."""
        self.x[...] = x
        if self.y is not self.x:
            self.y[...] = x
            self.y *= self.divisor

    def mean_of(self, total: Any, weight: float) -> Any:
        """Make `total`, of this rank, sum_i y / sum_i w."""
        allreduce(self.comm, total, op=SUM, name="sum of numerators")
        total /= allreduce(self.comm, weight, op=SUM, name="sum of weights")
        return total
