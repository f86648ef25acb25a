"""The fast generator inside the kernels; `philox` is the readable one."""

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import inlined, jit
from relaxmpi.primitives.philox import Stream

Words = NDArray[np.uint32]
# Two words each, the first one in the lower half: in little-endian memory, words in order.
Pairs = NDArray[np.uint64]
# The words of a counter, in 64-bit registers: one multiplication of vectors then gives the upper
# and the lower half of a product. Only the lower halves of the words count.
Counter = tuple[np.uint64, np.uint64, np.uint64, np.uint64]
Counters = tuple[Counter, Counter, Counter, Counter]

# Counters of a block: 8 fill a vector, and the rounds of 4 vectors hide each other's latency.
GROUPS = 32
ELEMENTS = 4 * GROUPS


@inlined
def _round(c: Counter, k0: np.uint64, k1: np.uint64) -> Counter:
    low = np.uint64(0xFFFFFFFF)  # a mask that costs nothing: the multiplication ignores the rest
    half = np.uint64(32)
    a = (c[0] & low) * np.uint64(0xD2511F53)
    b = (c[2] & low) * np.uint64(0xCD9E8D57)
    return (b >> half) ^ c[1] ^ k0, b, (a >> half) ^ c[3] ^ k1, a


@inlined
def _rounds(c: Counters, k0: np.uint64, k1: np.uint64, r: int) -> Counters:
    """Round r of four counters at a time."""
    k0 += np.uint64(r) * np.uint64(0x9E3779B9)
    k1 += np.uint64(r) * np.uint64(0xBB67AE85)
    return (
        _round(c[0], k0, k1),
        _round(c[1], k0, k1),
        _round(c[2], k0, k1),
        _round(c[3], k0, k1),
    )


@inlined
def _store(c: Counter, pairs: Pairs, group: int) -> None:
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    pairs[2 * group] = (c[0] & low) | (c[1] << half)
    pairs[2 * group + 1] = (c[2] & low) | (c[3] << half)


@inlined
def _fill_block(pairs: Pairs, first: int, seed: int, name: int, step: int, lane: int) -> None:
    """Draw for the counters first, ..., first + GROUPS - 1; first is a multiple of GROUPS."""
    c0 = np.uint64(first) & np.uint64(0xFFFFFFFF)
    c1 = np.uint64(first) >> np.uint64(32)  # the same in the whole block
    c2 = np.uint64(step)
    c3 = np.uint64(lane)
    k0 = np.uint64(seed)
    k1 = np.uint64(name)
    for j in range(8):
        c = (
            (c0 + np.uint64(j), c1, c2, c3),
            (c0 + np.uint64(j + 8), c1, c2, c3),
            (c0 + np.uint64(j + 16), c1, c2, c3),
            (c0 + np.uint64(j + 24), c1, c2, c3),
        )
        # Written out, because a loop here keeps the loop over j from becoming vectors.
        c = _rounds(c, k0, k1, 0)
        c = _rounds(c, k0, k1, 1)
        c = _rounds(c, k0, k1, 2)
        c = _rounds(c, k0, k1, 3)
        c = _rounds(c, k0, k1, 4)
        c = _rounds(c, k0, k1, 5)
        c = _rounds(c, k0, k1, 6)
        c = _rounds(c, k0, k1, 7)
        c = _rounds(c, k0, k1, 8)
        c = _rounds(c, k0, k1, 9)
        _store(c[0], pairs, j)
        _store(c[1], pairs, j + 8)
        _store(c[2], pairs, j + 16)
        _store(c[3], pairs, j + 24)


@inlined
def fill_elements(
    pairs: Pairs,
    start: int,
    count: int,
    seed: int,
    name: int,
    step: int,
    lane: int,
) -> int:
    """Draw for the elements start, ..., start + count - 1, and return where their words begin.

    `pairs` is as long as `pairs_for(count)`, because whole blocks are drawn.
    """
    skip = start % ELEMENTS
    first = (start - skip) // 4
    for b in range((skip + count + ELEMENTS - 1) // ELEMENTS):
        _fill_block(
            pairs[2 * GROUPS * b : 2 * GROUPS * (b + 1)],
            first + GROUPS * b,
            seed,
            name,
            step,
            lane,
        )
    return skip


def pairs_for(count: int) -> Pairs:
    """Scratch for the words of `count` elements."""
    return np.empty(count // 2 + ELEMENTS, np.uint64)


@jit
def _random_words(
    out: Words, pairs: Pairs, block: int, offset: int, seed: int, name: int, step: int, lane: int
) -> None:
    for lo in range(0, out.size, block):
        part = out[lo : min(lo + block, out.size)]
        skip = fill_elements(pairs, offset + lo, part.size, seed, name, step, lane)
        words = pairs.view(np.uint32)[skip:]
        for i in range(part.size):
            part[i] = words[i]


def random_words(out: Words, stream: Stream, offset: int) -> None:
    """Fill `out` with the words of elements offset, offset + 1, ... of the stream."""
    block = 8 * ELEMENTS
    _random_words(out, pairs_for(block), block, offset, *stream)
