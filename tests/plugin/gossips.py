"""Quadratics, and worlds of simulated ranks, for the tests of decentralised algorithms."""

import copy

import numpy as np

import relaxmpi as rx


def simulate(n, function, seed=0, delayed=False):
    """Run on n simulated ranks; with `delayed`, half of the messages come late, at random."""
    faults = [rx.faults.Delay(0.5, seconds=3e-3)] if delayed else []
    return rx.SimulatedWorld(n, seed=seed, faults=faults).run(function)


def pulls(comm, scale=1.0, size=1):
    """The gradient of (x - b)^2 / 2, with b the rank."""
    return lambda x: scale * (x - np.full(size, float(comm.rank)))


class Bowl:
    """f(x) = (x - b)^T A (x - b) / 2 with random symmetric positive A, of each rank's own."""

    def __init__(self, rank, size=5):
        numbers = np.random.default_rng(rank)
        root = numbers.standard_normal((size, size))
        self.A, self.b = root @ root.T / size + 0.1 * np.eye(size), numbers.standard_normal(size)

    def grad(self, x):
        return self.A @ (x - self.b)


def same_everywhere(runs):
    """Whether all ranks returned the same bytes."""
    return all(np.asarray(r).tobytes() == np.asarray(runs[0]).tobytes() for r in runs)


def descend(opt, x, grad, steps):
    """Take steps and return x after each."""
    seen = []
    for _ in range(steps):
        opt.step(grad(x))
        seen.append(x.copy())
    return np.array(seen)


def check_resume(comm, spec, steps=9):
    """Save at every step of a run, resume each, and compare all that follows bit by bit."""
    grad = Bowl(comm.rank).grad
    x = np.ones(5)
    opt = spec.bind(comm, x, lr=0.05)
    whole, states = [], []
    for _ in range(steps):
        states.append(copy.deepcopy((x, opt.state_dict())))
        opt.step(grad(x))
        whole.append(x.copy())
    opt.finish()
    end = x.copy()
    for t, (kept, state) in enumerate(states):
        y = np.ones(5)
        again = spec.bind(comm, y, lr=0.05)
        y[...] = kept
        again.load_state_dict(state)
        got = descend(again, y, grad, steps - t)
        again.finish()
        assert got.tobytes() == np.array(whole[t:]).tobytes(), f"resumed at step {t}"
        assert y.tobytes() == end.tobytes(), f"resumed at step {t}"
