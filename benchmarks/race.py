"""Seconds to the loss that Adam ends with: 1-bit Adam, warm-up included, against torch DDP.

    python benchmarks/race.py --lab hosts=4,latency=0.1ms,bandwidth=100Mbit

The network and the digits of examples/train_digits.py, one thread a rank. Both train for the same
steps on the same batches, DDP with torch's Adam and the bucket size that was its fastest in a few
steps before. Every few steps, while the clock stands, the loss on 1,000 images kept for that is
taken. DDP's last losses are the mark; 1-bit Adam goes on, up to 1.5 times the steps, until the mean
of as many is not above it.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset
from training import CAPS, adam_of, ddp, gloo, in_lab, new_model, onebit, parallel_of

import relaxmpi as rx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_digits import digits

BATCH = 32
LAST = 5  # losses that are averaged


class Point(NamedTuple):
    """A loss, and what it took."""

    step: int
    seconds: float
    loss: float


def fastest_cap(comm: rx.Comm) -> int:
    """DDP's best bucket size here; of the slowest rank, so that all agree."""
    taken = {}
    for cap in CAPS:
        step = ddp(comm, cap, "adam")
        for _ in range(3):  # buckets are rebuilt in the first ones
            step()
        begin = time.perf_counter()
        for _ in range(3):
            step()
        taken[cap] = rx.allreduce(comm, time.perf_counter() - begin, op=rx.MAX)
    return min(taken, key=taken.__getitem__)


def run(
    comm: rx.Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[TensorDataset, TensorDataset],
    steps: int,
    every: int,
    done: Callable[[list[Point]], bool] = lambda seen: False,
) -> list[Point]:
    """Train; the clock stands while the loss is taken."""
    (images, labels), (unseen, right) = data[0].tensors, data[1].tensors
    mine = slice(comm.rank, None, comm.size)
    order = torch.Generator().manual_seed(0)
    seconds, seen = 0.0, list[Point]()
    for step in range(1, steps + 1):
        batch = torch.randperm(len(images), generator=order)[: BATCH * comm.size][mine]
        rx.barrier(comm)
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        seconds += time.perf_counter() - begin
        if step % every == 0:
            with torch.no_grad():
                own = nn.functional.cross_entropy(model(unseen[mine]), right[mine])
            loss = rx.allreduce(comm, own.item(), op=rx.MEAN)
            seen.append(Point(step, rx.allreduce(comm, seconds, op=rx.MAX), loss))
            if done(seen):
                break
    return seen


def mark_of(seen: list[Point]) -> float:
    return statistics.mean(point.loss for point in seen[-LAST:])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lab", help="such as hosts=4,latency=0.1ms,bandwidth=100Mbit")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=float, default=0.2, help="share of the steps")
    parser.add_argument("--every", type=int, default=4, help="steps between losses")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.lab:
        rest = [f"--{k}={v}" for k, v in vars(given).items() if k != "lab" and v is not None]
        return in_lab(__file__, given.lab, rest)
    torch.set_num_threads(1)
    comm = rx.Comm.world()
    data = digits(comm)
    with gloo(comm):
        cap = fastest_cap(comm)
        model, _ = new_model()
        theirs = run(comm, parallel_of(model, cap), adam_of(model), data, given.steps, given.every)
    mark, freeze = mark_of(theirs), round(given.warmup * given.steps)

    def reached(seen: list[Point]) -> bool:
        return seen[-1].step > freeze and len(seen) >= LAST and mark_of(seen) <= mark

    model, optimizer = onebit(comm, freeze)
    ours = run(comm, model, optimizer, data, given.steps * 3 // 2, given.every, reached)
    if comm.rank == 0:
        then, now = theirs[-1], ours[-1]
        print(
            f"{comm.size} ranks: DDP with Adam ({cap} MiB) took {then.seconds:.1f} s for "
            f"{then.step} steps to a loss of {mark:.4f};\n1-bit Adam, {freeze} steps of warm-up, "
            + (
                f"had it after {now.step} steps and {now.seconds:.1f} s: "
                f"{then.seconds / now.seconds:.2f} times as fast"
                if reached(ours)
                else f"had {mark_of(ours):.4f} after {now.step} steps and {now.seconds:.1f} s"
            )
        )
        if given.json is not None:
            given.json.write_text(json.dumps({"cap": cap, "ddp": theirs, "onebit": ours}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
