"""The mean of momenta over the ranks as signs, in such a way that a step can still be left out.

The moves and bytes are those of `allreduce(op=MEAN, codec=ErrorFeedback(OneBit()))`, the oracle.
There residuals change while the exchange runs and the result is decoded in place; here momenta are
made while they are encoded, what arrives stays encoded, and nothing else changes until the caller
moves the parameters, in one pass over memory with the feedback and the new momentum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from relaxmpi.primitives.arguments import ordered
from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.codecs import Codec, Key, OneBit
from relaxmpi.primitives.devices import Device, Flat, device_of
from relaxmpi.primitives.ops import MEAN, Op
from relaxmpi.primitives.primitive import Plan, Verb
from relaxmpi.primitives.wire import Coded, Scratch
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm

__all__ = ["Live", "SignedMean", "signed_mean"]


class Live(NamedTuple):
    """Which coordinates of a buffer travel: runs of them, one after the other.

    Attributes:
        at: For each run, how many live coordinates lie before it; last, their number.
        source: For each run, where it begins in the buffer.

    Example:
        >>> live = Live.of(np.array([False, True, True, False, True]))
        >>> live.at.tolist(), live.source.tolist(), live.before(4)
        ([0, 2, 3], [1, 4], 2)
    """

    at: Any
    source: Any

    @classmethod
    def of(cls, mask: Any) -> Live:
        """Those where the mask is true."""
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).astype(np.int64)
        source, end = edges[::2].copy(), edges[1::2]
        return cls(np.concatenate([np.zeros(1, np.int64), np.cumsum(end - source)]), source)

    @property
    def size(self) -> int:
        """How many there are."""
        return int(self.at[-1])

    def before(self, i: int) -> int:
        """How many live coordinates lie before index i of the buffer."""
        r = int(np.searchsorted(self.source, i, side="right")) - 1
        return 0 if r < 0 else int(min(self.at[r] + i - self.source[r], self.at[r + 1]))


class SignedMean:
    """The two-sided memory of one buffer, and what an exchange has left for `move`.

    Residuals are those of `ErrorFeedback`: e of live coordinates, E of the chunks that this rank
    owns. They change in `move` and `keep`, and not at all where neither is called.

    Args:
        codec: Which scale, and how many share one.
        live: The coordinates that travel.
        dtype: "float32" or "float64".
        device: Where the buffer lives.
        units: The range of exponents of the units in which momenta travel.
    """

    def __init__(
        self, codec: OneBit, live: Live, dtype: str, device: Device, units: tuple[int, int]
    ) -> None:
        self.codec, self.live, self.units = codec, live, units
        self._dtype, self._device = dtype, device
        self.e = device.zeros(live.size, dtype)
        self._owner: dict[tuple[int, int], list[Any]] = {}
        self.own: dict[tuple[int, int], Any] = {}
        self._sums: dict[tuple[int, int], Any] = {}

    def owner(self, chunk: tuple[int, int]) -> list[Any]:
        """The residual of a chunk as its owner, and room for the next one."""
        if chunk not in self._owner:
            lo, hi = chunk
            self._owner[chunk] = [self._device.zeros(hi - lo, self._dtype) for _ in range(2)]
        return self._owner[chunk]

    def sum(self, chunk: tuple[int, int]) -> Any:
        """Where the payload of a reduced chunk stays."""
        if chunk not in self._sums:
            size = self.codec.nbytes(chunk[1] - chunk[0], self._dtype)
            self._sums[chunk] = self._device.empty(size, "uint8")
        return self._sums[chunk]

    @property
    def finite(self) -> bool:
        """Whether every number of every rank was; the same on all ranks."""
        bucket = self.codec.bucket
        heads = [
            payload[: np.dtype(self._dtype).itemsize * -(-(hi - lo) // bucket)]
            for (lo, hi), payload in self._sums.items()
        ]
        return all(bool(np.isfinite(head.view(self._dtype)).all()) for head in heads)

    def move(
        self, x: Any, origin: int, g: Any, m: Any, v: Any, live: tuple[int, int], step: Any
    ) -> None:
        """Take momenta, residuals and parameters of some live coordinates to the next step.

        Args:
            x: Parameters, of which the first one is number `origin` of the buffer.
            origin: See there.
            g: The buffer's gradients, as they were given to `signed_mean`, like m and v.
            m: See there.
            v: See there.
            live: From which live coordinate to which.
            step: The `Rates` of this step.
        """
        begin, end = live
        for (lo, hi), payload in self._sums.items():
            if lo < end and begin < hi:
                self._device.kernels.move_signed(
                    *(x, origin, g, m, v, self.e[lo:hi], *self.live),
                    chunk=lo,
                    live=(max(lo, begin), min(hi, end)),
                    own=self.own[lo, hi],
                    payload=payload,
                    bucket=self.codec.bucket,
                    units=self.units,
                    step=step,
                )

    def keep(self) -> None:
        """Keep what the owner of a chunk owes now."""
        for pair in self._owner.values():
            pair.reverse()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's residuals, as `ErrorFeedback` does."""
        worker = {("worker", 0, self.live.size): self.e.copy()}
        owner = {("owner", lo, hi): pair[0].copy() for (lo, hi), pair in self._owner.items()}
        return {"residuals": worker | owner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank."""
        self._owner.clear()
        for (side, lo, hi), residual in state["residuals"].items():
            target = self.e if side == "worker" else self.owner((lo, hi))[0]
            self._device.copy(target, residual)


@Verb
def signed_mean(
    comm: Comm, g: Any, m: Any, v: Any, memory: SignedMean, *, mix: Any, name: str = ""
) -> Plan[None]:
    """Exchange m + mix (g - m) of the live coordinates; the mean stays in `memory`, encoded.

    Args:
        comm: A Comm, no Hierarchy.
        g: 1-D array, not changed.
        m: Like g.
        v: Like g.
        memory: This buffer's own.
        mix: A number of the type of g.
        name: See `allreduce`.
    """
    flat, codec, count = device_of(g).flat(g), memory.codec, memory.live.size
    units = f"units {memory.units}"
    told = (flat.dtype, str(flat.shape), f"{count} of them live", units, codec.describe(), name)

    def flow() -> Flow[None]:
        if count:
            wire = _Signs(flat, m, v, memory, mix, comm.priced(codec), comm.scratch)
            buffer = flat.data[:count]  # only for its length: momenta need no memory
            yield from comm.schedule.allreduce(flat.device, buffer, buffer, MEAN, wire)

    return Plan(Call(("signed mean", *told)), ordered(comm, flat, flow()))


class _Signs(Coded):
    fills = False

    def __init__(
        self,
        flat: Flat,
        m: Any,
        v: Any,
        memory: SignedMean,
        mix: Any,
        codec: Codec,
        scratch: Scratch,
        begin: int = 0,
    ) -> None:
        super().__init__(flat.device, flat.dtype, codec, None, Key(), scratch, begin)
        self._flat, self._m, self._v, self._mix, self._held = flat, m, v, mix, memory
        self._base = flat.device.span(flat.data)[0]

    def at(self, lo: int) -> _Signs:
        """The same, counted from `lo`."""
        given = (self._flat, self._m, self._v, self._held, self._mix, self._codec, self._scratch)
        return _Signs(*given, self._begin + lo)

    def pack(self, x: Any, lo: int, hi: int) -> Any:
        """Make momenta, and encode them as a contributor; keep the scales.

        They leave from where the reduced chunk will arrive when they have left.
        """
        held, lo, hi = self._held, lo + self._begin, hi + self._begin
        payload = held.sum((lo, hi))
        held.own[lo, hi] = self._device.kernels.sign_momentum(
            *(self._flat.data, self._m, self._v, held.e[lo:hi], *held.live, payload),
            begin=lo,
            mix=self._mix,
            units=held.units,
            bucket=held.codec.bucket,
            l2=held.codec.scale == "l2",
        )
        return payload

    def total(self, out: Any) -> Any:
        """Add up where the owner's next residual will be."""
        return self._held.owner(self._chunk(out))[1]

    def repack(self, total: Any, lo: int, hi: int) -> Any:
        """Encode as the owner: what it owes and the total change places, and so nothing is lost."""
        chunk = (lo + self._begin, hi + self._begin)
        payload = self._held.sum(chunk)
        self._codec.encode_feedback(self._held.owner(chunk)[0], total, payload)
        return payload

    def _chunk(self, out: Any) -> tuple[int, int]:
        lo = (self._device.span(out)[0] - self._base) // self._flat.data.itemsize
        return lo, lo + len(out)

    def landing(self, out: Any) -> Any:
        """Receive where it stays."""
        return self._held.sum(self._chunk(out))

    def unpack(self, payload: Any, out: Any, op: Op, n: int) -> None:
        """Leave it encoded."""
        held = self._held.sum(self._chunk(out))
        if payload is not held:
            self._device.copy(held, payload)
