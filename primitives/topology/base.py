"""Topologies: who sends to whom, and with which weight, in decentralised training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from math import fsum, isfinite
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives.topology import spectrum

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Topology"]

_TOLERANCE = 1e-6  # of sums of weights: those of a matrix in fp32 pass


class Topology(ABC):
    """Who sends to whom at each step, and with which weight: a value, independent of n.

    At one step the ranks mix as x <- W x, where W[i, j] is the weight that rank j puts on what
    it sends to rank i. What a rank gives away and what it keeps add up to 1, so W is column
    stochastic and sum_i x_i never changes: this is all that `push_sum` needs. `neighbor_allreduce`
    also needs rows that sum to 1 (W is then doubly stochastic), or x would be biased.

    Which one to choose:

    - `OnePeerExponential` for `push_sum` and OSGP: one message a step, the exact mean after
      log2(n) steps if n is a power of two.
    - `BaseGraph` where messages must go both ways, or the mean must be exact for any n.
    - `Exponential` where the schedule must stay fixed (compressed gossip with replicas): log2(n)
      messages a step. `Ring` if the network is a ring or n is small: its gap falls with 1/n^2.
    - `RandomPairs` for pairwise averaging of ranks that drop out or run at their own pace.
    - `Complete` as the oracle: neighbour averaging on it is an all-reduce.

    Your own is a frozen dataclass with one method, `out`; all else follows from it. If `out`
    depends on the step, say `varies = True`, and give `period` if it has one. The repr is what
    ranks compare, so it must tell all that matters.

    Attributes:
        varies: Whether the step matters.

    Example:
        >>> from dataclasses import dataclass
        >>> import relaxmpi as rx
        >>> @dataclass(frozen=True)
        ... class OneWayRing(rx.Topology):
        ...     def out(self, rank, n, step=0):
        ...         return {(rank + 1) % n: 0.5} if n > 1 else {}
        >>> OneWayRing().into(0, n=3), OneWayRing().self_weight(0, n=3)
        ({2: 0.5}, 0.5)
        >>> OneWayRing().matrix(n=3)
        array([[0.5, 0. , 0.5],
               [0.5, 0.5, 0. ],
               [0. , 0.5, 0.5]])
        >>> OneWayRing().check(n=3)
        >>> round(OneWayRing().spectral_gap(n=3), 6)
        0.5
    """

    varies: ClassVar[bool] = False

    @abstractmethod
    def out(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
        """Return the ranks that `rank` of n sends to, with the weight put on what is sent.

        The weights are not negative and sum to at most 1. Without peers (n = 1, a rank that sits
        out) the dict is empty. Equal on all ranks that ask.
        """

    def into(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
        """Return the ranks that `rank` of n hears from, with the weights *they* put on it.

        By default found by asking all ranks for `out`, which costs O(n) and cannot disagree.
        """
        return {
            peer: weights[rank]
            for peer in range(n)
            if peer != rank and rank in (weights := self.out(peer, n, step))
        }

    def self_weight(self, rank: int, n: int, step: int = 0) -> float:
        """Return the weight that `rank` keeps: by default 1 - the sum of `out`."""
        return 1.0 - fsum(self.out(rank, n, step).values())

    def period(self, n: int) -> int | None:
        """Return after how many steps the schedule repeats; None if never, or not known."""
        return None if self.varies else 1

    def matrix(self, n: int, step: int = 0) -> NDArray[np.float64]:
        """Return the mixing matrix W of a step: (n, n), columns that sum to 1.

        Example:
            >>> import relaxmpi as rx
            >>> rx.Ring().matrix(n=4) * 3
            array([[1., 1., 0., 1.],
                   [1., 1., 1., 0.],
                   [0., 1., 1., 1.],
                   [1., 0., 1., 1.]])
        """
        W = np.zeros((n, n))
        for j in range(n):
            W[j, j] = self.self_weight(j, n, step)
            for i, weight in self.out(j, n, step).items():
                W[i, j] = weight
        return W

    def column_stochastic(self, n: int, step: int | None = None) -> bool:
        """Whether all that ranks give and keep sums to 1, at `step` or at every step.

        Raises:
            ValueError: Without `step`, if the schedule has no known period.
        """
        return all(_stochastic(self, n, k)[0] for k in self._steps(n, step))

    def doubly_stochastic(self, n: int, step: int | None = None) -> bool:
        """Whether the rows sum to 1 as well, so that x itself (not x / w) goes to the mean.

        Raises:
            ValueError: Without `step`, if the schedule has no known period.
        """
        return all(all(_stochastic(self, n, k)) for k in self._steps(n, step))

    def keeps(self, n: int) -> bool:
        """Whether every rank keeps some weight in all steps of a period, the first if unknown.

        Example:
            >>> import relaxmpi as rx
            >>> rx.Ring().keeps(n=4), rx.from_matrix([[0, 1], [1, 0]]).keeps(n=2)
            (True, False)
        """
        steps, ranks = range(self.period(n) or 1), range(n)
        return all(self.self_weight(rank, n, step) > _TOLERANCE for step in steps for rank in ranks)

    def _steps(self, n: int, step: int | None) -> range:
        period = self.period(n)
        if step is not None:
            step = step % period if period else step
            return range(step, step + 1)
        if period is None:
            raise ValueError(f"{self!r} has no period for n={n}: ask for one step")
        return range(period)

    def spectral_gap(self, n: int) -> float:
        """Return 1 - rho, where rho is the factor by which disagreement shrinks a step, in the end.

        rho = |lambda_2(P)|^(1/T), with P the product of the W of one period of T steps and
        lambda_2 its second largest eigenvalue; 1 if P averages exactly, 0 if the ranks never
        agree. Costs O(T n^3) unless there is a closed form.

        Raises:
            ValueError: If the schedule has no known period.

        Example:
            >>> import relaxmpi as rx
            >>> round(rx.Exponential().spectral_gap(16), 6)      # 2 / (1 + log2 n)
            0.4
            >>> rx.OnePeerExponential().spectral_gap(16)
            1.0
        """
        return spectrum.gap(self, n)

    def finite_time(self, n: int) -> int | None:
        """Return after how many steps from step 0 every rank holds exactly the mean, or None.

        Decided in exact arithmetic, with the weights read as fractions, over one period (up to
        64 powers of a matrix that does not vary). None also if there is no known period.

        Example:
            >>> import relaxmpi as rx
            >>> rx.OnePeerExponential().finite_time(8), rx.OnePeerExponential().finite_time(6)
            (3, None)
        """
        return spectrum.exact_after(self, n)

    def check(self, n: int, step: int = 0) -> None:
        """Refuse lists that do not fit each other at a step.

        Looks at all ranks, so that each rank comes to the same verdict without a message; the
        verdict is remembered for each topology, n and step within the period.

        Raises:
            ValueError: Naming rank, peer and step: a peer out of range, a self edge, a weight
                that is negative or not finite, weights that do not sum to 1, an in-list that
                does not match the out-lists, or a schedule that does not repeat as it says.
            TypeError: If the topology is no value, because it cannot be hashed.
        """
        period = self.period(n)
        try:
            _check(self, n, step % period if period else step)
        except TypeError:
            try:
                hash(self)
            except TypeError:
                raise TypeError(
                    f"a topology must be hashable, as a frozen dataclass is, not {self!r}"
                ) from None
            raise

    def plot(self, n: int, path: str | Path | None = None, step: int = 0) -> Any:
        """Draw the messages of a step on a circle of ranks.

        Needs matplotlib (in the extra `examples`).

        Args:
            n: Number of ranks.
            path: File to write, such as "ring.png"; None to write none.
            step: The step to draw.

        Returns:
            The `matplotlib.figure.Figure`; a notebook shows it.
        """
        from relaxmpi.primitives.topology import plot

        return plot.plot(self, n, path, step)


@lru_cache(maxsize=4096)
def _stochastic(topology: Topology, n: int, step: int) -> tuple[bool, bool]:
    """Whether the columns of W sum to 1, and the rows, without making the matrix."""
    rows = [topology.self_weight(rank, n, step) for rank in range(n)]
    columns = list(rows)
    lowest = min(rows)
    for rank in range(n):
        for peer, weight in topology.out(rank, n, step).items():
            columns[rank] += weight
            rows[peer] += weight
            lowest = min(lowest, weight)
    sums = (max(abs(total - 1) for total in totals) for totals in (columns, rows))
    ones = tuple(lowest >= -_TOLERANCE and error < _TOLERANCE for error in sums)
    return ones[0], ones[1]


@lru_cache(maxsize=4096)
def _check(topology: Topology, n: int, step: int) -> None:
    if n < 1:
        raise ValueError(f"a topology needs at least one rank, not n={n}")
    into: list[dict[int, float]] = [{} for _ in range(n)]
    period = topology.period(n)
    for rank in range(n):
        weights = topology.out(rank, n, step)
        _check_out(topology, rank, n, step, weights)
        for peer, weight in weights.items():
            into[peer][rank] = weight
        if period is not None and topology.out(rank, n, step + period) != weights:
            hint = f"period({n}) cannot be {period}" if topology.varies else "say varies = True"
            raise ValueError(
                f"{topology!r}: the peers of rank {rank} of {n} differ between steps {step} and "
                f"{step + period}: {hint}"
            )
    if type(topology).into is not Topology.into:  # which asks all ranks, for each of them
        for rank in range(n):
            _check_into(topology, rank, n, step, into[rank])


def _check_out(topology: Topology, rank: int, n: int, step: int, weights: dict[int, float]) -> None:
    where = f"{topology!r}, step {step}: rank {rank} of {n}"
    for peer, weight in weights.items():
        if peer not in range(n):
            raise ValueError(f"{where} sends to rank {peer}, which does not exist")
        if peer == rank:
            raise ValueError(f"{where} sends to itself: what it keeps is self_weight")
        if not (isfinite(weight) and weight >= 0):
            raise ValueError(
                f"{where} gives rank {peer} the weight {weight}: it must be finite and not negative"
            )
    kept = topology.self_weight(rank, n, step)
    if not (isfinite(kept) and kept >= -_TOLERANCE):
        raise ValueError(f"{where} keeps {kept} for itself: it gives away more than 1")
    total = fsum([kept, *weights.values()])
    if abs(total - 1) > _TOLERANCE:
        raise ValueError(f"{where} gives and keeps weights that sum to {total}, not to 1")


def _check_into(topology: Topology, rank: int, n: int, step: int, sent: dict[int, float]) -> None:
    where = f"{topology!r}, step {step}: rank {rank} of {n}"
    heard = topology.into(rank, n, step)
    for peer in sorted(heard.keys() | sent.keys()):
        if peer not in sent:
            raise ValueError(f"{where} expects rank {peer}, which does not send to it")
        if peer not in heard:
            raise ValueError(f"{where} does not expect rank {peer}, which sends to it")
        if heard[peer] != sent[peer]:
            raise ValueError(
                f"{where} expects the weight {heard[peer]} from rank {peer}, "
                f"which puts {sent[peer]} on it"
            )
