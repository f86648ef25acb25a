"""Numbers of the other ranks of a host, read where they lie: the kernel copies them once.

Memory that ranks share takes two copies, into it and out of it. Where a rank may read the memory
of its peers (`process_vm_readv`, as Open MPI and MPICH do for long messages), a long all-reduce
needs one: every rank says where its numbers lie, fetches its chunk from all others, adds it up, and
fetches the sums of the others.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.transport import Turn
from relaxmpi.primitives.wire import chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relaxmpi.primitives.devices import Device
    from relaxmpi.primitives.ops import Op
    from relaxmpi.primitives.slots import Slots
    from relaxmpi.primitives.wire import Plain
    from relaxmpi.primitives.work import Flow

__all__ = ["Pulls", "Reader"]

# Bytes that are fetched of all others before they are added: they stay in a core's own cache.
_OF_ALL = 256 * 1024
_MOST = 2**30  # the kernel reads a little less than 2^31 bytes in one call

# Bytes of a chunk up to which its sums are read where they were made, and not in the buffer: what
# another core has read, and still keeps, costs several times as much to write.
_APART = 512 * 1024

# Bytes up to which, for each of n ranks, copies by slots cost less than to ask the kernel: so many
# for all of them.
_SHORT = 512 * 1024

# Where numbers lie that the kernel cannot read, and those of a rank that cannot read the others'.
_HIDDEN, _NEVER = 0, -1


class Reader:
    """Reads the memory of other processes."""

    def __init__(self) -> None:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
        long, address = ctypes.c_ulong, ctypes.c_void_p
        function.argtypes = ctypes.c_int, address, long, address, long, long
        function.restype = ctypes.c_ssize_t
        self._function = function
        self._parts = array("q", [0] * 8)
        self._at = self._parts.buffer_info()[0]

    def read(self, process: int, theirs: int, mine: int, nbytes: int) -> bool:
        """Copy from an address of theirs to one of mine; False where that is not possible."""
        parts, at = self._parts, self._at
        while nbytes:
            now = min(nbytes, _MOST)
            parts[0], parts[1], parts[2], parts[3] = mine, now, theirs, now
            if self._function(process, at, 1, at + 16, 1, 0) != now:
                return False
            mine, theirs, nbytes = mine + now, theirs + now, nbytes - now
        return True

    def lets(self, process: int, begin: int, end: int) -> bool:
        """Whether the kernel reads such memory, judged by its first and its last byte.

        It does not read what a device has mapped.
        """
        parts, at = self._parts, self._at
        parts[0] = at + 64 - 8
        parts[1], parts[2], parts[3], parts[4], parts[5] = 2, begin, 1, end - 1, 1
        return bool(self._function(process, at, 1, at + 16, 2, 0) == 2)


class Pulls:
    """All-reduces of the ranks of one host by what each reads of the others.

    Nobody writes to what others may read before all have said that they have read it. A rank that
    gives up says so first, and what was read of it before that was looked at is no good: the call
    then waits, as for any rank that does not come.

    Args:
        slots: Whose turns say when.
        processes: Of all ranks; None where this rank cannot read one of them.

    Attributes:
        reads: Whether this rank can.
        able: Whether all ranks can, as far as is known.
        words: What compiled code is told.
    """

    def __init__(self, slots: Slots, processes: Sequence[int] | None) -> None:
        self._slots, self._processes = slots, processes or ()
        self.reads, self.able = processes is not None, True
        if self.reads:
            self._reader = Reader()
        self.words = (
            np.array(self._processes, np.int32),
            np.empty(8, np.int64),
            np.empty((slots.size, 2), np.int64),
        )
        self._rooms: dict[np.dtype[Any], Any] = {}
        self._sums: dict[np.dtype[Any], Any] = {}

    def takes(self, x: Any) -> bool:
        """Whether to read such a buffer; the same on all ranks, which have agreed on it."""
        return self.able and bool(x.nbytes * self._slots.size > _SHORT)

    def rooms(self, dtype: np.dtype[Any]) -> Any:
        """Return memory for a part of the chunk of each rank, a row a rank."""
        held = self._rooms.get(dtype)
        if held is None:
            n = self._slots.size
            most = max(1, _OF_ALL // (n - 1) // dtype.itemsize)
            held = self._rooms[dtype] = np.empty((n, most), dtype)
        return held

    def sums(self, x: Any) -> Any:
        """Return memory for the sums of this rank's chunk, or none where `out` holds them."""
        if x.nbytes > _APART * self._slots.size:
            return np.empty(0, x.dtype)
        held = self._sums.get(x.dtype)
        if held is None:
            held = self._sums[x.dtype] = np.empty(_APART // x.itemsize, x.dtype)
        return held

    def refused(self) -> None:
        """Take note that there are numbers that cannot be read; so do all ranks."""
        self.able = all(where != _NEVER for where, _ in self._slots.said())

    def allreduce(self, device: Device, x: Any, out: Any, op: Op, wire: Plain) -> Flow[bool]:
        """Reduce `x` into `out`, which may be `x`; False, on all ranks, where one is refused."""
        slots, bounds = self._slots, chunks(len(x), self._slots.size)
        try:
            yield slots.say(*self._where(device, x, out))
            offers = slots.said()
            if min(where for where, _ in offers) <= _HIDDEN:
                self.refused()
                return False
            if not self._add(device, x, out, op, wire, bounds, offers):
                yield Turn(lambda: False)
            yield slots.say()
            if not self._collect(device, out, bounds, offers):
                yield Turn(lambda: False)
            yield slots.say()
        except BaseException:
            slots.withdraw()
            raise
        return True

    def _where(self, device: Device, *arrays: Any) -> list[int]:
        """Return where the arrays lie, if the kernel reads that."""
        if not self.reads:
            return [_NEVER] * len(arrays)
        me, spans = self._processes[self._slots.rank], [device.span(a) for a in arrays]
        if not all(self._reader.lets(me, begin, end) for begin, end in spans):
            return [_HIDDEN] * len(arrays)
        return [begin for begin, _ in spans]

    def _add(
        self,
        device: Device,
        x: Any,
        out: Any,
        op: Op,
        wire: Plain,
        bounds: list[tuple[int, int]],
        offers: list[list[int]],
    ) -> bool:
        """Reduce this rank's chunk, part by part, in the order of ranks."""
        n, me, size, rooms = len(bounds), self._slots.rank, x.itemsize, self.rooms(x.dtype)
        lo, hi = bounds[me]
        for at in range(lo, hi, rooms.shape[1]):
            parts = list(rooms[:, : hi - at])
            count = len(parts[me])
            for r in _others(me, n):
                theirs, mine = offers[r][0] + at * size, device.span(parts[r])[0]
                if not self._reader.read(self._processes[r], theirs, mine, count * size):
                    return False
            parts[me] = x[at : at + count]
            into = out[at : at + count]
            wire.deliver(wire.reduced(parts, into, op, me), into, op, n)
        return self._slots.said() == offers

    def _collect(
        self,
        device: Device,
        out: Any,
        bounds: list[tuple[int, int]],
        offers: list[list[int]],
    ) -> bool:
        """Read the chunks of all others."""
        begin, size = device.span(out)[0], out.itemsize
        for r in _others(self._slots.rank, len(bounds)):
            lo, hi = (at * size for at in bounds[r])
            if not self._reader.read(self._processes[r], offers[r][1] + lo, begin + lo, hi - lo):
                return False
        return self._slots.said() == offers


def _others(me: int, n: int) -> list[int]:
    """Every other rank, each rank beginning with its right-hand neighbour."""
    return [(me + k) % n for k in range(1, n)]
