"""When the variance of 1-bit Adam is good enough to be kept for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["VarianceRatio", "check_freeze", "due", "lag_of"]


@dataclass(frozen=True)
class VarianceRatio:
    """Freeze once the variance hardly changes any more (Tang et al. 2021, section 7.1).

    With D = 1 / (1 - b_2) steps, b_2 the second of Adam's betas, and V_t = |v_t|_1 / (1 - b_2^t):
    freeze after the first step t >= `after`, t > D, with min(V_t, V_{t-D}) >= `ratio` max(V_t,
    V_{t-D}). (The paper writes |v_t|_1 / |v_{t-D}|_1 >= 0.96, for norms that fall. Those of young
    averages grow by themselves, which the division takes out; a norm that grows has not settled
    either.) Each buffer decides by its own v, which is the same on all ranks.

    Args:
        ratio: In (0, 1).
        after: Steps before, such as those in which the learning rate is warmed up.

    Example:
        >>> import relaxmpi as rx
        >>> rx.OneBitAdam(freeze=rx.VarianceRatio(after=2_000)).freeze
        VarianceRatio(ratio=0.96, after=2000)
    """

    ratio: float = 0.96
    after: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise ValueError(f"ratio must be in (0, 1), not {self.ratio}")
        if self.after < 0:
            raise ValueError(f"after must not be negative, not {self.after}")


def check_freeze(freeze: int | VarianceRatio) -> None:
    """Refuse what would freeze nothing, or nothing useful."""
    if isinstance(freeze, VarianceRatio):
        return
    if isinstance(freeze, bool) or not isinstance(freeze, int):
        raise TypeError(f"freeze must be a number of steps or a VarianceRatio, not {freeze!r}")
    if freeze < 1:
        raise ValueError(
            f"freeze must be at least one step, not {freeze}: without warm-up there is no variance "
            "to divide by"
        )


def lag_of(b2: float) -> int:
    """Return how many steps lie between the norms that are compared."""
    return max(1, round(1 / (1 - b2)))


def due(freeze: int | VarianceRatio, age: int, norms: Sequence[float]) -> bool:
    """Say whether step number `age` is the last one of the warm-up.

    Args:
        freeze: The rule.
        age: Steps so far.
        norms: V of the last steps, as many as lie between those compared, and one.
    """
    if isinstance(freeze, int):
        return age >= freeze
    then, now = min(norms[0], norms[-1]), max(norms[0], norms[-1])
    return age >= freeze.after and then >= freeze.ratio * now
