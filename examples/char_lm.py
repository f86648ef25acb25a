"""Train a small transformer on the source text of Python's standard library, with any algorithm.

    mpirun -n 4 python examples/char_lm.py --algorithm qsgd4 --steps 300
    mpirun -n 4 python examples/char_lm.py --optimizer diloco --steps 300 --resume runs/diloco
    mpirun -n 4 python examples/char_lm.py --optimizer onebit --warmup 0.2

With `--resume FOLDER` it goes on from the newest checkpoint there, as if it had never stopped.
It predicts the next character. Every tenth file is kept for validation, which is reported in bits
per character: 6.6 without any knowledge, 4.7 from the frequencies of characters alone.
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from tqdm import trange

import relaxmpi as rx

ALGORITHMS = {
    "sgd": rx.SGD(),  # the exchange of AllReduce SGD; the local rule is the optimizer's
    "qsgd8": rx.QSGD(bits=8),
    "qsgd4": rx.QSGD(bits=4),
    "sign": rx.QSGD(codec=rx.OneBit(), feedback=True),
    "bytegrad": rx.ByteGrad(),
}
# DiLoCo's pseudo-gradient is sent once in 50 steps, in 6 bits a number: 1/264 of the bytes. In the
# few outer steps of such short runs less momentum than its usual 0.9 was better.
DILOCO = rx.DiLoCo(
    every=50, outer_lr=1.0, outer_momentum=0.5, codec=rx.Quantizer(bits=6), feedback=True
)
RULE = rx.AdamW(betas=(0.9, 0.99), weight_decay=0.01)
OPTIMIZERS = ("adamw", "onebit", "diloco")
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
OTHER = len(ALPHABET)  # all other characters are one
CODES = {c: i for i, c in enumerate(ALPHABET)}


class Block(nn.Module):
    """Self-attention and a perceptron, each added to what comes in (Vaswani et al. 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        b, t, width = x.shape
        shape = (b, t, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.before(x)).view(shape).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, width))
        return x + self.perceptron(self.between(x))


class Transformer(nn.Module):
    """A decoder whose input and output embeddings are one matrix."""

    def __init__(self, width: int, layers: int, context: int, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET) + 1, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET) + 1, bias=False)
        self.head.weight = self.characters.weight
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Map (batch, time) characters to (batch, time, alphabet) scores of the next one."""
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        return self.head(self.last(self.blocks(x)))


def library(comm: rx.Comm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text for training and for validation; rank 0 reads the files for all."""
    texts = [np.empty(0, "uint8"), np.empty(0, "uint8")]
    if comm.rank == 0:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        sources = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        coded = [np.array([CODES.get(c, OTHER) for c in source], "uint8") for source in sources]
        held_out = coded[::10]
        del coded[::10]
        texts = [np.concatenate(coded), np.concatenate(held_out)]
    for i, name in enumerate(("training", "validation")):
        size = rx.allreduce(comm, len(texts[i]), op=rx.MAX)
        if comm.rank > 0:
            texts[i] = np.empty(size, "uint8")
        rx.broadcast(comm, texts[i], name=name)
    return torch.from_numpy(texts[0]), torch.from_numpy(texts[1])


def windows(text: torch.Tensor, begins: torch.Tensor, context: int) -> torch.Tensor:
    """Cut (len(begins), context + 1) characters out of the text."""
    return text[begins[:, None] + torch.arange(context + 1)].long()


