"""How the momenta of 1-bit Adam travel: fused, or spelled out for any codec and Comm."""

from __future__ import annotations

import math
from typing import Any, Protocol

from relaxmpi.primitives import (
    MEAN,
    Codec,
    Comm,
    ErrorFeedback,
    Hierarchy,
    OneBit,
    Work,
    allreduce,
    primitive,
)
from relaxmpi.primitives.devices import Device
from relaxmpi.primitives.signed import Live, SignedMean, signed_mean
from relaxmpi.primitives.work import Flow

__all__ = ["Momenta", "momenta_of", "units_of"]


class Momenta(Protocol):
    """The exchange of one buffer's momenta m + mix (g - m), of its live coordinates."""

    live: Live

    def start(
        self, comm: Comm, g: Any, m: Any, v: Any, mix: Any, late: Any, name: str, step: int
    ) -> Work[Any]:
        """Start it, and the mean of `late` behind it unless that is None."""

    @property
    def finite(self) -> bool:
        """Whether all numbers of all ranks were; the same on all ranks."""

    def move(
        self, x: Any, origin: int, g: Any, m: Any, v: Any, live: tuple[int, int], step: Any
    ) -> None:
        """Take the new momentum and step; see `SignedMean.move`."""

    def end(self, *, taken: bool) -> None:
        """The step has been taken, or was left out as if it had never been."""

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the residuals of this rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""


def momenta_of(
    codec: Codec, live: Live, comm: Comm, dtype: str, device: Device, units: tuple[int, int]
) -> Momenta:
    """Return the fused way where there is one."""
    if type(codec) is OneBit and not isinstance(comm, Hierarchy):
        return Fused(codec, live, dtype, device, units)
    return SpelledOut(codec, live, device, units)


def units_of(eps: float, dtype: str) -> tuple[int, int]:
    """Return the range of exponents of units near sqrt(v): none below eps, all exact."""
    most = 63 if dtype == "float32" else 511
    return max(-most, math.frexp(eps)[1] - 1) if eps else -most, most


class Fused:
    """Signs among equals; `SpelledOut` gives the same bytes."""

    def __init__(
        self, codec: OneBit, live: Live, dtype: str, device: Device, units: tuple[int, int]
    ) -> None:
        self.live, self._memory = live, SignedMean(codec, live, dtype, device, units)
        self.move = self._memory.move
        self.state_dict = self._memory.state_dict
        self.load_state_dict = self._memory.load_state_dict

    def start(
        self, comm: Comm, g: Any, m: Any, v: Any, mix: Any, late: Any, name: str, step: int
    ) -> Work[Any]:
        """See `Momenta`."""
        if late is None:
            return signed_mean.start(comm, g, m, v, self._memory, mix=mix, name=name)
        flow = signed_mean.flow(comm, g, m, v, self._memory, mix=mix, name=name)
        return _and_late.start(comm, flow, late, name)

    @property
    def finite(self) -> bool:
        """See `Momenta`."""
        return self._memory.finite

    def end(self, *, taken: bool) -> None:
        """Nothing has been changed by a step that was not taken."""
        if taken:
            self._memory.keep()


class SpelledOut:
    """Momenta to the front of g, and `allreduce` with feedback there.

    So that a step can be left out this takes a copy of the residuals in each one.
    """

    def __init__(self, codec: Codec, live: Live, device: Device, units: tuple[int, int]) -> None:
        self.live, self._memory, self._device = live, ErrorFeedback(codec), device
        self._units = units
        self._front: Any = None
        self._before: dict[str, Any] = {}
        self.state_dict = self._memory.state_dict
        self.load_state_dict = self._memory.load_state_dict

    def start(
        self, comm: Comm, g: Any, m: Any, v: Any, mix: Any, late: Any, name: str, step: int
    ) -> Work[Any]:
        """See `Momenta`."""
        self._device.kernels.gather_momentum(g, m, v, *self.live, mix=mix, units=self._units)
        self._front, self._before = g[: self.live.size], self._memory.state_dict()
        how: dict[str, Any] = {"op": MEAN, "codec": self._memory, "name": name, "step": step}
        if late is None:
            return allreduce.start(comm, self._front, **how)
        return _and_late.start(comm, allreduce.flow(comm, self._front, **how), late, name)

    @property
    def finite(self) -> bool:
        """See `Momenta`."""
        return bool(self._device.kernels.is_finite(self._front))

    def move(
        self, x: Any, origin: int, g: Any, m: Any, v: Any, live: tuple[int, int], step: Any
    ) -> None:
        """See `Momenta`."""
        how = {"live": live, "units": self._units, "step": step}
        self._device.kernels.move_frozen(x, origin, self._front, m, v, *self.live, **how)

    def end(self, *, taken: bool) -> None:
        """See `Momenta`."""
        if not taken:
            self._memory.load_state_dict(self._before)
        self._front, self._before = None, {}


@primitive
def _and_late(comm: Comm, momenta: Flow[Any], late: Any, name: str) -> Flow[None]:
    """Exchange momenta, then average the gradients of what is still in warm-up."""

    def flow() -> Flow[None]:
        yield from momenta
        yield from allreduce.flow(comm, late, op=MEAN, name=f"{name}, in warm-up")

    return flow()
