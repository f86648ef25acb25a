"""Kernels of the b-bit quantiser; the codec that uses them gives the formulas.

Payload: one scale a bucket, then the packed codes (see `_bits`); code = level + s. A bucket
that holds a NaN or an infinity has the scale NaN, so that all of it decodes to NaN.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._bits import copy_bytes, pack_bucket, unpack_bucket
from relaxmpi.primitives._draw import ELEMENTS, GROUPS, Pairs, fill_vector
from relaxmpi.primitives._jit import inlined, jit
from relaxmpi.primitives._reduce import (
    LANES,
    WIDTH,
    Lanes,
    fetch_ahead,
    join,
    largest,
    norm,
    room_ahead,
)
from relaxmpi.primitives._vectors import cast, load, negative, rint, store
from relaxmpi.primitives.philox import Stream

Floats = NDArray[Any]
Codes = NDArray[np.uint8]


@inlined
def _levels_nearest(u: Floats, lift: Any, inverse: Any, s: int, codes: Codes) -> None:
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
def _levels_stochastic(
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
def _quantise_bucket(
    u: Floats,
    scale: Floats,
    packed: Codes,
    codes: Codes,
    bits: int,
    l2: bool,
    random: bool,
    start: int,
    seed: int,
    name: int,
    step: int,
    lane: int,
    pairs: Pairs,
    lanes: Lanes,
) -> None:
    """Fill scale[0] and `packed`; `codes` is scratch and keeps the codes."""
    number = u.dtype.type
    s = (1 << (bits - 1)) - 1
    largest(u, scale)
    if l2 and scale[0] > 0:
        scale[0] = norm(u, scale[0], lanes)
    if not np.isfinite(scale[0]):
        scale[0] = np.nan
    if scale[0] > 0:
        # Small scales are lifted, or s / scale would overflow; a power of two changes no code.
        lift = number(1)
        if u.itemsize == 4:
            if scale[0] < number(2.0**-60):
                lift = number(2.0**80)
        elif scale[0] < number(2.0**-900):
            lift = number(2.0**100)
        lifted = scale[0] * lift
        inverse = number(s) / lifted
        if lifted * inverse < number(s):  # rounded down: the largest element would lose a level
            inverse = inverse * number(1 + (2.0**-23 if u.itemsize == 4 else 2.0**-52))
        if random:
            _levels_stochastic(u, lift, inverse, s, codes, start, seed, name, step, lane, pairs)
        else:
            _levels_nearest(u, lift, inverse, s, codes)
    else:
        for i in range(codes.size):
            codes[i] = np.uint8(s)
    pack_bucket(codes, bits, packed)


@inlined
def _values(codes: Codes, scale: Any, bits: int, out: Floats) -> None:
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
def _add_values(
    codes: Codes, scale: Any, bits: int, out: Floats, factor: int, into: Floats
) -> None:
    """Into = out + factor (1 or -1) times what `_values` gives."""
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


@jit
def _quantise(
    x: Floats,
    scales: Floats,
    payload: Codes,
    bits: int,
    bucket: int,
    l2: bool,
    random: bool,
    seed: int,
    name: int,
    step: int,
    lane: int,
    offset: int,
    scratch: Pairs,
) -> None:
    packed = payload[scales.size * scales.itemsize :]
    lanes = scratch[:LANES].view(np.float64)
    pairs = scratch[LANES : LANES + min(bucket, x.size) // 2 + ELEMENTS]
    codes = scratch[LANES + pairs.size :].view(np.uint8)
    for b in range(scales.size):
        lo = b * bucket
        hi = min(lo + bucket, x.size)
        _quantise_bucket(
            x[lo:hi],
            scales[b : b + 1],
            packed[lo * bits // 8 : (hi * bits + 7) // 8],
            codes[: hi - lo],
            bits,
            l2,
            random,
            offset + lo,
            seed,
            name,
            step,
            lane,
            pairs,
            lanes,
        )
    copy_bytes(scales.view(np.uint8), payload)


@jit
def _quantise_beside(
    x: Floats,
    memory: Floats,
    difference: bool,
    scales: Floats,
    payload: Codes,
    bits: int,
    bucket: int,
    l2: bool,
    random: bool,
    seed: int,
    name: int,
    step: int,
    lane: int,
    offset: int,
    scratch: Pairs,
    sums: Floats,
) -> None:
    packed = payload[scales.size * scales.itemsize :]
    width = min(bucket, x.size)
    lanes = scratch[:LANES].view(np.float64)
    pairs = scratch[LANES : LANES + width // 2 + ELEMENTS]
    codes = scratch[LANES + pairs.size :].view(np.uint8)
    for b in range(scales.size):
        lo = b * bucket
        hi = min(lo + bucket, x.size)
        n = hi - lo
        u = sums[:n]
        xb = x[lo:hi]
        held = memory[lo:hi]
        join(xb, held, difference, u)
        _quantise_bucket(
            u,
            scales[b : b + 1],
            packed[lo * bits // 8 : (hi * bits + 7) // 8],
            codes[:n],
            bits,
            l2,
            random,
            offset + lo,
            seed,
            name,
            step,
            lane,
            pairs,
            lanes,
        )
        if np.isfinite(scales[b]):
            if difference:
                _add_values(codes[:n], scales[b], bits, held, 1, held)
            else:
                _add_values(codes[:n], scales[b], bits, u, -1, held)
    copy_bytes(scales.view(np.uint8), payload)


@jit
def _dequantise(
    payload: Codes, out: Floats, bits: int, bucket: int, add: bool, scratch: Floats
) -> None:
    scales = scratch[: (out.size + bucket - 1) // bucket]
    codes = scratch[scales.size :].view(np.uint8)
    raw = scales.view(np.uint8)
    copy_bytes(payload[: raw.size], raw)
    packed = payload[raw.size :]
    for b in range(scales.size):
        lo = b * bucket
        hi = min(lo + bucket, out.size)
        n = hi - lo
        unpack_bucket(packed[lo * bits // 8 : (hi * bits + 7) // 8], bits, codes[:n])
        ob = out[lo:hi]
        if add:
            _add_values(codes[:n], scales[b], bits, ob, 1, ob)
        else:
            _values(codes[:n], scales[b], bits, ob)


def quantise(
    x: Floats,
    payload: Codes,
    *,
    bits: int,
    bucket: int,
    l2: bool,
    stream: Stream | None,
    offset: int,
) -> None:
    """Quantise x; round to nearest, or at random with the numbers of `stream`."""
    scales = np.empty(-(-x.size // bucket), x.dtype)
    scratch = _scratch(min(bucket, x.size))
    random, words = stream is not None, stream or _NO_STREAM
    _quantise(x, scales, payload, bits, bucket, l2, random, *words, offset, scratch)


def quantise_beside(
    x: Floats,
    memory: Floats,
    payload: Codes,
    *,
    difference: bool,
    bits: int,
    bucket: int,
    l2: bool,
    stream: Stream | None,
    offset: int,
) -> None:
    """Quantise u = x + memory and leave u - decoded there; or x - memory, and add decoded to it.

    In one pass. Where a bucket of u is not finite, its part of the memory stays as it was.
    """
    scales = np.empty(-(-x.size // bucket), x.dtype)
    width = min(bucket, x.size)
    _quantise_beside(
        x,
        memory,
        difference,
        scales,
        payload,
        bits,
        bucket,
        l2,
        stream is not None,
        *(stream or _NO_STREAM),
        offset,
        _scratch(width),
        np.empty(width, x.dtype),
    )


def dequantise(payload: Codes, out: Floats, *, bits: int, bucket: int, add: bool) -> None:
    """Decode into `out`, or add the decoded values to it."""
    # The scales, aligned, which a payload need not be; then the codes of one bucket.
    scratch = np.empty(-(-out.size // bucket) + min(bucket, out.size), out.dtype)
    _dequantise(payload, out, bits, bucket, add, scratch)


_NO_STREAM = Stream(0, 0, 0, 0)


def _scratch(width: int) -> Pairs:
    """Lanes, pairs and codes for buckets of `width` elements: passing one array is cheaper."""
    return np.empty(LANES + (width // 2 + ELEMENTS) + (width + 7) // 8, np.uint64)
