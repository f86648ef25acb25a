"""Seconds that simulated worlds take here: processor time, one core, medians.

    python benchmarks/simulation.py --rounds 5

Each program runs once before it is timed, which compiles its kernels.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import relaxmpi as rx

COUNT = 1000


def sixteen() -> None:
    """16 ranks, 100 compressed all-reduces."""

    def program() -> None:
        with rx.Comm.world() as comm:
            x = np.random.default_rng(comm.rank).standard_normal(COUNT).astype(np.float32)
            for _ in range(100):
                rx.allreduce(comm, x, codec=rx.MinMaxUInt8())

    rx.SimulatedWorld(16).run(program)


def neighbours() -> None:
    """1,024 ranks, 10 exchanges with the neighbours on a ring."""

    def program() -> None:
        with rx.Comm.world() as comm:
            x = np.ones(COUNT, np.float32)
            for _ in range(10):
                rx.neighbor_allreduce(comm, x, topology=rx.Ring())

    rx.SimulatedWorld(1024).run(program)


def large() -> None:
    """256 ranks, one compressed all-reduce."""

    def program() -> None:
        with rx.Comm.world() as comm:
            rx.allreduce(comm, np.ones(COUNT, np.float32), codec=rx.MinMaxUInt8())

    rx.SimulatedWorld(256).run(program)


def seeds() -> None:
    """1,000 seeds of a program of three verbs on 3 ranks."""

    def program() -> None:
        with rx.Comm.world() as comm:
            x = np.ones(COUNT, np.float32)
            rx.allreduce(comm, x)
            rx.broadcast(comm, x)
            rx.allgather(comm, x)

    for seed in range(1000):
        rx.SimulatedWorld(3, seed=seed).run(program)


PROGRAMS: dict[Callable[[], None], float] = {sixteen: 5, neighbours: 10, large: 5, seeds: 60}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{'':62}{'seconds':>8}{'bar':>6}")
    for program, bar in PROGRAMS.items():
        program()
        taken = []
        for _ in range(given.rounds):
            begin = time.process_time()
            program()
            taken.append(time.process_time() - begin)
        print(f"{program.__doc__:62}{statistics.median(taken):8.2f}{bar:6}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
