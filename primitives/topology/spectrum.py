"""How fast a topology mixes, and whether it averages exactly after finitely many steps."""

from __future__ import annotations

from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from relaxmpi.primitives.topology.base import Topology

__all__ = ["exact_after", "gap", "product"]

_EXACT = 1e-10  # what rounding leaves of W_T ... W_1 - J at most, for products of this length
_POWERS = 64  # of a static matrix
_DENOMINATOR = 10**6  # of weights that are read as fractions


def product(topology: Topology, n: int, first: int, count: int) -> NDArray[np.float64]:
    """The matrix by which `count` steps from step `first` mix: W_(first+count-1) ... W_first."""
    P = np.eye(n)
    for step in range(first, first + count):
        P = topology.matrix(n, step) @ P
    return P


def gap(topology: Topology, n: int) -> float:
    """See `Topology.spectral_gap`."""
    period = topology.period(n)
    if period is None:
        raise ValueError(f"{topology!r} has no period for n={n}, and so no spectral gap")
    P = product(topology, n, 0, period)
    if np.abs(P - 1 / n).max() < _EXACT:  # eigenvalues that rounding moved off 0 have large roots
        return 1.0
    size = np.sort(np.abs(np.linalg.eigvals(P)))
    return 1.0 - float(min(1.0, size[-2]) ** (1 / period))


def exact_after(topology: Topology, n: int) -> int | None:
    """See `Topology.finite_time`."""
    if n == 1:
        return 0
    period = topology.period(n)
    if period is None:
        return None
    P = np.eye(n)
    W = topology.matrix(n, 0)
    for step in range(period if topology.varies else _POWERS):
        if topology.varies and step > 0:
            W = topology.matrix(n, step)
        P = W @ P
        if np.abs(P - 1 / n).max() < _EXACT:  # exact arithmetic is slow: once is enough
            return step + 1 if _is_mean(topology, n, step + 1) else None
    return None


def _is_mean(topology: Topology, n: int, count: int) -> bool:
    """Whether W_(count-1) ... W_0 = J, in integers: row i of the product times its denominator."""
    rows: Any = np.eye(n, dtype=object)
    common = 1
    for step in range(count):
        out = [
            {rank: topology.self_weight(rank, n, step), **topology.out(rank, n, step)}
            for rank in range(n)
        ]
        exact = [{peer: _fraction(w) for peer, w in weights.items()} for weights in out]
        denominator = lcm(*(w.denominator for weights in exact for w in weights.values()))
        mixed: Any = np.zeros((n, n), dtype=object)
        for rank, weights in enumerate(exact):
            for peer, w in weights.items():
                mixed[peer] += int(w * denominator) * rows[rank]
        rows, common = mixed, common * denominator
    return bool((rows * n == common).all())


def _fraction(weight: float) -> Fraction:
    simple = Fraction(weight).limit_denominator(_DENOMINATOR)
    return simple if abs(float(simple) - weight) < 1e-15 else Fraction(weight)
