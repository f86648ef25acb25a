"""Memory for messages that is used again as soon as nobody holds it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from relaxmpi.primitives.devices import Device

__all__ = ["Buffers"]

_MOST = 64  # arrays of one size and format that are kept


class Buffers:
    """Arrays of host memory that go round; fresh pages cost more than the sums made in them.

    An array is free again when its only reference is the one kept here: messages under way, views
    of it and what was given to the caller count. Arrays of other devices are made anew.

    Example:
        >>> from relaxmpi.primitives.cpu import Cpu
        >>> buffers, cpu = Buffers(), Cpu()
        >>> a = buffers.take(cpu, 1000, "float32")
        >>> where, part = cpu.span(a), a[5:]
        >>> del a
        >>> cpu.span(buffers.take(cpu, 1000, "float32")) == where     # `part` is in use
        False
        >>> del part
        >>> cpu.span(buffers.take(cpu, 1000, "float32")) == where
        True
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], list[Any]] = {}
        probe = [np.empty(0, np.uint8)]
        self._free = sys.getrefcount(probe[0])

    def take(self, device: Device, count: int, dtype: str) -> Any:
        """Return memory for so many numbers; its content is arbitrary."""
        if device.name != "cpu":
            return device.empty(count, dtype)
        held = self._held.get((count, dtype))
        if held is None:
            held = self._held[count, dtype] = []
        for k in range(len(held)):
            if sys.getrefcount(held[k]) == self._free:
                return held[k]
        array = device.empty(count, dtype)
        if len(held) < _MOST:
            held.append(array)
        return array
