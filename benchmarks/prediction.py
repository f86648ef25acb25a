"""Predicted against measured seconds of all-reduce on emulated hosts: docs/prediction.md.

    python benchmarks/prediction.py --out docs/prediction.md
    python benchmarks/prediction.py --hosts 2 --latencies 5ms --bandwidths 100Mbit

For each network `relaxmpi lab` runs this file once: it fits a `Network` to the links and then
times the calls. The same function then runs in a `SimulatedWorld` on the fitted network. What was
measured is never changed, and nothing but `Network.from_measurement` tells the simulation
anything. Needs root, as the lab does.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import relaxmpi as rx

SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24}
HOSTS, LATENCIES, BANDWIDTHS = "2,4", "0.1ms,5ms", "100Mbit,1Gbit"
BUDGET = 1.5  # seconds for each case, about
CALLS = (5, 25)


class Case(NamedTuple):
    """One cell of the table: where, and what."""

    hosts: int
    latency: str
    bandwidth: str
    what: str
    size: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def codecs() -> dict[str, Any]:
    return {
        "fp32": None,
        "8 bit": rx.Quantizer(bits=8),
        "1 bit": rx.ErrorFeedback(rx.OneBit()),
    }


def once(comm: rx.Comm, x: np.ndarray, codec: Any) -> float:
    """Seconds that this rank is in one call, in place on a copy."""
    y = x.copy()
    rx.barrier(comm)
    begin = comm.now()
    rx.allreduce(comm, y, op=rx.MEAN, codec=codec)
    return comm.now() - begin


def timings(
    comm: rx.Comm, sizes: Sequence[int], calls: tuple[int, int] = CALLS
) -> dict[str, list[float]]:
    """Median seconds of each all-reduce, for each codec in the order of `sizes`.

    The ranks meet, each takes its own time of one call, and the longest counts. In a simulated
    world the same code gives the prediction.
    """
    found: dict[str, list[float]] = {name: [] for name in codecs()}
    for size in sizes:
        x = np.random.default_rng(comm.rank).standard_normal(size // 4).astype(np.float32)
        for name, codec in codecs().items():
            once(comm, x, codec)
            one = rx.allreduce(comm, once(comm, x, codec), op=rx.MAX)
            count = int(max(calls[0], min(calls[1], BUDGET / max(one, 1e-6))))
            taken = np.array([once(comm, x, codec) for _ in range(count)])
            found[name].append(float(np.median(rx.allreduce(comm, taken, op=rx.MAX))))
    return found


def measure(comm: rx.Comm, sizes: Sequence[int]) -> tuple[rx.Network, dict[str, list[float]]]:
    """Fit a network, then time the calls."""
    given = [codec for codec in codecs().values() if codec is not None]
    return rx.Network.from_measurement(comm, given), timings(comm, sizes)


def predict(network: rx.Network, ranks: int, sizes: Sequence[int]) -> dict[str, list[float]]:
    """Time the calls in a simulated world: of equal calls a few are enough."""

    def program() -> dict[str, list[float]]:
        with rx.Comm.world() as comm:
            return timings(comm, sizes, (3, 3))

    result: dict[str, list[float]] = rx.SimulatedWorld(ranks, network=network).run(program)[0]
    return result


def in_lab(hosts: int, latency: str, bandwidth: str) -> tuple[rx.Network, dict[str, list[float]]]:
    """Run this file on emulated hosts; say how busy the switch was, which bounds what they can."""
    from relaxmpi.lab import Lab
    from relaxmpi.units import parse_duration, parse_rate

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        with Lab(
            hosts=hosts, latency=parse_duration(latency), bandwidth=parse_rate(bandwidth)
        ) as lab:
            status = lab.run(["python", __file__, "--measure", str(out)], timeout=120)
        if status:
            raise SystemExit(f"the job on {hosts} hosts ended with status {status}")
        answer = json.loads(out.read_text())
    return rx.Network(**answer["network"]), answer["seconds"]


def cases(hosts: int, latency: str, bandwidth: str) -> tuple[rx.Network, list[Case]]:
    """Measure and predict on one network."""
    network, measured = in_lab(hosts, latency, bandwidth)
    predicted = predict(network, hosts, list(SIZES.values()))
    return network, [
        Case(hosts, latency, bandwidth, what, size, predicted[what][k], measured[what][k])
        for what in measured
        for k, size in enumerate(SIZES)
    ]


def summary(found: Sequence[Case]) -> str:
    errors = [abs(case.ratio - 1) for case in found]
    worst = max(found, key=lambda case: abs(case.ratio - 1))
    within = sum(error <= 0.2 for error in errors)
    return (
        f"Median error {statistics.median(errors):.1%}; {within} of {len(found)} within 20 %; "
        f"worst {max(errors):.0%} ({worst.hosts} hosts, {worst.latency}, {worst.bandwidth}, "
        f"{worst.what}, {worst.size})."
    )


def table(found: Sequence[Case]) -> str:
    """Return the table in Markdown: milliseconds."""
    lines = [
        "| hosts | one way | link | what | buffer | predicted, ms | measured, ms | ratio |",
        "|--:|--:|--:|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {c.hosts} | {c.latency} | {c.bandwidth} | {c.what} | {c.size} | "
        f"{c.predicted * 1e3:.2f} | {c.measured * 1e3:.2f} | {c.ratio:.2f} |"
        for c in found
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", default=HOSTS)
    parser.add_argument("--latencies", default=LATENCIES, help="one way")
    parser.add_argument("--bandwidths", default=BANDWIDTHS)
    parser.add_argument("--json", type=Path, help="collect results here, by network")
    parser.add_argument("--out", type=Path, help="put the table in place of this file's")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # on the hosts
    given = parser.parse_args()
    if given.measure:
        with rx.Comm.world() as comm:
            network, seconds = measure(comm, list(SIZES.values()))
            if comm.rank == 0:
                answer = {"network": vars(network), "seconds": seconds}
                given.measure.write_text(json.dumps(answer))
        return 0
    found: list[Case] = []
    for hosts in map(int, given.hosts.split(",")):
        for bandwidth in given.bandwidths.split(","):
            for latency in given.latencies.split(","):
                network, here = cases(hosts, latency, bandwidth)
                print(f"{hosts} hosts, {latency}, {bandwidth}: {network}\n{table(here)}\n")
                sys.stdout.flush()
                found += here
    print(summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
