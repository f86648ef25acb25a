"""Reductions over one bucket, with the same order of additions everywhere.

Sums: 32 lanes. Of each 128 elements lane j adds (x[j] + x[j + 32]) + (x[j + 64] + x[j + 96]); the
rest are added one by one, to lane j % 32; then the lanes are folded in halves (16, 8, ..., 1).
Lanes are double, so that sums of float32 cannot overflow. They are four vectors of 8, which stay
in registers.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import inlined
from relaxmpi.primitives._vectors import cast, highest, load, prefetch, prefetch_room, splat, store

Floats = NDArray[Any]
Lanes = NDArray[np.float64]
LANES = 32
WIDTH = 32  # numbers that kernels take at a time


@inlined
def fetch_ahead(x: Floats, i: int) -> None:
    """Begin to bring the numbers near that a pass over x will come to after 6 KiB.

    A bucket is read from memory once and then computed with: without this, memory waits meanwhile.
    """
    if x.itemsize == 4:
        prefetch(x, i + 1536)
        prefetch(x, i + 1552)
    else:
        for k in range(0, WIDTH, 8):
            prefetch(x, i + 768 + k)


@inlined
def room_ahead(out: Floats, i: int) -> None:
    """The same for numbers that are going to be written: memory is read before it is written."""
    if out.itemsize == 4:
        prefetch_room(out, i + 1536)
        prefetch_room(out, i + 1552)
    else:
        for k in range(0, WIDTH, 8):
            prefetch_room(out, i + 768 + k)


@inlined
def fetch_rows(x: Floats, lo: int) -> None:
    """What `fetch_ahead` does, for the 128 numbers of a step of a sum."""
    fetch_ahead(x, lo)
    fetch_ahead(x, lo + WIDTH)
    fetch_ahead(x, lo + 2 * WIDTH)
    fetch_ahead(x, lo + 3 * WIDTH)


@inlined
def join(x: Floats, held: Floats, weight: Any, out: Floats) -> None:
    """Out = x + weight held; it may be x."""
    whole = x.size - x.size % WIDTH
    for i in range(0, whole, WIDTH):
        fetch_ahead(x, i)
        fetch_ahead(held, i)
        store(out, i, load(x, i, WIDTH) + load(held, i, WIDTH) * weight)
    for i in range(whole, x.size):
        out[i] = x[i] + held[i] * weight


@inlined
def multiply(x: Floats, factor: Any, out: Floats) -> None:
    """Out = factor x."""
    whole = x.size - x.size % WIDTH
    for i in range(0, whole, WIDTH):
        room_ahead(out, i)
        store(out, i, load(x, i, WIDTH) * factor)
    for i in range(whole, x.size):
        out[i] = x[i] * factor


@inlined
def largest(x: Floats, out: Floats) -> None:
    """out[0] = max |x|; a NaN or an infinity if x holds one.

    On integers, because the bits of a float without its sign are ordered like its value, NaN last.
    """
    if x.itemsize == 4:
        out.view(np.int32)[0] = _largest(x.view(np.int32), np.int32(0x7FFFFFFF))
    else:
        out.view(np.int64)[0] = _largest(x.view(np.int64), np.int64(0x7FFFFFFFFFFFFFFF))


@inlined
def _largest(bits: NDArray[Any], magnitude: Any) -> Any:
    """The largest of the integers without their signs."""
    number = bits.dtype.type
    whole = bits.size - bits.size % WIDTH
    m = splat(number(0), WIDTH)
    for i in range(0, whole, WIDTH):
        m = max(m, load(bits, i, WIDTH) & magnitude)
    most = highest(m)
    for i in range(whole, bits.size):
        most = max(most, number(bits[i] & magnitude))
    return most


@inlined
def fold(lanes: Lanes) -> float:
    eight = (load(lanes, 0, 8) + load(lanes, 16, 8)) + (load(lanes, 8, 8) + load(lanes, 24, 8))
    store(lanes, 0, eight)
    for half in (4, 2, 1):
        for j in range(half):
            lanes[j] += lanes[j + half]
    return float(lanes[0])


@inlined
def sum_abs(x: Floats, unit: float, lanes: Lanes) -> float:
    """Sum of |x| * unit; unit is a power of two, 1 for float32."""
    if x.itemsize == 4:
        unit = 1.0
    a = splat(0.0, 8)
    b, c, d = a, a, a
    whole = x.size - x.size % (4 * LANES)
    for lo in range(0, whole, 4 * LANES):
        fetch_rows(x, lo)
        a += four_abs(x, lo, unit)
        b += four_abs(x, lo + 8, unit)
        c += four_abs(x, lo + 16, unit)
        d += four_abs(x, lo + 24, unit)
    keep(a, b, c, d, lanes)
    for j in range(x.size - whole):
        lanes[j % LANES] += abs(np.float64(x[whole + j])) * unit
    return fold(lanes)


@inlined
def sum_squares(x: Floats, unit: float, lanes: Lanes) -> float:
    """Sum of (x * unit)**2, added up like `sum_abs`."""
    if x.itemsize == 4:
        unit = 1.0
    a = splat(0.0, 8)
    b, c, d = a, a, a
    whole = x.size - x.size % (4 * LANES)
    for lo in range(0, whole, 4 * LANES):
        fetch_rows(x, lo)
        a += four_squares(x, lo, unit)
        b += four_squares(x, lo + 8, unit)
        c += four_squares(x, lo + 16, unit)
        d += four_squares(x, lo + 24, unit)
    keep(a, b, c, d, lanes)
    for j in range(x.size - whole):
        v = np.float64(x[whole + j]) * unit
        lanes[j % LANES] += v * v
    return fold(lanes)


@inlined
def four_abs(x: Floats, at: int, unit: float) -> Any:
    return (_abs(x, at, unit) + _abs(x, at + LANES, unit)) + (
        _abs(x, at + 2 * LANES, unit) + _abs(x, at + 3 * LANES, unit)
    )


@inlined
def four_squares(x: Floats, at: int, unit: float) -> Any:
    return (_square(x, at, unit) + _square(x, at + LANES, unit)) + (
        _square(x, at + 2 * LANES, unit) + _square(x, at + 3 * LANES, unit)
    )


@inlined
def _abs(x: Floats, at: int, unit: float) -> Any:
    return abs(cast(load(x, at, 8), np.float64)) * unit


@inlined
def _square(x: Floats, at: int, unit: float) -> Any:
    v = cast(load(x, at, 8), np.float64) * unit
    return v * v


@inlined
def keep(a: Any, b: Any, c: Any, d: Any, lanes: Lanes) -> None:
    store(lanes, 0, a)
    store(lanes, 8, b)
    store(lanes, 16, c)
    store(lanes, 24, d)


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
