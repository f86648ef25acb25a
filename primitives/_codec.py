"""The interface of codecs, and the checks that all of them share."""

import zlib
from abc import ABC, abstractmethod
from operator import index
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from relaxmpi.primitives.devices import kernels_for
from relaxmpi.primitives.philox import Stream

Floats = NDArray[Any]
Payload = NDArray[np.uint8]


class Key(NamedTuple):
    """What a payload is for; two encodings round with the same numbers only if keys are equal.

    Attributes:
        name: name of the buffer.
        step: number of the step, modulo 2**32.
        rank: the rank that encodes, below 2**24.
        site: 0 where a worker encodes, 1 where the owner of a chunk encodes the mean.
    """

    name: str = ""
    step: int = 0
    rank: int = 0
    site: int = 0

    def stream(self, seed: int) -> Stream:
        """The random numbers of this key."""
        if not 0 <= self.rank < 2**24 or not 0 <= self.site < 256:
            raise ValueError(f"rank must be below 2**24 and site below 256, not {self}")
        return Stream(
            seed,
            zlib.crc32(self.name.encode()),
            index(self.step) % 2**32,
            self.rank | self.site << 24,
        )


NO_KEY = Key()

# Made once: checks of short arrays cost more than their kernels.
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_BYTES = np.dtype(np.uint8)


class Codec(ABC):
    """Numbers to bytes and back.

    What `decode` gives depends on nothing but the payload: of many simulated ranks one decodes for
    all.

    All arrays are one-dimensional, contiguous and native; numbers are float32 or float64.
    """

    @abstractmethod
    def nbytes(self, count: int, dtype: DTypeLike) -> int:
        """Exact size of the payload of `count` numbers; 0 for none."""

    @abstractmethod
    def encode(self, x: Floats, payload: Payload, *, key: Key = NO_KEY, offset: int = 0) -> None:
        """Fill `payload[:nbytes]` from x, which is not changed.

        Args:
            x: the numbers.
            payload: bytes, at least `nbytes(x.size, x.dtype)` of them.
            key: what the payload is for.
            offset: index of x[0] in the whole buffer. Random numbers belong to an index, so
                that pieces of a buffer are rounded as in one call.

        Raises:
            TypeError: an array of another type.
            ValueError: an array of another shape, or too small a payload.
        """

    @abstractmethod
    def decode(self, payload: Payload, out: Floats) -> None:
        """Fill `out`, which has the size and the type of what was encoded."""

    def decode_add(self, payload: Payload, out: Floats) -> None:
        """Add the decoded numbers to `out`."""
        decoded = out.copy()
        self.decode(payload, decoded)
        kernels_for(out).accumulate(out, decoded)

    def decode_follow(
        self,
        payload: Payload,
        replica: Floats,
        *,
        part: float = 0.0,
        share: Floats | None = None,
    ) -> None:
        """Add the decoded numbers that are finite to a replica: a bad step is not remembered.

        Then share = part replica, in the same pass where the codec can.
        """
        decoded = replica.copy()
        self.decode(payload, decoded)
        kernels = kernels_for(replica)
        kernels.follow(replica, decoded)
        if share is not None:
            check_memory(replica, share, "share")
            kernels.scaled(replica, part, share)

    def encode_feedback(
        self, x: Floats, residual: Floats, payload: Payload, *, key: Key = NO_KEY, offset: int = 0
    ) -> None:
        """Encode u = x + residual, and leave residual = u - decoded (Seide et al. 2014).

        So decoded + residual = u to one ulp. Where the decoded numbers are not finite, the
        residual stays as it was: a bad step is seen, and not remembered.
        """
        check_memory(x, residual)
        kernels = kernels_for(x)
        u = x.copy()
        kernels.accumulate(u, residual)
        self.encode(u, payload, key=key, offset=offset)
        decoded = u.copy()
        self.decode(payload, decoded)
        kernels.leave(u, decoded, residual)

    def encode_difference(
        self,
        x: Floats,
        replica: Floats,
        payload: Payload,
        *,
        key: Key = NO_KEY,
        offset: int = 0,
        give: float = 0.0,
    ) -> None:
        """Encode x - replica, and let the replica follow what was encoded, as `decode_follow` does.

        So at every holder of the replica are the same bits. Then x <- x - give replica, in the same
        pass where the codec can; without `give` x is not changed.
        """
        check_memory(x, replica, "replica")
        if give:
            check_writable(x, "the array of numbers")
        change, kernels = x.copy(), kernels_for(x)
        kernels.subtract(x, replica, change)
        self.encode(change, payload, key=key, offset=offset)
        self.decode_follow(payload, replica)
        if give:
            kernels.mix(x, replica, -give, x)

    def describe(self) -> str:
        """What ranks must agree on before they exchange payloads."""
        return repr(self)


