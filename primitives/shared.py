"""Memory that the ranks of one host share: agreements and numbers without messages.

A message inside one machine is two copies and the upkeep of two requests. Here each rank writes
what it says to a place of its own, which all others read; see `words`. On machines other than
x86-64 MPI's messages are used.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.board import ROW, Board
from relaxmpi.primitives.pulls import Pulls, Reader
from relaxmpi.primitives.slots import Slots
from relaxmpi.primitives.words import LINE

if TYPE_CHECKING:
    from mpi4py import MPI

    from relaxmpi.primitives.settings import Settings

__all__ = ["Shared", "share"]

_TOKEN = 16
_LANES = 2
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


class Shared:
    """What the ranks of one Comm share.

    Attributes:
        boards: One for each lane of agreements.
        slots: For numbers.
        pulls: For many numbers.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        size: int,
        nudge: Callable[[], Any],
        processes: Sequence[int] | None = None,
    ) -> None:
        self._memory = memory
        words = memoryview(memory)[: _head(size)].cast("q")[_TOKEN // 8 :]
        self.boards = []
        for _ in range(_LANES):
            self.boards.append(Board(words[: size * ROW], rank, size, nudge))
            words = words[size * ROW :]
        numbers = np.frombuffer(memory, np.uint8, offset=_head(size))
        self.slots = Slots(numbers, words[: size * LINE], rank, size, nudge)
        self.pulls = Pulls(self.slots, processes)

    def free(self) -> None:
        """Give it back, when nobody on this rank will look at it any more."""
        for board in self.boards:
            board.free()
        self.slots.free()
        with suppress(BufferError):  # somebody keeps an error whose frames hold a view
            self._memory.close()


def _head(size: int) -> int:
    """Bytes before the slots."""
    words = size * (_LANES * ROW + LINE)
    return -(-(_TOKEN + 8 * words) // _PAGE) * _PAGE + _SHIFT


def share(
    mpi: MPI.Intracomm, settings: Settings, nudge: Callable[[], Any] = lambda: None
) -> Shared | None:
    """Map memory that all ranks see; None, on all ranks, where one of them cannot or will not.

    The memory has no name in any file system: rank 0 opens it, the others find it among the open
    files of that process, and the kernel takes it back with its last mapping, however the
    processes end. Pages take memory from when they are used.

    Args:
        mpi: The ranks, all on one host.
        settings: Whether this rank wants any, and may read the memory of the others.
        nudge: Lets MPI move its messages; called now and then by who waits.
    """
    size = mpi.size
    wanted = settings.shared_memory == 1 and platform.machine() == "x86_64" and size <= _MOST_RANKS
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
    seats = mpi.allgather((os.getpid(), _address(memory)) if memory is not None else None)
    if fd >= 0:
        os.close(fd)
    if memory is None or None in seats:
        return None
    readable = settings.single_copy == 1 and _reads(seats, token)
    processes = [process for process, _ in seats] if readable else None
    return Shared(memory, mpi.rank, size, nudge, processes)


def _address(memory: mmap.mmap) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


def _reads(seats: Sequence[tuple[int, int]], token: bytes) -> bool:
    """Whether this process may read the memory of these, which begins with the token."""
    found = np.empty(_TOKEN, np.uint8)
    try:
        reader = Reader()
    except AttributeError:  # the C library does not have the call
        return False
    for process, address in seats:
        found[:] = 0
        if not reader.read(process, address, found.ctypes.data, _TOKEN):
            return False
        if found.tobytes() != token:
            return False
    return True


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
