"""Small facts about a window of `attach` that all ranks must know, in one short message."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from relaxmpi.algorithms.attach_bucket import Slot
from relaxmpi.primitives import MAX, SUM, Comm, Work, allreduce

__all__ = ["Facts", "Flags", "NonFinite"]


_FIXED = 7  # numbers that do not belong to a parameter
_NONE = -(1 << 62)  # less than whatever anybody says


class NonFinite(Enum):
    """What `attach` does about a NaN or an infinity in a gradient of any rank.

    Attributes:
        PASS: Nothing: it reaches the parameters of all ranks. Costs nothing.
        RAISE: Every rank raises `NonFiniteError` naming rank, step and parameter.
        SKIP: No rank takes the step: `p.grad` is None in `optimizer.step()`, which then leaves
            parameters and momentum alone. Counted in `sync.stats().skipped`.

    With RAISE and SKIP what codecs owe (`feedback=True`) is what it was before such a step; that
    takes a copy of it every step.
    """

    PASS = "pass"
    RAISE = "raise"
    SKIP = "skip"


class Facts(NamedTuple):
    """What holds on any rank, or on any that trains.

    Attributes:
        training: Whether some rank has a batch.
        culprit: Rank and parameter of a number that is not finite.
        objector: A rank on which something is wrong.
        steps: Fewest and most steps of the ranks.
        alike: Whether the optimizers have the same settings.
        used: For each parameter, whether some rank has a gradient.
        weight: Sum of the weights of all ranks.
    """

    training: bool
    culprit: tuple[int, int] | None
    objector: int | None
    steps: tuple[int, int]
    alike: bool
    used: np.ndarray
    weight: float


class Flags:
    """One maximum over the ranks for each window, on a stream of its own."""

    def __init__(self, comm: Comm, count: int) -> None:
        self._comm, self._said = comm, np.zeros(_FIXED + count, np.int64)
        self._works: tuple[Work[Any], ...] = ()

    def start(
        self,
        slots: list[Slot],
        culprit: Slot | None,
        objects: bool,
        weight: float | None,
        mine: tuple[int, int] | None,
    ) -> None:
        """Say what holds on this rank; with a weight, the sum of weights is asked for, too.

        `mine` is the number of steps and a digest of the optimizer's settings; None where there
        is no batch.
        """
        said, comm = self._said, self._comm
        said[0] = mine is not None
        said[1] = 0 if culprit is None else 1 + culprit.index * comm.size + comm.rank
        said[2] = objects * (1 + comm.rank)
        # The largest x and the largest -x are equal in size where all x are.
        said[3:7] = _NONE if mine is None else (mine[0], -mine[0], mine[1], -mine[1])
        said[_FIXED:] = [slot.used for slot in slots]
        self._works = (allreduce.start(comm, said, op=MAX, name="flags"),)
        if weight is not None:
            self._works += (allreduce.start(comm, float(weight), op=SUM, name="weights"),)

    def wait(self) -> Facts:
        """Return what holds on any rank, once after each start."""
        (said, *weights), self._works = [work.wait() for work in self._works], ()
        training, code, objector, most, fewest, high, low = map(int, said[:_FIXED])
        slot, rank = divmod(code - 1, self._comm.size)
        return Facts(
            training=bool(training),
            culprit=(rank, slot) if code else None,
            objector=objector - 1 if objector else None,
            steps=(-fewest, most),
            alike=not training or high == -low,
            used=said[_FIXED:] > 0,
            weight=weights[0] if weights else 1.0,
        )
