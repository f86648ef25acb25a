"""Laws of topologies: weights sum to 1, lists fit, the mean is exact when it is said to be."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relaxmpi as rx
from relaxmpi.primitives.topology.spectrum import product

ANY_N = [
    rx.Complete(),
    rx.Ring(),
    rx.Exponential(),
    *(rx.OnePeerExponential(peers) for peers in (1, 2, 3, 7)),
    rx.RandomPairs(),
    rx.RandomPairs(seed=7),
    rx.BaseGraph(),
    rx.BaseGraph(peers=3),
]
EVEN_N = [rx.BipartiteExponential(), rx.ShiftOne()]
SIZES = range(1, 34)
EVERY = [(t, n) for t in ANY_N + EVEN_N for n in SIZES if t in ANY_N or n == 1 or n % 2 == 0]


def steps(topology: rx.Topology, n: int) -> range:
    return range(topology.period(n) or 6)


def J(n: int) -> np.ndarray:
    return np.full((n, n), 1 / n)


def contraction(topology: rx.Topology, n: int, first: int = 0) -> float:
    """The worst factor of the disagreement over one period."""
    period = topology.period(n)
    assert period is not None
    return float(np.linalg.norm(product(topology, n, first, period) - J(n), 2))


# --- laws of all built-in ones -----------------------------------------------------------------


@pytest.mark.parametrize("topology", ANY_N + EVEN_N, ids=repr)
def test_in_and_out_lists_fit_and_weights_sum_to_one(topology: rx.Topology) -> None:
    for n in [n for t, n in EVERY if t is topology]:
        for step in steps(topology, n):
            # Closed forms against what follows from `out` of all the others.
            for rank in range(n):
                out = topology.out(rank, n, step)
                assert rank not in out and set(out) <= set(range(n))
                assert topology.into(rank, n, step) == rx.Topology.into(topology, rank, n, step)
                kept = topology.self_weight(rank, n, step)
                assert kept == pytest.approx(rx.Topology.self_weight(topology, rank, n, step))
                assert kept > 0 and all(weight > 0 for weight in out.values())
                assert abs(math.fsum([kept, *out.values()]) - 1) < 1e-15
            W = topology.matrix(n, step)
            np.testing.assert_allclose(W.sum(0), 1, rtol=0, atol=1e-14)
            np.testing.assert_allclose(W.sum(1), 1, rtol=0, atol=1e-14)
            rx.Topology.check(topology, n, step)  # the one by looking at all ranks
            topology.check(n, step)
        if topology.period(n):
            assert rx.Topology.column_stochastic(topology, n)
            assert rx.Topology.doubly_stochastic(topology, n)
        assert topology.column_stochastic(n) and topology.doubly_stochastic(n)


@pytest.mark.parametrize("topology", ANY_N + EVEN_N, ids=repr)
def test_one_rank_has_no_peers_and_is_the_mean(topology: rx.Topology) -> None:
    for step in range(3):
        assert topology.out(0, 1, step) == topology.into(0, 1, step) == {}
        assert topology.self_weight(0, 1, step) == 1
    assert topology.period(1) == 1
    assert topology.finite_time(1) == 0
    assert topology.spectral_gap(1) == 1


@pytest.mark.parametrize("topology", ANY_N + EVEN_N, ids=repr)
def test_two_ranks_average_exactly_in_one_step(topology: rx.Topology) -> None:
    for step in range(3):
        np.testing.assert_array_equal(topology.matrix(2, step), J(2))
    assert topology.finite_time(2) == 1


@pytest.mark.parametrize("topology", ANY_N + EVEN_N, ids=repr)
def test_schedules_repeat_after_their_period(topology: rx.Topology) -> None:
    for n in (2, 6, 10, 16):
        period = topology.period(n)
        if period:
            for step in (0, 1, 5):
                for rank in range(n):
                    again = topology.out(rank, n, step + 3 * period)
                    assert topology.out(rank, n, step) == again
        assert topology.varies or period == 1


@pytest.mark.parametrize("topology", ANY_N + EVEN_N, ids=repr)
def test_values(topology: rx.Topology) -> None:
    assert eval(repr(topology), {type(topology).__name__: type(topology)}) == topology
    assert hash(topology) == hash(type(topology)(**vars(topology)))
    with pytest.raises(AttributeError):
        topology.peers = 5  # type: ignore[attr-defined]


@settings(max_examples=40, deadline=None)
@given(
    topology=st.sampled_from(ANY_N),
    n=st.integers(1, 130),
    step=st.integers(-5, 2**40),
)
def test_lists_fit_at_any_step_and_size(topology: rx.Topology, n: int, step: int) -> None:
    rx.Topology.check(topology, n, step)
    assert rx.Topology.doubly_stochastic(topology, n, step)


# --- finite time -------------------------------------------------------------------------------


def gossip(topology: rx.Topology, x: np.ndarray, first: int, count: int) -> np.ndarray:
    """As ranks do it, in the precision of x."""
    n = len(x)
    for step in range(first, first + count):
        mixed = x.copy()
        for rank in range(n):
            mixed[rank] = x[rank] * x.dtype.type(topology.self_weight(rank, n, step))
            for peer, weight in topology.into(rank, n, step).items():
                mixed[rank] += x[peer] * x.dtype.type(weight)
        x = mixed
    return x


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("topology", [rx.OnePeerExponential(), rx.BaseGraph()], ids=repr)
def test_powers_of_two_average_bit_for_bit(topology: rx.Topology, n: int) -> None:
    rounds = n.bit_length() - 1
    assert topology.period(n) == topology.finite_time(n) == rounds
    for first in range(rounds):  # from any step on: these W commute
        x = gossip(topology, np.arange(n, dtype=np.float32), first, rounds)
        assert (x == (n - 1) / 2).all()


@pytest.mark.parametrize("n", [3, 9, 27])
def test_powers_of_three_average_with_two_peers(n: int) -> None:
    two = rx.OnePeerExponential(peers=2)
    rounds = round(math.log(n, 3))
    assert two.period(n) == two.finite_time(n) == rounds
    x = gossip(two, np.arange(float(n)), 1, rounds)
    np.testing.assert_allclose(x, (n - 1) / 2, rtol=1e-15 * n)


def test_one_peer_exponential_is_exact_for_powers_only() -> None:
    exact = {n for n in range(2, 34) if rx.OnePeerExponential().finite_time(n) is not None}
    assert exact == {2, 4, 8, 16, 32}
    for topology in (rx.Ring(), rx.Exponential()):
        assert topology.finite_time(2) == 1
        assert topology.finite_time(12) is None
    assert rx.Ring().finite_time(3) == rx.Exponential().finite_time(3) == 1  # both are complete
    assert rx.Complete().finite_time(7) == 1


def test_an_exact_mean_is_not_mistaken_for_a_good_one() -> None:
    n = 8
    close = (1 - 1e-3) * J(n) + 1e-3 * np.eye(n)  # below all tolerances after 4 steps
    assert rx.from_matrix(close).finite_time(n) is None
    # de Bruijn: a static digraph whose powers become J, though it is no projection.
    W = np.zeros((n, n))
    for j in range(n):
        W[2 * j % n, j] = W[(2 * j + 1) % n, j] = 0.5
    assert rx.from_matrix(W).finite_time(n) == 3
    assert rx.from_matrix(W).spectral_gap(n) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("peers", [1, 2, 3, 4])
def test_base_graph_is_exact_for_every_n(peers: int) -> None:
    graph = rx.BaseGraph(peers)
    for n in range(1, 100):
        rounds = graph.period(n)
        assert rounds <= 2 * math.log(n, peers + 1) + 2
        assert np.abs(product(graph, n, 0, rounds) - 1 / n).max() < 1e-14
        assert max(len(graph.out(r, n, s)) for r in range(n) for s in range(rounds)) <= peers
        if n < 34:
            assert graph.finite_time(n) == (0 if n == 1 else rounds)
            assert graph.spectral_gap(n) == 1
            for step in range(rounds):
                W = graph.matrix(n, step)
                np.testing.assert_array_equal(W, W.T)


def test_base_graph_published_lengths() -> None:
    """Base-2 graphs of 5 and 6 ranks, as in the figures of the paper."""
    assert [rx.BaseGraph().period(n) for n in (5, 6)] == [5, 4]


# --- spectra -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(4, 65))
def test_gap_of_the_exponential_graph(n: int) -> None:
    gap = rx.Exponential().spectral_gap(n)
    known = {5: 0.75, 7: 0.646, 9: 0.558, 15: 0.510}
    if n % 2 == 0:
        assert gap == pytest.approx(2 / (1 + math.ceil(math.log2(n))), rel=1e-12)
    elif n in known:
        assert gap == pytest.approx(known[n], abs=6e-4)
    else:
        assert gap > 2 / (1 + math.ceil(math.log2(n)))


@pytest.mark.parametrize("n", [3, 4, 5, 16, 33, 100])
def test_gap_of_the_ring(n: int) -> None:
    expected = (2 - 2 * math.cos(2 * math.pi / n)) / 3
    assert rx.Ring().spectral_gap(n) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("topology", ANY_N, ids=repr)
def test_closed_forms_of_gaps(topology: rx.Topology) -> None:
    for n in (3, 5, 6, 12, 15):
        if topology.period(n):
            general = rx.Topology.spectral_gap(topology, n)
            assert topology.spectral_gap(n) == pytest.approx(general, abs=1e-6)


def test_hypercube_and_one_way_ring() -> None:
    networkx = pytest.importorskip("networkx")
    for q in (2, 3, 4):
        cube = rx.from_networkx(networkx.hypercube_graph(q))
        assert cube.spectral_gap(2**q) == pytest.approx(2 / (q + 1))
    ring = rx.from_networkx(networkx.cycle_graph(7, create_using=networkx.DiGraph))
    assert ring.spectral_gap(7) == pytest.approx(1 - math.cos(math.pi / 7))


CYCLES = {
    3: 0.25,
    5: 0.2023,
    6: 0.2165,
    7: 0.125,
    9: 0.1175,
    10: 0.1924,
    12: 0.2091,
    15: 0.0625,
    24: 0.2073,
    33: 0.0311,
}


@pytest.mark.parametrize("n", CYCLES)
def test_contraction_of_one_cycle_of_one_peer_exponential(n: int) -> None:
    one, m = rx.OnePeerExponential(), rx.OnePeerExponential().period(n)
    formula = max(
        abs(math.sin(math.pi * k * 2**m / n)) / (2**m * abs(math.sin(math.pi * k / n)))
        for k in range(1, n)
    )
    for first in range(m):
        assert contraction(one, n, first) == pytest.approx(formula, abs=1e-12)
    assert formula == pytest.approx(CYCLES[n], abs=6e-5)
    assert one.spectral_gap(n) == pytest.approx(1 - formula ** (1 / m))


def test_coinciding_and_self_edges_are_struck_out() -> None:
    two = rx.OnePeerExponential(peers=2)
    assert [two.out(0, 6, step) for step in range(2)] == [{1: 1 / 3, 2: 1 / 3}, {3: 1 / 2}]
    # Kept with their weights they would leave 2/9 after the cycle; without them nothing is left.
    assert two.finite_time(6) == 2
    assert rx.OnePeerExponential(peers=3).out(1, 4, 0) == {2: 0.25, 3: 0.25, 0: 0.25}
    for n in (6, 18, 54):
        for step in range(4):
            assert 0 not in two.out(0, n, step)
    for n in (6, 8, 12, 24, 32, 48):
        rx.Topology.check(rx.OnePeerExponential(peers=3), n, 1)
