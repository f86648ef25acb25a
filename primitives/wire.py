"""How numbers travel: as they are, or encoded, with or without a memory of what was lost.

A `Wire` serves one call on one buffer. Verbs move its payloads and never look inside.
"""

from __future__ import annotations

from typing import Any, Protocol

from relaxmpi.primitives.codecs import Codec, Key
from relaxmpi.primitives.devices import Device, Flat
from relaxmpi.primitives.feedback import ErrorFeedback
from relaxmpi.primitives.ops import Op

__all__ = ["Coded", "Plain", "Wire", "chunks", "wire_for"]

# Half precision is summed in single precision, or sums would overflow.
_WORK = {"float16": "float32", "bfloat16": "float32"}


def chunks(count: int, n: int) -> list[tuple[int, int]]:
    """Bounds of the chunk that each of n ranks owns: ceil(count / n) elements, the last fewer.

    Example:
        >>> chunks(5, 4)
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-count // n)
    return [(min(r * each, count), min((r + 1) * each, count)) for r in range(n)]


class Wire(Protocol):
    """Numbers to payloads and back, for one call."""

    work: str

    def inside(self) -> Plain:
        """Return the wire for moves inside a node, in full precision."""

    def shard(self, lo: int) -> Wire:
        """Return the wire between nodes for the share of the buffer that begins at `lo`."""

    def pack(self, x: Any, lo: int, hi: int) -> Any:
        """Return the payload of this rank's contribution x[lo:hi]."""

    def repack(self, total: Any, lo: int, hi: int) -> Any:
        """Return the payload of the reduced chunk [lo:hi], given in the work format."""

    def room(self, count: int) -> Any:
        """Return memory to receive the payload of `count` contributed numbers in."""

    def landing(self, out: Any) -> Any:
        """Return memory to receive a reduced chunk in; for plain numbers, `out` itself."""

    def start(self, payload: Any, total: Any) -> None:
        """Set `total` to the contribution in `payload`."""

    def fold(self, payload: Any, total: Any, op: Op) -> None:
        """Fold the contribution in `payload` into `total`."""

    def finish(self, total: Any, op: Op, n: int) -> None:
        """Turn a total over n ranks into what the owner repacks."""

    def unpack(self, payload: Any, out: Any, op: Op, n: int) -> None:
        """Fill `out`, of the caller's format, from the payload of a reduced chunk."""

    def deliver(self, total: Any, out: Any, op: Op, n: int) -> None:
        """Fill `out` from a finished total that is not sent on."""


class Plain:
    """The numbers themselves."""

    def __init__(self, device: Device, dtype: str) -> None:
        self._device, self.dtype = device, dtype
        self.work = _WORK.get(dtype, dtype)

    def inside(self) -> Plain:
        """Itself."""
        return self

    def shard(self, lo: int) -> Plain:
        """Partial sums travel in the work format: half precision could overflow."""
        return Plain(self._device, self.work)

    def pack(self, x: Any, lo: int, hi: int) -> Any:
        """Return the slice itself: nothing is copied."""
        return x[lo:hi]

    def repack(self, total: Any, lo: int, hi: int) -> Any:
        """Return the total, rounded to the caller's format."""
        return self._device.cast(total, self.work, self.dtype)

    def room(self, count: int) -> Any:
        """Return scratch."""
        return self._device.empty(count, self.dtype)

    def landing(self, out: Any) -> Any:
        """Receive in place."""
        return out

    def start(self, payload: Any, total: Any) -> None:
        """Copy, widened."""
        self._device.copy(total, self._device.cast(payload, self.dtype, self.work))

    def fold(self, payload: Any, total: Any, op: Op) -> None:
        """Reduce, widened."""
        self._device.reduce(op, total, self._device.cast(payload, self.dtype, self.work))

    def finish(self, total: Any, op: Op, n: int) -> None:
        """Divide a mean in the work format, where it cannot overflow."""
        if op is Op.MEAN:
            self._device.divide(total, n)

    def unpack(self, payload: Any, out: Any, op: Op, n: int) -> None:
        """Copy, unless it landed in place."""
        if payload is not out:
            self._device.copy(out, payload)

    def deliver(self, total: Any, out: Any, op: Op, n: int) -> None:
        """Copy, rounded."""
        self._device.copy(out, self._device.cast(total, self.work, self.dtype))


