"""Loss of 1-bit Adam and of DiLoCo against AdamW's: several seeds, paired, with 95 % intervals.

    mpirun -n 2 python benchmarks/quality.py
    mpirun -n 2 python benchmarks/quality.py --optimizers adamw diloco --steps 2000

Each run is examples/char_lm.py with another seed: other initial weights, other windows of text. All
optimizers take as many steps on the same windows; `adamw` averages gradients in full precision.
The loss is that on unseen files, in bits per character; ratios are to adamw's with the same seed.
Bytes are counted by the library on rank 0, without the evaluation, and averaged over all steps: for
1-bit Adam those of its warm-up, in full precision, are among them.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
from accuracy import T95, interval

import relaxmpi as rx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import char_lm

OPTIMIZERS = ("adamw", "onebit", "onebit-l2", "onebit-published", "onebit-published-l2", "diloco")


def settings_of(name: str, given: argparse.Namespace) -> argparse.Namespace:
    """Return what char_lm.py would get from its command line."""
    line = [f"--optimizer={name.split('-')[0]}", "--algorithm=sgd", f"--steps={given.steps}"]
    return char_lm.parser().parse_args([*line, f"--warmup={given.warmup}"])


def algorithm_of(name: str, settings: argparse.Namespace) -> rx.Algorithm:
    """Return the example's algorithm, or a form of it."""
    algorithm = char_lm.algorithm_of(settings)
    if "-published" in name:  # momenta are encoded as they are
        algorithm = dataclasses.replace(algorithm, normalise=False)
    if name.endswith("-l2"):
        algorithm = dataclasses.replace(algorithm, codec=rx.OneBit(scale="l2"))
    return algorithm


def report(reached: dict[str, list[char_lm.Run]]) -> None:
    """Print the table."""
    base = np.array([run.bits for run in reached["adamw"]])
    whole = np.mean([run.bytes for run in reached["adamw"]])
    print(f"\n{'':20}{'bits':>7}{'against adamw, %':>19}{'bytes a step':>15}{'share':>9}")
    for name, runs in reached.items():
        bits = np.array([run.bits for run in runs])
        sent = np.mean([run.bytes for run in runs])
        apart = interval(bits / base - 1) if name != "adamw" else ""
        share = f"1/{whole / sent:.1f}" if sent else ""  # one rank has nobody to send to
        print(f"{name:20}{bits.mean():7.4f}{apart:>19}{sent:15,.0f}{share:>9}")


def main() -> int:
    """Train with each optimizer and seed, and report on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS, default=["adamw", "onebit", "diloco"]
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--warmup", type=float, default=0.2, help="1-bit Adam's share of the steps")
    parser.add_argument("--seeds", type=int, default=5, choices=T95)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chosen = dict.fromkeys(("adamw", *given.optimizers))  # the base of all ratios comes first
    reached: dict[str, list[char_lm.Run]] = {name: [] for name in chosen}
    with rx.Comm.world() as comm:
        texts = char_lm.library(comm)
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            for name, runs in reached.items():
                settings = settings_of(name, given)
                settings.seed = seed
                algorithm = algorithm_of(name, settings)
                label = f"{name}, seed {seed}"
                runs.append(char_lm.train(comm, algorithm, texts, settings, label))
                assert runs[-1].equal
                if comm.rank == 0:
                    print(f"{label}: {runs[-1].bits:.4f}", file=sys.stderr)
        if comm.rank > 0:
            return 0
        where = f"{comm.size} ranks, {given.steps} steps, {given.seeds} seeds"
    print(f"{where}; bits per character of unseen source, a warm-up of {given.warmup:.0%}")
    report(reached)
    if given.json is not None:
        found = {name: [run._asdict() for run in runs] for name, runs in reached.items()}
        given.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
