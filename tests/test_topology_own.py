"""Topologies of users: matrices, graphs, classes of their own, what is refused; plots."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxmpi as rx

# --- matrices and graphs -----------------------------------------------------------------------


def test_a_matrix_comes_back_with_columns_that_sum_to_one_exactly() -> None:
    W = rx.Exponential().matrix(6).astype(np.float32)
    again = rx.from_matrix(W)
    assert rx.from_matrix(again.matrix(6)) == again
    np.testing.assert_allclose(again.matrix(6), W, atol=1e-7)
    for rank in range(6):
        total = Fraction(again.self_weight(rank, 6))
        total += sum(map(Fraction, again.out(rank, 6).values()))
        assert abs(total - 1) < 2**-53
        assert again.into(rank, 6) == rx.Topology.into(again, rank, 6)
    assert again.doubly_stochastic(6) and not again.varies
    again.check(6)


def test_ranks_can_compare_matrices_by_their_repr() -> None:
    a, b = (rx.from_matrix(rx.Ring().matrix(n)) for n in (4, 5))
    for same in (rx.Ring().matrix(4), rx.Ring().matrix(4).tolist(), a.matrix(4)):
        again = rx.from_matrix(same)
        assert again == a and hash(again) == hash(a) and repr(again) == repr(a)
    other = rx.Ring().matrix(4)
    other[:2, 0] += [1e-9, -1e-9]
    assert len({repr(a), repr(b), repr(rx.from_matrix(other))}) == 3


def test_column_stochastic_matrices_are_told_from_doubly_stochastic_ones() -> None:
    W = np.array([[0.5, 0, 0.25], [0.5, 0.5, 0.25], [0, 0.5, 0.5]])
    given = rx.from_matrix(W)
    given.check(3)
    assert given.column_stochastic(3) and not given.doubly_stochastic(3)
    with pytest.raises(ValueError, match="give the transpose"):
        rx.from_matrix(W.T)


@pytest.mark.parametrize(
    ("W", "message"),
    [
        (np.ones(4), "must be a square matrix"),
        (np.ones((2, 3)), "must be a square matrix"),
        (np.ones((0, 0)), "must be a square matrix"),
        ([[1.5, 0], [-0.5, 1]], r"W\[1, 0\] is -0.5"),
        ([[1, np.nan], [0, 1]], r"W\[0, 1\] is nan"),
        ([[1, 0.5], [0, 0.4]], r"column 1 of W sums to 0.9, not to 1"),
    ],
)
def test_matrices_that_are_refused(W: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rx.from_matrix(W)


def test_a_matrix_is_for_its_own_number_of_ranks() -> None:
    four = rx.from_matrix(rx.Ring().matrix(4))
    for ask in (four.check, four.matrix, lambda n: four.into(0, n)):
        with pytest.raises(ValueError, match="is a matrix for 4 ranks, but there are 5"):
            ask(5)


def test_graphs_of_networkx() -> None:
    networkx = pytest.importorskip("networkx")
    star = rx.from_networkx(networkx.star_graph(3))  # Metropolis-Hastings: 1 / (1 + 3)
    np.testing.assert_array_equal(star.matrix(4)[0], [0.25] * 4)
    np.testing.assert_array_equal(star.matrix(4).diagonal(), [0.25, 0.75, 0.75, 0.75])
    assert star.doubly_stochastic(4)
    digraph = rx.from_networkx(networkx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2), (1, 1)]))
    assert digraph.out(0, 3) == {1: 1 / 3, 2: 1 / 3}
    assert digraph.out(1, 3) == {2: 1 / 2}
    assert digraph.column_stochastic(3) and not digraph.doubly_stochastic(3)
    # Numbers are ranks, whatever the order; other nodes come in the order of the graph.
    assert rx.from_networkx(networkx.DiGraph([(2, 0), (0, 1)])).out(2, 3) == {0: 0.5}
    assert rx.from_networkx(networkx.DiGraph([("b", "a"), ("a", "c")])).out(0, 3) == {1: 0.5}
    parallel = networkx.MultiGraph([(0, 1), (0, 1), (1, 2)])
    assert rx.from_networkx(parallel) == rx.from_networkx(networkx.path_graph(3))
    with pytest.raises(TypeError, match="must be a networkx graph"):
        rx.from_networkx([(0, 1)])
    with pytest.raises(ValueError, match="square matrix"):
        rx.from_networkx(networkx.Graph())


# --- topologies of users -----------------------------------------------------------------------


@dataclass(frozen=True)
class Mine(rx.Topology):
    sends: Any = None
    hears: Any = None
    keeps: Any = None

    def out(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
        peers = self.sends or (lambda rank, n, step: {(rank + 1) % n: 0.5})
        return dict(peers(rank, n, step))

    def into(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
        return dict(self.hears(rank, n, step)) if self.hears else super().into(rank, n, step)

    def self_weight(self, rank: int, n: int, step: int = 0) -> float:
        return float(self.keeps(rank)) if self.keeps else super().self_weight(rank, n, step)


@dataclass(frozen=True)
class Varying(Mine):
    varies = True


@dataclass(frozen=True)
class Periodic(Varying):
    def period(self, n: int) -> int:
        return 3


def test_out_alone_makes_a_topology() -> None:
    mine = Mine()
    mine.check(5)
    assert mine.into(0, 5) == {4: 0.5}
    assert mine.doubly_stochastic(5)
    assert mine.spectral_gap(5) == pytest.approx(1 - math.cos(math.pi / 5))
    assert mine.finite_time(2) == 1


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (Mine(lambda r, n, s: {n: 0.5}), "rank 0 of 4 sends to rank 4, which does not exist"),
        (Mine(lambda r, n, s: {r - 1: 0.5}), "rank 0 of 4 sends to rank -1, which does not exist"),
        (Mine(lambda r, n, s: {r: 0.5}), "step 2: rank 0 of 4 sends to itself"),
        (Mine(lambda r, n, s: {(r + 1) % n: -0.5}), "gives rank 1 the weight -0.5"),
        (Mine(lambda r, n, s: {(r + 1) % n: math.inf}), "gives rank 1 the weight inf"),
        (Mine(lambda r, n, s: {(r + 1) % n: 1.5}), "keeps -0.5 for itself: it gives away more"),
        (Mine(keeps=lambda r: 0.6), "weights that sum to 1.1, not to 1"),
        (
            Mine(hears=lambda r, n, s: {(r + 1) % n: 0.5}),
            "step 2: rank 0 of 4 expects rank 1, which does not send to it",
        ),
        (
            Mine(hears=lambda r, n, s: {}),
            "step 2: rank 0 of 4 does not expect rank 3, which sends to it",
        ),
        (
            Mine(hears=lambda r, n, s: {(r - 1) % n: 0.4}),
            "expects the weight 0.4 from rank 3, which puts 0.5 on it",
        ),
        (
            Mine(lambda r, n, s: {(r + 1 + s % 2) % n: 0.5}),
            "rank 0 of 4 differ between steps 0 and 1: say varies = True",
        ),
        (
            Periodic(lambda r, n, s: {(r + 1 + s % 2) % n: 0.5}),
            r"rank 0 of 4 differ between steps 2 and 5: period\(4\) cannot be 3",
        ),
    ],
)
def test_lists_that_do_not_fit_are_found(topology: rx.Topology, message: str) -> None:
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(ValueError, match=message.replace("step 2", "step [02]")):
            topology.check(4, 2)


def test_a_check_is_remembered_within_the_period() -> None:
    asked: list[int] = []

    def sends(rank: int, n: int, step: int) -> dict[int, float]:
        asked.append(step)
        return {(rank + 1) % n: 0.5}

    for topology, different in ((Mine(sends), 1), (Periodic(sends), 3), (Varying(sends), 30)):
        asked.clear()
        for step in range(30):
            topology.check(4, step)
        assert len(asked) <= 24 * different
        for step in range(30):
            asked.clear()
            topology.check(4, step)
            assert not asked


def test_without_a_period_a_step_must_be_given() -> None:
    varying = Varying()
    assert varying.period(4) is None and varying.finite_time(4) is None
    for ask in (varying.doubly_stochastic, varying.column_stochastic, varying.spectral_gap):
        with pytest.raises(ValueError, match="has no period for n=4"):
            ask(4)
    assert varying.doubly_stochastic(4, step=7)


def test_a_topology_must_be_a_value() -> None:
    @dataclass
    class Loose(rx.Topology):
        def out(self, rank: int, n: int, step: int = 0) -> dict[int, float]:
            return {}

    with pytest.raises(TypeError, match="must be hashable, as a frozen dataclass is"):
        Loose().check(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rx.OnePeerExponential(0),
        lambda: rx.OnePeerExponential(1.5),
        lambda: rx.BaseGraph(peers=0),
        lambda: rx.RandomPairs(seed=-1),
        lambda: rx.RandomPairs(seed=2**32),
        lambda: rx.Ring().check(0),
        lambda: Mine().check(0),
    ],
)
def test_bad_numbers_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"must be a number from|needs at least one rank"):
        make()


# --- plots -------------------------------------------------------------------------------------


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    figure = rx.OnePeerExponential().plot(6, tmp_path / "one.png", step=1)
    (axes,) = figure.axes
    assert len(axes.patches) == 6
    assert axes.get_title() == "OnePeerExponential(peers=1), n=6, step 1"
    assert (tmp_path / "one.png").stat().st_size > 1000
    assert len(rx.Ring().plot(1).axes[0].patches) == 0
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"relaxmpi\[examples\]"):
        rx.Ring().plot(3)
