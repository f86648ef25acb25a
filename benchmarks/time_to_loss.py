"""Wall-clock to the same loss: OSGP against AllReduce SGD, both through `attach`.

    python benchmarks/time_to_loss.py --lab hosts=4,latency=5ms,bandwidth=1Gbit
    mpirun -n 4 python benchmarks/time_to_loss.py

The network of examples/train_digits.py learns its digits; each rank sees 32 images a step. Chosen
beforehand: both have the same constant learning rate, that example's, which was set for AllReduce
SGD, and the target is the mean training loss of AllReduce SGD in epoch 4 (`--epoch`). OSGP takes as
long as it takes to come down to the same mean over as many steps, at most twice as many
epochs. The clock of a step is that of the slowest rank; before it starts both take a few steps of
another model. At the end the mean model is evaluated on the test images.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import relaxmpi as rx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_digits import accuracy, digits, network
from training import in_lab

METHODS = {"AllReduce SGD": rx.SGD(), "OSGP, tau = 1": rx.OSGP(tau=1)}
EIGHT_BITS = {"OSGP, tau = 1, 8 bit": rx.OSGP(tau=1, codec=rx.Quantizer(bits=8))}
LR, BATCH = 0.15, 32


class Curve(NamedTuple):
    """Seconds at which each step ended on the slowest rank, and the mean loss of all ranks."""

    seconds: np.ndarray
    losses: np.ndarray
    accuracy: float

    def reaches(self, target: float, window: int) -> tuple[float, int]:
        """Seconds and steps until the mean over a window is down to the target."""
        means = np.convolve(self.losses, np.ones(window) / window, mode="valid")
        below = np.flatnonzero(means <= target)
        if not len(below):
            return np.inf, len(self.losses)
        step = int(below[0]) + window - 1
        return float(self.seconds[step]), step + 1


def train(comm: rx.Comm, algorithm: rx.Algorithm, data, epochs: int, seed: int) -> Curve:
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sampler = DistributedSampler(data[0], comm.size, comm.rank, seed=seed, drop_last=True)
    loader = DataLoader(data[0], BATCH, sampler=sampler, drop_last=True)
    seconds, losses = [], []
    with rx.attach(model, optimizer, algorithm, comm=comm) as sync:
        rx.barrier(comm)
        begin = time.perf_counter()
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                seconds.append(time.perf_counter() - begin)
        with sync.averaged():
            right = accuracy(model, data[1])
    return Curve(
        rx.allreduce(comm, np.array(seconds), op=rx.MAX),
        rx.allreduce(comm, np.array(losses), op=rx.MEAN),
        right,
    )


def compare(comm: rx.Comm, given: argparse.Namespace) -> dict[str, Curve]:
    torch.set_num_threads(1)
    data = digits(comm)
    methods = METHODS | (EIGHT_BITS if given.codec else {})
    few = torch.utils.data.Subset(data[0], range(3 * BATCH * comm.size))
    for algorithm in methods.values():
        train(comm, algorithm, (few, data[1]), 1, given.seed)
    whole = given.epoch * given.longer
    return {
        title: train(
            comm, algorithm, data, given.epoch if title == "AllReduce SGD" else whole, given.seed
        )
        for title, algorithm in methods.items()
    }


def report(curves: dict[str, Curve], given: argparse.Namespace) -> None:
    base = curves["AllReduce SGD"]
    window = len(base.losses) // given.epoch
    target = float(base.losses[-window:].mean())
    print(f"target: {target:.4f}, AllReduce SGD's mean loss in epoch {given.epoch}\n")
    print(f"{'':22}{'ms/step':>9}{'steps':>7}{'seconds':>9}{'sooner':>8}{'accuracy':>10}")
    for title, curve in curves.items():
        if curve is base:
            taken, steps = float(base.seconds[-1]), len(base.losses)
        else:
            taken, steps = curve.reaches(target, window)
        each = curve.seconds[-1] / len(curve.seconds)
        print(
            f"{title:22}{each * 1e3:9.1f}{steps:7}{taken:9.2f}{base.seconds[-1] / taken:7.2f}x"
            f"{curve.accuracy:10.1%}"
        )
    if given.json is not None:
        found = {t: [c.seconds.tolist(), c.losses.tolist(), c.accuracy] for t, c in curves.items()}
        given.json.write_text(json.dumps({"target": target, "curves": found}))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lab", help="such as hosts=4,latency=5ms,bandwidth=1Gbit")
    parser.add_argument("--epoch", type=int, default=4, help="whose loss is the target")
    parser.add_argument("--longer", type=int, default=2, help="how many times as long OSGP may go")
    parser.add_argument("--codec", action="store_true", help="OSGP in 8 bit, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.lab:
        rest = [f"--epoch={given.epoch}", f"--longer={given.longer}", f"--seed={given.seed}"]
        rest += ["--codec"] * given.codec + ([f"--json={given.json}"] if given.json else [])
        return in_lab(__file__, given.lab, rest)
    with rx.Comm.world() as comm:
        curves = compare(comm, given)
        if comm.rank == 0:
            report(curves, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
