"""Kernels of Adam: the step, and what must be known of a gradient before one is taken.

Loops go over blocks that stay in the cache, one array written at a time: LLVM gives up vector
code where it would have to test many pairs of arrays for overlap. The order of operations is that
of torch.optim.Adam.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._jit import inlined, jit
from relaxmpi.primitives._reduce import LANES, Lanes, largest, sum_abs, sum_squares

Floats = NDArray[Any]

BLOCK = 2048


class Rates(NamedTuple):
    """The numbers of one step, in the type of the buffer.

    Attributes:
        mix: 1 - beta_1.
        keep: beta_2.
        add: 1 - beta_2.
        length: lr / (1 - beta_1**t).
        root: sqrt(1 - beta_2**t), with t the number of times that v was updated.
        eps: What is added to the denominator.
        decay: 1 - lr w for decoupled weight decay, else 1.
        pull: w for weight decay that is a part of the gradient, else 0.
    """

    mix: Any
    keep: Any
    add: Any
    length: Any
    root: Any
    eps: Any
    decay: Any
    pull: Any


def rates(
    dtype: Any,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    lr: float,
    t: int,
    updates: int,
) -> Rates:
    """Round once, from double, what torch.optim.Adam computes in double."""
    b1, b2 = betas
    decay, pull = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
    length, root = lr / (1 - b1**t), math.sqrt(1 - b2**updates)
    one = np.dtype(dtype).type
    return Rates(*map(one, (1 - b1, b2, 1 - b2, length, root, eps, decay, pull)))


@inlined
def move(x: Floats, m: Floats, v: Floats, length: Any, root: Any, eps: Any, decay: Any) -> None:
    for i in range(x.size):
        x[i] = decay * x[i] - (length * m[i]) / (np.sqrt(v[i]) / root + eps)


@jit
def _adam(
    x: Floats,
    g: Floats,
    m: Floats,
    v: Floats,
    mix: Any,
    keep: Any,
    add: Any,
    length: Any,
    root: Any,
    eps: Any,
    decay: Any,
    pull: Any,
) -> None:
    for lo in range(0, x.size, BLOCK):
        hi = min(lo + BLOCK, x.size)
        xb, gb, mb, vb = x[lo:hi], g[lo:hi], m[lo:hi], v[lo:hi]
        if pull != 0:
            for i in range(xb.size):
                gb[i] += pull * xb[i]
        for i in range(xb.size):
            mb[i] += mix * (gb[i] - mb[i])
        for i in range(xb.size):
            vb[i] = keep * vb[i] + (add * gb[i]) * gb[i]
        move(xb, mb, vb, length, root, eps, decay)


@jit
def _facts(x: Floats, absolute: bool, lanes: Lanes, out: Floats) -> float:
    """Sum of |x| or of x**2; NaN if x holds a NaN or an infinity."""
    largest(x, out)
    if not np.isfinite(out[0]):
        return np.nan
    total = 0.0
    for lo in range(0, x.size, BLOCK):
        part = x[lo : min(lo + BLOCK, x.size)]
        total += sum_abs(part, 1.0, lanes) if absolute else sum_squares(part, 1.0, lanes)
    return total


@jit
def _largest(x: Floats, out: Floats) -> None:
    largest(x, out)


def adam(x: Floats, g: Floats, m: Floats, v: Floats, step: Rates) -> None:
    """One step of Adam; g changes where weight decay is a part of the gradient."""
    _adam(x, g, m, v, *step)


def is_finite(x: Floats) -> bool:
    """Whether x holds neither NaN nor infinity."""
    out = np.zeros(1, x.dtype)
    _largest(x, out)
    return bool(np.isfinite(out[0]))


def absolute_sum(x: Floats) -> float:
    """Sum of |x| in double, the same bits everywhere; NaN if a number is not finite."""
    return float(_facts(x, True, np.empty(LANES), np.zeros(1, x.dtype)))


def square_sum(x: Floats) -> float:
    """Sum of x**2 in double, the same bits everywhere; NaN if a number is not finite."""
    return float(_facts(x, False, np.empty(LANES), np.zeros(1, x.dtype)))
