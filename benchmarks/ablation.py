"""What overlap (O), fusion (F) and hierarchy (H) are worth, one by one, for three models.

    python benchmarks/ablation.py --lab hosts=2,latency=0.1ms,bandwidth=100Mbit
    python benchmarks/ablation.py --lab hosts=2,latency=5ms,bandwidth=1Gbit

Two emulated hosts with two ranks each. Each case is `attach` with one argument changed: O off
starts no bucket before the end of backward, F off exchanges every parameter by itself, H off
treats all ranks alike. The cases take turns, a few steps each; medians over all steps.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import relaxmpi as rx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import char_lm
import cnn_lstm
import train_digits
from training import Step, in_lab

CASES = {
    "all on": {},
    "O off": {"overlap": False},
    "F off": {"bucket_bytes": 1, "first_bucket_bytes": 1},
    "H off": {"flat": True},
    "all off": {"overlap": False, "bucket_bytes": 1, "first_bucket_bytes": 1, "flat": True},
}


def convolutional() -> tuple[nn.Module, Step]:
    model = train_digits.network()
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
    return model, lambda: nn.functional.cross_entropy(model(images), labels).backward()


def recurrent() -> tuple[nn.Module, Step]:
    model = cnn_lstm.ConvLSTM()
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
    return model, lambda: nn.functional.cross_entropy(model(images), labels).backward()


def transformer() -> tuple[nn.Module, Step]:
    model = char_lm.Transformer(width=128, layers=4, context=64)
    window = torch.randint(len(char_lm.ALPHABET), (4, 65))
    return model, lambda: char_lm.loss_of(model, window).backward()


MODELS = {"convolutional": convolutional, "recurrent": recurrent, "transformer": transformer}


def stepper(comm: rx.Comm, nodes: rx.Hierarchy, model: str, case: str, algorithm: str) -> Step:
    torch.manual_seed(0)
    network, backward = MODELS[model]()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    given = dict(CASES[case])
    where = comm if given.pop("flat", False) else nodes
    rx.attach(network, optimizer, train_digits.ALGORITHMS[algorithm], comm=where, **given)

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    return step


def measure(comm: rx.Comm, model: str, algorithm: str, rounds: int, steps: int) -> dict[str, float]:
    with comm.by_node() as nodes:
        chosen = {case: stepper(comm, nodes, model, case, algorithm) for case in CASES}
        taken: dict[str, list[float]] = {case: [] for case in CASES}
        for step in chosen.values():
            for _ in range(3):
                step()
        for _ in range(rounds):
            for case, step in chosen.items():
                for _ in range(steps):
                    rx.barrier(comm)
                    begin = time.perf_counter()
                    step()
                    taken[case].append(time.perf_counter() - begin)
    return {case: statistics.median(times) for case, times in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lab", help="such as hosts=2,latency=0.1ms,bandwidth=100Mbit")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--algorithm", choices=train_digits.ALGORITHMS, default="qsgd8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each case, each round")
    given = parser.parse_args()
    if given.lab:
        rest = ["--models", given.models, "--algorithm", given.algorithm]
        rest += ["--rounds", str(given.rounds), "--steps", str(given.steps)]
        return in_lab(__file__, given.lab, rest, ranks_per_host=2)
    torch.set_num_threads(1)
    comm = rx.Comm.world()
    if comm.rank == 0:
        print(f"{given.algorithm}, ms a step   " + "".join(f"{case:>16}" for case in CASES))
    for model in given.models.split(","):
        seconds = measure(comm, model, given.algorithm, given.rounds, given.steps)
        if comm.rank == 0:
            all_on = seconds["all on"]
            cells = [f"{t * 1e3:9.1f} {t / all_on:5.2f}x" for t in seconds.values()]
            print(f"{model:24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
