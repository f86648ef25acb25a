"""Memory that the ranks of one host share: agreements and numbers without messages.

A message inside one machine is two copies and the upkeep of two requests. Here each rank writes
what it says to a place of its own, which all others read. A place has one writer, so nothing is
locked: numbers first, then the count that says they are there. That stores of one core become
visible in their order is a promise of x86-64; on other machines MPI's messages are used.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.turns import SharedTurn

if TYPE_CHECKING:
    from mpi4py import MPI

    from relaxmpi.primitives.agreement import Vote

__all__ = ["Board", "Shared", "Slots", "share"]

_TOKEN = 16
_LINE = 8  # words of a cache line: the places of two ranks share none
_RING = 256
_BOARD = _LINE + _RING * 2  # words: up to which number all are read; numbers and codes
_LANES = 2
_KEPT = 64  # shapes whose views are at hand
_PAGE = 4096

# A slot holds what a rank gives in one turn; long enough for what a turn costs, and both slots of
# all ranks of a small host fit into a last-level cache.
_SLOT = 2 * 1024 * 1024
_ALL_SLOTS = 64 * 1024 * 1024
_MOST_RANKS = 256

# Where slots begin in a page. Large arrays of numpy begin at 16 and those of torch at 64, and some
# processors copy at a fifteenth of their speed to an address that is, modulo a page, less than 32
# bytes behind the source (measured on AMD's Zen 3: `rep movsb`, as glibc uses it).
_SHIFT = _PAGE // 2

# Looks in vain after which MPI's own messages, of other Comms or of the user, get their chance.
_NUDGE = 32


class Board:
    """A table of votes: each rank has a ring of entries that it writes and the others read.

    Who is a ring ahead of the others must look at one of its votes to cast the next.
    """

    def __init__(self, words: memoryview, rank: int, size: int, nudge: Callable[[], Any]) -> None:
        self.size = size
        self.rows = _rows(words, size)
        self._words, self._nudge = words, nudge
        self._mine = rank * _BOARD
        self._others = [r * _BOARD for r in range(size) if r != rank]
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
        return _LINE + number % _RING * 2

    def _has_room(self, number: int) -> bool:
        """Whether everybody has read what an entry of this number would replace."""
        rows = (self._mine, *self._others)
        self._room = _RING + min(self._words[row] for row in rows)
        return number <= self._room

    def heard(self, number: int) -> None:
        """Tell the others that they may replace their entries, up to the first that is unread."""
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
            self._write(*self._waiting.popleft())

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
                if not self._looks % _NUDGE:
                    board._nudge()
                return False
        for row in board._others:
            if words[row + at + 1] != self._code:
                self.equal = False
        self._done = True
        board.heard(number)
        return True


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
        self.rank, self.size, self.rows = rank, size, _rows(words, size)
        self._words, self._nudge, self.last = words, nudge, 0
        self._mine = rank * _LINE
        self._others = [r * _LINE for r in range(size) if r != rank]
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

    def nudge(self, looks: int) -> None:
        """Let MPI move its messages, now and then, when somebody has looked so often in vain."""
        if not looks % _NUDGE:
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


class Shared:
    """What the ranks of one Comm share.

    Attributes:
        boards: One for each lane of agreements.
        slots: For numbers.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, nudge: Callable[[], Any]) -> None:
        self._memory = memory
        words = memoryview(memory)[: _head(size)].cast("q")[_TOKEN // 8 :]
        self.boards = []
        for _ in range(_LANES):
            self.boards.append(Board(words[: size * _BOARD], rank, size, nudge))
            words = words[size * _BOARD :]
        numbers = np.frombuffer(memory, np.uint8, offset=_head(size))
        self.slots = Slots(numbers, words[: size * _LINE], rank, size, nudge)

    def free(self) -> None:
        """Give it back, when nobody on this rank will look at it any more."""
        for board in self.boards:
            board.free()
        self.slots.free()
        with suppress(BufferError):  # somebody keeps an error whose frames hold a view
            self._memory.close()


def _rows(words: memoryview, size: int) -> Any:
    """The same memory for compiled code, a row a rank."""
    return np.frombuffer(words, np.int64).reshape(size, -1)


def _head(size: int) -> int:
    """Bytes before the slots."""
    words = size * (_LANES * _BOARD + _LINE)
    return -(-(_TOKEN + 8 * words) // _PAGE) * _PAGE + _SHIFT


def share(
    mpi: MPI.Intracomm, wanted: bool, nudge: Callable[[], Any] = lambda: None
) -> Shared | None:
    """Map memory that all ranks see; None, on all ranks, where one of them cannot or will not.

    The memory has no name in any file system: rank 0 opens it, the others find it among the open
    files of that process, and the kernel takes it back with its last mapping, however the
    processes end. Pages take memory from when they are used.

    Args:
        mpi: The ranks, all on one host.
        wanted: Whether this rank wants any.
        nudge: Lets MPI move its messages; called now and then by who waits.
    """
    size = mpi.size
    wanted = wanted and platform.machine() == "x86_64" and size <= _MOST_RANKS
    slot = min(_SLOT, _ALL_SLOTS // (2 * size)) // _PAGE * _PAGE
    nbytes = _head(size) + 2 * size * slot
    fd, where, token = -1, "", b""
    if mpi.rank == 0 and wanted:
        with suppress(OSError):  # no files left, or none so long, or none without a name
            fd = os.memfd_create("relaxmpi")
            os.truncate(fd, nbytes)
            token = os.urandom(_TOKEN)
            os.pwrite(fd, token, 0)
            where = f"/proc/{os.getpid()}/fd/{fd}"
    where, token = mpi.bcast((where, token))
    memory = _mapped(where, token, nbytes) if wanted and where else None
    # The second meeting: from here on rank 0 may close the file.
    everybody = all(mpi.allgather(memory is not None))
    if fd >= 0:
        os.close(fd)
    if memory is None or not everybody:
        return None
    return Shared(memory, mpi.rank, size, nudge)


def _mapped(where: str, token: bytes, nbytes: int) -> mmap.mmap | None:
    """Map the memory behind that file; None if it is not there, or that of another job."""
    try:
        fd = os.open(where, os.O_RDWR)
        try:
            memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None
    return memory if memory[:_TOKEN] == token else None
