"""AsyncPushSum in worlds drawn at random: all must end, with all mass and within bounds."""

import contextlib

import numpy as np
import pytest

import relaxmpi as rx
from relaxmpi import faults

TOPOLOGIES = [
    rx.Ring(),
    rx.Exponential(),
    rx.OnePeerExponential(),
    rx.RandomPairs(),
    rx.BaseGraph(),
]
NETWORKS = [
    [],
    [faults.Delay(0.3, seconds=3e-3)],
    [faults.Drop(0.3), faults.Duplicate(0.2, later=2e-3), faults.Reorder(0.5, within=5e-3)],
    [faults.Drop(0.6)],
]


def averaged(comm, seed, topology, tau, codec, floor, saved):
    """Average for a while, the ranks for different numbers of steps."""
    rng = np.random.default_rng((seed, comm.rank))
    x = rng.standard_normal(5)
    begin = x.copy()
    memory = None if codec is None else rx.DifferenceCompression(codec)
    mix = rx.AsyncPushSum(comm, x, topology, max_staleness=tau, floor=floor, codec=memory)
    with comm.background() if seed % 3 == 0 else contextlib.nullcontext():
        for part in range(1 + saved):
            for _ in range(int(rng.integers(5, 30))):
                comm.compute(2e-3 * rng.random())
                mix.send()
                mix.fold()
            if part < saved:
                mix.load_state_dict(mix.state_dict())
        mix.close()
    assert tau is None or mix.stats.largest_staleness <= tau
    return begin, x, mix.w


def options(seed):
    """The options that all ranks draw."""
    rng = np.random.default_rng(seed)
    topology = TOPOLOGIES[rng.integers(len(TOPOLOGIES))]
    tau = [None, 0, 1, 3][rng.integers(4)]
    codec = [None, rx.Quantizer(bits=4)][rng.integers(2)]
    floor = float(rng.choice([0.0, 0.1, 0.6]))
    return topology, tau, codec, floor, bool(rng.integers(2))


@pytest.mark.parametrize("seed", range(24))
def test_all_mass_is_there_at_the_end(seed):
    rng = np.random.default_rng((1, seed))
    n = int(rng.integers(2, 8))
    hurt = [
        *NETWORKS[rng.integers(len(NETWORKS))],
        faults.Pause(int(rng.integers(n)), at=0.01, seconds=float(rng.choice([0.0, 0.1]))),
        faults.SlowDown(int(rng.integers(n)), factor=float(rng.choice([1.0, 8.0]))),
    ]

    def program():
        with rx.Comm.world(timeout=100) as comm:
            return averaged(comm, seed, *options(seed))

    world = rx.SimulatedWorld(n, faults=hurt, seed=seed, jitter=0.2)
    ends = world.run(program)
    assert abs(sum(begin - x for begin, x, _ in ends)).max() < 1e-12, world
    assert abs(sum(w for *_, w in ends) - n) < 1e-12, world


@pytest.mark.ranks(2, 3, 4)
def test_on_real_ranks(comm):
    for seed in range(4):
        begin, x, w = averaged(comm, seed, *options(seed))
        total = rx.allreduce(comm, np.append(begin - x, w - 1))
        assert abs(total).max() < 1e-12, options(seed)
