"""1-bit Adam: after a warm-up the variance is frozen, and the momentum travels as signs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relaxmpi.algorithms.adamw import AdamW, widened, work_format
from relaxmpi.algorithms.base import Algorithm, Bound
from relaxmpi.algorithms.freezing import VarianceRatio, check_freeze, due, lag_of
from relaxmpi.algorithms.momenta import Momenta, momenta_of
from relaxmpi.primitives import MEAN, Codec, Comm, OneBit, Work, allreduce
from relaxmpi.primitives.devices import Device, device_of
from relaxmpi.primitives.signed import Live

__all__ = ["BoundOneBitAdam", "OneBitAdam", "Segment"]


@dataclass(frozen=True)
class OneBitAdam(Algorithm):
    """1-bit Adam (Tang et al. 2021, arXiv 2102.02888).

    Warm-up, to step T: `AdamW` along the mean gradient. T is given, or found by `VarianceRatio`.
    Afterwards v = v_T stays, and with f_i the loss on rank i each step is

        m_i <- m + (1 - b_1) (grad f_i(x) - m)
        m <- mean_i m_i                            as signs, with two-sided `ErrorFeedback`
        x <- x - lr w x
        x <- x - lr / (1 - b_1^t) m / (sqrt(v) / sqrt(1 - b_2^T) + eps)

    (for weight decay that is a part of the gradient, grad f_i(x) + w x). So the bias correction of
    m goes on, and that of v is the one of step T for ever. All ranks hold the same m and x.

    - Coordinates with v = 0 at step T have had no gradient: from then on they are not sent, have no
      part in scales, no residual, and stay as they are, but for decoupled weight decay. Where v is
      0 everywhere the warm-up goes on until it has been otherwise for as many steps.
    - A gradient that is not finite on some rank leaves the step out on all, as if it had not been.
    - On one rank nothing needs to be sent: v stays alive, and this is `AdamW`.
    - On a Hierarchy momenta are averaged in full precision inside nodes.
    - lr may change at will: residuals are in units of the momentum.

    Args:
        freeze: T, or the rule that finds it. The paper takes 15 to 25 % of all steps; lr should be
            past its warm-up.
        codec: How momenta are encoded. The paper's scale is `OneBit(scale="l2")`; l1 is a
            contraction for all numbers. `OneBit` is exchanged in place and fused with the step, any
            other codec by `allreduce`.
        max_norm: Scale gradients down to this norm: in the warm-up that of the mean gradient;
            afterwards, where nobody has it, sqrt(mean_i |grad f_i|^2), which is no smaller.
        rule: betas, eps and weight decay.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> x = np.ones(3)
        >>> with rx.Comm.world() as comm:
        ...     opt = rx.OneBitAdam(freeze=2).bind(comm, x, lr=0.25)
        ...     for _ in range(4):
        ...         opt.step(2 * x)
        >>> bool((abs(x) < 0.25).all())
        True
    """

    freeze: int | VarianceRatio
    codec: Codec = field(default_factory=OneBit)
    max_norm: float | None = None
    rule: AdamW = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        check_freeze(self.freeze)
        if not isinstance(self.codec, Codec):
            raise TypeError(
                f"codec must be a Codec, not {self.codec!r}: each buffer makes its own memory"
            )
        if not isinstance(self.rule, AdamW):
            raise TypeError(f"1-bit Adam is made for the rule AdamW(...), not {self.rule!r}")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive, not {self.max_norm}")

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundOneBitAdam:
        """See `Algorithm.bind`."""
        if x is None:
            raise TypeError("1-bit Adam is the local rule itself: it needs the parameters")
        flat = device_of(x).flat(x)
        whole = [Segment(0, len(flat.data), x)]
        return BoundOneBitAdam(self, comm, whole, work_format(flat), flat.device, lr, name)


class Segment:
    """Parameters of one kind in a buffer: all, or those of one tensor.

    Attributes:
        lo: Where they begin in the buffer.
        hi: Where they end.
        t: Steps taken.
        updates: How many of them changed v.
        used: Whether any rank had a gradient; otherwise the next step leaves them out.
        late: Whether they had no variance when the buffer's was frozen: then they are in warm-up
            for good, and their gradients travel in full precision.
        idle: Which of them do not travel.
    """

    def __init__(self, lo: int, hi: int, x: Any) -> None:
        self.lo, self.hi, self.x = lo, hi, x
        self.t = self.updates = 0
        self.used, self.late = True, False
        self.idle: Any = np.empty(0, np.int64)

    @contextmanager
    def numbers(self) -> Iterator[Any]:
        """Context in which the parameters are a 1-D array in the work format."""
        with widened(self.x) as x:
            yield x


class BoundOneBitAdam(Bound):
    """The state of 1-bit Adam for one buffer.

    Attributes:
        m: The momentum, the same on all ranks.
        v: The variance.
        age: Steps in which v was not zero everywhere.
        momenta: How they travel; None in the warm-up.
        rule: betas, eps and weight decay.
    """

    def __init__(
        self,
        spec: OneBitAdam,
        comm: Comm,
        segments: list[Segment],
        dtype: str,
        device: Device,
        lr: float,
        name: str,
    ) -> None:
        self.spec, self.comm, self.name = spec, comm, name
        self.lr, self.rule = lr, spec.rule
        self.segments, self._dtype, self._device = segments, dtype, device
        self.m, self.v = (device.zeros(segments[-1].hi, dtype) for _ in range(2))
        self.age = 0
        self.momenta: Momenta | None = None
        self._norms: list[float] = []
        self._g: Any = None
        self._late: Any = None

    def on_grads(self, g: Any) -> Work[Any]:
        """Start to average gradients, or momenta."""
        if self.momenta is None:
            return allreduce.start(self.comm, g, op=MEAN, name=self.name)
        data = self._g = self._numbers(g)
        self._clip(data)
        rule = self.rule
        if rule.weight_decay and not rule.decoupled:
            for s in self.segments:
                if not s.late:
                    with s.numbers() as x:
                        data[s.lo : s.hi] += data.dtype.type(rule.weight_decay) * x
        late = [data[s.lo : s.hi] for s in self.segments if s.late]
        self._late = np.concatenate(late) if late else None
        mix = self._rates(1, 1).mix
        return self.momenta.start(self.comm, data, self.m, mix, self._late, self.name, self.age)

    def on_step(self, g: Any) -> None:
        """Take the step, unless a gradient was not finite."""
        if self.arrived(g):
            self.take()
        else:
            self.leave_out()

    def arrived(self, g: Any) -> bool:
        """Take over what the exchange has left in `g`; say whether all of it is finite."""
        finite = self._device.kernels.is_finite
        if self.momenta is None:
            self._g = self._numbers(g)
            return bool(finite(self._g))
        return self.momenta.finite and (self._late is None or bool(finite(self._late)))

    def take(self) -> None:
        """Move the parameters."""
        if self.momenta is None:
            self._clip(self._g)
            for s in self.segments:
                if s.used:
                    self._warm(s, self._g[s.lo : s.hi])
            self._grow_older()
        else:
            self._frozen(self.momenta)
            self.momenta.end(taken=True)
            self.age += 1
        self._g = self._late = None

    def leave_out(self) -> None:
        """Forget what was exchanged."""
        if self.momenta is not None:
            self.momenta.end(taken=False)
        self._g = self._late = None

    def _warm(self, s: Segment, g: Any) -> None:
        s.t, s.updates = s.t + 1, s.updates + 1
        rates = self._rates(s.t, s.updates)
        with s.numbers() as x:
            self._device.kernels.adam(x, g, self.m[s.lo : s.hi], self.v[s.lo : s.hi], rates)

    def _frozen(self, momenta: Momenta) -> None:
        begin = 0
        for s in self.segments:
            if s.late:
                end = begin + s.hi - s.lo
                if s.used:
                    self._warm(s, self._late[begin:end])
                begin = end
                continue
            s.t += 1
            rates, live = self._rates(s.t, s.updates), momenta.live
            places = (live.before(s.lo), live.before(s.hi))
            with s.numbers() as x:
                if len(s.idle) and rates.decay != 1:
                    x[s.idle] *= rates.decay
                momenta.move(x, s.lo, self._g, self.m, self.v, places, rates)

    def _rates(self, t: int, updates: int) -> Any:
        r = self.rule
        return self._device.kernels.rates(
            self._dtype, r.betas, r.eps, r.weight_decay, r.decoupled, self.lr, t, updates
        )

    def _grow_older(self) -> None:
        """Decide, as all ranks do by the same numbers, whether this was the last warm-up step."""
        if not self.age and not self.v.any():
            return
        self.age += 1
        if self.comm.size == 1:
            return
        freeze, b2 = self.spec.freeze, self.rule.betas[1]
        if isinstance(freeze, VarianceRatio):
            norm = self._device.kernels.absolute_sum(self.v) / (1 - b2**self.age)
            self._norms = [*self._norms, norm][-1 - lag_of(b2) :]
            if len(self._norms) <= lag_of(b2):
                return
        if due(freeze, self.age, self._norms):
            self._freeze()

    def _freeze(self) -> None:
        for s in self.segments:
            s.late = not self.v[s.lo : s.hi].any()
        self._let_travel()
        for s in self.segments:
            if not s.late:
                self.m[s.lo : s.hi][s.idle] = 0

    def _let_travel(self) -> None:
        live = self.v > 0
        for s in self.segments:
            mine = live[s.lo : s.hi]
            mine &= not s.late
            s.idle = np.flatnonzero(~mine)
        self._norms = []
        self.momenta = momenta_of(
            self.spec.codec, Live.of(live), self.comm, self._dtype, self._device
        )

    def _numbers(self, g: Any) -> Any:
        """View a gradient as the work format, or copy it."""
        flat = device_of(g).flat(g)
        if len(flat.data) != len(self.m):
            raise ValueError(f"{len(self.m)} parameters got {len(flat.data)} gradients")
        return flat.device.cast(flat.data, flat.dtype, self._dtype)

    def _clip(self, g: Any) -> None:
        if self.spec.max_norm is None:
            return
        norm = math.sqrt(self.squares(g))
        if norm > self.spec.max_norm:  # not where it is NaN: the step will be left out
            self._device.scale(g, self.spec.max_norm / (norm + 1e-6))

    def squares(self, g: Any) -> float:
        """Return the square of the norm that `max_norm` limits; collective after the freeze."""
        mine: float = self._device.kernels.square_sum(g)
        if self.momenta is None:
            return mine
        total: float = allreduce(self.comm, mine, op=MEAN, name=f"{self.name}, squares")
        return total

    def state_dict(self, *, moments: bool = True) -> dict[str, Any]:
        """Return copies of what this rank must save.

        Args:
            moments: With m and v.
        """
        state: dict[str, Any] = {
            "segments": [(s.t, s.updates, s.late) for s in self.segments],
            "age": self.age,
            "norms": list(self._norms),
            "layout": self._layout,
            "owed": None if self.momenta is None else self.momenta.state_dict(),
        }
        return state | ({"m": self.m.copy(), "v": self.v.copy()} if moments else {})

    @property
    def _layout(self) -> str:
        return f"rank {self.comm.rank} of {self.comm.layout}"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank.

        What codecs owe belongs to one number of ranks: among another one it is forgotten, with a
        warning. What was frozen stays so, except on one rank.
        """
        for key, array in (("m", self.m), ("v", self.v)):
            if key in state:
                self._device.copy(array, state[key])
        self.age, self._norms = state["age"], list(state["norms"])
        self.momenta = self._g = self._late = None
        for s, (t, updates, late) in zip(self.segments, state["segments"], strict=True):
            s.t, s.updates, s.late = t, updates, late and self.comm.size > 1
        if state["owed"] is None or self.comm.size == 1:
            return
        self._let_travel()
        if state["layout"] == self._layout and self.momenta is not None:
            self.momenta.load_state_dict(state["owed"])
        else:
            warnings.warn(
                f"what the codec owes was saved by {state['layout']} and this is {self._layout}: "
                "it begins at zero",
                RuntimeWarning,
                stacklevel=2,
            )
