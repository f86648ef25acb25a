"""Topologies of pairs: matchings, the published formulas, random ones that all ranks share."""

from typing import Any

import numpy as np
import pytest

import relaxmpi as rx

EVEN_N = [rx.BipartiteExponential(), rx.ShiftOne()]


def partners(topology: Any, n: int, step: int) -> list[int]:
    return [topology.partner(rank, n, step) for rank in range(n)]


@pytest.mark.parametrize("topology", EVEN_N, ids=repr)
def test_pairs_are_perfect_matchings_across_two_halves(topology: Any) -> None:
    for n in range(2, 34, 2):
        for step in range(topology.period(n)):
            met = partners(topology, n, step)
            assert all(met[met[rank]] == rank != met[rank] for rank in range(n))
            if isinstance(topology, rx.BipartiteExponential):
                assert all((rank + met[rank]) % 2 for rank in range(n))
            else:
                assert all((rank < n // 2) != (met[rank] < n // 2) for rank in range(n))


@pytest.mark.parametrize("topology", EVEN_N, ids=repr)
@pytest.mark.parametrize("n", [3, 5, 33])
def test_odd_numbers_are_refused_in_one_sentence(topology: rx.Topology, n: int) -> None:
    message = rf"{type(topology).__name__}\(\) needs an even number of ranks, not {n}: .*any number"
    for refuse in (topology.check, topology.matrix, topology.finite_time):
        with pytest.raises(ValueError, match=message):
            refuse(n)
    with pytest.raises(ValueError, match=message):
        topology.into(1, n, 4)


def test_shift_one_is_that_of_bagua() -> None:
    shift = rx.ShiftOne()
    assert [partners(shift, 4, s) for s in (0, 1)] == [[2, 3, 0, 1], [3, 2, 1, 0]]
    assert [partners(shift, 6, s) for s in range(3)] == [
        [3, 4, 5, 0, 1, 2],
        [4, 5, 3, 2, 0, 1],
        [5, 3, 4, 1, 2, 0],
    ]
    assert partners(shift, 8, 1) == [5, 6, 7, 4, 3, 0, 1, 2]
    for n in (2, 4, 6, 16):
        met = {(rank, shift.partner(rank, n, s)) for rank in range(n // 2) for s in range(n // 2)}
        assert len(met) == (n // 2) ** 2


def test_bipartite_exponential_is_the_published_formula_without_repeats() -> None:
    pairs = rx.BipartiteExponential()
    # D = 1, 3, 5, 9, both signs: modulo 16 all differ.
    shifts = [pairs.partner(1, 16, step) - 1 for step in range(8)]
    assert [shift % 16 for shift in shifts] == [d % 16 for d in (1, -1, 3, -3, 5, -5, 9, -9)]
    # Modulo 8, -5 and 5 are 3 and -3 again.
    assert pairs.period(8) == 4
    assert pairs.period(2) == 1


@pytest.mark.parametrize("n", [2, 3, 4, 5, 16, 33])
def test_random_pairs_are_matchings_and_one_sits_out_if_n_is_odd(n: int) -> None:
    for step in range(50):
        met = partners(rx.RandomPairs(seed=3), n, step)
        assert all(met[met[rank]] == rank for rank in range(n))
        assert sum(met[rank] == rank for rank in range(n)) == n % 2


def test_random_pairs_are_the_same_everywhere_and_uniform() -> None:
    assert partners(rx.RandomPairs(seed=1), 4, 0) == [2, 3, 0, 1]  # pinned: part of saved runs
    state = np.random.get_state()[1]
    counts = np.zeros(6)
    for step in range(3000):
        counts[partners(rx.RandomPairs(), 6, step)[0]] += 1
    assert (np.random.get_state()[1] == state).all()
    assert counts[0] == 0
    assert np.abs(counts[1:] / 600 - 1).max() < 0.15  # about 3.7 standard deviations
    steps = [partners(rx.RandomPairs(seed), 16, step) for seed in (0, 1) for step in (0, 1, 2**31)]
    assert len({tuple(met) for met in steps}) == 6


@pytest.mark.parametrize(("n", "mean"), [(8, 6 / 14), (5, 0.5), (2, 0.0)])
def test_random_pairs_shrink_disagreement_by_the_formula(n: int, mean: float) -> None:
    pairs = rx.RandomPairs(seed=2)
    x = np.arange(float(n)) - (n - 1) / 2
    ratios = [np.sum((pairs.matrix(n, s) @ x) ** 2) / np.sum(x**2) for s in range(1500)]
    assert np.mean(ratios) == pytest.approx(mean, abs=0.03)
    assert pairs.spectral_gap(n) == pytest.approx(1 - mean**0.5)
    assert pairs.finite_time(n) == (1 if n == 2 else None)
