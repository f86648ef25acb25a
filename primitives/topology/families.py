"""Families of topologies whose in- and out-lists fit by construction."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from relaxmpi.primitives.topology.base import Topology

__all__ = ["Circulant", "Matching", "Regular", "Symmetric"]


class Regular(Topology):
    """What each rank gives and keeps sums to 1, and what it hears and keeps as well.

    So nothing has to be looked for at run time: the tests have done it.
    """

    def column_stochastic(self, n: int, step: int | None = None) -> bool:
        """See `Topology.column_stochastic`."""
        return True

    def doubly_stochastic(self, n: int, step: int | None = None) -> bool:
        """See `Topology.doubly_stochastic`."""
        return True

    def check(self, n: int, step: int = 0) -> None:
        """See `Topology.check`: only numbers of ranks that a topology cannot have are refused."""
        if n < 1:
            raise ValueError(f"a topology needs at least one rank, not n={n}")
        self.out(0, n, step)


class Circulant(Regular):
    """Rank i sends to i + s mod n for the same shifts s on all ranks, all weights 1 / (d + 1).

    All such W commute, and the discrete Fourier transform of a column gives their eigenvalues:
    lambda_k = (1 + sum_s exp(-2 pi i k s / n)) / (d + 1).
    """

    @abstractmethod
    def shifts(self, n: int, step: int) -> tuple[int, ...]:
        """Return the d different shifts of a step, each in 1, ..., n - 1."""

    def out(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
        """See `Topology.out`."""
        shifts = self.shifts(n, step)
        weight = 1 / (len(shifts) + 1)
        return {(rank + s) % n: weight for s in shifts}

    def into(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
        """See `Topology.into`."""
        shifts = self.shifts(n, step)
        weight = 1 / (len(shifts) + 1)
        return {(rank - s) % n: weight for s in shifts}

    def self_weight(self, rank: int, n: int, step: int = 0) -> float:
        """See `Topology.self_weight`."""
        return 1 / (len(self.shifts(n, step)) + 1)

    def spectral_gap(self, n: int) -> float:
        """See `Topology.spectral_gap`: from the Fourier transforms, in O(T n log n)."""
        period = self.period(n) or 1
        eigenvalues = np.ones(n)
        for step in range(period):
            column = np.zeros(n)
            column[[0, *self.shifts(n, step)]] = self.self_weight(0, n, step)
            eigenvalues *= np.abs(np.fft.fft(column))
        second = float(eigenvalues[1:].max(initial=0.0))
        # What rounding leaves of a zero has a large root.
        return 1.0 if second < 1e-12 else 1.0 - float(min(1.0, second) ** (1 / period))


class Symmetric(Regular):
    """Who sends also hears, with the same weight."""

    def into(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
        """See `Topology.into`: the same as `out`."""
        return self.out(rank, n, step)


class Matching(Symmetric):
    """At each step disjoint pairs average: x_i, x_j <- (x_i + x_j) / 2."""

    @abstractmethod
    def partner(self, rank: int, n: int, step: int) -> int:
        """Return whom `rank` meets at a step; itself if it sits out."""

    def out(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
        """See `Topology.out`."""
        peer = self.partner(rank, n, step)
        return {} if peer == rank else {peer: 0.5}
