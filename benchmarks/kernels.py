"""Speed of the codecs on one thread: whole encode and decode calls against a copy of memory.

    python benchmarks/kernels.py [--count 16777216] [--rounds 9] [--json FILE]

GB/s count the float32 side. All cases take turns in each round, and medians are compared, so
that a disturbance hits all of them; seconds are those of this thread on a processor. `bar` is
the ratio to numpy.copyto that a case must reach: for a step of an optimizer half of what reading
and writing its bytes once would reach, where copyto moves 8 bytes an element. Nothing that comes
from memory is faster than to read it, as numpy.max does, nor what goes there than to fill it.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from relaxmpi.primitives import kernels
from relaxmpi.primitives.codecs import Codec, MinMaxUInt8, OneBit, Quantizer
from relaxmpi.primitives.signed import Live
from relaxmpi.primitives.topk import TopK

COPY = "numpy.copyto"


def cases(count: int) -> dict[str, tuple[float | None, Callable[[], object]]]:
    """Name, bar and call of each case."""
    x = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    out = np.zeros_like(x)
    residual = np.zeros_like(x)

    def encoder(codec: Codec) -> tuple[Callable[[], object], Callable[[], object]]:
        payload = np.zeros(codec.nbytes(count, x.dtype), np.uint8)
        codec.encode(x, payload)
        return lambda: codec.encode(x, payload), lambda: codec.decode(payload, out)

    minmax, from_minmax = encoder(MinMaxUInt8())
    nearest, from_4bit = encoder(Quantizer(bits=4, stochastic=False))
    stochastic, _ = encoder(Quantizer(bits=4, stochastic=True))
    onebit, from_onebit = encoder(OneBit())
    topk, from_topk = encoder(TopK(0.01))
    tenth, from_tenth = encoder(TopK(0.1))
    signs = np.zeros(OneBit().nbytes(count, x.dtype), np.uint8)
    return {
        COPY: (None, lambda: np.copyto(out, x)),
        "numpy.max, which only reads": (None, lambda: x.max()),
        "fill, which only writes": (None, lambda: out.fill(1)),
        "MinMaxUInt8 encode": (0.8, minmax),
        "MinMaxUInt8 decode": (1.5, from_minmax),
        "Quantizer(4, nearest) encode": (1.5, nearest),
        "Quantizer(4, stochastic) encode": (0.45, stochastic),
        "Quantizer(4) decode": (None, from_4bit),
        "OneBit encode": (2.0, onebit),
        "OneBit decode": (1.5, from_onebit),
        "OneBit encode_feedback": (0.4, lambda: OneBit().encode_feedback(x, residual, signs)),
        **steps(count),
        "TopK(1 %) encode": (None, topk),
        "TopK(1 %) decode": (None, from_topk),
        "TopK(10 %) encode": (None, tenth),
        "TopK(10 %) decode": (None, from_tenth),
    }


def steps(count: int) -> dict[str, tuple[float | None, Callable[[], object]]]:
    """A step of Adam, and the two passes over memory of 1-bit Adam."""
    numbers = np.random.default_rng(1)
    g, m, x = (numbers.standard_normal(count, dtype=np.float32) for _ in range(3))
    v, e = np.ones_like(x), np.zeros_like(x)
    codec, live = OneBit(), Live.of(np.ones(count, np.bool_))
    payload = np.zeros(codec.nbytes(count, x.dtype), np.uint8)
    rates = kernels.rates(x.dtype, (0.9, 0.999), 1e-8, 0.0, True, 1e-9, 100, 50)

    def encode() -> np.ndarray:
        return kernels.sign_momentum(
            *(g, m, v, e, *live, payload),
            begin=0,
            mix=rates.mix,
            units=(-27, 63),
            bucket=codec.bucket,
            l2=codec.scale == "l2",
        )

    def onebit() -> None:
        own = encode()
        kernels.move_signed(
            *(x, 0, g, m, v, e, *live),
            chunk=0,
            live=(0, count),
            own=own,
            payload=payload,
            bucket=codec.bucket,
            units=(-27, 63),
            step=rates,
        )

    return {
        # g, m, v and x read; m, v and x written
        "Adam, one step": (8 / 28 / 2, lambda: kernels.adam(x, g, m, v, rates)),
        # g, m, e, v and x read, e, m and x written, and a bit written and read
        "1-bit Adam, one step": (8 / 32.25 / 2, onebit),
        "1-bit Adam, first pass": (None, encode),
    }


def measure(count: int, rounds: int) -> dict[str, dict[str, float | None]]:
    table = cases(count)
    seconds: dict[str, list[float]] = {name: [] for name in table}
    for _, call in table.values():
        call()  # compiles, and touches every page
    for _ in range(rounds):
        for name, (_, call) in table.items():
            start = time.thread_time()
            call()
            seconds[name].append(time.thread_time() - start)
    copy = statistics.median(seconds[COPY])
    return {
        name: {
            "gb_per_s": 4e-9 * count / statistics.median(times),
            "ratio": copy / statistics.median(times),
            "bar": table[name][0],
        }
        for name, times in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2**24, help="float32 elements")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    result = measure(options.count, options.rounds)
    print(f"{options.count} float32, one thread, median of {options.rounds}")
    print(f"{'':34}{'GB/s':>8}{'ratio':>8}{'bar':>8}")
    for name, row in result.items():
        bar = "" if row["bar"] is None else f"{row['bar']:.3f}"
        print(f"{name:34}{row['gb_per_s']:8.1f}{row['ratio']:8.3f}{bar:>8}")
    if options.json:
        setup = {"count": options.count, "rounds": options.rounds, "machine": platform.machine()}
        options.json.write_text(json.dumps({**setup, "cases": result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
