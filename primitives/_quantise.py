"""Kernels of the b-bit quantiser; the codec that uses them gives the formulas.

Payload: one scale a bucket, then the packed codes (see `_bits`); code = level + s. A bucket
that holds a NaN or an infinity has the scale NaN, so that all of it decodes to NaN.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._bits import copy_bytes, pack_bucket, unpack_bucket
from relaxmpi.primitives._draw import ELEMENTS, Pairs
from relaxmpi.primitives._jit import inlined, jit
from relaxmpi.primitives._levels import add_values, levels_nearest, levels_stochastic, values
from relaxmpi.primitives._reduce import LANES, Lanes, join, largest, multiply, norm
from relaxmpi.primitives.philox import Stream

Floats = NDArray[Any]
Codes = NDArray[np.uint8]


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
            levels_stochastic(u, lift, inverse, s, codes, start, seed, name, step, lane, pairs)
        else:
            levels_nearest(u, lift, inverse, s, codes)
    else:
        for i in range(codes.size):
            codes[i] = np.uint8(s)
    pack_bucket(codes, bits, packed)


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
    weight: Any,
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
        join(xb, held, x.dtype.type(-1 if difference else 1), u)
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
                add_values(codes[:n], scales[b], bits, held, 1, held)
            else:
                add_values(codes[:n], scales[b], bits, u, -1, held)
        if weight is not None:  # compiled apart: without a weight x may be read-only
            join(xb, held, weight, xb)
    copy_bytes(scales.view(np.uint8), payload)


@jit
def _dequantise(
    payload: Codes,
    out: Floats,
    bits: int,
    bucket: int,
    add: bool,
    scratch: Floats,
    part: Any,
    share: Floats | None,
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
            add_values(codes[:n], scales[b], bits, ob, 1, ob)
        else:
            values(codes[:n], scales[b], bits, ob)
        if share is not None:
            multiply(ob, part, share[lo:hi])


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
    give: float = 0.0,
) -> None:
    """Quantise u = x + memory and leave u - decoded there; or x - memory, and add decoded to it.

    In one pass, as is x <- x - give memory after it. Where a bucket of u is not finite, its part of
    the memory stays as it was.
    """
    scales = np.empty(-(-x.size // bucket), x.dtype)
    width = min(bucket, x.size)
    _quantise_beside(
        x,
        memory,
        difference,
        x.dtype.type(-give) if give else None,
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


def dequantise(
    payload: Codes,
    out: Floats,
    *,
    bits: int,
    bucket: int,
    add: bool,
    part: float = 0.0,
    share: Floats | None = None,
) -> None:
    """Decode into `out`, or add the decoded values to it; then share = part out, in one pass."""
    # The scales, aligned, which a payload need not be; then the codes of one bucket.
    scratch = np.empty(-(-out.size // bucket) + min(bucket, out.size), out.dtype)
    factor = None if share is None else out.dtype.type(part)
    _dequantise(payload, out, bits, bucket, add, scratch, factor, share)


_NO_STREAM = Stream(0, 0, 0, 0)


def _scratch(width: int) -> Pairs:
    """Lanes, pairs and codes for buckets of `width` elements: passing one array is cheaper."""
    return np.empty(LANES + (width // 2 + ELEMENTS) + (width + 7) // 8, np.uint64)
