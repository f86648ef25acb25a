"""Packing of codes of 1 to 8 bits; the layout of one bucket of n codes.

The first m = n - n % 8 codes are cut into fields of 8, 4, 2 or 1 bits, the low bits first: 5
bits are a field of 4 and one of 1. A field of width w fills m*w/8 bytes, *split* and not
adjacent: byte i holds the codes i, i + m*w/8, i + 2*m*w/8, ... from the low bits up, because
whole vectors of codes can then be shifted and merged (five times faster than pairs of
neighbours). The last n % 8 codes follow one after the other, lowest bit first, and zeros fill
the last byte. Together ceil(bits * n / 8) bytes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import inlined, jit

Codes = NDArray[np.uint8]


@inlined
def pack_bucket(codes: Codes, bits: int, out: Codes) -> None:
    """Pack one bucket; `out` has ceil(bits * codes.size / 8) bytes."""
    whole = codes.size - codes.size % 8
    at = 0
    shift = 0
    if bits & 8:
        for i in range(whole):
            out[i] = codes[i]
        at = whole
    if bits & 4:
        n = whole // 2
        _pack4(codes[:n], codes[n:whole], out[at : at + n])
        at += n
        shift += 4
    if bits & 2:
        n = whole // 4
        _pack2(
            codes[:n],
            codes[n : 2 * n],
            codes[2 * n : 3 * n],
            codes[3 * n : whole],
            shift,
            out[at : at + n],
        )
        at += n
        shift += 2
    if bits & 1:
        n = whole // 8
        field = out[at : at + n]
        for i in range(n):
            field[i] = np.uint8(0)
        for j in range(8):
            _merge_bit(codes[j * n : (j + 1) * n], shift, j, field)
        at += n
    if whole < codes.size:
        word = 0
        for j in range(codes.size - whole):
            word |= np.int64(codes[whole + j]) << (bits * j)
        for k in range(at, out.size):
            out[k] = np.uint8(word & 255)
            word >>= 8


@inlined
def _pack4(low: Codes, high: Codes, out: Codes) -> None:
    for i in range(out.size):
        out[i] = np.uint8(np.uint8(low[i] & np.uint8(15)) | np.uint8(high[i] << np.uint8(4)))


@inlined
def _pack2(a: Codes, b: Codes, c: Codes, d: Codes, shift: int, out: Codes) -> None:
    three = np.uint8(3)
    s = np.uint8(shift)
    for i in range(out.size):
        out[i] = np.uint8(
            ((a[i] >> s) & three)
            | (((b[i] >> s) & three) << np.uint8(2))
            | (((c[i] >> s) & three) << np.uint8(4))
            | (((d[i] >> s) & three) << np.uint8(6))
        )


@inlined
def _merge_bit(codes: Codes, shift: int, j: int, out: Codes) -> None:
    s = np.uint8(shift)
    t = np.uint8(j)
    for i in range(out.size):
        out[i] |= np.uint8(((codes[i] >> s) & np.uint8(1)) << t)


@inlined
def unpack_bucket(packed: Codes, bits: int, codes: Codes) -> None:
    """Undo `pack_bucket`."""
    whole = codes.size - codes.size % 8
    at = 0
    shift = 0
    if bits & 8:
        for i in range(whole):
            codes[i] = packed[i]
        at = whole
    else:
        for i in range(whole):
            codes[i] = np.uint8(0)
    for width in (4, 2, 1):
        if bits & width:
            n = whole * width // 8
            for j in range(8 // width):
                _take(
                    packed[at : at + n],
                    j * width,
                    (1 << width) - 1,
                    shift,
                    codes[j * n : (j + 1) * n],
                )
            at += n
            shift += width
    if whole < codes.size:
        word = np.int64(0)
        for k in range(at, packed.size):
            word |= np.int64(packed[k]) << (8 * (k - at))
        for j in range(codes.size - whole):
            codes[whole + j] = np.uint8((word >> (bits * j)) & ((1 << bits) - 1))


@inlined
def _take(packed: Codes, down: int, mask: int, up: int, codes: Codes) -> None:
    d = np.uint8(down)
    m = np.uint8(mask)
    u = np.uint8(up)
    for i in range(codes.size):
        codes[i] |= np.uint8(((packed[i] >> d) & m) << u)


@jit
def _pack(codes: Codes, bits: int, bucket: int, out: Codes) -> None:
    for lo in range(0, codes.size, bucket):
        hi = min(lo + bucket, codes.size)
        pack_bucket(codes[lo:hi], bits, out[lo * bits // 8 : (hi * bits + 7) // 8])


@jit
def _unpack(packed: Codes, bits: int, bucket: int, codes: Codes) -> None:
    for lo in range(0, codes.size, bucket):
        hi = min(lo + bucket, codes.size)
        unpack_bucket(packed[lo * bits // 8 : (hi * bits + 7) // 8], bits, codes[lo:hi])


@inlined
def copy_bytes(source: Codes, out: Codes) -> None:
    """Move scales to or from the front of a payload, which need not be aligned for them."""
    for i in range(source.size):
        out[i] = source[i]


def split_payload(
    payload: Codes, count: int, dtype: np.dtype[Any], bits: int, bucket: int
) -> tuple[Codes, Codes]:
    """The bytes of the scales and those of the packed codes."""
    head = dtype.itemsize * -(-count // bucket)
    return payload[:head], payload[head : head + (bits * count + 7) // 8]


def pack(codes: Codes, out: Codes, *, bits: int, bucket: int) -> None:
    """Pack codes below 2**bits into `out` of ceil(bits * codes.size / 8) bytes."""
    _pack(codes, bits, bucket, out)


def unpack(packed: Codes, codes: NDArray[Any], *, bits: int, bucket: int) -> None:
    """Undo `pack`."""
    _unpack(packed, bits, bucket, codes)
