"""All-reduce against raw mpi4py and torch's gloo: interleaved, medians of the slowest rank.

    mpirun -n 4 python benchmarks/collectives.py
    relaxmpi lab --hosts 4 --latency 0.1ms --bandwidth 200Mbit -- \
        python benchmarks/collectives.py --sizes 4MiB --codecs --gloo --rounds 5

Every case reduces float32. "in place" cases begin and end in one buffer: for MPI that is IN_PLACE,
or a second buffer and a copy; "out" cases leave the input alone.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import relaxmpi as rx
from relaxmpi.units import parse_bytes

Cases = dict[str, Callable[[], object]]


def raw_cases(comm: rx.Comm, x: np.ndarray, y: np.ndarray) -> Cases:
    from mpi4py import MPI  # here, because Comm.world() starts MPI with longer eager messages

    world = comm.mpi

    def copy_back(reduce: Callable[[], object]) -> Callable[[], object]:
        return lambda: (reduce(), np.copyto(x, y))

    def blocking() -> None:
        world.Allreduce(x, y)

    def nonblocking() -> None:
        world.Iallreduce(x, y).Wait()

    return {
        "MPI in place": lambda: world.Allreduce(MPI.IN_PLACE, x),
        "MPI in place, I": lambda: world.Iallreduce(MPI.IN_PLACE, x).Wait(),
        "MPI out + copy": copy_back(blocking),
        "MPI out + copy, I": copy_back(nonblocking),
        "MPI out": blocking,
        "MPI out, I": nonblocking,
    }


def our_cases(comm: rx.Comm, x: np.ndarray, y: np.ndarray) -> Cases:
    return {
        "relaxmpi in place": lambda: rx.allreduce(comm, x),
        "relaxmpi out": lambda: rx.allreduce(comm, x, y),
    }


def coded_cases(comm: rx.Comm, x: np.ndarray) -> Cases:
    codecs = {
        "relaxmpi 8 bit": rx.Quantizer(bits=8),
        "relaxmpi 4 bit": rx.Quantizer(bits=4),
        "relaxmpi 1 bit": rx.OneBit(),
        "relaxmpi 1 bit + feedback": rx.ErrorFeedback(rx.OneBit()),
    }
    return {
        name: lambda codec=codec: rx.allreduce(comm, x, op=rx.MEAN, codec=codec)
        for name, codec in codecs.items()
    }


def gloo_cases(comm: rx.Comm, x: np.ndarray) -> Cases:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        address = comm.mpi.bcast(os.environ.get("RELAXMPI_LAB_MASTER", "127.0.0.1"))
        os.environ.setdefault("MASTER_PORT", "29511")
        os.environ["MASTER_ADDR"] = address
        dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
    tensor = torch.from_numpy(x)
    return {"gloo": lambda: dist.all_reduce(tensor)}


def measure(
    comm: rx.Comm, cases: Cases, x: np.ndarray, rounds: int, calls: int
) -> dict[str, float]:
    """Median seconds a call; a batch of calls takes as long as it does on its slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            x[:] = 0
            case()
            comm.mpi.Barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                case()
            times[name].append((time.perf_counter() - begin) / calls)
    slowest = {name: rx.allreduce(comm, np.array(t), op=rx.MAX) for name, t in times.items()}
    return {name: float(np.median(t)) for name, t in slowest.items()}


def fastest(seconds: dict[str, float], kind: str) -> float:
    return min(t for name, t in seconds.items() if name.startswith(kind))


def show(nbytes: int, seconds: dict[str, float]) -> None:
    print(f"\n{nbytes:,} bytes")
    place, out = fastest(seconds, "MPI in place"), fastest(seconds, "MPI out")
    place = min(place, fastest(seconds, "MPI out + copy"))
    out = min(seconds["MPI out"], seconds["MPI out, I"])
    for name, t in seconds.items():
        against = out if name.endswith(("out", "out, I")) else place
        note = f"{t / against:8.2f} x and {(t - against) * 1e6:+9.0f} us against the best of MPI"
        if "gloo" in seconds:
            note += f", {seconds['gloo'] / t:6.2f} x as fast as gloo"
        print(f"  {name:26s} {t * 1e6:12.1f} us {note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="4KiB,32KiB,256KiB,1MiB,4MiB,32MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=0, help="calls a round; 0: by size, 2 to 50")
    parser.add_argument("--codecs", action="store_true", help="also with codecs")
    parser.add_argument("--gloo", action="store_true", help="also torch.distributed with gloo")
    parser.add_argument("--json", type=Path, help="write the seconds to this file")
    args = parser.parse_args()
    results = {}
    with rx.Comm.world() as comm:
        for nbytes in (int(parse_bytes(text)) for text in args.sizes.split(",")):
            x = np.zeros(nbytes // 4, np.float32)
            y = np.zeros_like(x)
            cases = raw_cases(comm, x, y) | our_cases(comm, x, y)
            if args.codecs:
                cases |= coded_cases(comm, x)
            if args.gloo:
                cases |= gloo_cases(comm, x)
            calls = args.calls or max(2, min(50, 2**24 // nbytes))
            seconds = measure(comm, cases, x, args.rounds, calls)
            results[str(nbytes)] = seconds
            if comm.rank == 0:
                show(nbytes, seconds)
        if args.json and comm.rank == 0:
            args.json.write_text(json.dumps({"ranks": comm.size, "seconds": results}, indent=1))


if __name__ == "__main__":
    main()
