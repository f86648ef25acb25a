"""Test accuracy of full and low precision: mean of several seeds with 95 % intervals.

    mpirun -n 4 python benchmarks/accuracy.py

Each run is examples/train_digits.py with another seed: other initial weights, other batches. The
differences to AllReduce SGD are paired by seed.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

import relaxmpi as rx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_digits import ALGORITHMS, digits, train

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def interval(values: np.ndarray) -> str:
    half = T95[len(values)] * values.std(ddof=1) / len(values) ** 0.5
    return f"{100 * values.mean():6.2f} +- {100 * half:4.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5, choices=T95)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = ["sgd", *(name for name in given.algorithms if name != "sgd")]
    with rx.Comm.world() as comm:
        data = digits(comm)
        bar = tqdm(total=given.seeds * len(names), disable=comm.rank > 0)
        reached: dict[str, list[float]] = {name: [] for name in names}
        for seed in range(given.seeds):
            for name in names:
                run = train(comm, ALGORITHMS[name], data, epochs=given.epochs, seed=seed)
                assert run.equal
                reached[name].append(run.accuracy)
                bar.update()
        bar.close()
        if comm.rank:
            return 0
        print(f"{comm.size} ranks, {given.epochs} epochs, {given.seeds} seeds; % of 1,000 images")
        print(f"\n{'':10}{'accuracy':>15}{'against sgd':>18}")
        for name, values in reached.items():
            difference = np.subtract(values, reached["sgd"])
            print(f"{name:10}{interval(np.array(values))}   {interval(difference)}")
        if given.json is not None:
            given.json.write_text(json.dumps(reached, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
