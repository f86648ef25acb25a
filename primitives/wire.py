"""How numbers travel: as they are, or encoded, with or without a memory of what was lost.

A `Wire` serves one call on one buffer. Verbs move its payloads and never look inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from relaxmpi.primitives.codecs import Codec, Key
from relaxmpi.primitives.devices import Device, Flat
from relaxmpi.primitives.feedback import ErrorFeedback
from relaxmpi.primitives.ops import Op

__all__ = ["Coded", "Plain", "Wire", "chunks", "wire_for"]

# Memory of a device, count and format, that lasts until the running flow ends.
Scratch = Callable[[Device, int, str], Any]

# Pieces of this many encoded numbers are long enough for what a message costs.
_PIECE = 2**19

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
    """Numbers to payloads and back, for one call.

    Attributes:
        work: The format of totals.
        fills: Whether `unpack` fills `out` and does nothing else, so that a copy of it would do.
    """

    work: str
    fills: bool

    def pieces(self, x: Any, busy: int) -> int:
        """In how many pieces `x` should go, where `busy` of them would suit the transport."""

    def at(self, lo: int) -> Wire:
        """Return the wire for the piece of the buffer that begins at `lo`."""

    def inside(self, scratch: Scratch) -> Plain:
        """Return the wire for moves inside a node, in full precision."""

    def shard(self, lo: int, scratch: Scratch) -> Wire:
        """Return the wire between nodes for the share of the buffer that begins at `lo`."""

    def pack(self, x: Any, lo: int, hi: int) -> Any:
        """Return the payload of this rank's contribution x[lo:hi]."""

    def repack(self, total: Any, lo: int, hi: int) -> Any:
        """Return the payload of the reduced chunk [lo:hi], given in the work format."""

    def room(self, count: int) -> Any:
        """Return memory to receive the payload of `count` contributed numbers in."""

    def total(self, out: Any) -> Any:
        """Return memory for the total of a chunk that ends in `out`; `out` itself if it can be."""

    def landing(self, out: Any) -> Any:
        """Return memory to receive a reduced chunk in; for plain numbers, `out` itself."""

    def first(self, payload: Any, total: Any) -> Any:
        """Return the contribution in `payload` as work numbers, in `total` or where it is."""

    def fold(self, so_far: Any, payload: Any, op: Op, into: Any) -> Any:
        """Return `so_far` and the contribution in `payload` as one, in `into` or where it was."""

    def finish(self, total: Any, op: Op, n: int) -> None:
        """Turn a total over n ranks into what the owner repacks."""

    def unpack(self, payload: Any, out: Any, op: Op, n: int) -> None:
        """Fill `out`, of the caller's format, from the payload of a reduced chunk."""

    def deliver(self, total: Any, out: Any, op: Op, n: int) -> None:
        """Fill `out` from a finished total that is not sent on."""


class Plain:
    """The numbers themselves."""

    fills = True

    def __init__(self, device: Device, dtype: str, scratch: Scratch) -> None:
        self._device, self.dtype, self._scratch = device, dtype, scratch
        self.work = _WORK.get(dtype, dtype)

    def pieces(self, x: Any, busy: int) -> int:
        """As many as suit the transport: cuts do not change sums."""
        return busy

    def at(self, lo: int) -> Plain:
        """Itself."""
        return self

    def inside(self, scratch: Scratch) -> Plain:
        """Return the same with other scratch."""
        return Plain(self._device, self.dtype, scratch)

    def shard(self, lo: int, scratch: Scratch) -> Plain:
        """Partial sums travel in the work format: half precision could overflow."""
        return Plain(self._device, self.work, scratch)

    def pack(self, x: Any, lo: int, hi: int) -> Any:
        """Return the slice itself: nothing is copied."""
        return x[lo:hi]

    def repack(self, total: Any, lo: int, hi: int) -> Any:
        """Return the total, rounded to the caller's format."""
        return self._device.cast(total, self.work, self.dtype)

    def room(self, count: int) -> Any:
        """Return scratch."""
        return self._scratch(self._device, count, self.dtype)

    def total(self, out: Any) -> Any:
        """The end of the reduction is written where it belongs."""
        return out

    def landing(self, out: Any) -> Any:
        """Receive in place."""
        return out

    def first(self, payload: Any, total: Any) -> Any:
        """Widened; nothing is copied where the formats are equal."""
        return self._device.cast(payload, self.dtype, self.work)

    def fold(self, so_far: Any, payload: Any, op: Op, into: Any) -> Any:
        """Reduce; widened numbers stay in their own memory."""
        if self.work != self.dtype:
            payload, into = self._device.cast(payload, self.dtype, self.work), so_far
        self._device.reduce(op, so_far, payload, into)
        return into

    def finish(self, total: Any, op: Op, n: int) -> None:
        """Divide a mean in the work format, where it cannot overflow."""
        if op is Op.MEAN:
            self._device.divide(total, n)

    def reduced(self, parts: list[Any], out: Any, op: Op, own: int = 0) -> Any:
        """Return the finished total of what all ranks gave, in `out` where the formats are equal.

        It is reduced in the order of ranks. Where `out` is the memory of one of the parts it must
        be that of rank `own`, and the first part may be written to.
        """
        reduce, so_far = self._device.reduce, parts[0]
        if self.work == self.dtype:
            for r, part in enumerate(parts[1:], 1):
                into = out if r >= own else so_far
                reduce(op, so_far, part, into)
                so_far = into
        else:
            so_far = self._device.cast(so_far, self.dtype, self.work)
            for part in parts[1:]:
                reduce(op, so_far, self._device.cast(part, self.dtype, self.work), so_far)
        self.finish(so_far, op, len(parts))
        return so_far

    def unpack(self, payload: Any, out: Any, op: Op, n: int) -> None:
        """Copy, unless it is there."""
        if payload is not out:
            self._device.copy(out, payload)

    def deliver(self, total: Any, out: Any, op: Op, n: int) -> None:
        """Copy, rounded, unless it is there."""
        if total is not out:
            self._device.copy(out, self._device.cast(total, self.work, self.dtype))


