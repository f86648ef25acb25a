"""Adam and AdamW along the mean of all gradients; and as a local rule of other algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from relaxmpi.algorithms.base import Algorithm, Local, Rule
from relaxmpi.algorithms.sgd import BoundSGD
from relaxmpi.primitives import Comm
from relaxmpi.primitives.devices import Flat, device_of

__all__ = ["AdamW", "Moments", "widened", "work_format"]

_FORMATS = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


@dataclass(frozen=True)
class AdamW(Algorithm, Rule):
    """Adam with decoupled weight decay (Kingma & Ba 2015; Loshchilov & Hutter 2019).

    With b_1, b_2 = betas and w the weight decay, in step t = 1, 2, ...:

        g <- mean_i grad f_i(x)                        the one thing that is communicated
        x <- x - lr w x                                decoupled (AdamW)
        g <- g + w x                                   otherwise (Adam)
        m <- m + (1 - b_1) (g - m)
        v <- b_2 v + (1 - b_2) g^2
        x <- x - lr / (1 - b_1^t) m / (sqrt(v) / sqrt(1 - b_2^t) + eps)

    That is `torch.optim.AdamW`, and `torch.optim.Adam` for `decoupled=False`, to rounding, in one
    pass over memory. m and v are kept in float32 for half precision.

    Args:
        betas: b_1 and b_2.
        eps: Keeps the step finite where v is small.
        weight_decay: w.
        decoupled: Whether weight decay bypasses m and v.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> x = np.ones(2)
        >>> with rx.Comm.world() as comm:
        ...     rx.AdamW(weight_decay=0.5).bind(comm, x, lr=0.25).step(np.array([8.0, -2.0]))
        >>> x.round(6)
        array([0.625, 1.125])
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # lists come out of JSON
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), not {self.betas}")
        if self.eps < 0 or self.weight_decay < 0:
            raise ValueError(
                f"eps and weight_decay must not be negative: {self.eps}, {self.weight_decay}"
            )

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundSGD:
        """See `Algorithm.bind`."""
        return BoundSGD(self, comm, x, lr, name)

    def local(self) -> Moments:
        """See `Rule.local`."""
        return Moments(self)

    @property
    def own_rule(self) -> str:
        """All of it differs from plain descent."""
        return repr(self)


class Moments(Local):
    """The moments of one buffer: m, v and the number of steps."""

    def __init__(self, rule: AdamW) -> None:
        self.rule, self.t = rule, 0
        self.m: Any = None
        self.v: Any = None

    def apply(self, x: Any, g: Any, lr: float) -> None:
        """See `Local`."""
        device, rule = device_of(x), self.rule
        with widened(x) as numbers, widened(g) as gradient:
            if self.m is None:
                dtype = work_format(device.flat(x))
                self.m, self.v = (device.zeros(len(numbers), dtype) for _ in range(2))
            self.t += 1
            rates = device.kernels.rates(
                *(numbers.dtype, rule.betas, rule.eps, rule.weight_decay, rule.decoupled, lr),
                *(self.t, self.t),
            )
            device.kernels.adam(numbers, gradient, self.m, self.v, rates)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the moments."""
        moments = {"m": self.m, "v": self.v}
        return {"t": self.t, **{k: None if a is None else a.copy() for k, a in moments.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Local`."""
        self.t = state["t"]
        self.m, self.v = (None if state[k] is None else state[k].copy() for k in "mv")


def work_format(flat: Flat) -> str:
    """The format in which Adam computes; TypeError where there is none."""
    if flat.dtype not in _FORMATS:
        raise TypeError(f"Adam steps {', '.join(_FORMATS)}, not {flat.dtype}")
    return _FORMATS[flat.dtype]


@contextmanager
def widened(x: Any) -> Iterator[Any]:
    """Context in which a buffer is a 1-D array in the work format; rounded back at its end."""
    flat = device_of(x).flat(x)
    work = work_format(flat)
    numbers = flat.device.cast(flat.data, flat.dtype, work)
    yield numbers
    if numbers is not flat.data:
        flat.device.copy(flat.data, flat.device.cast(numbers, work, flat.dtype))
