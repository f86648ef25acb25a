"""Predicted against measured seconds of all-reduce on emulated hosts: docs/prediction.md.

    python benchmarks/prediction.py --out docs/prediction.md
    python benchmarks/prediction.py --hosts 2 --latencies 5ms --bandwidths 100Mbit

For each network `relaxmpi lab` runs this file once: it fits a `Network` to the links and then
times the calls. The same function then runs in a `SimulatedWorld` on the fitted network. What was
measured is never changed, and nothing but `Network.from_measurement` tells the simulation
anything. Needs root, as the lab does.

Emulated hosts share the cores of one machine, with each other and with the switch. Which calls
wait for those more than for the network follows from the fitted numbers alone: of a call that takes
t, and would take p if links were infinitely fast, the processors' share is p / t. Where it is more
than a quarter, the row is marked; none is left out.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import relaxmpi as rx
from relaxmpi.primitives.simulation.network import BATCH

SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24}
MARKS = "<!-- results -->", "<!-- end of results -->"
BUDGET = 0.8  # seconds for each case, about
CALLS = (5, 200)
CROWDED = 1 / 4  # from this share of processors on, a row says more of them than of the network


class Case(NamedTuple):
    """One cell of the table: where, and what."""

    hosts: int
    latency: str
    bandwidth: str
    what: str
    size: str
    predicted: float
    measured: float
    processors: float  # seconds predicted if links were infinitely fast

    @property
    def share(self) -> float:
        """What part of the predicted time processors need alone."""
        return self.processors / self.predicted

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
    """Seconds that this rank is in one call, in place, as on a gradient in every step."""
    rx.barrier(comm)
    begin = comm.now()
    rx.allreduce(comm, x, op=rx.MEAN, codec=codec)
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


def measure(
    comm: rx.Comm, sizes: Sequence[int], calls: tuple[int, int] = CALLS
) -> tuple[rx.Network, dict[str, list[float]]]:
    """Fit a network, then time the calls."""
    given = [codec for codec in codecs().values() if codec is not None]
    return rx.Network.from_measurement(comm, given), timings(comm, sizes, calls)


def predict(network: rx.Network, ranks: int, sizes: Sequence[int]) -> dict[str, list[float]]:
    """Time the calls in a simulated world: of equal calls a few are enough."""

    def program() -> dict[str, list[float]]:
        with rx.Comm.world() as comm:
            return timings(comm, sizes, (3, 3))

    result: dict[str, list[float]] = rx.SimulatedWorld(ranks, network=network).run(program)[0]
    return result


class Result(NamedTuple):
    """One network: what was fitted, how busy the lab's switch was, and the cases."""

    hosts: int
    latency: str
    bandwidth: str
    network: rx.Network
    switch: float
    cases: list[Case]


def in_lab(hosts: int, latency: str, bandwidth: str) -> Result:
    """Run this file on emulated hosts, then predict what it has measured."""
    from relaxmpi.lab import Lab
    from relaxmpi.units import parse_duration, parse_rate

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        with Lab(
            hosts=hosts, latency=parse_duration(latency), bandwidth=parse_rate(bandwidth)
        ) as lab:
            begin = time.monotonic()
            status = lab.run(["python", __file__, "--measure", str(out)], timeout=120)
            switch = lab.switch_seconds / (time.monotonic() - begin)
        if status:
            raise SystemExit(f"the job on {hosts} hosts ended with status {status}")
        answer = json.loads(out.read_text())
    network, measured = rx.Network(**answer["network"]), answer["seconds"]
    return Result(
        hosts, latency, bandwidth, network, switch,
        compared(hosts, latency, bandwidth, network, measured),
    )  # fmt: skip


def compared(
    hosts: int,
    latency: str,
    bandwidth: str,
    network: rx.Network,
    measured: dict[str, list[float]],
) -> list[Case]:
    """Predict on a fitted network what was measured."""
    fast = replace(network, latency=0.0, bandwidth=1e15, batch_delay=0.0, agree_cost=0.0)
    predicted, alone = (predict(net, hosts, list(SIZES.values())) for net in (network, fast))
    return [
        Case(
            hosts,
            latency,
            bandwidth,
            what,
            size,
            *(x[what][k] for x in (predicted, measured, alone)),
        )
        for what in measured
        for k, size in enumerate(SIZES)
    ]


