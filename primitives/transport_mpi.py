"""The transport over MPI, for host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.settings import Settings
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.transport import TAG, Reduction, Request, pieces_of

__all__ = ["MpiTransport"]

# Measured on one host with 2 ranks, and with more: from here on a scatter-reduce by messages beats
# Iallreduce. Fixed numbers, because the two add in different orders and so differ in bits.
_DIRECT_OF_TWO = 256 * 1024
_DIRECT = 2 * 1024 * 1024
_FLOATS = {"float32", "float64", "complex64", "complex128"}
_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_MPI_OP = {Op.SUM: MPI.SUM, Op.MEAN: MPI.SUM, Op.MAX: MPI.MAX, Op.MIN: MPI.MIN}


class _One:
    """One MPI request, with the array it may still read or write."""

    __slots__ = ("_data", "_request")

    def __init__(self, request: MPI.Request, data: Any) -> None:
        self._request, self._data = request, data

    def test(self) -> bool:
        return self._request.Test()


class _Many:
    """The pieces of one long move."""

    __slots__ = ("_data", "_requests")

    def __init__(self, requests: list[MPI.Request], data: Any) -> None:
        self._requests, self._data = requests, data

    def test(self) -> bool:
        return MPI.Request.Testall(self._requests)


class MpiTransport:
    """Bytes by Isend and Irecv, in short pieces between nodes; plain sums by Iallreduce.

    Between nodes a long message would go by rendezvous, whose handshakes stall a TCP link for a
    quarter of the time; pieces below the eager limit keep it full. `MPI.MAX` loses NaN and MPI
    sums of half precision overflow, so only short sums of full-precision numbers, and short
    maxima of integers, are left to MPI.
    """

    def __init__(self, mpi: MPI.Intracomm, settings: Settings, stats: Stats, nodes: int) -> None:
        self._mpi, self._stats, self._nodes = mpi, stats, nodes
        self._most = settings.max_message
        self.longest = min(settings.segment, self._most) if nodes > 1 else self._most

    def isend(self, data: Any, dest: int, tag: int = TAG) -> Request:
        """Start sending the bytes of `data`."""
        mpi, raw, piece = self._mpi, data.view(np.uint8), self.longest
        size = raw.size
        self._stats.payload_bytes += size
        self._stats.messages += 1
        if size <= piece:
            return _One(mpi.Isend(raw, dest, tag), raw)
        cuts = range(0, size, piece)
        return _Many([mpi.Isend(raw[i : i + piece], dest, tag) for i in cuts], raw)

    def irecv(self, data: Any, source: int, tag: int = TAG) -> Request:
        """Start receiving exactly the bytes of `data`."""
        mpi, raw, piece = self._mpi, data.view(np.uint8), self.longest
        if raw.size <= piece:
            return _One(mpi.Irecv(raw, source, tag), raw)
        cuts = range(0, raw.size, piece)
        return _Many([mpi.Irecv(raw[i : i + piece], source, tag) for i in cuts], raw)

    def announce(self, header: Any, dest: int, tag: int) -> Request:
        """Start sending a short header, which is no payload."""
        self._stats.header_bytes += header.size
        return _One(self._mpi.Isend(header, dest, tag), header)

    def ibroadcast(self, data: Any, root: int) -> Request:
        """Start a broadcast of the bytes of `data`."""
        raw = data.view(np.uint8)
        cuts = range(0, raw.size, self._most)
        if self._mpi.rank == root:
            self._stats.payload_bytes += raw.size
            self._stats.messages += len(cuts)
        return _Many([self._mpi.Ibcast(raw[i : i + self._most], root) for i in cuts], raw)

    def reduction(self, data: Any, dtype: str, op: Op) -> Reduction | None:
        """Return MPI's, on one node and up to the size where direct exchange is faster.

        Counted as the bytes that a bandwidth-optimal one sends.
        """
        direct = _DIRECT_OF_TWO if self._mpi.size == 2 else _DIRECT
        if self._nodes > 1 or data.nbytes >= direct:
            return None
        if dtype not in _INTEGERS and not (op.additive and dtype in _FLOATS):
            return None

        def start(data: Any, out: Any) -> Request:
            n = self._mpi.size
            self._stats.payload_bytes += 2 * (n - 1) * data.nbytes // n
            self._stats.messages += 2 * (n - 1)
            return _One(self._mpi.Iallreduce(data, out, _MPI_OP[op]), (data, out))

        return start

    def pieces(self, data: Any) -> int:
        """In how many pieces a reduction of `data` should go: several between nodes, if long."""
        return pieces_of(data.nbytes, self._nodes)
