"""Step time against the number of nodes: gossip beside plain and overlapped all-reduce.

    python benchmarks/scaling.py                  # 4 to 256 simulated nodes, about a minute
    mpirun -n 4 python benchmarks/scaling.py --mpi --parameters 1e6

ResNet-50 on 10 Gbit/s Ethernet, as in the papers on stochastic gradient push: 25.6 million
parameters, 265 ms of computation a step on every node, one third of it forward, with a seeded,
normal jitter of 5 %. The same function runs on MPI, where a computation is a sleep.

Then the model is calibrated on one published number, AllReduce SGD's 420 ms at 32 nodes, by the
time of computation, and predicts those of SGP and OSGP (Wang et al. 2020, arXiv 1910.00643, table
2a). The methods overlap as `attach` lets them: plain AllReduce and SGP not at all, all-reduce in
buckets behind the backward computation, OSGP's messages behind the next step.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import relaxmpi as rx

NODES = (4, 8, 16, 32, 64, 128, 256)
PARAMETERS = 25.6e6
COMPUTE, FORWARD, JITTER = 0.265, 1 / 3, 0.05
BUCKET = 25 * 2**20  # bytes, DDP's default
HELD = 8192  # numbers that stand for all parameters in the simulated world
WARM = 2  # steps before the clock starts
SYNCHRONOUS = ("AllReduce", "overlapped")  # no step depends on earlier ones: a quarter will do
PUBLISHED = {"AllReduce": 0.420, "SGP": 0.304, "OSGP": 0.271}  # seconds, 32 nodes
Step = Callable[[float], None]


@rx.primitive
def mean(comm: rx.Comm, x: np.ndarray) -> Iterator[Any]:
    """All-reduce in its two halves, each in one go.

    `rx.allreduce` sends the same bytes in pieces of 1 MiB, which keep processors and links busy
    at once; for 102 MB among 256 nodes that is a simulation of hours.
    """

    def flow() -> Iterator[Any]:
        chunk = yield from rx.reduce_scatter.flow(comm, x, op=rx.MEAN)
        yield from rx.allgather.flow(comm, chunk, x)

    return flow()


def plain(comm: rx.Comm, x: np.ndarray, _buckets: int) -> Step:
    """AllReduce SGD: the whole computation, then the exchange."""

    def step(seconds: float) -> None:
        comm.compute(seconds)
        mean(comm, x)

    return step


def overlapped(comm: rx.Comm, x: np.ndarray, buckets: int) -> Step:
    """AllReduce SGD, each bucket as soon as the backward computation has filled it."""
    parts = np.array_split(x, buckets)

    def step(seconds: float) -> None:
        comm.compute(seconds * FORWARD)
        works = []
        for part in parts:
            comm.compute(seconds * (1 - FORWARD) / buckets)
            works.append(mean.start(comm, part))
        for work in works:
            work.wait()

    return step


def gossip(algorithm: rx.Algorithm) -> Callable[[rx.Comm, np.ndarray, int], Step]:
    """The whole computation, then a step of an algorithm, which returns when it may go on."""

    def of(comm: rx.Comm, x: np.ndarray, _buckets: int) -> Step:
        bound, g = algorithm.bind(comm, x, lr=0.0), np.zeros_like(x)

        def step(seconds: float) -> None:
            comm.compute(seconds)
            bound.step(g)

        return step

    return of


METHODS = {
    "AllReduce": plain,
    "overlapped": overlapped,
    "SGP": gossip(rx.SGP()),
    "OSGP": gossip(rx.OSGP(tau=1)),
}


def seconds_per_step(
    comm: rx.Comm, method: str, x: np.ndarray, given: argparse.Namespace, compute: float
) -> float:
    """Mean over the ranks: those of a gossip need not end at the same time."""
    buckets = math.ceil(given.parameters * 4 / BUCKET)
    step = METHODS[method](comm, x, buckets)
    noise = np.random.default_rng([given.seed, comm.rank])
    steps = max(1, given.steps // 4) if method in SYNCHRONOUS else given.steps
    times = compute * (1 + given.jitter * noise.standard_normal(WARM + steps)).clip(0.1)
    with comm.background():
        begin = comm.now()
        for k, seconds in enumerate(times):
            if k == WARM:
                begin = comm.now()
            step(float(seconds))
        taken = (comm.now() - begin) / steps
    return float(rx.allreduce(comm, taken, op=rx.MEAN))


def simulated(nodes: int, method: str, given: argparse.Namespace, compute: float) -> float:
    # Between nodes buffers go in segments that are short enough to travel while both ends compute.
    # Here one message stands for all of them: the times are the same, with far fewer events.
    network = rx.Network.ethernet(
        given.gbit * 1e9,
        latency=given.latency,
        scale=given.parameters / HELD,
        segment=2**30,
        eager=2**31,
    )

    def program() -> float:
        with rx.Comm.world() as comm:
            return seconds_per_step(comm, method, np.zeros(HELD, "f4"), given, compute)

    world = rx.SimulatedWorld(nodes, network=network, seed=given.seed, grouped_above=2)
    return float(world.run(program)[0])


def calibrated(given: argparse.Namespace, nodes: int = 32) -> tuple[float, dict[str, float]]:
    """Find the computation with which AllReduce takes what was published; predict the others."""

    def excess(compute: float) -> float:
        return simulated(nodes, "AllReduce", given, compute) - PUBLISHED["AllReduce"]

    low, high = 0.5 * given.compute, given.compute
    at_low, at_high = excess(low), excess(high)
    compute = low - at_low * (high - low) / (at_high - at_low)  # it is linear in the computation
    return compute, {method: simulated(nodes, method, given, compute) for method in METHODS}


def row(head: str, cells: Iterable[str]) -> str:
    return f"{head:>16}" + "".join(f"{cell:>14}" for cell in cells)


def draw(table: dict[int, dict[str, float]], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(6, 4), layout="constrained")
    for method in next(iter(table.values())):
        panel.plot(list(table), [1e3 * taken[method] for taken in table.values()], "o-")
    panel.set(xscale="log", xlabel="nodes", ylabel="ms a step", ylim=(0, None))
    panel.set_xticks(list(table), list(map(str, table)), minor=False)
    panel.set_xticks([], minor=True)
    panel.legend(panel.get_lines(), list(next(iter(table.values()))))
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=130)


def report(given: argparse.Namespace) -> None:
    print(
        f"simulated: {given.parameters:,.0f} parameters, {given.gbit:g} Gbit/s, "
        f"{given.latency * 1e6:g} us, {given.compute * 1e3:g} ms of computation with "
        f"{given.jitter:.0%} jitter; ms a step, mean of {given.steps} steps and all nodes\n"
    )
    print(row("nodes", given.methods))
    table: dict[int, dict[str, float]] = {}
    for nodes in given.nodes:
        table[nodes] = {m: simulated(nodes, m, given, given.compute) for m in given.methods}
        print(row(str(nodes), (f"{1e3 * s:.1f}" for s in table[nodes].values())), flush=True)
    first, last = table[given.nodes[0]], table[given.nodes[-1]]
    print(row("growth", (f"{last[m] / first[m] - 1:+.1%}" for m in given.methods)))
    if given.plot:
        draw(table, given.plot)
    if not given.calibrate:
        return
    compute, predicted = calibrated(given)
    print(f"\n32 nodes; {compute * 1e3:.0f} ms of computation make AllReduce take 420 ms\n")
    print(row("", predicted))
    print(row("predicted", (f"{1e3 * s:.0f}" for s in predicted.values())))
    known = [PUBLISHED.get(method) for method in predicted]
    print(row("published", (f"{1e3 * s:.0f}" if s else "-" for s in known)))
    pairs = zip(predicted.values(), known, strict=True)
    print(row("miss", (f"{p / s - 1:+.1%}" if s else "-" for p, s in pairs)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mpi", action="store_true", help="on the ranks that mpirun started")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--parameters", type=float, default=PARAMETERS)
    parser.add_argument("--gbit", type=float, default=10.0, help="per second, simulated")
    parser.add_argument("--latency", type=float, default=50e-6, help="seconds, simulated")
    parser.add_argument("--compute", type=float, default=COMPUTE, help="seconds a step")
    parser.add_argument("--jitter", type=float, default=JITTER, help="standard deviation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="such as out/scaling.png")
    parser.add_argument("--calibrate", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    if not given.mpi:
        report(given)
        return 0
    with rx.Comm.world() as comm:
        x = np.zeros(int(given.parameters), "f4")
        taken = {m: seconds_per_step(comm, m, x, given, given.compute) for m in given.methods}
        if comm.rank == 0:
            print(f"{comm.size} ranks: {int(given.parameters):,} parameters, ms a step\n")
            print(row("", taken))
            print(row("", (f"{1e3 * s:.1f}" for s in taken.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
