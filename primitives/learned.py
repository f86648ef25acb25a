"""All-reduces inside one host that have been checked before, and are made again as they were.

To check the arguments of a small call, and to put them into words and these into a hash, takes
longer than to move its numbers. So does a flow, where nothing else is pending: a known call begins
without one, and becomes one where the peers are late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from relaxmpi.primitives.ops import MEAN, SUM, Op
from relaxmpi.primitives.primitive import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from relaxmpi.primitives.agreement import Lane
    from relaxmpi.primitives.calls import Call
    from relaxmpi.primitives.devices import Flat
    from relaxmpi.primitives.stream import Stream
    from relaxmpi.primitives.turns import SharedTurn
    from relaxmpi.primitives.work import Flow

    Begin = Callable[[Any, Any, bool], SharedTurn]
    Rest = Callable[[SharedTurn, Any, Any, bool], Flow[None]]

__all__ = ["Again", "Learned", "sent_by"]

_MOST = 256


class _Known(NamedTuple):
    """A call, and how it is made.

    Attributes:
        call: What the ranks agree on.
        begin: Returns what moves the numbers from x to out, divided or not.
        rest: Waits for that, does what may be left, and counts.
        sent: The bytes and messages that are counted where nothing is left.
        spare: A turn that is over, for the next call, or nothing.
    """

    call: Call
    begin: Begin
    rest: Rest
    sent: tuple[int, int]
    spare: list[SharedTurn]


class Learned:
    """The calls that one Comm knows, by shape, format, operation and name.

    What can differ between two arrays of one shape and format is looked at again each time:
    strides, alignment, whether they may be written to, and whether two of them overlap.
    """

    def __init__(self, comm: Stream, take_back: Callable[[], None]) -> None:
        self._comm, self._take_back = comm, take_back
        self._known: dict[tuple[Any, ...], _Known] = {}

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self._known

    def add(self, call: Call, flat: Flat, op: Op, name: str, begin: Begin, rest: Rest) -> None:
        """Remember a checked call."""
        if type(name) is not str:
            return
        if len(self._known) >= _MOST:
            self.clear()
        known = _Known(call, begin, rest, sent_by(self._comm.size, flat.data), [])
        self._known[flat.shape, flat.data.dtype, op is MEAN, name] = known

    def clear(self) -> None:
        """Forget them all."""
        self._known.clear()

    def plan(self, x: Any, out: Any, op: Any, name: Any) -> Again | None:
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
        return Again(self._comm, known, x, out, op is MEAN, self._take_back)


class Again(Plan[Any]):
    """A known call of certain arrays, and what `run_once` runs.

    Attributes:
        lane: Where the ranks agree on it; to be set before `begin`.
        begun: Whether its turn is under way, and the vote on it.
    """

    __slots__ = ("_comm", "_known", "_mean", "_out", "_turn", "_vote", "_x", "begun", "lane")

    lane: Lane
    take_back: Callable[[], None]

    def __init__(
        self,
        comm: Stream,
        known: _Known,
        x: Any,
        out: Any,
        mean: bool,
        take_back: Callable[[], None],
    ) -> None:
        self.call, self.take_back = known.call, take_back
        self._comm, self._known, self._x, self._out, self._mean = comm, known, x, out, mean
        self.begun = False

    @property
    def flow(self) -> Flow[Any]:
        """What carries it out."""
        return self._all()

    def begin(self) -> bool:
        """See `Once`."""
        turn = self._turn = self._begin()
        vote = self._vote = self.lane.post(self.call, turn)
        self.begun = True
        return turn.test() and turn.moved and vote[1] is turn

    def end(self) -> Any:
        """See `Once`."""
        self._turn.let_go()
        self._known.spare.append(self._turn)
        stats, (nbytes, messages) = self._comm.stats, self._known.sent
        stats.payload_bytes += nbytes
        stats.messages += messages
        return self._out

    def rest(self) -> Flow[Any]:
        """See `Once`."""
        turn = self._turn
        return self.lane.behind(self.call, self._vote, turn, self._rest(turn), self.take_back)

    def _begin(self) -> SharedTurn:
        x, out = self._x, self._out
        flat = x if x.ndim == 1 else x.reshape(-1)
        target, spare = flat if out is x else out.reshape(-1), self._known.spare
        if not spare:
            return self._known.begin(flat, target, self._mean)
        turn = spare.pop()
        turn.renew(flat, target)
        return turn

    def _all(self) -> Flow[Any]:
        comm = self._comm
        comm.begin()
        try:
            return (yield from self._rest(self._begin()))
        finally:
            comm.end()

    def _rest(self, turn: SharedTurn) -> Flow[Any]:
        x, out = self._x.reshape(-1), self._out.reshape(-1)
        yield from self._known.rest(turn, x, out, self._mean)
        return self._out


def sent_by(n: int, x: Any) -> tuple[int, int]:
    """Bytes and messages that each of n ranks counts for an all-reduce of `x`.

    They are those of a bandwidth-optimal exchange of messages.
    """
    return 2 * (n - 1) * x.nbytes // n, 2 * (n - 1)
