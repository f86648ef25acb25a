"""The fast generator inside the kernels; `philox` is the readable one."""

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import inlined, jit
from relaxmpi.primitives._vectors import counting, splat, zip_words
from relaxmpi.primitives.philox import Stream

Words = NDArray[np.uint32]
# Two words each, the first one in the lower half: in little-endian memory, words in order.
Pairs = NDArray[np.uint64]
# Counters of a vector: two registers of AVX2, one of AVX-512. The ten rounds of one vector are one
# chain, and the processor begins the next vector meanwhile.
GROUPS = 8
ELEMENTS = 4 * GROUPS


@inlined
def fill_vector(
    pairs: Pairs, at: int, first: int, seed: int, name: int, step: int, lane: int
) -> None:
    """Draw for the counters first, ..., first + GROUPS - 1; first is a multiple of GROUPS.

    The words are in 64-bit lanes: one multiplication then gives the upper and the lower half of a
    product. Only the lower halves of the lanes count, until they are stored.
    """
    low = np.uint64(0xFFFFFFFF)  # a mask that costs nothing: the multiplication ignores the rest
    half = np.uint64(32)
    k0, k1 = np.uint64(seed), np.uint64(name)
    c0 = counting(np.uint64, GROUPS) + (np.uint64(first) & low)
    c1 = splat(np.uint64(first) >> half, GROUPS)  # the same in all: there is no carry
    c2 = splat(np.uint64(step), GROUPS)
    c3 = splat(np.uint64(lane), GROUPS)
    for _ in range(10):
        a = (c0 & low) * np.uint64(0xD2511F53)
        b = (c2 & low) * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ (c1 ^ k0), b, (a >> half) ^ (c3 ^ k1), a
        k0 += np.uint64(0x9E3779B9)
        k1 += np.uint64(0xBB67AE85)
    zip_words(pairs, at, (c0 & low) | (c1 << half), (c2 & low) | (c3 << half))


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

    `pairs` is as long as `pairs_for(count)`, because whole vectors are drawn.
    """
    skip = start % ELEMENTS
    first = (start - skip) // 4
    for b in range((skip + count + ELEMENTS - 1) // ELEMENTS):
        fill_vector(pairs, 2 * GROUPS * b, first + GROUPS * b, seed, name, step, lane)
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
    block = 1024
    _random_words(out, pairs_for(block), block, offset, *stream)
