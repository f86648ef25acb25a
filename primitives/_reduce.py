"""Reductions over one bucket, with the same order of additions everywhere.

Sums: 32 lanes. Of each 128 elements lane j adds (x[j] + x[j + 32]) + (x[j + 64] + x[j + 96]); the
rest are added one by one, to lane j % 32; then the lanes are folded in halves (16, 8, ..., 1).
Lanes are double, so that sums of float32 cannot overflow. (Four rows of 32 are what a memory
prefetcher follows and vector units fill: other shapes take up to three times as long.)
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import inlined

Floats = NDArray[Any]
Lanes = NDArray[np.float64]
LANES = 32


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
    return float(lanes[0])


@inlined
def sum_abs(x: Floats, unit: float, lanes: Lanes) -> float:
    """Sum of |x| * unit; unit is a power of two, 1 for float32."""
    if x.itemsize == 4:
        unit = 1.0
    for j in range(LANES):
        lanes[j] = 0.0
    whole = x.size - x.size % (4 * LANES)
    for lo in range(0, whole, 4 * LANES):
        a, b = x[lo : lo + LANES], x[lo + LANES : lo + 2 * LANES]
        c, d = x[lo + 2 * LANES : lo + 3 * LANES], x[lo + 3 * LANES : lo + 4 * LANES]
        for j in range(LANES):
            lanes[j] += (_abs(a[j], unit) + _abs(b[j], unit)) + (
                _abs(c[j], unit) + _abs(d[j], unit)
            )
    for j in range(x.size - whole):
        lanes[j % LANES] += _abs(x[whole + j], unit)
    return _fold(lanes)


@inlined
def sum_squares(x: Floats, unit: float, lanes: Lanes) -> float:
    """Sum of (x * unit)**2, added up like `sum_abs`."""
    if x.itemsize == 4:
        unit = 1.0
    for j in range(LANES):
        lanes[j] = 0.0
    whole = x.size - x.size % (4 * LANES)
    for lo in range(0, whole, 4 * LANES):
        a, b = x[lo : lo + LANES], x[lo + LANES : lo + 2 * LANES]
        c, d = x[lo + 2 * LANES : lo + 3 * LANES], x[lo + 3 * LANES : lo + 4 * LANES]
        for j in range(LANES):
            lanes[j] += (_square(a[j], unit) + _square(b[j], unit)) + (
                _square(c[j], unit) + _square(d[j], unit)
            )
    for j in range(x.size - whole):
        lanes[j % LANES] += _square(x[whole + j], unit)
    return _fold(lanes)


@inlined
def _abs(x: Any, unit: float) -> float:
    return float(abs(np.float64(x)) * unit)


@inlined
def _square(x: Any, unit: float) -> float:
    v = np.float64(x) * unit
    return float(v * v)


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