class KernelCodec(Codec):
    """A codec over kernels: arguments are checked here, once, and empty arrays end here."""

    def nbytes(self, count: int, dtype: DTypeLike) -> int:
        """Exact size of the payload of `count` numbers; 0 for none."""
        itemsize = float_type(dtype).itemsize
        if count < 0:
            raise ValueError(f"a payload is one of zero or more numbers, not of {count}")
        return self._nbytes(count, itemsize) if count else 0

    def encode(self, x: Floats, payload: Payload, *, key: Key = NO_KEY, offset: int = 0) -> None:
        """Fill `payload`: see `Codec`."""
        if size := self._check(x, payload, payload, offset):
            self._encode(kernels_for(x), x, payload[:size], key, offset)

    def decode(self, payload: Payload, out: Floats) -> None:
        """Fill `out`: see `Codec`."""
        if size := self._check(out, payload, out):
            self._decode(kernels_for(out), payload[:size], out, add=False)

    def decode_add(self, payload: Payload, out: Floats) -> None:
        """Add the decoded numbers to `out`."""
        if size := self._check(out, payload, out):
            self._decode(kernels_for(out), payload[:size], out, add=True)

    def decode_follow(
        self,
        payload: Payload,
        replica: Floats,
        *,
        part: float = 0.0,
        share: Floats | None = None,
    ) -> None:
        """Add what is finite: see `Codec`."""
        if share is not None:
            check_memory(replica, share, "share")
        if size := self._check(replica, payload, replica):
            kernels = kernels_for(replica)
            if not self._is_finite(payload[:size], replica):
                super().decode_follow(payload, replica, part=part, share=share)
            elif share is None:
                self._decode(kernels, payload[:size], replica, add=True)
            else:
                self._decode_share(kernels, payload[:size], replica, part, share)

    def encode_feedback(
        self, x: Floats, residual: Floats, payload: Payload, *, key: Key = NO_KEY, offset: int = 0
    ) -> None:
        """Encode x + residual and keep what is lost: see `Codec`."""
        check_memory(x, residual)
        if size := self._check(x, payload, payload, offset):
            self._encode_feedback(kernels_for(x), x, residual, payload[:size], key, offset)

    def encode_difference(
        self,
        x: Floats,
        replica: Floats,
        payload: Payload,
        *,
        key: Key = NO_KEY,
        offset: int = 0,
        give: float = 0.0,
    ) -> None:
        """Encode x - replica, which follows: see `Codec`."""
        check_memory(x, replica, "replica")
        if give:
            check_writable(x, "the array of numbers")
        if size := self._check(x, payload, payload, offset):
            self._encode_difference(kernels_for(x), x, replica, payload[:size], key, offset, give)

    def _check(self, x: Floats, payload: Payload, filled: NDArray[Any], offset: int = 0) -> int:
        check_numbers(x, "the array of numbers")
        size = self._nbytes(x.size, x.dtype.itemsize) if x.size else 0
        check_payload(payload, x, size, offset)
        check_writable(filled, "the payload" if filled is payload else "the array of numbers")
        return size

    @abstractmethod
    def _nbytes(self, count: int, itemsize: int) -> int: ...

    @abstractmethod
    def _encode(self, kernels: Any, x: Floats, payload: Payload, key: Key, offset: int) -> None: ...

    @abstractmethod
    def _decode(self, kernels: Any, payload: Payload, out: Floats, *, add: bool) -> None: ...

    def _decode_share(
        self, kernels: Any, payload: Payload, replica: Floats, part: float, share: Floats
    ) -> None:
        self._decode(kernels, payload, replica, add=True)
        kernels.scaled(replica, part, share)

    def _is_finite(self, payload: Payload, out: Floats) -> bool:
        """Whether all decoded numbers are known to be finite, without decoding them."""
        return False

    def _encode_feedback(
        self, kernels: Any, x: Floats, residual: Floats, payload: Payload, key: Key, offset: int
    ) -> None:
        super().encode_feedback(x, residual, payload, key=key, offset=offset)

    def _encode_difference(
        self,
        kernels: Any,
        x: Floats,
        replica: Floats,
        payload: Payload,
        key: Key,
        offset: int,
        give: float,
    ) -> None:
        super().encode_difference(x, replica, payload, key=key, offset=offset, give=give)


