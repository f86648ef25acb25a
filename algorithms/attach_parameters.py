"""Buckets of parameters of 1-bit Adam: their state is a part of an optimizer's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from relaxmpi.algorithms.adamw import AdamW, widened, work_format
from relaxmpi.algorithms.onebit_adam import OneBitAdam
from relaxmpi.algorithms.onebit_bound import BoundOneBitAdam, Segment
from relaxmpi.primitives import Comm, Work
from relaxmpi.primitives.devices import device_of

__all__ = ["ParameterBound", "phase_of", "rule_of"]

_WARM, _FROZEN, _LATE = 0, 1, 2


class Owner(Protocol):
    """What a bucket asks of its optimizer."""

    algorithm: OneBitAdam
    state: Any

    def measure(self) -> None:
        """Find the norm of all gradients before they leave, if it must be then."""

    def squares(self) -> float:
        """Return its square."""


def rule_of(group: dict[str, Any]) -> AdamW:
    """Return the settings of a parameter group."""
    return AdamW(*(group[k] for k in ("betas", "eps", "weight_decay", "decoupled")))


def phase_of(state: dict[str, Any]) -> tuple[int, int]:
    """Return the age of the bucket of a parameter, and whether it is frozen.

    Parameters that were late in their last bucket are as young as their variance.
    """
    steps = int(state.get("step", 0))
    if state.get("frozen", _WARM) == _LATE:
        return int(state["updates"]), _WARM
    return int(state.get("age", steps)), int(state.get("frozen", _WARM))


class ParameterSegment(Segment):
    """One parameter, whose memory is its own."""

    @contextmanager
    def numbers(self) -> Iterator[Any]:
        """See `Segment.numbers`; other memory layouts, such as channels last, are copied."""
        p = self.x.detach()
        dense = p.contiguous()
        with widened(dense) as x:
            yield x
        if dense is not p:
            p.copy_(dense)


class ParameterBound(BoundOneBitAdam):
    """The state of a bucket of parameters, which shares memory with the optimizer's.

    Attributes:
        flat: Where their gradients are.
    """

    def __init__(
        self,
        owner: Owner,
        comm: Comm,
        params: list[Any],
        flat: Any,
        group: dict[str, Any],
        name: str,
    ) -> None:
        segments, begin = list[Segment](), 0
        for p in params:
            segments.append(ParameterSegment(begin, begin + p.numel(), p))
            begin += p.numel()
        device = device_of(flat)
        dtype = work_format(device.flat(flat, writable=False, strided=True))
        self._owner, self._group, self.flat = owner, group, flat
        super().__init__(owner.algorithm, comm, segments, dtype, device, 0.0, name)
        self.adopt()

    def settings(self) -> tuple[float, AdamW]:
        """Those of the group, whatever has changed them."""
        return float(self._group["lr"]), rule_of(self._group)

    def on_grads(self, g: Any) -> Work[Any]:
        """See `BoundOneBitAdam`."""
        self._owner.measure()
        return super().on_grads(g)

    def squares(self, g: Any) -> float:
        """The norm is that of all parameters of the optimizer."""
        return self._owner.squares()

    def own_squares(self, g: Any) -> float:
        """Return the square of the norm of this bucket's gradient."""
        return float(self._device.kernels.square_sum(self._numbers(g)))

    def adopt(self) -> None:
        """Take over what the optimizer's state says, and let it show this bucket's memory."""
        states = [self._owner.state.get(s.x, {}) for s in self.segments]
        frozen = any(state.get("frozen", _WARM) == _FROZEN for state in states)
        self.age = 0
        for s, state in zip(self.segments, states, strict=True):
            s.t = int(state.get("step", 0))
            s.updates = int(state.get("updates", s.t))
            s.late = frozen and state.get("frozen", _WARM) != _FROZEN
            if not (frozen and s.late):
                self.age = max(self.age, phase_of(state)[0])
            if state:
                for key, flat in (("exp_avg", self.m), ("exp_avg_sq", self.v)):
                    view = torch.from_numpy(flat[s.lo : s.hi]).view(s.x.shape)
                    state[key] = view.copy_(state[key])
        if not frozen or self.comm.size == 1:
            self.momenta = None
        elif self.momenta is None:
            self._let_travel()

    def publish(self) -> None:
        """Let the optimizer's state say what has become of the parameters."""
        for s in self.segments:
            if not s.t:
                continue
            state = self._owner.state[s.x]
            if "exp_avg" not in state:
                for key, flat in (("exp_avg", self.m), ("exp_avg_sq", self.v)):
                    state[key] = torch.from_numpy(flat[s.lo : s.hi]).view(s.x.shape)
            frozen = _WARM if self.momenta is None else _LATE if s.late else _FROZEN
            facts = {"step": s.t, "updates": s.updates, "age": self.age, "frozen": frozen}
            for key, value in facts.items():
                if key in state:
                    state[key].fill_(value)
                else:
                    state[key] = torch.tensor(float(value))

    def state_dict(self, *, moments: bool = False) -> dict[str, Any]:
        """The moments are in the optimizer's state."""
        return super().state_dict(moments=moments)
