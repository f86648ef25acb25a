"""The state of 1-bit Adam for one buffer; `OneBitAdam` gives the rule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.algorithms.adamw import AdamW, widened
from relaxmpi.algorithms.base import Bound
from relaxmpi.algorithms.freezing import VarianceRatio, due, lag_of
from relaxmpi.algorithms.momenta import Momenta, momenta_of, units_of
from relaxmpi.primitives import MEAN, Comm, Work, allreduce
from relaxmpi.primitives.devices import Device, device_of
from relaxmpi.primitives.signed import Live

if TYPE_CHECKING:
    from relaxmpi.algorithms.onebit_adam import OneBitAdam

__all__ = ["BoundOneBitAdam", "Segment"]


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
        g: The gradients of the step that is being taken.
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
        self.lr, self.segments = lr, segments
        self._dtype, self._device = dtype, device
        self.m, self.v = (device.zeros(segments[-1].hi, dtype) for _ in range(2))
        self.age = 0
        self.momenta: Momenta | None = None
        self._norms: list[float] = []
        self.g: Any = None
        self._late: Any = None
        self._mix: Any = None

    def on_grads(self, g: Any) -> Work[Any]:
        """Start to average gradients, or momenta."""
        if self.momenta is None:
            return allreduce.start(self.comm, g, op=MEAN, name=self.name)
        data = self.g = self._numbers(g)
        self._clip(data)
        _, rule = self.settings()
        if rule.weight_decay and not rule.decoupled:
            for s in self.segments:
                if not s.late:
                    with s.numbers() as x:
                        data[s.lo : s.hi] += data.dtype.type(rule.weight_decay) * x
        late = [data[s.lo : s.hi] for s in self.segments if s.late]
        self._late = np.concatenate(late) if late else None
        self._mix = self._rates(1, 1).mix  # with which momenta are made a second time
        given = (data, self.m, self.v, self._mix, self._late, self.name, self.age)
        return self.momenta.start(self.comm, *given)

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
            self.g = self._numbers(g)
            return bool(finite(self.g))
        if self.g is None:  # it has been left out already
            return False
        return self.momenta.finite and (self._late is None or bool(finite(self._late)))

    def take(self) -> None:
        """Move the parameters."""
        if self.momenta is None:
            self._clip(self.g)
            for s in self.segments:
                if s.used:
                    self._warm(s, self.g[s.lo : s.hi])
            self._grow_older()
        else:
            self._frozen(self.momenta)
            self.momenta.end(taken=True)
            self.age += 1
        self.g = self._late = None

    def leave_out(self) -> None:
        """Forget what was exchanged."""
        if self.momenta is not None and self.g is not None:
            self.momenta.end(taken=False)
        self.g = self._late = None

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
            rates = self._rates(s.t, s.updates)._replace(mix=self._mix)
            live = momenta.live
            places = (live.before(s.lo), live.before(s.hi))
            with s.numbers() as x:
                if len(s.idle) and rates.decay != 1:
                    x[s.idle] *= rates.decay
                momenta.move(x, s.lo, self.g, self.m, self.v, places, rates)

    def _rates(self, t: int, updates: int) -> Any:
        lr, r = self.settings()
        return self._device.kernels.rates(
            self._dtype, r.betas, r.eps, r.weight_decay, r.decoupled, lr, t, updates
        )

    def settings(self) -> tuple[float, AdamW]:
        """Return the step length and the rule of this step."""
        return self.lr, self.spec.rule

    def _grow_older(self) -> None:
        """Decide, as all ranks do by the same numbers, whether this was the last warm-up step."""
        if not self.age and not self.v.any():
            return
        self.age += 1
        if self.comm.size == 1:
            return
        freeze, b2 = self.spec.freeze, self.settings()[1].betas[1]
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
        self.comm.free_scratch()  # that of gradients in full precision
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
        units = units_of(self.settings()[1].eps, self._dtype) if self.spec.normalise else (0, 0)
        self.momenta = momenta_of(
            self.spec.codec, Live.of(live), self.comm, self._dtype, self._device, units
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
            "lr": self.lr,
            "age": self.age,
            "norms": list(self._norms),
            "layout": self._layout,
            "owed": None if self.momenta is None else self.momenta.state_dict(),
        }
        return state | ({"m": self.m.copy(), "v": self.v.copy()} if moments else {})

    @property
    def _layout(self) -> str:
        return f"rank {self.comm.rank} of {self.comm.layout}"

    def load_resized(self, state: dict[str, Any]) -> None:
        """Restore all but what codecs owe; what was frozen stays so, except on one rank."""
        for key, array in (("m", self.m), ("v", self.v)):
            if key in state:
                self._device.copy(array, state[key])
        self.lr, self.age, self._norms = state["lr"], state["age"], list(state["norms"])
        self.momenta = self.g = self._late = None
        for s, (t, updates, late) in zip(self.segments, state["segments"], strict=True):
            s.t, s.updates, s.late = t, updates, late and self.comm.size > 1
        if state["owed"] is None or self.comm.size == 1:
            return
        self._let_travel()
        assert self.momenta is not None
        if not self.momenta.live.size:
            raise ValueError("there is no variance yet: load the state of the optimizer first")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank.

        What codecs owe belongs to one number of ranks: among another one it is forgotten, with a
        warning. What was frozen stays so, except on one rank.
        """
        self.load_resized(state)
        if self.momenta is None:
            return
        if state["layout"] == self._layout:
            self.momenta.load_state_dict(state["owed"])
        else:
            warnings.warn(
                f"what the codec owes was saved by {state['layout']} and this is {self._layout}: "
                "it begins at zero",
                RuntimeWarning,
                stacklevel=2,
            )
