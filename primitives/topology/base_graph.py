"""The Base-(k+1) graph: the exact mean after few steps for every number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar, TypeAlias

from relaxmpi.primitives.topology.families import Symmetric

__all__ = ["BaseGraph"]

Round: TypeAlias = list[dict[int, float]]  # of each rank: its peers and the weights, symmetric


@dataclass(frozen=True)
class BaseGraph(Symmetric):
    """Base-(k+1) graph (Takezawa et al., NeurIPS 2023, arXiv 2305.11420), k = `peers`.

    A schedule of at most 2 log_{k+1}(n) + 2 symmetric rounds, each with at most k peers a rank,
    after which every rank holds the exact mean, for every n. If n has no prime factor above
    k + 1 it is a butterfly, with one round for each factor. Otherwise, with n = r s, where s has
    no prime factor above k + 1 and r only such, it is the shorter of (a) the simple graph on
    blocks of r ranks and then a butterfly across the blocks, (b) the simple graph on all n. The
    *simple* graph:

    1. Write n in base k + 1 as sizes |V_1| > |V_2| > ... with |V_l| = a_l (k+1)^{p_l}, a_l <= k,
       and average inside each group by a butterfly.
    2. For l = 1, 2, ...: each rank of the later groups exchanges with one rank of each of the
       a_l parts of V_l, weight |V_l| / (a_l sum_{l' >= l} |V_l'|). Now each part of V_l has the
       global mean. The ranks of V_l that are left over average among themselves.
    3. Average inside each part of V_l.

    The mean is exact over one whole period, counted from step 0; `OnePeerExponential` is shorter
    where n is a power of p + 1, and exact from any step on.

    Args:
        peers: The largest number of peers a step, k; with 1 all exchanges are pairs.

    Example:
        >>> import relaxmpi as rx
        >>> [rx.BaseGraph().finite_time(n) for n in (1, 2, 3, 5, 6, 8, 25)]
        [0, 1, 3, 5, 4, 3, 9]
        >>> rx.BaseGraph(peers=2).out(0, n=6, step=1)
        {3: 0.5}
    """

    peers: int = 1
    varies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.peers, int) or self.peers < 1:
            raise ValueError(f"peers must be a number from 1 on, not {self.peers!r}")

    def period(self, n: int) -> int:
        """See `Topology.period`: the number of rounds."""
        return max(1, len(_schedule(n, self.peers)))

    def out(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
        """See `Topology.out`."""
        rounds = _schedule(n, self.peers)
        return dict(rounds[step % len(rounds)][rank]) if rounds else {}


@lru_cache(maxsize=64)
def _schedule(n: int, k: int) -> list[Round]:
    stages = _factors(n, k)
    rest = n // prod(stages)
    whole, blocks = _simple(n, k), _simple(rest, k)
    if len(whole) <= len(blocks) + len(stages):
        return whole
    rounds = [
        [
            {first + peer: weight for peer, weight in weights.items()}
            for first in range(0, n, rest)
            for weights in block
        ]
        for block in blocks
    ]
    for stage in range(len(stages)):
        across = _idle(n)
        for place in range(rest):
            _butterfly(across, range(place, n, rest), k, stage)
        rounds.append(across)
    return rounds


def _simple(n: int, k: int) -> list[Round]:
    """The simple Base-(k+1) graph, or a butterfly where that is enough."""
    stages = _factors(n, k)
    if prod(stages) == n:
        rounds = [_idle(n) for _ in stages]
        for t, mixing in enumerate(rounds):
            _butterfly(mixing, range(n), k, t)
        return rounds
    groups = _groups(n, k)
    before = len(_factors(len(groups[0]), k))
    after = len(_factors(len(_parts(groups[0], k)[0]), k))
    rounds = [_idle(n) for _ in range(before + 1 + after)]
    for number, group in enumerate(groups):
        # A group that is done early begins again, which changes nothing: all its values are equal.
        for t, mixing in enumerate(rounds[:before]):
            _butterfly(mixing, group, k, t)
        _share(rounds[before + number], groups[number:], k)
        for t, mixing in enumerate(rounds[before + number + 1 :]):
            for part in _parts(group, k):
                _butterfly(mixing, part, k, t)
    return rounds


def _share(mixing: Round, groups: list[range], k: int) -> None:
    """The ranks of the later groups meet one rank of each part of the first one."""
    first, later = groups[0], [rank for group in groups[1:] for rank in group]
    if not later:
        return
    parts = _parts(first, k)
    weight = len(first) / (len(parts) * (len(first) + len(later)))
    for part in parts:
        for a, b in zip(later, part, strict=False):
            mixing[a][b] = mixing[b][a] = weight
    left = [rank for part in parts for rank in part[len(later) :]]
    for at in range(0, len(left), k + 1):
        _average(mixing, left[at : at + k + 1])


def _butterfly(mixing: Round, members: range, k: int, step: int) -> None:
    """Add one round of a mixed-radix butterfly: averages over one digit of the position."""
    factors = _factors(len(members), k)
    if not factors:
        return
    stage = step % len(factors)
    stride, factor = prod(factors[:stage]), factors[stage]
    for at in range(len(members)):
        if at // stride % factor == 0:
            _average(mixing, members[at : at + stride * factor : stride])


def _average(mixing: Round, members: Sequence[int]) -> None:
    for a in members:
        mixing[a].update((b, 1 / len(members)) for b in members if b != a)


def _groups(n: int, k: int) -> list[range]:
    """Split n ranks by the digits of n in base k + 1, the largest group first."""
    groups: list[range] = []
    while n:
        size = len(_parts(range(n), k)[0])
        start = groups[-1].stop if groups else 0
        groups.append(range(start, start + n // size * size))
        n %= size
    return groups


def _parts(group: range, k: int) -> list[range]:
    """Cut a group into parts of the largest power of k + 1 that fits, leaving out a remainder."""
    size = 1
    while size * (k + 1) <= len(group):
        size *= k + 1
    return [group[at : at + size] for at in range(0, len(group) - size + 1, size)]


def _factors(n: int, k: int) -> list[int]:
    """The factors of n from 2 to k + 1, large ones first: their product has all primes <= k + 1."""
    factors = []
    for factor in range(k + 1, 1, -1):
        while n % factor == 0:
            factors.append(factor)
            n //= factor
    return factors


def _idle(n: int) -> Round:
    return [{} for _ in range(n)]
