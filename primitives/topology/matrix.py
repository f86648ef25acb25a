"""Topologies given as a matrix or as a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from relaxmpi.primitives.topology.base import Topology

__all__ = ["FromMatrix", "from_matrix", "from_networkx"]


@dataclass(frozen=True, repr=False)
class FromMatrix(Topology):
    """A static topology for one number of ranks; made by `from_matrix` and `from_networkx`.

    Attributes:
        n: The number of ranks.
        digest: Of the matrix: ranks compare it, through the repr.
    """

    n: int
    digest: str
    _keeps: tuple[float, ...] = field(compare=False)
    _sends: tuple[dict[int, float], ...] = field(compare=False)
    _hears: tuple[dict[int, float], ...] = field(compare=False)

    def __repr__(self) -> str:
        return f"from_matrix(<{self.n} ranks, {self.digest}>)"

    def out(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
        """See `Topology.out`."""
        self._fits(n)
        return dict(self._sends[rank])

    def into(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
        """See `Topology.into`."""
        self._fits(n)
        return dict(self._hears[rank])

    def self_weight(self, rank: int, n: int, step: int = 0) -> float:
        """See `Topology.self_weight`."""
        self._fits(n)
        return self._keeps[rank]

    def _fits(self, n: int) -> None:
        if n != self.n:
            raise ValueError(f"{self!r} is a matrix for {self.n} ranks, but there are {n}")


def from_matrix(W: ArrayLike) -> FromMatrix:
    """Return the static topology with the mixing matrix W, x <- W x.

    W[i, j] is the weight on what rank j sends to rank i; zeros are no edges. Columns must sum to 1
    (to 1e-6: the diagonal is then set to what makes them exact), and rows too for what needs
    a doubly stochastic matrix.

    Raises:
        ValueError: If W is not square, has an entry that is negative or not finite, or a column
            that does not sum to 1.

    Example:
        >>> import relaxmpi as rx
        >>> chain = rx.from_matrix([[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
        >>> chain
        from_matrix(<3 ranks, 01e9c276ef6d>)
        >>> chain.out(0, n=3), chain.doubly_stochastic(n=3), chain.finite_time(n=3)
        ({1: 0.5}, True, None)
    """
    M: NDArray[np.float64] = np.array(W, dtype=np.float64) + 0.0  # no -0 in the digest
    if M.ndim != 2 or M.shape[0] != M.shape[1] or M.size == 0:
        raise ValueError(f"W must be a square matrix, not of shape {M.shape}")
    if not (np.isfinite(M).all() and (M >= 0).all()):
        i, j = np.argwhere(~(np.isfinite(M) & (M >= 0)))[0]
        raise ValueError(f"W[{i}, {j}] is {M[i, j]}: weights are finite and not negative")
    sums = M.sum(0)
    j = int(np.abs(sums - 1).argmax())
    if abs(sums[j] - 1) > 1e-6:
        rows = " (the rows do: give the transpose)" if np.allclose(M.sum(1), 1) else ""
        raise ValueError(f"column {j} of W sums to {sums[j]}, not to 1{rows}")
    n = len(M)
    sends: list[dict[int, float]] = [{} for _ in range(n)]
    hears: list[dict[int, float]] = [{} for _ in range(n)]
    for i, j in np.argwhere(M).tolist():
        if i != j:
            sends[j][i] = hears[i][j] = float(M[i, j])
    for j in range(n):
        if abs(fsum(M[:, j]) - 1) > 2**-52:  # as in matrices that were made in fp32
            M[j, j] = 1 - fsum(sends[j].values())
    digest = sha256(M.astype("<f8").tobytes()).hexdigest()[:12]
    keeps = tuple(M.diagonal().tolist())
    return FromMatrix(n, digest, keeps, tuple(sends), tuple(hears))


def from_networkx(G: Any) -> FromMatrix:
    """Return the static topology of a networkx graph.

    Rank k is node k if the nodes are the numbers 0, ..., n - 1, otherwise the k-th of `G.nodes`.
    Attributes of edges, parallel edges and self loops do not count. Weights:

    - undirected: Metropolis-Hastings, W[i, j] = 1 / (1 + max(d_i, d_j)), doubly stochastic
      (Xiao, Boyd and Lall 2005);
    - directed: 1 / (1 + out-degree), column stochastic, for `push_sum`.

    Raises:
        TypeError: If G is no graph.
        ValueError: If the graph has no nodes.

    Example:
        >>> import networkx                                             # doctest: +SKIP
        >>> torus = networkx.grid_2d_graph(3, 3, periodic=True)         # doctest: +SKIP
        >>> round(rx.from_networkx(torus).spectral_gap(n=9), 6)         # doctest: +SKIP
        0.6
    """
    if not hasattr(G, "is_directed"):
        raise TypeError(f"G must be a networkx graph, not {G!r}")
    nodes = list(G.nodes)
    if set(nodes) == set(range(len(nodes))):
        nodes = sorted(nodes)
    rank = {node: k for k, node in enumerate(nodes)}
    n = len(nodes)
    A = np.zeros((n, n), dtype=bool)  # A[i, j]: j sends to i
    for edge in G.edges:
        j, i = rank[edge[0]], rank[edge[1]]
        A[i, j] = i != j
        if not G.is_directed():
            A[j, i] = i != j
    degree = A.sum(0)
    larger = degree if G.is_directed() else np.maximum(degree[:, None], degree)
    W = A / (1.0 + larger)
    W[np.diag_indices(n)] = 1 - W.sum(0)
    return from_matrix(W)
