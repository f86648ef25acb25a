"""Kernels of gossip: weighted sums, shares of push-sum, and replicas that follow what was sent.

All work on arrays of one type, float or complex; weights are rounded to the precision of the
numbers. Outputs may be one of the inputs, and each such case has a loop of its own: the compiler
vectorises a loop only where it sees, or finds at run time, that arrays do not overlap.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import jit

Numbers = NDArray[Any]


def _real(x: Numbers, weight: float) -> Any:
    return x.real.dtype.type(weight)


@jit
def _scaled(x: Numbers, weight: Any, out: Numbers) -> None:
    for i in range(x.size):
        out[i] = weight * x[i]


@jit
def _scale(x: Numbers, weight: Any) -> None:
    for i in range(x.size):
        x[i] *= weight


def scaled(x: Numbers, weight: float, out: Numbers) -> None:
    """Out = weight x."""
    if out is x:
        _scale(x, _real(x, weight))
    else:
        _scaled(x, _real(x, weight), out)


@jit
def _share(x: Numbers, keep: Any, give: Any, out: Numbers) -> None:
    for i in range(x.size):
        v = x[i]
        out[i] = give * v
        x[i] = keep * v


def share(x: Numbers, keep: float, give: float, out: Numbers) -> None:
    """Out = give x, then x = keep x, in one pass."""
    _share(x, _real(x, keep), _real(x, give), out)


@jit
def _pair(a: Numbers, of_a: Any, b: Numbers, of_b: Any, out: Numbers) -> None:
    for i in range(a.size):
        out[i] = of_a * a[i] + of_b * b[i]


@jit
def _pair_into(a: Numbers, of_a: Any, b: Numbers, of_b: Any) -> None:
    for i in range(a.size):
        b[i] = of_a * a[i] + of_b * b[i]


def pair(a: Numbers, of_a: float, b: Numbers, of_b: float, out: Numbers) -> None:
    """Out = of_a a + of_b b."""
    of_a, of_b = _real(a, of_a), _real(b, of_b)
    if out is a:
        _pair_into(b, of_b, a, of_a)  # a sum of two is the same either way round
    elif out is b:
        _pair_into(a, of_a, b, of_b)
    else:
        _pair(a, of_a, b, of_b, out)


@jit
def _mix(so_far: Numbers, x: Numbers, weight: Any, out: Numbers) -> None:
    for i in range(x.size):
        out[i] = so_far[i] + weight * x[i]


@jit
def _mix_into(so_far: Numbers, x: Numbers, weight: Any) -> None:
    for i in range(x.size):
        so_far[i] += weight * x[i]


@jit
def _mix_onto(so_far: Numbers, x: Numbers, weight: Any) -> None:
    for i in range(x.size):
        x[i] = so_far[i] + weight * x[i]


def mix(so_far: Numbers, x: Numbers, weight: float, out: Numbers) -> None:
    """Out = so_far + weight x."""
    if out is so_far:
        _mix_into(so_far, x, _real(x, weight))
    elif out is x:
        _mix_onto(so_far, x, _real(x, weight))
    else:
        _mix(so_far, x, _real(x, weight), out)


@jit
def _gap(so_far: Numbers, theirs: Numbers, mine: Numbers, weight: Any) -> None:
    for i in range(mine.size):
        so_far[i] += weight * (theirs[i] - mine[i])


@jit
def _two_gaps(
    x: Numbers, mine: Numbers, a: Numbers, of_a: Any, b: Numbers, of_b: Any, out: Numbers
) -> None:
    for i in range(mine.size):
        out[i] = ((x[i] - mine[i]) + of_a * (a[i] - mine[i])) + of_b * (b[i] - mine[i])


@jit
def subtract(a: Numbers, b: Numbers, out: Numbers) -> None:
    """Out = a - b."""
    for i in range(a.size):
        out[i] = a[i] - b[i]


def drift(x: Numbers, mine: Numbers, others: list[tuple[Numbers, float]], out: Numbers) -> None:
    """Out = x - mine + sum weight (theirs - mine): exactly nothing where all are equal.

    `out` is none of the others. The sum is made in the order given; the first two others, which
    are all on a ring, take one pass.
    """
    if len(others) > 1:
        (a, of_a), (b, of_b), *others = others
        _two_gaps(x, mine, a, _real(mine, of_a), b, _real(mine, of_b), out)
    else:
        subtract(x, mine, out)
    for theirs, weight in others:
        _gap(out, theirs, mine, _real(mine, weight))


@jit
def follow(replica: Numbers, change: Numbers) -> None:
    """Add the change to the replica, where it is finite: a bad step is seen, not remembered."""
    for i in range(replica.size):
        if np.isfinite(change[i]):
            replica[i] += change[i]


@jit
def _meet(x: Numbers, mine: Numbers, theirs: Numbers, half: Any) -> None:
    for i in range(x.size):
        a = half * mine[i]
        b = half * theirs[i]
        if x[i] == mine[i]:
            x[i] = a + b
        else:
            x[i] += b - a


def meet(x: Numbers, mine: Numbers, theirs: Numbers) -> None:
    """Add (theirs - mine) / 2 to x: the same bits on both sides where x is still mine."""
    _meet(x, mine, theirs, _real(x, 0.5))
