"""Numbers in memory that the ranks of one host share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.words import LINE, NUDGE, rows

__all__ = ["Slots"]

_WORDS = 3  # of a row: the turn, and what was said with it
_KEPT = 64  # shapes whose views are at hand


class Slots:
    """Two buffers of each rank, by turns: one may still be read when the next is filled.

    In turn t a rank fills its buffer, says t, waits until all have said t, and reads theirs. Who
    has said t + 1 has read all that was given in turn t, so two buffers are enough.

    Attributes:
        nbytes: Of each buffer.
        rows: For each rank, which turn it has said.
        last: The turn that was begun last.
    """

    def __init__(
        self,
        memory: Any,
        words: memoryview,
        rank: int,
        size: int,
        nudge: Callable[[], Any],
    ) -> None:
        self.nbytes = len(memory) // (2 * size)
        self.rank, self.size, self.rows = rank, size, rows(words, size)
        self._words, self._nudge, self.last = words, nudge, 0
        self._mine = rank * LINE
        self._others = [r * LINE for r in range(size) if r != rank]
        self._buffers = memory.reshape(2, size, self.nbytes)
        self._views: dict[tuple[int, np.dtype[Any]], list[list[Any]]] = {}
        self._whole: dict[np.dtype[Any], tuple[Any, Any]] = {}

    def turn(self, count: int, dtype: np.dtype[Any]) -> list[Any]:
        """Begin the next turn: the buffers of all ranks, as `count` numbers each."""
        self.last += 1
        views = self._views.get((count, dtype))
        if views is None:
            if len(self._views) >= _KEPT:
                self._views.clear()
            cut = self._buffers[:, :, : count * dtype.itemsize]
            views = [[buffer.view(dtype) for buffer in parity] for parity in cut]
            self._views[count, dtype] = views
        return views[self.last % 2]

    def next_turn(self, dtype: np.dtype[Any]) -> tuple[int, Any, Any]:
        """Begin the next turn for compiled code.

        Returns:
            Its number, its buffers, a row a rank, and those of the turn after it, into which a
            rank may write when all have said this one.
        """
        self.last += 1
        whole = self._whole.get(dtype)
        if whole is None:
            even, odd = self._buffers.view(dtype)
            whole = self._whole[dtype] = even, odd
        return self.last, whole[self.last % 2], whole[(self.last + 1) % 2]

    def given(self) -> Request:
        """Say that this rank's buffer is filled; the request is done when all of them are."""
        self._words[self._mine] = self.last
        return _Given(self, self.last)

    def say(self, *words: int) -> Request:
        """Begin a turn that fills no buffer, and end it; others may look at these words then.

        Without any, the words said before stay.
        """
        self.last += 1
        for at, word in enumerate(words, self._mine + 1):
            self._words[at] = word
        return self.given()

    def said(self) -> list[list[int]]:
        """Return the words of all ranks."""
        return self.rows[:, 1:_WORDS].tolist()  # type: ignore[no-any-return]

    def withdraw(self) -> None:
        """Take back the words said last, also from who has begun to act on them."""
        with suppress(ValueError):  # the memory was freed
            for at in range(self._mine + 1, self._mine + _WORDS):
                self._words[at] = 0

    def nudge(self, looks: int) -> None:
        """Let MPI move its messages, now and then, when somebody has looked so often in vain."""
        if not looks % NUDGE:
            self._nudge()

    def take_back(self) -> None:
        """Undo a turn whose buffers nobody has asked for, and will not."""
        self.last -= 1
        self._words[self._mine] = self.last

    def free(self) -> None:
        """Let go of the memory."""
        self._views.clear()
        self._whole.clear()
        del self._buffers, self.rows
        with suppress(BufferError):
            self._words.release()


class _Given:
    """The request of one turn."""

    __slots__ = ("_left", "_looks", "_slots", "_turn")

    def __init__(self, slots: Slots, turn: int) -> None:
        self._slots, self._turn = slots, turn
        self._left, self._looks = len(slots._others), 0

    def test(self) -> bool:
        slots = self._slots
        while self._left:
            if slots._words[slots._others[self._left - 1]] < self._turn:
                self._looks += 1
                slots.nudge(self._looks)
                return False
            self._left -= 1
        return True
