"""Small facts about a window of `attach` that all ranks must know, in one short message."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from relaxmpi.algorithms.attach_bucket import Slot
from relaxmpi.primitives import MAX, SUM, Comm, Work, allreduce

__all__ = ["Facts", "Flags", "NonFinite"]


class NonFinite(Enum):
    """What `attach` does about a NaN or an infinity in a gradient of any rank.

    Attributes:
        PASS: Nothing: it reaches the parameters of all ranks. Costs nothing.
        RAISE: Every rank raises `NonFiniteError` naming rank, step and parameter.
        SKIP: No rank takes the step: `p.grad` is None in `optimizer.step()`, which then leaves
            parameters and momentum alone. Counted in `sync.stats().skipped`.
    """

    PASS = "pass"
    RAISE = "raise"
    SKIP = "skip"


class Facts(NamedTuple):
    """What holds on any rank.

    Attributes:
        training: Whether some rank has a batch.
        used: For each parameter, whether some rank has a gradient.
        culprit: Rank and parameter of a number that is not finite.
        weight: Sum of the weights of all ranks.
    """

    training: bool
    used: np.ndarray
    culprit: tuple[int, int] | None
    weight: float


class Flags:
    """One maximum over the ranks for each window, on a stream of its own."""

    def __init__(self, comm: Comm, count: int) -> None:
        self._comm, self._said = comm, np.zeros(2 + count, np.int64)
        self._works: tuple[Work[Any], ...] = ()

    def start(
        self, slots: list[Slot], culprit: Slot | None, training: bool, weight: float | None
    ) -> None:
        """Say what holds on this rank; with a weight, the sum of weights is asked for, too."""
        said, comm = self._said, self._comm
        said[0] = training
        said[1] = 0 if culprit is None else 1 + culprit.index * comm.size + comm.rank
        said[2:] = [slot.used for slot in slots]
        self._works = (allreduce.start(comm, said, op=MAX, name="flags"),)
        if weight is not None:
            self._works += (allreduce.start(comm, float(weight), op=SUM, name="weights"),)

    def wait(self) -> Facts:
        """Return what holds on any rank, once after each start."""
        (said, *weights), self._works = [work.wait() for work in self._works], ()
        code = int(said[1]) - 1
        slot, rank = divmod(code, self._comm.size)
        culprit = None if code < 0 else (rank, slot)
        return Facts(bool(said[0]), said[2:] > 0, culprit, weights[0] if weights else 1.0)
