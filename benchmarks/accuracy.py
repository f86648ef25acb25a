"""Test accuracy of the algorithms: mean of several seeds with 95 % intervals.

    mpirun -n 4 python benchmarks/accuracy.py
    python benchmarks/accuracy.py --simulated 8 --algorithms sgp osgp choco4
    python benchmarks/accuracy.py --simulated 8 --taus 0 1 2 4 8 --plot out/tau.png

Each run is examples/train_digits.py with another seed: other initial weights, other batches. The
differences to AllReduce SGD are paired by seed. Where each rank has a model of its own, the mean
model is evaluated, and the spread is the ranks' distance from it at the end, by its norm. With
`--taus` OSGP is run with each staleness, sending every tau steps (algorithm 2 of Assran et al.
2019), and its last training loss is plotted.

In a simulated world one rank computes at a time, without MPI: the numbers are the same.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

import relaxmpi as rx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_digits import ALGORITHMS, Run, digits, train

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
DECAY = 0.01  # gossip comes together as learning rates fall
LAST = 10  # steps whose mean loss is the last loss


def interval(values: np.ndarray) -> str:
    half = T95[len(values)] * values.std(ddof=1) / len(values) ** 0.5
    return f"{100 * values.mean():6.2f} +- {100 * half:4.2f}"


def work(given: argparse.Namespace) -> dict[str, list[Run]] | None:
    chosen = {name: ALGORITHMS[name] for name in ("sgd", *given.algorithms)}
    for tau in given.taus:
        chosen[f"tau {tau}"] = rx.OSGP(tau=tau)
    with rx.Comm.world() as comm:
        data = digits(comm)
        bar = tqdm(total=given.seeds * len(chosen), disable=comm.rank > 0)
        reached: dict[str, list[Run]] = {name: [] for name in chosen}
        for seed in range(given.seeds):
            for name, algorithm in chosen.items():
                run = train(comm, algorithm, data, epochs=given.epochs, seed=seed, decay=DECAY)
                assert run.equal
                reached[name].append(run)
                bar.update()
        bar.close()
        return reached if comm.rank == 0 else None


def report(reached: dict[str, list[Run]]) -> None:
    print(f"\n{'':10}{'accuracy':>15}{'against sgd':>18}{'last loss':>11}{'largest spread':>16}")
    base = [run.accuracy for run in reached["sgd"]]
    for name, runs in reached.items():
        values = np.array([run.accuracy for run in runs])
        loss = np.mean([run.losses[-LAST:].mean() for run in runs])
        print(
            f"{name:10}{interval(values)}   {interval(values - base)}{loss:11.3f}"
            f"{max(run.spread for run in runs):16.3%}"
        )


def draw(reached: dict[str, list[Run]], taus: list[int], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(5, 3.8), layout="constrained")
    losses = np.array([[r.losses[-LAST:].mean() for r in reached[f"tau {tau}"]] for tau in taus])
    half = T95[losses.shape[1]] * losses.std(axis=1, ddof=1) / losses.shape[1] ** 0.5
    panel.errorbar(taus, losses.mean(axis=1), half, marker="o", capsize=3, label="OSGP")
    panel.axhline(
        np.mean([r.losses[-LAST:].mean() for r in reached["sgd"]]), ls=":", label="AllReduce SGD"
    )
    panel.set(xlabel="tau, steps", ylabel=f"training loss, mean of the last {LAST} steps")
    panel.legend()
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulated", type=int, metavar="RANKS")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5, choices=T95)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS)
    parser.add_argument("--taus", type=int, nargs="+", default=[])
    parser.add_argument("--plot", type=Path, help="the loss against tau")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.algorithms is None:
        given.algorithms = [] if given.taus else [name for name in ALGORITHMS if name != "sgd"]
    if given.simulated:
        reached = rx.SimulatedWorld(given.simulated).run(work, given)[0]
        where = f"{given.simulated} simulated ranks"
    else:
        reached = work(given)
        if reached is None:
            return 0
        with rx.Comm.world() as comm:
            where = f"{comm.size} ranks"
    print(f"{where}, {given.epochs} epochs, {given.seeds} seeds; % of 1,000 images")
    report(reached)
    if given.json is not None:
        found = {name: [run.accuracy for run in runs] for name, runs in reached.items()}
        given.json.write_text(json.dumps(found, indent=1))
    if given.plot is not None:
        draw(reached, given.taus, given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
