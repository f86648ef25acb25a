"""Turns of ranks that share memory, by compiled code: requests that move what they wait for.

They use the words and slots of `shared` as `SharedSchedule` does in Python, so each rank may do it
either way, and changes over without telling the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.transport import Request

if TYPE_CHECKING:
    from relaxmpi.primitives.board import Board
    from relaxmpi.primitives.pulls import Pulls
    from relaxmpi.primitives.slots import Slots

__all__ = ["SharedTurn", "Turns"]

# How often compiled code looks for the peers before Python gets its chance: some 50 microseconds,
# or so many times that others may take the core, which is as little where no other wants it.
_LOOKS = 20_000
_POLITE_LOOKS = 200

# Where compiled code is told of the vote, and of the number of the turn.
_VOTES, _ENTRY, _NUMBER, _CODE, _NOW = -9, -8, -7, -6, -4

_DTYPES = frozenset(np.dtype(name) for name in ("f4", "f8", "i4", "i8"))


class Turns:
    """The compiled turns of one Comm.

    Args:
        slots: Where its ranks put their numbers.
        polite: Whether others may need the core of a rank that waits.
    """

    def __init__(self, slots: Slots, polite: bool) -> None:
        self.slots, self.polite = slots, polite
        self.looks = _POLITE_LOOKS if polite else _LOOKS
        self.code: Any = import_module("relaxmpi.primitives._together")
        self._pull: Any = import_module("relaxmpi.primitives._pull")

    def takes(self, x: Any) -> bool:
        """Whether there is code for such an array: others would each be compiled for."""
        return x.dtype in _DTYPES and bool(x.flags.carray)

    def at_once(self, x: Any, out: Any, mean: bool) -> SharedTurn:
        """Every rank reads and adds all."""
        return self.again(self.spans(x), x, out, mean)

    def spans(self, x: Any) -> Any:
        """Return what `again` is told of an array of this length."""
        return np.array([(0, len(x))] * self.slots.size)

    def again(self, spans: Any, x: Any, out: Any, mean: bool) -> SharedTurn:
        """Do the same as `at_once`."""
        return self._turn(self.code.AT_ONCE, x, out, spans, 0, mean)

    def scatter(
        self, x: Any, out: Any, spans: list[tuple[int, int]], each: int, mean: bool
    ) -> SharedTurn:
        """Every rank reads and adds its span, for which there is room for `each` numbers."""
        return self._turn(self.code.SCATTER, x, out, np.array(spans), each, mean)

    def gather(self, out: Any, spans: list[tuple[int, int]], scattered: SharedTurn) -> SharedTurn:
        """Every rank reads the spans of all others, whose sums are there if that turn was last."""
        put = self.slots.last == scattered.number
        kind = self.code.GATHER if put else self.code.GATHER_PUT
        return self._turn(kind, out, out, np.array(spans), 0, False)

    def _turn(self, kind: int, x: Any, out: Any, spans: Any, each: int, mean: bool) -> SharedTurn:
        number, given, onward = self.slots.next_turn(x.dtype)
        call = x, out, given, onward, kind, self.slots.rank, spans, each, mean
        return SharedTurn(self, self.code.turn, call, number)

    def pull(self, pulls: Pulls, spans: Any, x: Any, out: Any, mean: bool) -> SharedTurn:
        """Every rank reads its span of all others, from where it lies, and then their sums."""
        slots = self.slots
        slots.last += 1
        rooms, sums = pulls.rooms(x.dtype), pulls.sums(x)
        call = (x, out, rooms, sums, slots.rank, spans, mean, *pulls.words)
        return SharedTurn(self, self._pull.pull, call, slots.last, more=2)


class SharedTurn:
    """One turn, or several that move one buffer, and the request that is done when they are.

    It can carry the vote on its call: then it moves nothing where that is not `equal`.

    Attributes:
        number: Of the first turn.
        moved: Whether all was moved.
        equal: See `Vote`.
        refused: Whether nothing was moved because the numbers of a rank cannot be read.
    """

    __slots__ = (
        "_args",
        "_board",
        "_looks",
        "_more",
        "_move",
        "_turns",
        "equal",
        "moved",
        "number",
        "refused",
    )

    def __init__(
        self, turns: Turns, move: Any, call: tuple[Any, ...], number: int, more: int = 0
    ) -> None:
        self.number, self._move, self._more, self._turns = number, move, more, turns
        rows, stage = turns.slots.rows, np.zeros(3, np.int64)
        vote, when = (rows, 0, 0, 0), (rows, number, turns.looks, turns.polite, stage)
        self._args = [*call, *vote, *when]
        self._board: Board | None = None
        self._looks, self.equal, self.refused, self.moved = 0, True, False, False

    def renew(self, x: Any, out: Any) -> None:
        """Begin the same with other arrays of this length, when it has moved all."""
        args, slots = self._args, self._turns.slots
        args[0], args[1] = x, out
        if self._more:
            slots.last = number = slots.last + 1
        else:
            number, args[2], args[3] = slots.next_turn(x.dtype)
        self.number = args[_NOW] = number
        args[_NUMBER] = 0
        self._looks, self.moved = 0, False

    def let_go(self) -> None:
        """Do not keep the arrays."""
        self._args[0] = self._args[1] = None

    @property
    def request(self) -> Request:
        """Itself; see `Vote`."""
        return self

    def carry(self, board: Board, number: int, code: int) -> None:
        """Cast this vote when the turn begins."""
        self._board = board
        args = self._args
        args[_VOTES], args[_ENTRY] = board.rows, board.entry(number)
        args[_NUMBER], args[_CODE] = number, code

    def test(self) -> bool:
        """Move what can be moved; whether that was all."""
        code = self._turns.code
        stage = self._move(*self._args)
        if stage == code.LATE:
            self._looks += 1
            self._turns.slots.nudge(self._looks)
            return False
        if self._board is not None:
            self.equal = stage != code.DIFFER
            self._board.heard(self._args[_NUMBER])
            self._board = None
        if stage == code.DONE:
            self._turns.slots.last = self.number + self._more
            self.moved = True
        else:
            self.refused = stage != code.DIFFER
        return True
