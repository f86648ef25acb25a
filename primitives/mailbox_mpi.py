"""Messages that come when they come, over MPI: persistent receives that are posted beforehand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from mpi4py import MPI

from relaxmpi.primitives.transport import Every, Request
from relaxmpi.primitives.transport_mpi import MpiTransport

__all__ = ["MpiMailbox"]

_MESSAGE = 1  # as in MpiTransport, which sends them
_NOTE = 2
_NOTE_BYTES = 64


class _Slot:
    """Room for one message of one sender: a persistent receive for each of its pieces.

    Attributes:
        last: Whether what has arrived is no message, but the sender's end.
    """

    __slots__ = ("_arrived", "_requests", "_status", "data", "last")

    def __init__(self, mpi: MPI.Intracomm, source: int, length: int, piece: int) -> None:
        self.data = np.empty(length, np.uint8)
        cuts = range(0, length, piece)
        self._requests = [mpi.Recv_init(self.data[i : i + piece], source, _MESSAGE) for i in cuts]
        self._status = MPI.Status()
        self.start()

    def start(self) -> None:
        self._arrived, self.last = 0, False
        for request in self._requests:
            request.Start()

    def test(self) -> bool:
        for request in self._requests[self._arrived :]:
            if not request.Test(self._status):
                return False
            self.last = self._status.count == 0
            self._arrived += 1
        return True

    def free(self) -> None:
        for request in self._requests:
            request.Free()


class _Sent:
    """A request of MPI, with what it reads."""

    __slots__ = ("_data", "_request")

    def __init__(self, request: MPI.Request, data: Any) -> None:
        self._request, self._data = request, data

    def test(self) -> bool:
        return self._request.Test()


class MpiMailbox:
    """See `Mailbox`. MPI cannot be trusted to cancel a receive, so the end uses them all up."""

    reliable = True

    def __init__(
        self,
        mpi: MPI.Intracomm,
        transport: MpiTransport,
        length: int,
        peers: tuple[Collection[int], Collection[int]],
        ring: int,
    ) -> None:
        sources, self._dests = peers
        self._mpi, self._transport = mpi, transport
        piece = transport.longest
        self._fillers = ring * len(range(0, length, piece))
        self._slots = {
            source: deque(_Slot(mpi, source, length, piece) for _ in range(ring))
            for source in sources
        }
        self._turns = deque(self._slots)
        self._notes: list[_Sent] = []
        self._news = False

    def send(self, dest: int, message: Any) -> Request:
        """See `Mailbox`."""
        return self._transport.isend(message, dest)

    def _full(self) -> int | None:
        """Return the next sender of whom there is a message; each gets its turn."""
        for _ in range(len(self._turns)):
            source = self._turns[0]
            self._turns.rotate(-1)
            slot = self._slots[source][0]
            if slot.test() and not slot.last:
                return source
        return None

    def take(self, read: Callable[[int, Any], None]) -> bool:
        """See `Mailbox`."""
        source = self._full()
        if source is None:
            return False
        slots = self._slots[source]
        read(source, slots[0].data)
        slots[0].start()
        slots.rotate(-1)
        self._news = True
        return True

    def tell(self, dest: int, note: bytes) -> None:
        """See `Mailbox`."""
        self._notes = [sent for sent in self._notes if not sent.test()]
        self._notes.append(_Sent(self._mpi.Isend([note, MPI.BYTE], dest, _NOTE), note))

    def told(self) -> tuple[int, bytes] | None:
        """See `Mailbox`."""
        status = MPI.Status()
        if not self._mpi.Iprobe(MPI.ANY_SOURCE, _NOTE, status):
            return None
        self._news = True
        note = bytearray(_NOTE_BYTES)
        self._mpi.Recv([note, MPI.BYTE], status.source, _NOTE, status)
        return status.source, bytes(note[: status.count])

    def arrival(self) -> Request:
        """See `Mailbox`."""
        self._news = False
        return self

    def test(self) -> bool:
        """Whether something is here to be read, or was read since `arrival`."""
        if self._news or self._mpi.Iprobe(MPI.ANY_SOURCE, _NOTE):
            return True
        firsts = [slots[0] for slots in self._slots.values()]
        return any(slot.test() and not slot.last for slot in firsts)

    def alarm(self, seconds: float) -> None:
        """Nothing is ever lost, so nobody asks for this."""
        raise NotImplementedError

    def end(self) -> Request:
        """Send an empty message for each receive that a peer has posted."""
        nothing = np.empty(0, np.uint8)
        fillers: list[Request] = [
            _Sent(self._mpi.Isend(nothing, dest, _MESSAGE), nothing)
            for dest in self._dests
            for _ in range(self._fillers)
        ]
        slots = [slot for ring in self._slots.values() for slot in ring]
        return _Ended(Every([*fillers, *slots, *self._notes]), slots)


class _Ended:
    """The end of a mailbox: when all is received and sent, the requests are given back."""

    def __init__(self, left: Every, slots: list[_Slot]) -> None:
        self._left, self._slots = left, slots

    def test(self) -> bool:
        if not self._left.test():
            return False
        while self._slots:
            self._slots.pop().free()
        return True
