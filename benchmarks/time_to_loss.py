"""Wall-clock to the same loss: OSGP against AllReduce SGD, both through `attach`.

    python benchmarks/time_to_loss.py --lab hosts=4,latency=5ms,bandwidth=1Gbit
    mpirun -n 4 python benchmarks/time_to_loss.py

The network of examples/train_digits.py learns its digits; each rank sees 32 images a step. Chosen
beforehand: both have the same constant learning rate, that example's, which was set for AllReduce
SGD, and the target is the loss on the test images that AllReduce SGD has after epoch 4 (`--epoch`).
Every ten steps the clock stops and the mean model is evaluated; OSGP goes on until its loss is down
to the target, at most twice as long. The clock is that of the slowest rank. Before it starts both
take a few steps with another model.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import relaxmpi as rx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_digits import digits, network
from training import in_lab

BASE = rx.SGD()
METHODS = {"OSGP, tau = 1": rx.OSGP(tau=1)}
EIGHT_BITS = {"OSGP, tau = 1, 8 bit": rx.OSGP(tau=1, codec=rx.Quantizer(bits=8))}
LR, BATCH, EVERY = 0.15, 32, 10


class Curve(NamedTuple):
    """After so many steps and seconds, on the slowest rank, the mean model had this loss."""

    steps: list[int]
    seconds: list[float]
    losses: list[float]

    def reaches(self, target: float) -> int | None:
        """Return the place of the first loss that is down to the target."""
        return next((k for k, loss in enumerate(self.losses) if loss <= target), None)


@torch.no_grad()
def loss_of(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    return nn.functional.cross_entropy(model(images), labels).item()


def batches(data: TensorDataset, comm: rx.Comm, seed: int) -> Iterator[list[torch.Tensor]]:
    """Go through the training images again and again, in another order each time."""
    sampler = DistributedSampler(data, comm.size, comm.rank, seed=seed, drop_last=True)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def train(
    comm: rx.Comm, algorithm: rx.Algorithm, data: Any, steps: int, seed: int, target: float = 0.0
) -> Curve:
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    curve = Curve([], [], [])
    clock = 0.0
    stream = batches(data[0], comm, seed)
    with rx.attach(model, optimizer, algorithm, comm=comm) as sync:
        while (done := len(curve.steps) * EVERY) < steps:
            rx.barrier(comm)
            begin = time.perf_counter()
            few = min(EVERY, steps - done)
            for images, labels in itertools.islice(stream, few):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
            clock += rx.allreduce(comm, time.perf_counter() - begin, op=rx.MAX)
            with sync.averaged():
                loss = loss_of(model, data[1])
            for column, value in zip(curve, (done + few, clock, loss), strict=True):
                column.append(value)
            if rx.allreduce(comm, loss, op=rx.MAX) <= target:
                break
    return curve


def compare(comm: rx.Comm, given: argparse.Namespace) -> dict[str, Curve]:
    torch.set_num_threads(1)
    data = digits(comm)
    methods = METHODS | (EIGHT_BITS if given.codec else {})
    for algorithm in (BASE, *methods.values()):
        train(comm, algorithm, data, 3, given.seed)
    steps = given.epoch * (len(data[0]) // comm.size // BATCH)
    base = train(comm, BASE, data, steps, given.seed)
    target = rx.allreduce(comm, base.losses[-1], op=rx.MAX)
    return {"AllReduce SGD": base} | {
        title: train(comm, algorithm, data, 2 * steps, given.seed, target)
        for title, algorithm in methods.items()
    }


def report(curves: dict[str, Curve], given: argparse.Namespace) -> None:
    base = curves["AllReduce SGD"]
    target = base.losses[-1]
    print(f"target: {target:.4f}, AllReduce SGD's test loss after epoch {given.epoch}\n")
    print(f"{'':22}{'ms/step':>9}{'steps':>7}{'seconds':>9}{'sooner':>8}")
    for title, curve in curves.items():
        each = curve.seconds[-1] / curve.steps[-1]
        k = len(base.steps) - 1 if curve is base else curve.reaches(target)
        if k is None:
            print(f"{title:22}{each * 1e3:9.1f}{'':7}{'not yet':>9}")
        else:
            taken = curve.seconds[k]
            sooner = base.seconds[-1] / taken
            print(f"{title:22}{each * 1e3:9.1f}{curve.steps[k]:7}{taken:9.2f}{sooner:7.2f}x")
    if given.json is not None:
        given.json.write_text(json.dumps({title: c._asdict() for title, c in curves.items()}))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lab", help="such as hosts=4,latency=5ms,bandwidth=1Gbit")
    parser.add_argument("--epoch", type=int, default=4, help="whose loss is the target")
    parser.add_argument("--codec", action="store_true", help="OSGP in 8 bit, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.lab:
        rest = [f"--epoch={given.epoch}", f"--seed={given.seed}"]
        rest += ["--codec"] * given.codec + ([f"--json={given.json}"] if given.json else [])
        return in_lab(__file__, given.lab, rest)
    with rx.Comm.world() as comm:
        curves = compare(comm, given)
        if comm.rank == 0:
            report(curves, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
