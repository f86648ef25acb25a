"""All-reduces inside one host that have been checked before, and are made again as they were.

To check the arguments of a small call, and to put them into words and these into a hash, takes
longer than to move its numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from relaxmpi.primitives.ops import MEAN, SUM, Op
from relaxmpi.primitives.primitive import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from relaxmpi.primitives.calls import Call
    from relaxmpi.primitives.devices import Flat
    from relaxmpi.primitives.stream import Stream
    from relaxmpi.primitives.work import Flow

    Move = Callable[[Any, Any, bool], Flow[None]]

__all__ = ["Learned", "sent_by"]

_MOST = 256


class _Known(NamedTuple):
    """A call, and what moves the numbers from x to out, divided or not, and counts them."""

    call: Call
    move: Move


class Learned:
    """The calls that one Comm knows, by shape, format, operation and name.

    What can differ between two arrays of one shape and format is looked at again each time:
    strides, alignment, whether they may be written to, and whether two of them overlap.
    """

    def __init__(self, comm: Stream) -> None:
        self._comm = comm
        self._known: dict[tuple[Any, ...], _Known] = {}

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self._known

    def add(self, call: Call, flat: Flat, op: Op, name: str, move: Move) -> None:
        """Remember a checked call."""
        if type(name) is not str:
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[flat.shape, flat.data.dtype, op is MEAN, name] = _Known(call, move)

    def plan(
        self, x: Any, out: Any, op: Any, name: Any, take_back: Callable[[], None]
    ) -> Plan[Any] | None:
        """Return the plan of a call that is known; the arguments are what the caller passed."""
        if type(x) is not np.ndarray or type(name) is not str or (op is not SUM and op is not MEAN):
            return None
        known = self._known.get((x.shape, x.dtype, op is MEAN, name))
        if known is None or not x.flags.carray:
            return None
        if out is None:
            out = x
        elif type(out) is not np.ndarray or (out.shape, out.dtype) != (x.shape, x.dtype):
            return None
        elif not out.flags.carray or np.may_share_memory(x, out):
            return None
        return Plan(known.call, self._once(known, x, out, op is MEAN), take_back)

    def _once(self, known: _Known, x: Any, out: Any, mean: bool) -> Flow[Any]:
        self._comm.begin()
        try:
            yield from known.move(x.reshape(-1), out.reshape(-1), mean)
        finally:
            self._comm.end()
        return out


def sent_by(n: int, x: Any) -> tuple[int, int]:
    """Bytes and messages that each of n ranks counts for an all-reduce of `x`.

    They are those of a bandwidth-optimal exchange of messages.
    """
    return 2 * (n - 1) * x.nbytes // n, 2 * (n - 1)
