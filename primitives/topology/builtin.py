"""The built-in topologies, exact for every number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives.philox import Stream, random_words
from relaxmpi.primitives.topology.base import Topology
from relaxmpi.primitives.topology.families import Circulant, Matching

__all__ = [
    "BipartiteExponential",
    "Complete",
    "Exponential",
    "OnePeerExponential",
    "RandomPairs",
    "Ring",
    "ShiftOne",
]


@dataclass(frozen=True)
class Complete(Circulant):
    """Everybody sends to everybody: W = J, each weight 1 / n.

    Example:
        >>> import relaxmpi as rx
        >>> rx.Complete().out(0, n=4)
        {1: 0.25, 2: 0.25, 3: 0.25}
    """

    def shifts(self, n: int, step: int = 0) -> tuple[int, ...]:
        """See `Circulant.shifts`."""
        return tuple(range(1, n))

    def finite_time(self, n: int) -> int | None:
        """See `Topology.finite_time`: one step."""
        return 0 if n == 1 else 1


@dataclass(frozen=True)
class Ring(Circulant):
    """Both neighbours, each weight 1/3; 1/2 for the two ranks of n = 2.

    The gap is (2 - 2 cos(2 pi / n)) / 3, about 4 pi^2 / (3 n^2): slow from a dozen ranks on.

    Example:
        >>> import relaxmpi as rx
        >>> list(rx.Ring().out(0, n=5)), list(rx.Ring().out(0, n=2)), rx.Ring().out(0, n=1)
        ([4, 1], [1], {})
    """

    def shifts(self, n: int, step: int = 0) -> tuple[int, ...]:
        """See `Circulant.shifts`."""
        return (n - 1, 1) if n > 2 else (1,) * (n - 1)


@dataclass(frozen=True)
class Exponential(Circulant):
    """Static directed exponential graph (Ying et al., NeurIPS 2021, arXiv 2110.13363).

    Rank i sends to i + 2^k mod n for all k = 0, ..., m - 1 with m = ceil(log2 n), each weight
    1 / (m + 1). The gap is 2 / (m + 1) for even n, larger for odd n.

    Example:
        >>> import relaxmpi as rx
        >>> rx.Exponential().out(0, n=7)
        {1: 0.25, 2: 0.25, 4: 0.25}
    """

    def shifts(self, n: int, step: int = 0) -> tuple[int, ...]:
        """See `Circulant.shifts`."""
        return tuple(1 << k for k in range(_rounds(n, 2)))


@dataclass(frozen=True)
class OnePeerExponential(Circulant):
    """Time-varying directed exponential graph (Assran et al., ICML 2019; Ying et al. 2021).

    At step t rank i sends to i + j (p+1)^k mod n, j = 1, ..., p, with k = t mod m, where m is the
    smallest number with (p+1)^m >= n; each weight is 1 / (d + 1) with the d <= p peers that
    are left when coinciding ones and the rank itself have been struck out (as for n = 6, p = 2
    in the second round).

    If n is a power of p + 1, any m consecutive steps average exactly (Ying et al.), bit for bit
    if p = 1 and the inputs are integers that fit. For other n and p = 1, m steps leave at most
    max_k |sin(pi k 2^m / n)| / (2^m |sin(pi k / n)|) of the disagreement, which is 1/4 (n=3),
    0.22 (6), 1/8 (7), 0.21 (12).

    Args:
        peers: Messages a step, p.

    Example:
        >>> import relaxmpi as rx
        >>> [list(rx.OnePeerExponential().out(0, n=8, step=t)) for t in range(4)]
        [[1], [2], [4], [1]]
        >>> [list(rx.OnePeerExponential(peers=2).out(0, n=9, step=t)) for t in range(2)]
        [[1, 2], [3, 6]]
    """

    peers: int = 1
    varies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.peers, int) or self.peers < 1:
            raise ValueError(f"peers must be a number from 1 on, not {self.peers!r}")

    def period(self, n: int) -> int:
        """See `Topology.period`: m."""
        return max(1, _rounds(n, self.peers + 1))

    def shifts(self, n: int, step: int = 0) -> tuple[int, ...]:
        """See `Circulant.shifts`."""
        far = (self.peers + 1) ** (step % self.period(n))
        return tuple(dict.fromkeys(s for j in range(self.peers) if (s := (j + 1) * far % n)))


@dataclass(frozen=True)
class BipartiteExponential(Matching):
    """Time-varying pairs of an odd and an even rank, for pairwise averaging without deadlock.

    At step t the odd rank a meets the even rank a + s mod n, where s runs through +1, -1, +3, -3,
    +5, -5, +9, -9, ..., that is +D, -D for D = 1 and all 1 + 2^k, k = 1, ..., ceil(log2 n) - 1,
    without repeats mod n. All ranks have a partner and both name each other, which the
    released code of SGP (its graph of this name) does not ensure.

    Raises:
        ValueError: If n is odd and not 1.

    Example:
        >>> import relaxmpi as rx
        >>> [list(rx.BipartiteExponential().out(1, n=8, step=t)) for t in range(4)]
        [[2], [0], [4], [6]]
        >>> rx.BipartiteExponential().out(0, n=3)
        Traceback (most recent call last):
        ValueError: BipartiteExponential() needs an even number of ranks, not 3: ...
    """

    varies: ClassVar[bool] = True

    def period(self, n: int) -> int:
        """See `Topology.period`: the number of different shifts."""
        return max(1, len(_odd_shifts(n)))

    def partner(self, rank: int, n: int, step: int) -> int:
        """See `Matching.partner`."""
        if n == 1:
            return rank
        _need_even(self, n)
        shifts = _odd_shifts(n)
        shift = shifts[step % len(shifts)]
        return (rank + shift if rank % 2 else rank - shift) % n


@dataclass(frozen=True)
class ShiftOne(Matching):
    """BAGUA's `shift_one`: pairs of one rank of the lower and one of the upper half.

    With h = n / 2, rank r < h meets h + (r + t) mod h at step t, which is 0 at the first exchange:
    in h steps each rank meets every rank of the other half. It mixes slowly (gap 0.08 for n = 16;
    `BipartiteExponential` and `BaseGraph` are exact there). BAGUA refuses odd n, and so does this
    class.

    Source: `decentralized_full_precision_synchronous.rs` of BAGUA (Gan et al., VLDB 2021).

    Raises:
        ValueError: If n is odd and not 1.

    Example:
        >>> import relaxmpi as rx
        >>> [[*rx.ShiftOne().out(r, n=6, step=1)][0] for r in range(6)]
        [4, 5, 3, 2, 0, 1]
    """

    varies: ClassVar[bool] = True

    def period(self, n: int) -> int:
        """See `Topology.period`: n / 2."""
        return max(1, n // 2)

    def partner(self, rank: int, n: int, step: int) -> int:
        """See `Matching.partner`."""
        if n == 1:
            return rank
        _need_even(self, n)
        half = n // 2
        return half + (rank + step) % half if rank < half else (rank - half - step) % half


@dataclass(frozen=True)
class RandomPairs(Matching):
    """A fresh random perfect matching at every step, the same on all ranks by the seed.

    All matchings are equally likely; if n is odd, one rank sits out. In the mean over matchings
    one step shrinks the squared disagreement by (n - 2) / (2 (n - 1)) for even n, 1/2 for odd n
    (W is a projection, so E[W^T W] = E[W]); there is no period, and `spectral_gap` is 1 - the
    root of that. The randomised gossip of Boyd et al. 2006 with all ranks active.

    Args:
        seed: Any number from 0 to 2^32 - 1; the random numbers are Philox4x32-10 of (seed, step).

    Example:
        >>> import relaxmpi as rx
        >>> [rx.RandomPairs(seed=1).partner(r, n=4, step=0) for r in range(4)]
        [2, 3, 0, 1]
    """

    seed: int = 0
    varies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be a number from 0 to 2^32 - 1, not {self.seed!r}")

    def period(self, n: int) -> int | None:
        """See `Topology.period`: none, but for the one pair of n = 2."""
        return 1 if n <= 2 else None

    def partner(self, rank: int, n: int, step: int) -> int:
        """See `Matching.partner`."""
        return int(_random_pairs(self.seed, n, step)[rank])

    def spectral_gap(self, n: int) -> float:
        """See `Topology.spectral_gap`: in the mean square over matchings."""
        squared = 0.5 if n % 2 else (n - 2) / (2 * (n - 1))
        return 1.0 if n == 1 else 1.0 - float(squared**0.5)


def _rounds(n: int, base: int) -> int:
    """The smallest m with base^m >= n."""
    rounds, reach = 0, 1
    while reach < n:
        rounds, reach = rounds + 1, reach * base
    return rounds


def _odd_shifts(n: int) -> tuple[int, ...]:
    distances = [1, *(1 + (1 << k) for k in range(1, _rounds(n, 2)))]
    return tuple(dict.fromkeys(s % n for d in distances for s in (d, -d)))


def _need_even(topology: Topology, n: int) -> None:
    if n % 2:
        raise ValueError(
            f"{topology!r} needs an even number of ranks, not {n}: RandomPairs lets one rank "
            "sit out, OnePeerExponential takes any number"
        )


_PAIRS = crc32(b"RandomPairs")


@lru_cache(maxsize=256)
def _random_pairs(seed: int, n: int, step: int) -> NDArray[np.int64]:
    """The partner of each rank: neighbours in a random order of all ranks meet."""
    stream = Stream(seed, _PAIRS, step & 0xFFFFFFFF, 0)
    words = random_words(stream, 0, 2 * n).astype(np.uint64)
    order = np.argsort(words[::2] << np.uint64(32) | words[1::2], kind="stable")
    partner = np.arange(n)
    even, odd = order[: n - n % 2 : 2], order[1::2]
    partner[even], partner[odd] = odd, even
    return partner
