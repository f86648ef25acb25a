"""Kernels of the min-max quantiser with 8 bits; `MinMaxUInt8` gives the formulas."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import inlined, jit
from relaxmpi.primitives._reduce import WIDTH, fetch_ahead, room_ahead
from relaxmpi.primitives._vectors import cast, highest, load, rint, splat, store

Floats = NDArray[Any]
Codes = NDArray[np.uint8]

HEADER = 32
BLOCK = 4096


@inlined
def _range(x: Floats, header: Floats) -> None:
    """Header = (min x, max x), or two NaN where x holds a NaN or an infinity.

    As in `largest`, on integers: the map v ^ (v >> 31 & 0x7fffffff) orders floats, with the
    infinities at 0x7f800000 and -0x7f800001 and NaN beyond them.
    """
    if x.itemsize == 4:
        _ends(x.view(np.int32), np.int32(31), np.int32(0x7FFFFFFF), header.view(np.int32))
    else:
        _ends(x.view(np.int64), np.int64(63), np.int64(0x7FFFFFFFFFFFFFFF), header.view(np.int64))
    if not (np.isfinite(header[0]) and np.isfinite(header[1])):
        header[0] = np.nan
        header[1] = np.nan


@inlined
def _ends(bits: NDArray[Any], shift: Any, magnitude: Any, out: NDArray[Any]) -> None:
    number = bits.dtype.type
    whole = bits.size - bits.size % WIDTH
    high = splat(number(-magnitude - number(1)), WIDTH)
    flipped = high  # of -1 - v, the largest where v is the smallest
    for i in range(0, whole, WIDTH):
        fetch_ahead(bits, i)
        v = load(bits, i, WIDTH)
        v = v ^ ((v >> shift) & magnitude)
        high = max(high, v)
        flipped = max(flipped, v ^ number(-1))
    top, bottom = highest(high), number(~highest(flipped))
    for i in range(whole, bits.size):
        w = number(bits[i] ^ number(number(bits[i] >> shift) & magnitude))
        top, bottom = max(top, w), min(bottom, w)
    out[0] = number(bottom ^ number(number(bottom >> shift) & magnitude))
    out[1] = number(top ^ number(number(top >> shift) & magnitude))


@inlined
def _tiny(header: Floats) -> Any:
    """Below it 255 / range overflows."""
    return header.dtype.type(2.0**-118 if header.itemsize == 4 else 2.0**-1010)


@inlined
def _on_grid(header: Floats) -> bool:
    """Whether BAGUA's grid of multiples of 1/scale is fine enough: max|x|*255/range <= 2**14.

    Computed with small numbers, so that it holds for the largest floats too. Also true for all
    zeros, which the grid maps to zero.
    """
    small = header.dtype.type(2.0**-20)
    most = max(abs(header[0]), abs(header[1]))
    spread = header[1] * small - header[0] * small
    if most == 0:
        return True
    fine: bool = most * small * header.dtype.type(255) <= spread * header.dtype.type(16384)
    return fine and bool(spread > _tiny(header))


@inlined
def _grid(header: Floats) -> tuple[Any, Any]:
    """BAGUA's scale and lo; halved, which changes no bit, so that the range cannot overflow."""
    number = header.dtype.type
    half = number(0.5)
    spread = header[1] * half - header[0] * half
    # BAGUA's eps is there for a range of zero. Where it would be a percent of the range, it
    # would coarsen the grid, and round gradients of 1e-9 to nothing: left out.
    eps = number(1e-7) * half
    if spread > 0 and spread < number(2.0**-17):
        eps = number(0)
    scale = number(127.5) / (spread + eps)
    return scale, np.rint(header[1] * scale) - number(255)


@jit
def _quantise(x: Floats, header: Floats, codes: Codes) -> None:
    number = x.dtype.type
    _range(x, header)
    lift = number(1)
    base = number(0)
    lo = np.int32(0)
    factor = number(0)
    if _on_grid(header):
        factor, lo_float = _grid(header)
        lo = np.int32(lo_float)
    elif header[1] > header[0]:
        if header[1] - header[0] < number(2.0**-60):
            lift = number(2.0**80)
        base = header[0] * lift
        factor = number(255) / (header[1] * lift - base)
    if np.isfinite(header[0]):
        bottom, top = np.int32(0), np.int32(255)
        whole = x.size - x.size % WIDTH
        for i in range(0, whole, WIDTH):
            fetch_ahead(x, i)
            levels = cast(rint((load(x, i, WIDTH) * lift - base) * factor), np.int32) - lo
            store(codes, i, cast(min(max(levels, bottom), top), np.uint8))
        for i in range(whole, x.size):
            level = np.int32(np.int32(np.rint((x[i] * lift - base) * factor)) - lo)
            codes[i] = np.uint8(np.int32(min(max(level, bottom), top)))
    else:
        for i in range(codes.size):
            codes[i] = np.uint8(0)


@jit
def _dequantise(header: Floats, codes: Codes, out: Floats, add: bool, scratch: Floats) -> None:
    number = out.dtype.type
    grid = _on_grid(header)
    scale, lo = _grid(header)
    offset = header[0]
    step = (header[1] - header[0]) / number(255)
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        code = codes[start:stop]
        target = scratch[: stop - start] if add else out[start:stop]
        whole = target.size - target.size % WIDTH
        if grid:
            for i in range(0, whole, WIDTH):
                room_ahead(out, start + i)
                store(target, i, (cast(load(code, i, WIDTH), number) + lo) / scale)
            for i in range(whole, target.size):
                target[i] = (number(code[i]) + lo) / scale
        else:
            for i in range(0, whole, WIDTH):
                room_ahead(out, start + i)
                store(target, i, cast(load(code, i, WIDTH), number) * step + offset)
            for i in range(whole, target.size):
                target[i] = offset + number(code[i]) * step
        if add:
            block = out[start:stop]
            for i in range(block.size):
                block[i] += target[i]


def quantise_minmax(x: Floats, payload: Codes) -> None:
    """Header, codes, and zeros up to the end of the payload."""
    header = np.empty(2, x.dtype)
    head = header.nbytes
    _quantise(x, header, payload[HEADER : HEADER + x.size])
    payload[:head] = header.view(np.uint8)
    payload[head:HEADER] = 0
    payload[HEADER + x.size :] = 0


def dequantise_minmax(payload: Codes, out: Floats, *, add: bool) -> None:
    """Decode into `out`, or add the decoded values to it."""
    header = np.empty(2, out.dtype)
    header.view(np.uint8)[:] = payload[: header.nbytes]
    _dequantise(header, payload[HEADER : HEADER + out.size], out, add, np.empty(BLOCK, out.dtype))
