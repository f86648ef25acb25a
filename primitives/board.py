"""Votes in memory that the ranks of one host share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.turns import SharedTurn
from relaxmpi.primitives.words import LINE, NUDGE, rows

if TYPE_CHECKING:
    from relaxmpi.primitives.agreement import Vote

__all__ = ["ROW", "Board"]

_RING = 256
ROW = LINE + _RING * 2  # words: up to which number all are read; numbers and codes


class Board:
    """A table of votes: each rank has a ring of entries that it writes and the others read.

    Who is a ring ahead of the others must look at one of its votes to cast the next.
    """

    def __init__(self, words: memoryview, rank: int, size: int, nudge: Callable[[], Any]) -> None:
        self.size = size
        self.rows = rows(words, size)
        self._words, self._nudge = words, nudge
        self._mine = rank * ROW
        self._others = [r * ROW for r in range(size) if r != rank]
        self._cast = self._read = 0
        self._early: set[int] = set()  # read before others that were cast earlier
        self._room = _RING
        self._waiting: deque[tuple[int, int]] = deque()

    def vote(self, code: int, along: Request | None = None) -> Vote:
        """Say a number, now or with a turn that can carry it; see `Table`."""
        number = self._cast + 1
        self._cast = number
        if number > self._room and (self._waiting or not self._has_room(number)):
            self._waiting.append((number, code))
        elif isinstance(along, SharedTurn):
            along.carry(self, number, code)
            return along
        else:
            self._write(number, code)
        return _Vote(self, number, code)

    def _write(self, number: int, code: int) -> None:
        words, at = self._words, self._mine + self.entry(number)
        words[at + 1] = code
        words[at] = number

    def entry(self, number: int) -> int:
        """Return where in a row the vote of this number stands: the number itself, and a code."""
        return LINE + number % _RING * 2

    def _has_room(self, number: int) -> bool:
        """Whether everybody has read what an entry of this number would replace."""
        rows = (self._mine, *self._others)
        self._room = _RING + min(self._words[row] for row in rows)
        return number <= self._room

    def heard(self, number: int) -> None:
        """Tell the others that they may replace their entries, up to the first that is unread.

        May be said again: who says it may be stopped by a signal before he has noted that he has.
        """
        if number <= self._read:
            return
        if number == self._read + 1 and not self._early:
            self._read = self._words[self._mine] = number
            return
        self._early.add(number)
        while self._read + 1 in self._early:
            self._read += 1
            self._early.remove(self._read)
        self._words[self._mine] = self._read

    def _flush(self) -> None:
        """Write what had to wait for room."""
        while self._waiting and self._has_room(self._waiting[0][0]):
            self._write(*self._waiting[0])
            self._waiting.popleft()

    def free(self) -> None:
        """Let go of the memory."""
        del self.rows
        with suppress(BufferError):  # as in `Shared.free`
            self._words.release()


class _Vote:
    """See `Vote` of agreements."""

    __slots__ = ("_board", "_code", "_done", "_looks", "_number", "equal")

    def __init__(self, board: Board, number: int, code: int) -> None:
        self._board, self._number, self._code = board, number, code
        self._looks, self._done, self.equal = 0, False, True

    @property
    def request(self) -> Request:
        """Itself; no attribute, which would make it garbage that only a collection finds."""
        return self

    def test(self) -> bool:
        board, number = self._board, self._number
        if self._done:
            return True
        if board._waiting:
            board._flush()
        words, at = board._words, board.entry(number)
        for row in board._others:
            if words[row + at] < number:
                self._looks += 1
                if not self._looks % NUDGE:
                    board._nudge()
                return False
        for row in board._others:
            if words[row + at + 1] != self._code:
                self.equal = False
        board.heard(number)
        self._done = True
        return True