class Coded:
    """Numbers through a codec: two quantisations, one by each contributor and one by the owner.

    Everything is kept in mean units, so that a residual means the same under SUM and MEAN.
    """

    fills = True

    def __init__(
        self,
        device: Device,
        dtype: str,
        codec: Codec,
        memory: ErrorFeedback | None,
        key: Key,
        scratch: Scratch,
        begin: int = 0,
    ) -> None:
        self._device, self._dtype, self._codec = device, dtype, codec
        self._memory, self._key, self._begin = memory, key, begin
        self._keys = {site: key._replace(site=k) for k, site in enumerate(("worker", "owner"))}
        self._scratch = scratch
        self._sizes: dict[int, int] = {}
        self.work = "float64" if dtype == "float64" else "float32"

    def pieces(self, x: Any, busy: int) -> int:
        """Cuts change codes, so their number depends on nothing but the count of numbers."""
        return max(1, len(x) // _PIECE)

    def at(self, lo: int) -> Coded:
        """The same, counted from `lo`."""
        begin = self._begin + lo
        return Coded(
            self._device, self._dtype, self._codec, self._memory, self._key, self._scratch, begin
        )

    def inside(self, scratch: Scratch) -> Plain:
        """Plain numbers of the caller's format."""
        return Plain(self._device, self._dtype, scratch)

    def shard(self, lo: int, scratch: Scratch) -> Coded:
        """Encode work numbers, counted from `lo`."""
        return Coded(self._device, self.work, self._codec, self._memory, self._key, scratch, lo)

    def _encode(self, x: Any, site: str, lo: int, hi: int) -> Any:
        payload = self._bytes(hi - lo)
        lo, hi = lo + self._begin, hi + self._begin
        key = self._keys[site]
        if self._memory is None:
            self._codec.encode(x, payload, key=key, offset=lo)
        else:
            residual = self._memory.site(site, lo, hi, self._device, self.work)
            self._codec.encode_feedback(x, residual, payload, key=key, offset=lo)
        return payload

    def _bytes(self, count: int) -> Any:
        size = self._sizes.get(count)
        if size is None:
            size = self._sizes[count] = self._codec.nbytes(count, self.work)
        return self._scratch(self._device, size, "uint8")

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

    def total(self, out: Any) -> Any:
        """Return scratch in the work format."""
        return self._scratch(self._device, len(out), self.work)

    def first(self, payload: Any, total: Any) -> Any:
        """Decode."""
        self._codec.decode(payload, total)
        return total

    def fold(self, so_far: Any, payload: Any, op: Op, into: Any) -> Any:
        """Decode and add."""
        self._codec.decode_add(payload, so_far)
        return so_far

    def finish(self, total: Any, op: Op, n: int) -> None:
        """Turn the sum into the mean, whatever the operation."""
        self._device.divide(total, n)

    def unpack(self, payload: Any, out: Any, op: Op, n: int) -> None:
        """Decode; scale a sum up again."""
        wide = out if self._dtype == self.work else self.total(out)
        self._codec.decode(payload, wide)
        self.deliver(wide, out, op, n)

    def deliver(self, total: Any, out: Any, op: Op, n: int) -> None:
        """Scale a sum up again; round."""
        if op is Op.SUM:
            self._device.scale(total, n)
        if total is not out:
            self._device.copy(out, self._device.cast(total, self.work, self._dtype))


def wire_for(
    flat: Flat,
    codec: Codec | ErrorFeedback,
    key: Key,
    scratch: Scratch,
    priced: Callable[[Codec], Codec],
) -> Coded:
    """Return the wire of a coded call, whose work has the price that it has in its world."""
    if isinstance(codec, ErrorFeedback):
        return Coded(flat.device, flat.dtype, priced(codec.codec), codec, key, scratch)
    return Coded(flat.device, flat.dtype, priced(codec), None, key, scratch)
