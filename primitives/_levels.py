"""Levels of the b-bit quantiser and back, for one bucket; a code is level + s, s = 2**(b-1) - 1."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._draw import ELEMENTS, GROUPS, Pairs, fill_vector
from relaxmpi.primitives._jit import inlined
from relaxmpi.primitives._reduce import WIDTH, fetch_ahead, room_ahead
from relaxmpi.primitives._vectors import cast, load, negative, rint, store

Floats = NDArray[Any]
Codes = NDArray[np.uint8]


@inlined
def levels_nearest(u: Floats, lift: Any, inverse: Any, s: int, codes: Codes) -> None:
    top = np.int32(s)
    bottom = np.int32(-s)
    whole = u.size - u.size % WIDTH
    for i in range(0, whole, WIDTH):
        fetch_ahead(u, i)
        levels = cast(rint((load(u, i, WIDTH) * lift) * inverse), np.int32)
        store(codes, i, cast(min(max(levels, bottom), top) + top, np.uint8))
    for i in range(whole, u.size):
        level = np.int32(np.rint((u[i] * lift) * inverse))
        codes[i] = np.uint8(np.int32(min(max(level, bottom), top) + top))


@inlined
def levels_stochastic(
    u: Floats,
    lift: Any,
    inverse: Any,
    s: int,
    codes: Codes,
    start: int,
    seed: int,
    name: int,
    step: int,
    lane: int,
    pairs: Pairs,
) -> None:
    """Round the elements start, start + 1, ...; `pairs` is scratch for their random words.

    In fixed point with 24 binary places, where floor(a + uniform) is exact: in floating point
    a + uniform may round up to the next integer, and an a on the grid would leave it.
    """
    top = np.int32(s)
    most = np.int32(s << 24)
    fixed = inverse * u.dtype.type(2.0**24)
    skip = start % ELEMENTS
    first = (start - skip) // 4
    words = pairs.view(np.uint32)[skip:]
    vectors = (skip + u.size + ELEMENTS - 1) // ELEMENTS
    whole = u.size - u.size % ELEMENTS
    # One chain of multiplications after the other would leave most of the processor idle: levels
    # are computed beside the words of the next ones.
    for k in range(vectors + 1):
        if k < vectors:
            fill_vector(pairs, 2 * GROUPS * k, first + GROUPS * k, seed, name, step, lane)
        i = (k - 1) * ELEMENTS
        if k > 0 and i < whole:
            fetch_ahead(u, i)
            v = load(u, i, ELEMENTS)
            a = min(cast(abs((v * lift) * fixed), np.int32), most)
            uniform = load(words, i, ELEMENTS) >> np.uint32(8)
            levels = (cast(a, np.uint32) + uniform) >> np.uint32(24)
            below = cast(negative(v), np.int32)
            signed = (cast(levels, np.int32) ^ below) - below  # ~x + 1 is -x
            store(codes, i, cast(signed + top, np.uint8))
    for i in range(whole, u.size):
        b = np.int64(min(np.int32(abs((u[i] * lift) * fixed)), most))
        level = (b + np.int64(words[i] >> np.uint32(8))) >> 24
        codes[i] = np.uint8(top - level if u[i] < 0 else top + level)


@inlined
def values(codes: Codes, scale: Any, bits: int, out: Floats) -> None:
    s = np.int32((1 << (bits - 1)) - 1)
    unit = out.dtype.type(1) / out.dtype.type(s)  # s * unit is exactly 1 for every s used
    whole = out.size - out.size % WIDTH
    for i in range(0, whole, WIDTH):
        room_ahead(out, i)
        levels = cast(cast(load(codes, i, WIDTH), np.int32) - s, out.dtype.type)
        store(out, i, (levels * unit) * scale)
    for i in range(whole, out.size):
        out[i] = scale * (out.dtype.type(np.int32(np.int32(codes[i]) - s)) * unit)


@inlined
def add_values(codes: Codes, scale: Any, bits: int, out: Floats, factor: int, into: Floats) -> None:
    """Into = out + factor (1 or -1) times what `values` gives."""
    s = np.int32((1 << (bits - 1)) - 1)
    unit = out.dtype.type(1) / out.dtype.type(s)
    signed = scale * out.dtype.type(factor)
    whole = out.size - out.size % WIDTH
    for i in range(0, whole, WIDTH):
        room_ahead(into, i)
        levels = cast(cast(load(codes, i, WIDTH), np.int32) - s, out.dtype.type)
        store(into, i, load(out, i, WIDTH) + (levels * unit) * signed)
    for i in range(whole, out.size):
        level = out.dtype.type(np.int32(np.int32(codes[i]) - s))
        into[i] = out[i] + (level * unit) * signed
