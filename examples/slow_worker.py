"""One rank is three times slower than the others: who waits for it?

    mpirun -n 4 python examples/slow_worker.py
    python examples/slow_worker.py --simulated 4      # the same in a world with a virtual clock

A small perceptron learns handwritten digits on all ranks. A gradient takes 10 ms, on the last rank
30 ms (`comm.compute`, so that the cores are free for the messages). AllReduce SGD waits for the
slow rank in every step. OSGP waits once messages are tau steps late. Push-sum without a bound and
AD-PSGD never wait. The loss is that of each rank's own model on all training images, averaged over
the ranks, against time.

Everything was chosen beforehand, in the simulated world with seeds 1 to 3: each learning rate as
the best of 0.4, 0.8, 1.2 and 1.6 (with 3.2 all methods diverge), and the target as the loss that
AllReduce SGD has after four fifths of its steps, rounded. OSGP sends every tau steps, as in
algorithm 2 of the paper: if it gave half of its model away in each of 16 steps before anything
came back, the rest would be too small to divide by.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits

import relaxmpi as rx

FAST, SLOW = 0.010, 0.030  # seconds a gradient
BATCH = 128
TARGET = 0.04
METHODS = {
    "AllReduce SGD": (rx.SGD(), 1.6),
    "OSGP, tau = 1": (rx.OSGP(tau=1), 1.6),
    "OSGP, tau = 4": (rx.OSGP(tau=4), 1.2),
    "OSGP, tau = 16": (rx.OSGP(tau=16), 0.8),
    "push-sum, no bound": (rx.OSGP(tau=None, topology=rx.Ring()), 1.6),
    "AD-PSGD": (rx.ADPSGD(), 1.6),
}


class Run(NamedTuple):
    """What a method gave: the loss at each of `times`, and steps of a fast and the slow rank."""

    times: np.ndarray
    losses: np.ndarray
    steps: tuple[int, int]

    def reaches(self, target: float) -> float:
        """Seconds until the loss is down to the target."""
        below = np.flatnonzero(self.losses <= target)
        return float(self.times[below[0]]) if len(below) else np.inf


class Perceptron:
    """64 pixels, 32 hidden units, 10 digits; its parameters are one flat array."""

    shapes = ((64, 32), (32,), (32, 10), (10,))
    size = sum(int(np.prod(shape)) for shape in shapes)

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = (images[:1440] / 16).astype("float32")
        self.targets = np.eye(10, dtype="float32")[labels[:1440]]

    def start(self, seed: int) -> np.ndarray:
        """Return the same random parameters on all ranks."""
        return np.random.default_rng(seed).normal(0, 0.2, self.size).astype("float32")

    def _forward(self, x: np.ndarray, chosen: np.ndarray | slice):
        ends = np.cumsum([np.prod(shape) for shape in self.shapes])[:-1]
        first, a, second, b = (
            part.reshape(shape) for part, shape in zip(np.split(x, ends), self.shapes, strict=True)
        )
        hidden = np.tanh(self.images[chosen] @ first + a)
        scores = hidden @ second + b
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, second, scores / scores.sum(axis=1, keepdims=True)

    def loss(self, x: np.ndarray) -> float:
        """Return the mean cross entropy of all images."""
        share = (self._forward(x, slice(None))[2] * self.targets).sum(axis=1)
        return float(-np.log(share + 1e-12).mean())

    def gradient(self, x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Return the gradient of the mean cross entropy of some images."""
        hidden, second, shares = self._forward(x, chosen)
        errors = (shares - self.targets[chosen]) / len(chosen)
        back = errors @ second.T * (1 - hidden**2)
        parts = (self.images[chosen].T @ back, back.sum(0), hidden.T @ errors, errors.sum(0))
        return np.concatenate([part.ravel() for part in parts])


def train(comm: rx.Comm, algorithm: rx.Algorithm, lr: float, steps: int, seed: int) -> Run:
    """Train for as long as the slow rank takes for so many steps."""
    net = Perceptron()
    slow = comm.rank == comm.size - 1
    x, batches = net.start(seed), np.random.default_rng([seed, comm.rank])
    first = algorithm.bind(comm, x.copy(), lr=lr)  # compiles kernels before the clock starts
    first.step(np.zeros_like(x))
    first.finish()
    optimizer = algorithm.bind(comm, x, lr=lr)
    seen = [(0.0, x.copy())]

    def step() -> float:
        chosen = batches.integers(1440 // comm.size, size=BATCH) * comm.size + comm.rank
        gradient = net.gradient(x, chosen)
        comm.compute(SLOW if slow else FAST)
        optimizer.step(gradient)
        seen.append((comm.now() - begin, x.copy()))
        return seen[-1][0]

    rx.barrier(comm)
    begin = comm.now()
    if algorithm.lockstep:
        for _ in range(steps):
            step()
    else:  # everyone takes as many steps as there is time for
        while step() < steps * SLOW:
            pass
    optimizer.finish()

    times, models = zip(*seen, strict=True)
    losses = np.array([net.loss(model) for model in models])
    grid = np.arange(0, steps * SLOW * 1.1, FAST)
    now = losses[np.searchsorted(times, grid, side="right") - 1]
    counts = rx.allgather(comm, np.array([len(seen) - 1])).ravel()
    return Run(grid, rx.allreduce(comm, now, op=rx.MEAN), (int(counts[0]), int(counts[-1])))


def work(given: argparse.Namespace) -> dict[str, Run]:
    """Train with each method."""
    with rx.Comm.world() as comm:
        return {
            title: train(comm, algorithm, given.lr or lr, given.steps, given.seed)
            for title, (algorithm, lr) in METHODS.items()
        }


def report(runs: dict[str, Run], where: str) -> None:
    """Print the table."""
    print(f"{where}, the last one three times slower; target: loss {TARGET}\n")
    print(f"{'':20}{'steps, fast':>12}{'slow':>6}{'last loss':>11}{'to target':>12}{'ratio':>8}")
    whole = runs["AllReduce SGD"].reaches(TARGET)
    for title, run in runs.items():
        taken = run.reaches(TARGET)
        ratio = f"{taken / whole:8.2f}" if whole < np.inf else ""
        print(
            f"{title:20}{run.steps[0]:12}{run.steps[1]:6}{run.losses[-1]:11.3f}"
            + (f"{taken:10.2f} s{ratio}" if taken < np.inf else f"{'not reached':>20}")
        )


def draw(runs: dict[str, Run], out: Path) -> None:
    """Write the plot."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for title, run in runs.items():
        panel.plot(run.times, run.losses, label=title)
    panel.axhline(TARGET, color="grey", linestyle=":")
    panel.set(xlabel="seconds", ylabel="training loss, mean over the ranks", yscale="log")
    panel.legend()
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=130)
    print(f"\nPlot: {out}")


def main() -> None:
    """Train here or in a simulated world; report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulated", type=int, metavar="RANKS")
    parser.add_argument("--steps", type=int, default=200, help="of AllReduce SGD")
    parser.add_argument("--lr", type=float, help="for all methods, instead of each one's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/slow_worker.png"))
    given = parser.parse_args()
    if given.simulated:
        runs = rx.SimulatedWorld(given.simulated, seed=given.seed).run(work, given)[0]
        where = f"{given.simulated} simulated ranks"
    else:
        runs = work(given)
        with rx.Comm.world() as comm:
            rank, where = comm.rank, f"{comm.size} ranks"
        if rank:
            return
    report(runs, where)
    draw(runs, given.out)


if __name__ == "__main__":
    main()
