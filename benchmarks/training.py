"""Seconds of a training step: this library, torch DDP and (where installed) Horovod, in one run.

    mpirun -n 4 python benchmarks/training.py
    python benchmarks/training.py --lab hosts=4,latency=0.1ms,bandwidth=100Mbit
    python benchmarks/training.py --lab hosts=4,latency=5ms,bandwidth=1Gbit --methods sgp osgp
    python benchmarks/training.py --lab hosts=4,latency=5ms,bandwidth=1Gbit --wait 21ms

The network of examples/train_digits.py on random images, plain SGD, one thread a rank; and Adam,
with 1-bit Adam after its warm-up. DDP gets gradient views, a static graph and several bucket sizes;
ratios are to its best with the same optimizer. The methods take turns, a few steps each, so that
all of them see the same machine; medians over all turns. The kernels are compiled and DDP's buckets
rebuilt before the clock starts.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import relaxmpi as rx
from relaxmpi.units import parse_bytes, parse_duration, parse_rate

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_digits import ALGORITHMS, network
from waiting import Waiting

BATCH = 32
CAPS = (1, 4, 25)  # MiB: DDP's choices of bucket_cap_mb
WARM = 3  # steps before the clock starts
WAIT = "wait so long for a gradient instead of computing it, which takes cores from other hosts"
Step = Callable[[], None]
Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Step:
    """The user's loop, the same for all methods."""
    numbers = torch.Generator().manual_seed(rank)
    images = torch.randn(BATCH, 1, 28, 28, generator=numbers)
    labels = torch.randint(10, (BATCH,), generator=numbers)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def new_model(wait: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = network()
    if wait:
        model = Waiting(model, torch.zeros(BATCH, 1, 28, 28), wait)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def adam_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def onebit(
    comm: rx.Comm, freeze: int, make: Make = new_model
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = make()
    spec = rx.OneBitAdam(freeze=freeze)
    optimizer = rx.OneBitAdamOptimizer(model.parameters(), spec, comm=comm, lr=1e-3)
    rx.attach(model, optimizer, spec, comm=comm)
    return model, optimizer


def ours(comm: rx.Comm, name: str, make: Make) -> Step:
    model, optimizer = make()
    rx.attach(model, optimizer, ALGORITHMS[name], comm=comm)
    return stepper(model, optimizer, comm.rank)


def parallel_of(model: nn.Module, cap: int) -> DistributedDataParallel:
    return DistributedDataParallel(
        model, bucket_cap_mb=cap, gradient_as_bucket_view=True, static_graph=True
    )


def ddp(comm: rx.Comm, cap: int, make: Make = new_model, hook: str | None = None) -> Step:
    model, optimizer = make()
    parallel = parallel_of(model, cap)
    if hook == "fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "ours":
        ours = rx.ddp_hook(rx.Quantizer(bits=8), comm=comm)
        parallel.register_comm_hook(parallel.process_group, ours)
    elif hook == "adam":
        optimizer = adam_of(model)
    return stepper(parallel, optimizer, comm.rank)


def horovod(comm: rx.Comm, make: Make) -> Step | None:
    try:
        import horovod.torch as hvd
    except ImportError:
        return None
    hvd.init()
    model, optimizer = make()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return stepper(model, optimizer, comm.rank)


@contextmanager
def gloo(comm: rx.Comm) -> Iterator[None]:
    """A process group of the same ranks."""
    host = os.environ.get("RELAXMPI_LAB_MASTER", "127.0.0.1")
    port = 0
    if comm.rank == 0:
        with socket.socket() as s:
            s.bind((host, 0))
            port = s.getsockname()[1]
    port = rx.allreduce(comm, port, op=rx.MAX)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{host}:{port}", rank=comm.rank, world_size=comm.size
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def methods(comm: rx.Comm, make: Make) -> dict[str, Callable[[], Step | None]]:
    """What makes the steps of each method."""
    found: dict[str, Callable[[], Step | None]] = {}
    found["compute alone"] = lambda: stepper(*make(), comm.rank)
    for cap in CAPS:
        found[f"DDP, {cap} MiB"] = partial(ddp, comm, cap, make)
    for cap in CAPS:
        found[f"DDP fp16, {cap} MiB"] = partial(ddp, comm, cap, make, "fp16")
    for cap in CAPS:
        found[f"DDP 8 bit hook, {cap} MiB"] = partial(ddp, comm, cap, make, "ours")
    found["Horovod"] = partial(horovod, comm, make)
    for name in ALGORITHMS:
        found[f"relaxmpi {name}"] = partial(ours, comm, name, make)
    for cap in CAPS:
        found[f"Adam: DDP, {cap} MiB"] = partial(ddp, comm, cap, make, "adam")
    found["Adam: relaxmpi 1 bit"] = lambda: stepper(*onebit(comm, WARM - 1, make), comm.rank)
    return found


def steps_of(comm: rx.Comm, wanted: list[str], make: Make) -> dict[str, Step]:
    """Make what is wanted; all ranks meet in between, so that no two libraries wait crosswise."""
    made = {}
    for name, begin in methods(comm, make).items():
        if is_wanted(name, wanted):
            rx.barrier(comm)
            step = begin()
            if step is not None:
                made[name] = step
    return made


def is_wanted(name: str, wanted: list[str]) -> bool:
    """Whether a method was asked for; what all are compared with always is."""
    adam = any(want.startswith("Adam") for want in wanted)
    reference = name == "compute alone" or name.startswith(("DDP, ", "Adam: DDP, ")[: 1 + adam])
    asked = (name.startswith(want) or name.endswith(f" {want}") for want in wanted)
    return not wanted or reference or any(asked)


def measure(
    comm: rx.Comm, rounds: int, steps: int, wanted: list[str], make: Make
) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    with gloo(comm):
        chosen = steps_of(comm, wanted, make)
        for step in chosen.values():
            for _ in range(WARM):
                rx.barrier(comm)  # nothing of ours is under way while others use another library
                step()
        taken: dict[str, list[float]] = {name: [] for name in chosen}
        for _ in range(rounds):
            for name, step in chosen.items():
                rx.barrier(comm)
                begin = time.perf_counter()
                for _ in range(steps):  # no barrier in between: it would hide what is under way
                    step()
                taken[name].append((time.perf_counter() - begin) / steps)
    return taken


def report(taken: dict[str, list[float]], size: int, out: Path | None) -> None:
    median = {name: statistics.median(times) for name, times in taken.items()}
    best = {
        start: min(found, key=median.__getitem__)
        for start in ("DDP, ", "Adam: DDP, ")
        if (found := [name for name in median if name.startswith(start)])
    }
    where = os.environ.get("RELAXMPI_LAB", "this machine")
    count = len(next(iter(taken.values())))
    print(f"{size} ranks, {where}, batch {BATCH} a rank, medians of {count} turns; load ", end="")
    print(f"{os.getloadavg()[0]:.1f}\n\n{'':26}{'ms/step':>9}{'quartiles':>15}   against")
    for name, middle in median.items():
        low, _, high = (1e3 * q for q in statistics.quantiles(taken[name], n=4))
        of = best["Adam: DDP, " if name.startswith("Adam") else "DDP, "]
        times = f"{median[of] / middle:9.2f}x {of}"
        print(f"{name:26}{middle * 1e3:9.1f}{low:8.1f}{high:7.1f}{times}")
    if out is not None:
        result = {"ranks": size, "where": where, "load": os.getloadavg()[0], "seconds": taken}
        out.write_text(json.dumps(result, indent=1))


def in_lab(file: str, spec: str, rest: list[str], ranks_per_host: int = 1) -> int:
    """Run a file on emulated hosts."""
    from relaxmpi.lab import Lab

    given = dict(part.split("=", 1) for part in spec.split(","))
    with Lab(
        hosts=int(given.get("hosts", 4)),
        latency=parse_duration(given.get("latency", "0.1ms")),
        bandwidth=parse_rate(given.get("bandwidth", "100Mbit")),
        queue=parse_bytes(given["queue"]) if "queue" in given else None,
    ) as lab:
        return lab.run(["python", file, *rest], ranks_per_host=ranks_per_host, timeout=900)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lab", help="such as hosts=4,latency=0.1ms,bandwidth=100Mbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of each method, each round")
    parser.add_argument("--methods", nargs="+", default=[], help="beside DDP; default: all")
    parser.add_argument("--wait", type=parse_duration, default=0.0, metavar="21ms", help=WAIT)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.lab:
        rest = ["--rounds", str(given.rounds), "--steps", str(given.steps)]
        rest += ["--methods", *given.methods] if given.methods else []
        rest += ["--wait", f"{given.wait}s"] if given.wait else []
        return in_lab(
            __file__, given.lab, rest + (["--json", str(given.json)] if given.json else [])
        )
    comm = rx.Comm.world()
    taken = measure(comm, given.rounds, given.steps, given.methods, partial(new_model, given.wait))
    if comm.rank == 0:
        report(taken, comm.size, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