def scales_are_finite(payload: Payload, count: int, dtype: DTypeLike) -> bool:
    """Whether a payload begins with so many finite numbers."""
    kind = np.dtype(dtype)
    return bool(np.isfinite(payload[: count * kind.itemsize].view(kind)).all())


def float_type(dtype: DTypeLike) -> np.dtype[Any]:
    """The type, if it is one that codecs take."""
    kind = np.dtype(dtype)
    if kind not in _FLOATS:
        raise TypeError(f"codecs take float32 and float64, not {kind}; convert with astype first")
    return kind


def check_numbers(x: Floats, what: str) -> None:
    """One-dimensional contiguous floats, or an error that says what to do."""
    if not hasattr(x, "dtype"):
        raise TypeError(f"{what} must be an array, not {type(x).__name__}")
    if x.dtype not in _FLOATS:
        float_type(x.dtype)
    if x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(
            f"{what} must be one-dimensional and contiguous, not of shape {x.shape} and strides "
            f"{x.strides}; pass numpy.ravel(x), which copies if it must"
        )


def check_payload(payload: Payload, x: Floats, size: int, offset: int) -> None:
    """Check that x fits into `size` bytes of a payload."""
    if not hasattr(payload, "dtype"):
        raise TypeError(
            f"the payload must be an array of uint8, not {type(payload).__name__}; use "
            "numpy.frombuffer(payload, 'u1') to decode"
        )
    if payload.dtype != _BYTES:
        raise TypeError(f"the payload must be uint8, not {payload.dtype}; use payload.view('u1')")
    if payload.ndim != 1 or payload.size < size or not payload.flags.c_contiguous:
        raise ValueError(
            f"the payload of {x.size} numbers needs {size} contiguous bytes, not shape "
            f"{payload.shape}; allocate codec.nbytes(x.size, x.dtype)"
        )
    if offset < 0:
        raise ValueError(f"offset is an index into the whole buffer, not {offset}")


def check_writable(array: NDArray[Any], what: str) -> None:
    """An array that is going to be filled is no read-only one."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{what} is read-only and was to be filled: pass a copy")


def check_memory(x: Floats, memory: Floats, what: str = "residual") -> None:
    """What is kept of a buffer is like x, or an error says so."""
    check_numbers(memory, f"the {what}")
    check_writable(memory, f"the {what}")
    if memory.dtype != x.dtype or memory.shape != x.shape:
        raise ValueError(
            f"the {what} must be like x, {x.shape} of {x.dtype}, not {memory.shape} of "
            f"{memory.dtype}; keep one {what} for each buffer"
        )