def errors(found: Sequence[Case]) -> str:
    off = [abs(case.ratio - 1) for case in found]
    worst = max(found, key=lambda case: abs(case.ratio - 1))
    within = sum(error <= 0.2 for error in off)
    return (
        f"median error {statistics.median(off):.1%}; {within} of {len(found)} within 20 %; "
        f"worst {max(off):.0%} ({worst.hosts} hosts, {worst.latency}, {worst.bandwidth}, "
        f"{worst.what}, {worst.size})"
    )


def summary(found: Sequence[Case]) -> str:
    """Say how far off predictions are: all of them, and those that are about the network."""
    lines = [f"All rows: {errors(found)}."]
    kept = [case for case in found if case.share <= CROWDED]
    if kept and len(kept) < len(found):
        lines.append(f"Rows without a mark: {errors(kept)}.")
    return "\n\n".join(lines)


def table(found: Sequence[Case]) -> str:
    """Return the table in Markdown: milliseconds."""
    lines = [
        "| hosts | one way | link | what | buffer | predicted, ms | measured | ratio | cores |",
        "|--:|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {c.hosts} | {c.latency} | {c.bandwidth} | {c.what} | {c.size} | "
        f"{c.predicted * 1e3:.2f} | {c.measured * 1e3:.2f} | {c.ratio:.2f} | "
        f"{c.share:.0%}{' (x)' if c.share > CROWDED else ''} |"
        for c in found
    ]
    return "\n".join(lines)


def fits(results: Sequence[Result]) -> str:
    """Return what was fitted, in Markdown."""
    lines = [
        (
            "| hosts | one way | link | latency, ms | Mbit/s | send, us | receive | 32 KiB | delay "
            "| agree | call | switch |"
        ),
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        net = r.network
        bytes_cost = BATCH * (net.send_byte + net.receive_byte)
        costs = " | ".join(
            f"{1e6 * cost:.0f}"
            for cost in (
                net.send_cost, net.receive_cost, bytes_cost, net.batch_delay, net.agree_cost,
                net.call_cost,
            )
        )  # fmt: skip
        lines.append(
            f"| {r.hosts} | {r.latency} | {r.bandwidth} | {net.latency * 1e3:.3f} | "
            f"{net.bandwidth * 8e-6:.1f} | {costs} | {r.switch:.0%} |"
        )
    return "\n".join(lines)


def page(text: str, results: Sequence[Result]) -> str:
    """Return the text of docs/prediction.md with these results between its marks."""
    found = [case for r in results for case in r.cases]
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    parts = [MARKS[0], summary(found), table(found), fits(results), MARKS[1]]
    return before + "\n\n".join(parts) + after


def load(file: Path | None) -> dict[str, Result]:
    """Return the results of earlier runs, by network."""
    if file is None or not file.exists():
        return {}
    kept = {}
    for key, (*where, network, switch, cases) in json.loads(file.read_text()).items():
        kept[key] = Result(*where, rx.Network(**network), switch, [Case(*c) for c in cases])
    return kept


def save(file: Path, results: dict[str, Result]) -> None:
    data = {key: [*r[:3], vars(r.network), r.switch, r.cases] for key, r in results.items()}
    file.write_text(json.dumps(data, indent=1))


def parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", default="2,4", help="'' measures nothing")
    parser.add_argument("--latencies", default="0.1ms,5ms", help="one way")
    parser.add_argument("--bandwidths", default="100Mbit,1Gbit")
    parser.add_argument("--json", type=Path, help="keep results here, beside those of other runs")
    parser.add_argument("--out", type=Path, help="put the tables between the marks of this file")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # on the hosts
    given = parser.parse_args()
    if given.measure:
        with rx.Comm.world() as comm:
            network, seconds = measure(comm, list(SIZES.values()))
            if comm.rank == 0:
                answer = {"network": vars(network), "seconds": seconds}
                given.measure.write_text(json.dumps(answer))
        return 0
    results = load(given.json)
    for hosts, bandwidth, latency in itertools.product(
        map(int, parts(given.hosts)), parts(given.bandwidths), parts(given.latencies)
    ):
        result = in_lab(hosts, latency, bandwidth)
        results[f"{hosts} {bandwidth} {latency}"] = result
        print(f"{result.network}\n{table(result.cases)}\nswitch {result.switch:.0%}\n", flush=True)
        if given.json:
            save(given.json, results)
    ordered = [results[key] for key in sorted(results)]
    print(summary([case for r in ordered for case in r.cases]))
    if given.out:
        given.out.write_text(page(given.out.read_text(), ordered))
    return 0


if __name__ == "__main__":
    sys.exit(main())
