"""Kernels of the sparsifier; `TopK` gives the rule.

Payload: the k values, in the order of their indices; the `low` last bits of the indices, packed as
one bucket (see `_bits`); and a row of bits, the low ones of a byte first, where bit
(index >> low) + j is set for index number j (Elias 1974, Fano 1971). Zeros fill the last byte.

Magnitudes are compared as integers, because the bits of a float without its sign are ordered like
its value, NaN last. One pass counts the candidates, those above a floor that is guessed from a
sample, and one gathers them; the choice is made among them alone. A wrong guess costs time and
nothing else.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._bits import pack, unpack
from relaxmpi.primitives._cast import accumulate
from relaxmpi.primitives._jit import jit

Floats = NDArray[Any]
Bits = NDArray[Any]
Codes = NDArray[np.uint8]
Indices = NDArray[np.int64]

DIGIT = 11
BLOCK = 32
STRIDE = 61  # no divisor of the usual lengths of rows: a sample of one column would mislead


@jit
def _kth_largest(sizes: Bits, k: int, counts: Indices) -> tuple[Any, int]:
    """The k-th largest, and how many are larger: digit by digit, the highest first."""
    number = sizes.dtype.type
    found = number(0)
    above = 0
    high = 8 * sizes.itemsize - 1
    while high > 0:
        low = max(high - DIGIT, 0)
        for d in range(counts.size):
            counts[d] = 0
        for i in range(sizes.size):
            m = sizes[i]
            if m >> high == found >> high:
                # Unsigned, here and below: a signed index is tested for being negative.
                counts[np.uint64((m >> low) & ((1 << DIGIT) - 1))] += 1
        d = counts.size - 1
        while above + counts[d] < k:
            above += counts[d]
            d -= 1
        found = number(found | number(d << low))
        high = low
    return found, above


@jit
def _sample(bits: Bits, mask: Any, sizes: Bits) -> None:
    for s in range(sizes.size):
        sizes[s] = bits[s * STRIDE] & mask


@jit
def _count(bits: Bits, mask: Any, floor: Any, hits: Codes) -> int:
    """Candidates in each block, and in all."""
    number = bits.dtype.type
    total = 0
    for b in range(hits.size):
        block = bits[b * BLOCK : min((b + 1) * BLOCK, bits.size)]
        part = number(0)
        for i in range(block.size):
            part = number(part + number(number(block[i] & mask) >= floor))
        hits[b] = np.uint8(part)
        total += part
    return total


@jit
def _gather(bits: Bits, mask: Any, floor: Any, hits: Codes, indices: Indices, sizes: Bits) -> None:
    """Indices and magnitudes of the candidates; `indices` has room for BLOCK more."""
    # Whoever writes to a buffer that is being sent gets wrong numbers, but must not make this
    # write elsewhere: so there may be more or fewer candidates than were counted.
    number = bits.dtype.type
    j = np.uint64(0)
    for b in range(hits.size):
        if hits[b] > 0 and j < sizes.size:
            for i in range(np.uint64(b * BLOCK), np.uint64(min((b + 1) * BLOCK, bits.size))):
                indices[j] = i
                j += np.uint64(number(bits[i] & mask) >= floor)
    for c in range(j, sizes.size):
        indices[c] = 0
    for c in range(sizes.size):
        sizes[c] = bits[np.uint64(indices[c])] & mask


@jit
def _choose(sizes: Bits, least: Any, ties: int, indices: Indices) -> None:
    """Move the chosen indices to the front: above `least`, and the first `ties` equal to it."""
    j = np.uint64(0)
    for c in range(sizes.size):
        tie = sizes[c] == least
        chosen = (sizes[c] > least) | (tie & (ties > 0))
        ties -= np.int64(tie)
        indices[j] = indices[c]
        j += np.uint64(chosen)


def _largest(x: Floats, keep: int) -> Indices:
    """Indices of the `keep` largest magnitudes, in order; of equal ones, the first."""
    integer: Any = np.int32 if x.itemsize == 4 else np.int64
    bits, mask = x.view(integer), integer(np.iinfo(integer).max)
    counts = np.empty(1 << DIGIT, np.int64)
    sample = np.empty(-(-x.size // STRIDE), integer)
    share = keep // STRIDE + 1
    rank = share + 4 * math.isqrt(share) + 4  # four deviations more than the sample's share
    floor = integer(1)  # zeros only where nothing else is left
    if rank < sample.size:
        _sample(bits, mask, sample)
        floor = max(floor, integer(_kth_largest(sample, rank, counts)[0]))
    hits = np.empty(-(-x.size // BLOCK), np.uint8)
    found = _count(bits, mask, floor, hits)
    if found < keep:
        floor = integer(0)
        found = _count(bits, mask, floor, hits)
    indices, sizes = np.empty(found + BLOCK, np.int64), np.empty(found, integer)
    _gather(bits, mask, floor, hits, indices, sizes)
    least, above = _kth_largest(sizes, keep, counts)
    _choose(sizes, integer(least), keep - above, indices)
    return indices[:keep]


@jit
def _write(
    x: Floats, indices: Indices, values: Floats, low: int, codes: Codes, high: Codes
) -> None:
    for b in range(high.size):
        high[b] = np.uint8(0)
    for j in range(values.size):
        i = indices[j]
        values[j] = x[np.uint64(i)]
        codes[j] = np.uint8(i & ((1 << low) - 1))
        at = (i >> low) + j
        high[np.uint64(at >> 3)] |= np.uint8(1 << (at & 7))


@jit
def _read(high: Codes, codes: Codes, low: int, count: int, indices: Indices) -> bool:
    """Undo `_write`; False unless that gives increasing indices below `count`, one a code."""
    j = 0
    for b in range(high.size):
        byte = np.int64(high[b])
        for t in range(8):
            indices[np.uint64(min(j, codes.size))] = 8 * b + t - j
            j += (byte >> t) & 1
    sound = bool(j == codes.size)
    last = -1
    for j in range(codes.size):
        i = (indices[j] << low) | np.int64(codes[j])
        if not last < i < count:
            sound = False
        indices[j] = i
        last = i
    return sound


@jit
def _put(values: Floats, indices: Indices, out: Floats, add: bool) -> None:
    if add:
        for j in range(values.size):
            out[np.uint64(indices[j])] += values[j]
    else:
        for i in range(out.size):
            out[i] = 0
        for j in range(values.size):
            out[np.uint64(indices[j])] = values[j]


@jit
def _clear(indices: Indices, out: Floats) -> None:
    for j in range(indices.size):
        out[np.uint64(indices[j])] = 0


@jit
def _sums_are_finite(x: Floats, y: Floats) -> bool:
    most = np.finfo(x.dtype).max
    bad = np.int32(0)
    for i in range(x.size):
        bad |= np.int32(not abs(x[i] + y[i]) <= most)
    return bool(bad == 0)


def _split(payload: Codes, itemsize: int, keep: int, low: int) -> tuple[Codes, ...]:
    """The bytes of the values, of the low bits, and of the row of bits."""
    middle = itemsize * keep
    end = middle + -(-low * keep // 8)
    return payload[:middle], payload[middle:end], payload[end:]


def _fill(x: Floats, payload: Codes, keep: int, low: int) -> Indices:
    head, packed, high = _split(payload, x.itemsize, keep, low)
    indices = _largest(x, keep)
    values, codes = np.empty(keep, x.dtype), np.empty(keep, np.uint8)
    _write(x, indices, values, low, codes, high)
    if not np.isfinite(values).all():
        values[:] = np.nan
    head[:] = values.view(np.uint8)
    pack(codes, packed, bits=low, bucket=keep)
    return indices


def sparsify(x: Floats, payload: Codes, *, keep: int, low: int) -> None:
    """The `keep` largest magnitudes; all values are NaN where x holds a NaN or an infinity."""
    _fill(x, payload, keep, low)


def sparsify_feedback(x: Floats, residual: Floats, payload: Codes, *, keep: int, low: int) -> None:
    """The same for u = x + residual; leaves u in `residual`, and zeros where it was taken.

    Where u is not finite, the residual stays as it was.
    """
    if _sums_are_finite(x, residual):
        accumulate(residual, x)
        _clear(_fill(residual, payload, keep, low), residual)
    else:
        u = x.copy()
        accumulate(u, residual)
        _fill(u, payload, keep, low)


def densify(payload: Codes, out: Floats, *, keep: int, low: int, add: bool) -> None:
    """Decode into `out`, or add the decoded values to it.

    Raises:
        ValueError: the indices are damaged; `out` is as it was.
    """
    head, packed, high = _split(payload, out.itemsize, keep, low)
    values, codes = np.empty(keep, out.dtype), np.empty(keep, np.uint8)
    values.view(np.uint8)[:] = head
    unpack(packed, codes, bits=low, bucket=keep)
    indices = np.empty(keep + 1, np.int64)
    if not _read(high, codes, low, out.size, indices):
        raise ValueError(
            f"the payload holds no {keep} increasing indices below {out.size}: it is damaged, or "
            "not one of this codec and this many numbers"
        )
    if np.isnan(values[0]):
        out[:] = np.nan
    else:
        _put(values, indices[:keep], out, add)
