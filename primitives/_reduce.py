"""Reductions over one bucket, with the same order of additions everywhere.

Sums: 128 partial sums, lane j adds the elements j, j + 128, ... in order, then the lanes are
folded in halves (64, 32, ..., 1). Partial sums are double, so float32 cannot overflow.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import inlined

Floats = NDArray[Any]
Lanes = NDArray[np.float64]
LANES = 128


@inlined
def largest(x: Floats, out: Floats) -> None:
    """out[0] = max |x|; a NaN or an infinity if x holds one.

    On integers, because the bits of a float without its sign are ordered like its value, NaN
    last, and a maximum of floats is not vectorised.
    """
    if x.itemsize == 4:
        narrow = x.view(np.int32)
        m = np.int32(0)
        for i in range(narrow.size):
            m = max(m, np.int32(narrow[i] & np.int32(0x7FFFFFFF)))
        out.view(np.int32)[0] = m
    else:
        wide = x.view(np.int64)
        w = np.int64(0)
        for i in range(wide.size):
            w = max(w, wide[i] & np.int64(0x7FFFFFFFFFFFFFFF))
        out.view(np.int64)[0] = w


@inlined
def _fold(lanes: Lanes) -> float:
    half = LANES // 2
    while half > 0:
        for j in range(half):
            lanes[j] += lanes[j + half]
        half //= 2
    return lanes[0]


@inlined
def sum_abs(x: Floats, unit: float, lanes: Lanes) -> float:
    """Sum of |x| * unit; unit is a power of two."""
    for j in range(LANES):
        lanes[j] = 0.0
    whole = x.size - x.size % LANES
    for lo in range(0, whole, LANES):
        part = x[lo : lo + LANES]
        for j in range(LANES):
            lanes[j] += abs(np.float64(part[j])) * unit
    for j in range(x.size - whole):
        lanes[j] += abs(np.float64(x[whole + j])) * unit
    return _fold(lanes)


@inlined
def sum_squares(x: Floats, unit: float, lanes: Lanes) -> float:
    """Sum of (x * unit)**2; unit is a power of two."""
    for j in range(LANES):
        lanes[j] = 0.0
    whole = x.size - x.size % LANES
    for lo in range(0, whole, LANES):
        part = x[lo : lo + LANES]
        for j in range(LANES):
            v = np.float64(part[j]) * unit
            lanes[j] += v * v
    for j in range(x.size - whole):
        v = np.float64(x[whole + j]) * unit
        lanes[j] += v * v
    return _fold(lanes)


@inlined
def unit_for(x: Floats, m: float) -> float:
    """A power of two that brings m = max |x| near 1, so that squares of doubles stay in range."""
    if x.itemsize == 4 or m == 0 or not np.isfinite(m):
        return 1.0
    return math.ldexp(1.0, -max(math.frexp(m)[1], -1000))


@inlined
def norm(x: Floats, m: float, lanes: Lanes) -> float:
    """Euclidean norm; m = max |x|."""
    unit = unit_for(x, m)
    return math.sqrt(sum_squares(x, unit, lanes)) / unit
