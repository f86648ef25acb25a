"""The fast generator inside the kernels; `philox` is the readable one."""

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import inlined, jit
from relaxmpi.primitives.philox import Stream

Words = NDArray[np.uint32]
# Four words of the counter and two of the key, in 64-bit registers: one multiplication of
# vectors then gives the upper and the lower half of a product.
State = tuple[np.uint64, np.uint64, np.uint64, np.uint64, np.uint64, np.uint64]


@inlined
def _round(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> State:
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    a = c0 * np.uint64(0xD2511F53)
    b = c2 * np.uint64(0xCD9E8D57)
    return (
        (b >> half) ^ c1 ^ k0,
        b & low,
        (a >> half) ^ c3 ^ k1,
        a & low,
        (k0 + np.uint64(0x9E3779B9)) & low,
        (k1 + np.uint64(0xBB67AE85)) & low,
    )


@inlined
def _fill_groups(
    words: Words, first: int, groups: int, seed: int, name: int, step: int, lane: int
) -> None:
    for g in range(groups):
        index = np.uint64(first + g)
        c0 = index & np.uint64(0xFFFFFFFF)
        c1 = index >> np.uint64(32)
        c2 = np.uint64(step)
        c3 = np.uint64(lane)
        k0 = np.uint64(seed)
        k1 = np.uint64(name)
        # Written out, because a loop here keeps the loop over groups from being vectorised.
        c0, c1, c2, c3, k0, k1 = _round(c0, c1, c2, c3, k0, k1)
        c0, c1, c2, c3, k0, k1 = _round(c0, c1, c2, c3, k0, k1)
        c0, c1, c2, c3, k0, k1 = _round(c0, c1, c2, c3, k0, k1)
        c0, c1, c2, c3, k0, k1 = _round(c0, c1, c2, c3, k0, k1)
        c0, c1, c2, c3, k0, k1 = _round(c0, c1, c2, c3, k0, k1)
        c0, c1, c2, c3, k0, k1 = _round(c0, c1, c2, c3, k0, k1)
        c0, c1, c2, c3, k0, k1 = _round(c0, c1, c2, c3, k0, k1)
        c0, c1, c2, c3, k0, k1 = _round(c0, c1, c2, c3, k0, k1)
        c0, c1, c2, c3, k0, k1 = _round(c0, c1, c2, c3, k0, k1)
        c0, c1, c2, c3, k0, k1 = _round(c0, c1, c2, c3, k0, k1)
        words[4 * g] = np.uint32(c0)
        words[4 * g + 1] = np.uint32(c1)
        words[4 * g + 2] = np.uint32(c2)
        words[4 * g + 3] = np.uint32(c3)


@inlined
def fill_elements(
    words: Words,
    start: int,
    count: int,
    seed: int,
    name: int,
    step: int,
    lane: int,
) -> int:
    """Draw for the elements start, ..., start + count - 1, and return where in `words` they begin.

    `words` has room for count + 8, because counters come in groups of four elements.
    """
    skip = start % 4
    _fill_groups(words, start // 4, (skip + count + 3) // 4, seed, name, step, lane)
    return skip


@jit
def _random_words(
    out: Words, scratch: Words, offset: int, seed: int, name: int, step: int, lane: int
) -> None:
    block = scratch.size - 8
    for lo in range(0, out.size, block):
        part = out[lo : min(lo + block, out.size)]
        skip = fill_elements(scratch, offset + lo, part.size, seed, name, step, lane)
        for i in range(part.size):
            part[i] = scratch[skip + i]


def random_words(out: Words, stream: Stream, offset: int) -> None:
    """Fill `out` with the words of elements offset, offset + 1, ... of the stream."""
    _random_words(out, np.empty(1032, np.uint32), offset, *stream)