def loss_of(model: nn.Module, window: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each character given those before it in its window."""
    return cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def bits_per_character(comm: rx.Comm, model: nn.Module, text: torch.Tensor, context: int) -> float:
    """Return the validation loss; each rank takes its share of up to 1,024 windows."""
    begins = torch.linspace(0, len(text) - context - 1, 1024).long()[comm.rank :: comm.size]
    losses = [loss_of(model, windows(text, part, context)).item() for part in begins.split(16)]
    return rx.allreduce(comm, sum(losses) / len(losses) / math.log(2), op=rx.MEAN)


def equal(comm: rx.Comm, model: nn.Module) -> bool:
    """Say whether all ranks hold the same model, bit for bit."""
    bits = torch.cat([p.detach().ravel() for p in model.parameters()]).view(torch.int32)
    seen = rx.allgather(comm, bits)
    return bool((seen == seen[0]).all())


def algorithm_of(given: argparse.Namespace) -> rx.Algorithm:
    """Return what is exchanged around the optimizer, or, for 1-bit Adam, what it is."""
    if given.optimizer == "onebit":
        return rx.OneBitAdam(freeze=max(1, round(given.warmup * given.steps)), rule=RULE)
    return DILOCO if given.optimizer == "diloco" else ALGORITHMS[given.algorithm]


def optimizer_of(
    comm: rx.Comm, model: nn.Module, algorithm: rx.Algorithm, lr: float
) -> torch.optim.Optimizer:
    """Return the optimizer that goes with the algorithm."""
    if isinstance(algorithm, rx.OneBitAdam):
        return rx.OneBitAdamOptimizer(model.parameters(), algorithm, comm=comm, lr=lr)
    settings = {"lr": lr, "betas": RULE.betas, "weight_decay": RULE.weight_decay}
    return torch.optim.AdamW(model.parameters(), **settings)


class Run(NamedTuple):
    """What came out: validation bits per character, bytes and seconds a step of this rank."""

    bits: float
    bytes: float
    seconds: float
    parameters: int
    equal: bool


def train(
    comm: rx.Comm,
    algorithm: rx.Algorithm,
    texts: tuple[torch.Tensor, torch.Tensor],
    given: argparse.Namespace,
    name: str,
) -> Run:
    """Train on all ranks, showing progress on rank 0."""
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    text, held_out = texts
    model = Transformer(given.width, given.layers, given.context)
    optimizer = optimizer_of(comm, model, algorithm, given.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.lr, given.steps, pct_start=0.1)
    sync = rx.attach(model, optimizer, algorithm, comm=comm)
    places = torch.Generator().manual_seed(given.seed * comm.size + comm.rank)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sync": sync}
    state["places"] = places
    done = 0
    if given.resume:
        found = rx.load(given.resume, comm, missing_ok=True, **state)
        done, planned = found.get("step", 0), found.get("steps", given.steps)
        if planned != given.steps:
            raise SystemExit(
                f"{given.resume} was begun with --steps {planned}, on which its learning rates "
                "depend: give the same, or another folder"
            )
        if done and comm.rank == 0:
            print(f"resumed after step {done}")

    bar = trange(done, given.steps, desc=name, disable=comm.rank > 0)
    begin = time.perf_counter()
    for step in bar:
        begins = torch.randint(len(text) - given.context, (given.batch,), generator=places)
        optimizer.zero_grad()
        loss = loss_of(model, windows(text, begins, given.context))
        loss.backward()
        optimizer.step()
        scheduler.step()
        bar.set_postfix_str(f"{loss.item() / math.log(2):.2f} bits", refresh=False)
        if given.resume and (step + 1) % given.save_every == 0:
            rx.save(given.resume, comm, keep=2, step=step + 1, steps=given.steps, **state)
    left = given.steps - done
    seconds = (time.perf_counter() - begin) / left if left else 0.0
    sent = sync.stats().payload_bytes  # a step; evaluating would add to it

    with sync.averaged():
        bits = bits_per_character(comm, model, held_out, given.context)
        same = equal(comm, model)
    sync.detach()
    parameters = sum(p.numel() for p in model.parameters())
    return Run(bits, sent, seconds, parameters, same)


def parser() -> argparse.ArgumentParser:
    """Return the command line's, whose defaults are a run of a minute."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, default="qsgd8", help="of adamw: how gradients travel"
    )
    parser.add_argument(
        "--warmup", type=float, default=0.2, help="of onebit: share of the steps before the freeze"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=12, help="windows a rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters in a window")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--resume", metavar="FOLDER", help="of checkpoints, to go on from and add to"
    )
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    return parser


def main() -> None:
    """Read the command line, train, and report on rank 0."""
    given = parser().parse_args()
    with rx.Comm.world() as comm:
        name = given.algorithm if given.optimizer == "adamw" else given.optimizer
        run = train(comm, algorithm_of(given), library(comm), given, name)
        if comm.rank == 0:
            pace = f"{run.seconds * 1e3:.0f} ms a step" if run.seconds else "nothing was left to do"
            print(
                f"{comm.size} ranks, {name}: {run.bits:.3f} bits per character of unseen source "
                f"after {given.steps} steps; {run.parameters:,} parameters, {run.bytes:,.0f} bytes "
                f"and {pace}; equal on all ranks: "
                f"{'yes' if run.equal else 'NO'}"
            )
        if not run.equal:
            raise SystemExit("the ranks hold different models")


if __name__ == "__main__":
    main()