class Coded:
    """Numbers through a codec: two quantisations, one by each contributor and one by the owner.

    Everything is kept in mean units, so that a residual means the same under SUM and MEAN.
    """

    def __init__(
        self,
        device: Device,
        dtype: str,
        codec: Codec,
        memory: ErrorFeedback | None,
        key: Key,
        begin: int = 0,
    ) -> None:
        self._device, self._dtype, self._codec = device, dtype, codec
        self._memory, self._key, self._begin = memory, key, begin
        self.work = "float64" if dtype == "float64" else "float32"

    def inside(self) -> Plain:
        """Plain numbers of the caller's format."""
        return Plain(self._device, self._dtype)

    def shard(self, lo: int) -> Coded:
        """Encode work numbers, counted from `lo`."""
        return Coded(self._device, self.work, self._codec, self._memory, self._key, lo)

    def _encode(self, x: Any, site: str, lo: int, hi: int) -> Any:
        payload = self._bytes(hi - lo)
        lo, hi = lo + self._begin, hi + self._begin
        key = self._key._replace(site=("worker", "owner").index(site))
        if self._memory is None:
            self._codec.encode(x, payload, key=key, offset=lo)
        else:
            residual = self._memory.site(site, lo, hi, self._device, self.work)
            self._codec.encode_feedback(x, residual, payload, key=key, offset=lo)
        return payload

    def _bytes(self, count: int) -> Any:
        return self._device.empty(self._codec.nbytes(count, self.work), "uint8")

    def pack(self, x: Any, lo: int, hi: int) -> Any:
        """Encode as a contributor."""
        return self._encode(self._device.cast(x[lo:hi], self._dtype, self.work), "worker", lo, hi)

    def repack(self, total: Any, lo: int, hi: int) -> Any:
        """Encode as the owner."""
        return self._encode(total, "owner", lo, hi)

    def room(self, count: int) -> Any:
        """Return scratch for a payload."""
        return self._bytes(count)

    def landing(self, out: Any) -> Any:
        """Return scratch for a payload."""
        return self._bytes(len(out))

    def start(self, payload: Any, total: Any) -> None:
        """Decode."""
        self._codec.decode(payload, total)

    def fold(self, payload: Any, total: Any, op: Op) -> None:
        """Decode and add."""
        self._codec.decode_add(payload, total)

    def finish(self, total: Any, op: Op, n: int) -> None:
        """Turn the sum into the mean, whatever the operation."""
        self._device.divide(total, n)

    def unpack(self, payload: Any, out: Any, op: Op, n: int) -> None:
        """Decode; scale a sum up again."""
        wide = out if self._dtype == self.work else self._device.empty(len(out), self.work)
        self._codec.decode(payload, wide)
        self.deliver(wide, out, op, n)

    def deliver(self, total: Any, out: Any, op: Op, n: int) -> None:
        """Scale a sum up again; round."""
        if op is Op.SUM:
            self._device.scale(total, n)
        if total is not out:
            self._device.copy(out, self._device.cast(total, self.work, self._dtype))


def wire_for(flat: Flat, codec: Codec | ErrorFeedback | None, key: Key) -> Wire:
    """Return the wire of one call."""
    if codec is None:
        return Plain(flat.device, flat.dtype)
    if isinstance(codec, ErrorFeedback):
        return Coded(flat.device, flat.dtype, codec.codec, codec, key)
    return Coded(flat.device, flat.dtype, codec, None, key)
