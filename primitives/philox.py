"""Random numbers by counter: Philox4x32-10, the slow and obvious way.

Every random number of this library is a pure function of *what it is for* (seed, name of the
buffer, step, rank, element), so bytes never depend on threads, chunks or devices. The fast
generator is inside the kernels; this one is the oracle they are compared with.

Philox is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Stream", "philox4x32", "random_words", "uniforms"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class Stream(NamedTuple):
    """Which random numbers: four 32-bit words, the same for all elements of a buffer.

    Attributes:
        seed: first word of the Philox key.
        name: second word of the key: the crc32 of the buffer's name.
        step: third word of the counter.
        lane: fourth word of the counter: rank | site << 24.
    """

    seed: int
    name: int
    step: int
    lane: int


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Ten rounds of Philox4x32 on counters of shape (..., 4).

    >>> philox4x32(np.zeros(4, np.uint32), (0, 0)).tolist() == [
    ...     0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    True
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        a = c0 * np.uint64(_MULTIPLIERS[0])
        b = c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (b >> _HALF) ^ c1 ^ np.uint64(k0),
            b & _LOW,
            (a >> _HALF) ^ c3 ^ np.uint64(k1),
            a & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def random_words(stream: Stream, offset: int, count: int) -> NDArray[np.uint32]:
    """The random words of the elements offset, ..., offset + count - 1 of a buffer.

    Element e has word e % 4 of the counter (e // 4 low, e // 4 high, step, lane).

    >>> s = Stream(seed=1, name=2, step=3, lane=4)
    >>> bool((random_words(s, 0, 10)[7:] == random_words(s, 7, 3)).all())
    True
    """
    first, last = offset // 4, (offset + count + 3) // 4
    groups = np.arange(first, last, dtype=np.uint64)
    counter = np.empty((groups.size, 4), np.uint32)
    counter[:, 0] = groups & _LOW
    counter[:, 1] = groups >> _HALF
    counter[:, 2] = stream.step
    counter[:, 3] = stream.lane
    skip = offset - 4 * first
    return philox4x32(counter, (stream.seed, stream.name)).reshape(-1)[skip : skip + count]


def uniforms(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Uniform numbers in [0, 1): the upper 24 bits of each word, times 2**-24.

    >>> float(uniforms(np.array([0xFFFFFFFF], np.uint32))[0]) == 1 - 2**-24
    True
    """
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
