"""Kernels of the one-bit compressor; `OneBit` gives the formulas.

Payload: one scale a bucket, then one bit an element in the layout of `_bits`, set for x >= 0.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._bits import split_payload
from relaxmpi.primitives._jit import inlined, jit
from relaxmpi.primitives._reduce import (
    LANES,
    WIDTH,
    Lanes,
    fetch_rows,
    fold,
    four_abs,
    join,
    keep,
    largest,
    room_ahead,
    sum_abs,
    sum_squares,
    unit_for,
)
from relaxmpi.primitives._vectors import cast, load, signs, splat, store

Floats = NDArray[Any]
Codes = NDArray[np.uint8]


@inlined
def scale_of(x: Floats, l2: bool, out: Floats, lanes: Lanes) -> None:
    """out[0] = mean |x|, or the root of mean x**2; NaN where x holds a NaN or an infinity."""
    unit = 1.0
    if x.itemsize == 8:  # sums of floats cannot overflow in double, those of doubles can
        largest(x, out)
        unit = unit_for(x, out[0]) / x.size
    if l2:
        mean = math.sqrt(sum_squares(x, unit, lanes) / x.size)
    else:
        mean = sum_abs(x, unit, lanes) / x.size
    out[0] = mean / unit
    if not np.isfinite(out[0]):
        out[0] = np.nan


@inlined
def pack_signs(x: Floats, packed: Codes) -> None:
    n = x.size // 8
    zero = x.dtype.type(0)
    whole = n - n % WIDTH
    for i in range(0, whole, WIDTH):
        byte = signs(load(x, i, WIDTH)) & np.uint8(1)
        byte |= signs(load(x, n + i, WIDTH)) & np.uint8(2)
        byte |= signs(load(x, 2 * n + i, WIDTH)) & np.uint8(4)
        byte |= signs(load(x, 3 * n + i, WIDTH)) & np.uint8(8)
        byte |= signs(load(x, 4 * n + i, WIDTH)) & np.uint8(16)
        byte |= signs(load(x, 5 * n + i, WIDTH)) & np.uint8(32)
        byte |= signs(load(x, 6 * n + i, WIDTH)) & np.uint8(64)
        byte |= signs(load(x, 7 * n + i, WIDTH)) & np.uint8(128)
        store(packed, i, byte)
    for i in range(whole, n):
        bits = 0
        for j in range(8):
            bits |= (x[j * n + i] >= zero) << j
        packed[i] = np.uint8(bits)
    if 8 * n < x.size:
        last = 0
        for j in range(x.size - 8 * n):
            if x[8 * n + j] >= zero:
                last |= 1 << j
        packed[n] = np.uint8(last)


@inlined
def pack_and_scale(x: Floats, packed: Codes, out: Floats, lanes: Lanes) -> None:
    """`pack_signs` and `scale_of` by mean |x| in one pass, for whole steps of the sum in each bit.

    So memory and arithmetic are busy at the same time.
    """
    n = x.size // 8
    for i in range(0, n, WIDTH):
        store(packed, i, splat(np.uint8(0), WIDTH))
    a = splat(0.0, 8)
    b, c, d = a, a, a
    for j in range(8):
        bit = np.uint8(1 << j)
        for i in range(0, n, 4 * LANES):
            lo = j * n + i
            fetch_rows(x, lo)
            a += four_abs(x, lo, 1.0)
            b += four_abs(x, lo + 8, 1.0)
            c += four_abs(x, lo + 16, 1.0)
            d += four_abs(x, lo + 24, 1.0)
            for k in range(0, 4 * LANES, WIDTH):
                bits = signs(load(x, lo + k, WIDTH)) & bit
                store(packed, i + k, load(packed, i + k, WIDTH) | bits)
    keep(a, b, c, d, lanes)
    out[0] = fold(lanes) / x.size
    if not np.isfinite(out[0]):
        out[0] = np.nan


@inlined
def values_of(packed: Codes, scale: Any, out: Floats) -> None:
    n = out.size // 8
    if n > 0:
        out[0] = scale
        if out.itemsize == 4:
            _signed(packed, n, np.int32(31), out.view(np.int32))
        else:
            _signed(packed, n, np.int64(63), out.view(np.int64))
    for j in range(out.size - 8 * n):
        out[8 * n + j] = scale if packed[n] & np.uint8(1 << j) else -scale


@inlined
def _signed(packed: Codes, n: int, top: Any, out: NDArray[Any]) -> None:
    """Fill 8 n floats, given as integers, from the first one, with a minus where no bit is set."""
    number = out.dtype.type
    minus, scale = number(number(1) << top), out[0]
    whole = n - n % WIDTH
    for j in range(8):
        part = out[j * n : (j + 1) * n]
        up = number(top - number(j))
        for i in range(0, whole, WIDTH):
            room_ahead(part, i)
            unset = cast(load(packed, i, WIDTH) ^ np.uint8(255), number)
            store(part, i, ((unset << up) & minus) ^ scale)
        for i in range(whole, n):
            unset_bit = number(packed[i] ^ np.uint8(255))
            part[i] = number(number(number(unset_bit << up) & minus) ^ scale)


@inlined
def without(u: Floats, scale: Any, residual: Floats) -> None:
    """Residual = u - decoded, where decoded is scale or -scale."""
    zero = u.dtype.type(0)
    for i in range(u.size):
        residual[i] = u[i] - (scale if u[i] >= zero else -scale)


@inlined
def _sign_bucket(x: Floats, part: Codes, scale: Floats, l2: bool, lanes: Lanes) -> None:
    if x.itemsize == 4 and not l2 and x.size % (32 * LANES) == 0:
        pack_and_scale(x, part, scale, lanes)
    else:
        scale_of(x, l2, scale, lanes)
        pack_signs(x, part)


@jit
def _sign(x: Floats, scales: Floats, packed: Codes, bucket: int, l2: bool, lanes: Lanes) -> None:
    for b in range(scales.size):
        lo = b * bucket
        hi = min(lo + bucket, x.size)
        part = packed[lo // 8 : (hi + 7) // 8]
        _sign_bucket(x[lo:hi], part, scales[b : b + 1], l2, lanes)


@jit
def _sign_feedback(
    x: Floats,
    residual: Floats,
    scales: Floats,
    packed: Codes,
    bucket: int,
    l2: bool,
    lanes: Lanes,
    sums: Floats,
) -> None:
    for b in range(scales.size):
        lo = b * bucket
        hi = min(lo + bucket, x.size)
        xb = x[lo:hi]
        rb = residual[lo:hi]
        u = sums[: hi - lo]
        join(xb, rb, x.dtype.type(1), u)
        _sign_bucket(u, packed[lo // 8 : (hi + 7) // 8], scales[b : b + 1], l2, lanes)
        if np.isfinite(scales[b]):
            without(u, scales[b], rb)


@jit
def _unsign(
    scales: Floats, packed: Codes, out: Floats, bucket: int, add: bool, values: Floats
) -> None:
    for b in range(scales.size):
        lo = b * bucket
        hi = min(lo + bucket, out.size)
        bits = packed[lo // 8 : (hi + 7) // 8]
        if add:
            ob = out[lo:hi]
            q = values[: hi - lo]
            values_of(bits, scales[b], q)
            for i in range(q.size):
                ob[i] += q[i]
        else:
            values_of(bits, scales[b], out[lo:hi])


def sign(x: Floats, payload: Codes, *, bucket: int, l2: bool) -> None:
    """One scale a bucket and one bit an element."""
    head, packed = split_payload(payload, x.size, x.dtype, 1, bucket)
    scales = np.empty(-(-x.size // bucket), x.dtype)
    _sign(x, scales, packed, bucket, l2, np.empty(LANES))
    head[:] = scales.view(np.uint8)


def sign_feedback(x: Floats, residual: Floats, payload: Codes, *, bucket: int, l2: bool) -> None:
    """The same for u = x + residual; leaves u - decoded in `residual`, in one pass."""
    head, packed = split_payload(payload, x.size, x.dtype, 1, bucket)
    scales = np.empty(-(-x.size // bucket), x.dtype)
    sums = np.empty(min(bucket, x.size), x.dtype)
    _sign_feedback(x, residual, scales, packed, bucket, l2, np.empty(LANES), sums)
    head[:] = scales.view(np.uint8)


def unsign(payload: Codes, out: Floats, *, bucket: int, add: bool) -> None:
    """Decode into `out`, or add the decoded values to it."""
    head, packed = split_payload(payload, out.size, out.dtype, 1, bucket)
    scales = np.empty(-(-out.size // bucket), out.dtype)
    scales.view(np.uint8)[:] = head
    values = np.empty(min(bucket, out.size) if add else 0, out.dtype)
    _unsign(scales, packed, out, bucket, add, values)
