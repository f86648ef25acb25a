"""What overlap, fusion and hierarchy are worth, each by itself, and what one rank pays.

    python benchmarks/attach.py overlap --lab hosts=2,latency=0.1ms,bandwidth=100Mbit
    mpirun -n 4 python benchmarks/attach.py fusion
    python benchmarks/attach.py hierarchy --lab hosts=2,latency=0.1ms,bandwidth=100Mbit
    python benchmarks/attach.py alone

`overlap`: backward is a fixed time asleep, spread over the layers, so that cores do not matter, and
as long as the communication takes. `fusion`: 300 small tensors. `hierarchy`: 4 MiB, two ranks a
host, flat against by node. `alone`: the cost on one rank.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import relaxmpi as rx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_digits
from training import Step, in_lab

LAYERS, WIDTH = 16, 256


class Slow(torch.autograd.Function):
    """The identity, whose backward takes a given time and no processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Return a copy."""
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep."""
        time.sleep(ctx.seconds)
        return g, None


def medians(cases: dict[str, Step], rounds: int, before: Callable[[], None]) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for step in cases.values():
        for _ in range(3):
            step()
    for _ in range(rounds):
        for name, step in cases.items():
            before()
            begin = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in taken.items()}


def stepper(
    model: nn.Module, forward: Callable[[], torch.Tensor], comm: rx.Comm | None, **given: Any
) -> tuple[Step, rx.Sync | None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = None if comm is None else rx.attach(model, optimizer, rx.SGD(), comm=comm, **given)

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    return step, sync


def overlap(comm: rx.Comm, rounds: int) -> None:
    seconds = [0.0]
    x = torch.randn(1, WIDTH)

    def case(overlapped: bool, background: bool) -> Step:
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

        def forward() -> torch.Tensor:
            y = x
            for layer in layers:
                y = Slow.apply(layer(y), seconds[0] / LAYERS)
            return y.sum()

        step, sync = stepper(
            layers, forward, comm, overlap=overlapped, bucket_bytes=2**19, first_bucket_bytes=2**18
        )
        assert sync is not None

        def run() -> None:
            with sync.background() if background else nullcontext():
                step()

        return run

    cases = {
        "O off": case(False, False),
        "hooks": case(True, False),
        "background": case(True, True),
    }
    exchange = medians({"O off": cases["O off"]}, rounds, lambda: rx.barrier(comm))["O off"]
    seconds[0] = rx.allreduce(comm, exchange, op=rx.MAX)
    found = medians(cases, rounds, lambda: rx.barrier(comm))
    if comm.rank == 0:
        whole = found["O off"] - seconds[0]
        print(f"backward {seconds[0] * 1e3:.0f} ms asleep, communication {whole * 1e3:.0f} ms")
        for name, t in found.items():
            print(f"{name:12}{t * 1e3:8.1f} ms a step, {(found['O off'] - t) / whole:6.1%} hidden")


def fusion(comm: rx.Comm, rounds: int) -> None:
    x = torch.randn(8, 16)
    cases = {}
    for name, given in {
        "fused": {},
        "each tensor by itself": {"bucket_bytes": 1, "first_bucket_bytes": 1},
    }.items():
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(150)))
        cases[name], _ = stepper(model, lambda model=model: model(x).sum(), comm, **given)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(150)))
    cases["compute alone"], _ = stepper(model, lambda: model(x).sum(), None)
    found = medians(cases, rounds, lambda: rx.barrier(comm))
    if comm.rank == 0:
        for name, t in found.items():
            print(f"{name:24}{t * 1e3:8.2f} ms a step")
        alone = found["compute alone"]
        ratio = (found["each tensor by itself"] - alone) / (found["fused"] - alone)
        print(f"exchange of 300 tensors: {ratio:.1f} times as fast when fused")


def hierarchy(comm: rx.Comm, rounds: int) -> None:
    x = torch.randn(2**20)
    with comm.by_node() as nodes:
        for codec in (None, rx.Quantizer(bits=8), rx.OneBit()):
            cases = {
                name: lambda where=where, codec=codec: rx.allreduce(
                    where, x, op=rx.MEAN, codec=codec
                )
                for name, where in {"flat": comm, "by node": nodes}.items()
            }
            found = medians(cases, rounds, lambda: rx.barrier(comm))
            if comm.rank == 0:
                flat, by_node = found["flat"] * 1e3, found["by node"] * 1e3
                print(
                    f"{codec or 'no codec'!s:50}{flat:8.1f} ms flat, {by_node:7.1f} ms by node, "
                    f"{flat / by_node:.2f} times as fast"
                )


def alone(comm: rx.Comm, rounds: int) -> None:
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
    cases = {}
    for name, where in {"plain": None, "attached": comm}.items():
        model = train_digits.network()

        def forward(model: nn.Module = model) -> torch.Tensor:
            return nn.functional.cross_entropy(model(images), labels)

        cases[name], _ = stepper(model, forward, where)
    found = medians(cases, rounds * 20, lambda: None)
    for name, t in found.items():
        print(f"{name:12}{t * 1e3:8.2f} ms a step, {t / found['plain'] - 1:+.1%}")


PARTS = {"overlap": overlap, "fusion": fusion, "hierarchy": hierarchy, "alone": alone}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=list(PARTS))
    parser.add_argument("--lab", help="such as hosts=2,latency=0.1ms,bandwidth=100Mbit")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    if given.lab:
        rest = [given.what, "--rounds", str(given.rounds)]
        return in_lab(__file__, given.lab, rest, 2 if given.what == "hierarchy" else 1)
    torch.set_num_threads(1)
    PARTS[given.what](rx.Comm.world(), given.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
