"""Kernels that narrow floats to 16 bits and widen them, and the plain sums.

Half floats are passed as uint16: numba has no float16 on the CPU, and numpy has no bfloat16.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import jit

Floats = NDArray[Any]
Halves = NDArray[np.uint16]

BLOCK = 4096


@jit
def _narrow_fp16(bits: NDArray[np.uint32], out: Halves, saturate: bool) -> None:
    over = np.uint32(0x7BFF) if saturate else np.uint32(0x7C00)
    for i in range(bits.size):
        a = np.uint32(bits[i] & np.uint32(0x7FFFFFFF))
        odd = np.uint32(np.uint32(a >> np.uint32(13)) & np.uint32(1))
        # Rebias the exponent (127 to 15) and round to nearest even.
        half = np.uint32(np.uint32(a + np.uint32(0xC8000FFF) + odd) >> np.uint32(13))
        # Below 2**-14: multiples of 2**-24, so shift the mantissa, again to nearest even.
        m = np.uint32(np.uint32(a & np.uint32(0x7FFFFF)) | np.uint32(0x800000))
        shift = np.uint32(max(min(np.int32(126) - np.int32(a >> np.uint32(23)), 31), 1))
        odd = np.uint32(np.uint32(m >> shift) & np.uint32(1))
        up = np.uint32(np.uint32(np.uint32(1) << np.uint32(shift - np.uint32(1))) - np.uint32(1))
        small = np.uint32(np.uint32(m + up + odd) >> shift)
        if a < np.uint32(0x38800000):
            half = small
        if a >= np.uint32(0x477FF000):
            half = over
        if a == np.uint32(0x7F800000):
            half = np.uint32(0x7C00)
        if a > np.uint32(0x7F800000):
            half = np.uint32(np.uint32(0x7E00) | np.uint32((a >> np.uint32(13)) & 0x1FF))
        out[i] = np.uint16(half | np.uint32(np.uint32(bits[i] >> np.uint32(16)) & 0x8000))


@jit
def _widen_fp16(halves: Halves, out: Floats) -> None:
    bits = out.view(np.uint32)
    scale = np.float32(2.0**112)
    for lo in range(0, out.size, BLOCK):
        h = halves[lo : min(lo + BLOCK, out.size)]
        b = bits[lo : lo + h.size]
        f = out[lo : lo + h.size]
        for i in range(h.size):
            b[i] = np.uint32(np.uint32(h[i] & np.uint16(0x7FFF)) << np.uint32(13))
        for i in range(h.size):
            f[i] *= scale  # moves the exponent, and normalises what was subnormal
        for i in range(h.size):
            v = b[i]
            if v >= np.uint32(0x47800000):  # 65536 and more: was an infinity or a NaN
                v = np.uint32(v | np.uint32(0x7F800000))
            b[i] = np.uint32(v | np.uint32(np.uint32(h[i] & np.uint16(0x8000)) << np.uint32(16)))


@jit
def _narrow_bf16(bits: NDArray[np.uint32], out: Halves, saturate: bool) -> None:
    over = np.uint32(0x7F7F) if saturate else np.uint32(0x7F80)
    for i in range(bits.size):
        a = np.uint32(bits[i] & np.uint32(0x7FFFFFFF))
        odd = np.uint32(np.uint32(a >> np.uint32(16)) & np.uint32(1))
        half = np.uint32(np.uint32(a + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        if a >= np.uint32(0x7F7F8000):
            half = over
        if a == np.uint32(0x7F800000):
            half = np.uint32(0x7F80)
        if a > np.uint32(0x7F800000):
            half = np.uint32(np.uint32(0x7FC0) | np.uint32(a >> np.uint32(16)))
        out[i] = np.uint16(half | np.uint32(np.uint32(bits[i] >> np.uint32(16)) & 0x8000))


@jit
def _widen_bf16(halves: Halves, bits: NDArray[np.uint32]) -> None:
    for i in range(bits.size):
        bits[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16))


def _single_bits(x: Floats) -> NDArray[np.uint32]:
    """The bits of x as float32; doubles are rounded to odd, so that rounding again is harmless."""
    if x.dtype == np.float32:
        return x.view(np.uint32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        single = x.astype(np.float32)
    back = single.astype(np.float64)
    bits = single.view(np.uint32)
    inexact = (back != x) & ~np.isnan(x)
    bits[inexact & (np.abs(back) > np.abs(x))] -= np.uint32(1)
    bits[inexact] |= np.uint32(1)
    return bits


def narrow_fp16(x: Floats, out: Halves, *, saturate: bool) -> None:
    """Round to IEEE half floats, to nearest even; NaN and infinities stay.

    `saturate` turns finite numbers beyond 65504 into 65504 instead of an infinity.
    """
    _narrow_fp16(_single_bits(x), out, saturate)


def widen_fp16(halves: Halves, out: Floats) -> None:
    """Half floats to float32 or float64, exactly."""
    if out.dtype == np.float32:
        _widen_fp16(halves, out)
    else:
        single = np.empty(out.size, np.float32)
        _widen_fp16(halves, single)
        out[:] = single


def narrow_bf16(x: Floats, out: Halves, *, saturate: bool) -> None:
    """Round to bfloat16 (the upper half of a float32), to nearest even; as `narrow_fp16`."""
    _narrow_bf16(_single_bits(x), out, saturate)


def widen_bf16(halves: Halves, out: Floats) -> None:
    """Bfloat16 to float32 or float64, exactly."""
    single = out if out.dtype == np.float32 else np.empty(out.size, np.float32)
    _widen_bf16(halves, single.view(np.uint32))
    if single is not out:
        out[:] = single


@jit
def accumulate(acc: Floats, x: Floats) -> None:
    """Add x to acc."""
    for i in range(acc.size):
        acc[i] += x[i]


@jit
def _scale(x: Floats, factor: Any) -> None:
    for i in range(x.size):
        x[i] *= factor


def scale(x: Floats, factor: float) -> None:
    """Multiply x by a number, which is first rounded to the type of x."""
    _scale(x, x.dtype.type(factor))


@jit
def leave(u: Floats, decoded: Floats, residual: Floats) -> None:
    """Residual = u - decoded, where the decoded value is finite."""
    for i in range(u.size):
        if np.isfinite(decoded[i]):
            residual[i] = u[i] - decoded[i]
