"""Codecs turn numbers into bytes and back: low precision as a value that a verb is given.

A codec is a frozen dataclass without state. The memory that makes a biased one converge is
`ErrorFeedback`, around it. Sizes are known to both sides from the number of elements alone.

Notation of the docstrings: a bucket holds B elements x_i; M = max |x_i|; b bits; an unbiased
codec C has variance bound w when E C(x) = x and E |C(x) - x|^2 <= w |x|^2; a biased one is a
contraction d when |C(x) - x|^2 <= (1 - d) |x|^2. Buckets begin at the first element encoded.

A bucket that holds a NaN or an infinity decodes to NaN, all of it, and changes no other one.
"""

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from relaxmpi.primitives.devices import kernels_for
from relaxmpi.primitives.philox import Stream

__all__ = ["Cast", "Codec", "Identity", "Key", "MinMaxUInt8", "OneBit", "Quantizer"]

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
            seed, zlib.crc32(self.name.encode()), self.step % 2**32, self.rank | self.site << 24
        )


class Codec(ABC):
    """Numbers to bytes and back.

    All arrays are one-dimensional, contiguous and native; numbers are float32 or float64.
    """

    @abstractmethod
    def nbytes(self, count: int, dtype: DTypeLike) -> int:
        """Exact size of the payload of `count` numbers; 0 for none."""

    @abstractmethod
    def encode(self, x: Floats, payload: Payload, *, key: Key = Key(), offset: int = 0) -> None:
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

    def encode_feedback(
        self, x: Floats, residual: Floats, payload: Payload, *, key: Key = Key(), offset: int = 0
    ) -> None:
        """Encode u = x + residual, and leave residual = u - decoded (Seide et al. 2014).

        So decoded + residual = u to one ulp. Where the decoded numbers are not finite, the
        residual stays as it was: a bad step is seen, and not remembered.
        """
        _check_residual(x, residual)
        kernels = kernels_for(x)
        u = x.copy()
        kernels.accumulate(u, residual)
        self.encode(u, payload, key=key, offset=offset)
        decoded = u.copy()
        self.decode(payload, decoded)
        kernels.leave(u, decoded, residual)

    def describe(self) -> str:
        """What ranks must agree on before they exchange payloads."""
        return repr(self)


@dataclass(frozen=True)
class Identity(Codec):
    """The bytes themselves: the oracle, and sums in a fixed order.

    C(x) = x; itemsize bytes an element.

    >>> x, out = np.array([1.5, -2], np.float32), np.empty(2, np.float32)
    >>> payload = np.empty(Identity().nbytes(2, x.dtype), np.uint8)
    >>> Identity().encode(x, payload)
    >>> Identity().decode(payload, out)
    >>> out.tolist()
    [1.5, -2.0]
    """

    def nbytes(self, count: int, dtype: DTypeLike) -> int:
        return count * _float_type(dtype).itemsize

    def encode(self, x: Floats, payload: Payload, *, key: Key = Key(), offset: int = 0) -> None:
        _check(self, x, payload)
        payload[: x.nbytes] = x.view(np.uint8)

    def decode(self, payload: Payload, out: Floats) -> None:
        _check(self, out, payload)
        out.view(np.uint8)[:] = payload[: out.nbytes]


@dataclass(frozen=True)
class Cast(Codec):
    """Round to 16-bit floats, to nearest even.

    |C(x) - x| <= 2**-11 |x| for fp16 (2**-14 <= |x| <= 65504), 2**-8 |x| for bf16; 2 bytes an
    element. Finite numbers beyond the range become the largest finite one, never an infinity;
    NaN and infinities stay what they are.

    Args:
        to: "fp16" (IEEE half) or "bf16" (the range of float32, 8 bits of precision).

    >>> x, out = np.array([1.0, 7e4, -np.inf], np.float32), np.empty(3, np.float32)
    >>> payload = np.empty(Cast("fp16").nbytes(3, x.dtype), np.uint8)
    >>> Cast("fp16").encode(x, payload)
    >>> Cast("fp16").decode(payload, out)
    >>> payload.size, out.tolist()
    (6, [1.0, 65504.0, -inf])
    """

    to: Literal["fp16", "bf16"]

    def __post_init__(self) -> None:
        if self.to not in ("fp16", "bf16"):
            raise ValueError(f'Cast takes "fp16" or "bf16", not {self.to!r}')

    def nbytes(self, count: int, dtype: DTypeLike) -> int:
        _float_type(dtype)
        return 2 * count

    def encode(self, x: Floats, payload: Payload, *, key: Key = Key(), offset: int = 0) -> None:
        halves = payload[: _check(self, x, payload)].view(np.uint16)
        if self.to == "fp16":
            kernels_for(x).narrow_fp16(x, halves, saturate=True)
        else:
            kernels_for(x).narrow_bf16(x, halves, saturate=True)

    def decode(self, payload: Payload, out: Floats) -> None:
        halves = payload[: _check(self, out, payload)].view(np.uint16)
        if self.to == "fp16":
            kernels_for(out).widen_fp16(halves, out)
        else:
            kernels_for(out).widen_bf16(halves, out)


@dataclass(frozen=True)
class MinMaxUInt8(Codec):
    """8 bits between the smallest and the largest number of one chunk: the codec of BAGUA.

    With the range r = max - min, in the arithmetic of x:

    - scale = 255 / (r + 1e-7), hi = rint(max * scale), lo = hi - 255;
      code = min(rint(x * scale), hi) - lo in [0, 255]; C(x) = (code + lo) / scale (Gan et al.
      2021, arXiv 2107.01499, as its code computes it), where max|x| * 255 / r <= 2**14;
    - C(x) = min + code * r / 255 beyond, where that grid of multiples of 1/scale is too coarse
      for float32; constants are exact.

    Both sides derive the choice from min and max. Codes are clamped (BAGUA's wrap around), and
    1e-7 is left out where it would be a percent of r: it would round small gradients to nothing.
    Deterministic, |C(x) - x| <= 0.501 r / 255 (0.6 up to max|x| * 255 / r = 2**20);
    contraction d >= 1 - B / 255**2.

    Payload of one call: min and max in the type of x, zeros up to 32 bytes, the codes, zeros up
    to a multiple of 32: 32 + 32 * ceil(count / 32) bytes.

    >>> x, out = np.array([-1, -0.5, 0, 0.5, 1], np.float32), np.empty(5, np.float32)
    >>> payload = np.empty(MinMaxUInt8().nbytes(5, x.dtype), np.uint8)
    >>> MinMaxUInt8().encode(x, payload)
    >>> payload.size, payload[32:37].tolist()
    (64, [0, 63, 127, 191, 255])
    """

    def nbytes(self, count: int, dtype: DTypeLike) -> int:
        _float_type(dtype)
        return 32 + 32 * -(-count // 32) if count else 0

    def encode(self, x: Floats, payload: Payload, *, key: Key = Key(), offset: int = 0) -> None:
        if size := _check(self, x, payload):
            kernels_for(x).quantise_minmax(x, payload[:size])

    def decode(self, payload: Payload, out: Floats) -> None:
        if size := _check(self, out, payload):
            kernels_for(out).dequantise_minmax(payload[:size], out, add=False)

    def decode_add(self, payload: Payload, out: Floats) -> None:
        if size := _check(self, out, payload):
            kernels_for(out).dequantise_minmax(payload[:size], out, add=True)


@dataclass(frozen=True)
class Quantizer(Codec):
    """b-bit quantiser with one scale a bucket; the quantiser of QSGD (Alistarh et al. 2017).

    With s = 2**(b-1) - 1 and N = M or |x|_2: a = s |x_i| / N, C(x_i) = sgn(x_i) N level / s, where

    - stochastic: level = floor(a) + Bernoulli(a - floor(a)). Unbiased; variance exactly
      (N/s)**2 sum p_i (1 - p_i), so w <= min(B / (4 s**2), sqrt(B) / s). With M it is about 28
      times smaller than with |x|_2 (4 bits, B = 512, Gaussian): the l2 norm pays only with
      entropy coding.
    - nearest: level = rint(a). With M, |C(x) - x| <= M / (2 s), d >= 1 - B / (4 s**2); half the
      error of stochastic rounding, but biased.

    Zero stays zero, and with N = M the largest element is exact. Random numbers are Philox, a
    function of (seed, key, index). Norms beyond the range of the type decode to NaN.

    Payload: ceil(count / bucket) scales in the type of x, then the codes, level + s, packed:
    ceil(b count / 8) + itemsize ceil(count / bucket) bytes.

    Args:
        bits: 2 to 8.
        bucket: elements that share a scale, a multiple of 8.
        norm: "max" or "l2".
        stochastic: True or False; None is stochastic in `encode`, where nothing else would
            remove the bias, and nearest in `encode_feedback`, which does.
        seed: 32 bits, equal on all ranks.

    >>> q = Quantizer(bits=4, stochastic=False)
    >>> x, out = np.array([0, 3.5, -7, 1.2], np.float32), np.empty(4, np.float32)
    >>> payload = np.empty(q.nbytes(4, x.dtype), np.uint8)
    >>> q.encode(x, payload)
    >>> q.decode(payload, out)
    >>> payload.size, out.tolist()
    (6, [0.0, 4.0, -7.0, 1.0])
    """

    bits: int
    bucket: int = 512
    norm: Literal["max", "l2"] = "max"
    stochastic: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits == 1:
            raise ValueError("Quantizer takes 2 to 8 bits; for one bit an element use OneBit()")
        if self.bits not in range(2, 9):
            raise ValueError(f"Quantizer takes 2 to 8 bits, not {self.bits!r}")
        _check_bucket(self.bucket)
        if self.norm not in ("max", "l2"):
            raise ValueError(f'norm must be "max" or "l2", not {self.norm!r}')
        if self.seed not in range(2**32):
            raise ValueError(f"seed must be an integer in [0, 2**32), not {self.seed!r}")

    def nbytes(self, count: int, dtype: DTypeLike) -> int:
        itemsize = _float_type(dtype).itemsize
        return -(-self.bits * count // 8) + itemsize * -(-count // self.bucket)

    def encode(self, x: Floats, payload: Payload, *, key: Key = Key(), offset: int = 0) -> None:
        if size := _check(self, x, payload, offset):
            stream = None if self.stochastic is False else key.stream(self.seed)
            kernels_for(x).quantise(
                x,
                payload[:size],
                **self._scheme(),
                l2=self.norm == "l2",
                stream=stream,
                offset=offset,
            )

    def encode_feedback(
        self, x: Floats, residual: Floats, payload: Payload, *, key: Key = Key(), offset: int = 0
    ) -> None:
        _check_residual(x, residual)
        if size := _check(self, x, payload, offset):
            stream = key.stream(self.seed) if self.stochastic else None
            kernels_for(x).quantise_feedback(
                x,
                residual,
                payload[:size],
                **self._scheme(),
                l2=self.norm == "l2",
                stream=stream,
                offset=offset,
            )

    def decode(self, payload: Payload, out: Floats) -> None:
        if size := _check(self, out, payload):
            kernels_for(out).dequantise(payload[:size], out, **self._scheme(), add=False)

    def decode_add(self, payload: Payload, out: Floats) -> None:
        if size := _check(self, out, payload):
            kernels_for(out).dequantise(payload[:size], out, **self._scheme(), add=True)

    def _scheme(self) -> dict[str, int]:
        return {"bits": self.bits, "bucket": self.bucket}


@dataclass(frozen=True)
class OneBit(Codec):
    """Signs with one scale a bucket, sgn(0) = +1; use it with error feedback.

    - "l1": C(x) = mean|x| sgn(x) (Karimireddy et al. 2019): contraction, exactly
      d = |x|_1**2 / (B |x|_2**2); |C(x) - x|^2 = |x|_2**2 - |x|_1**2 / B.
    - "l2": C(x) = sqrt(mean x**2) sgn(x), the scale of 1-bit Adam (Tang et al. 2021);
      |C(x) - x|^2 = 2 |x|_2**2 - 2 |x|_1 |x|_2 / sqrt(B): not a contraction for sparse x.

    A bucket of zeros stays zero.

    Payload: ceil(count / bucket) scales in the type of x, then one bit an element, set for
    x >= 0: ceil(count / 8) + itemsize ceil(count / bucket) bytes.

    Args:
        scale: "l1" or "l2".
        bucket: elements that share a scale, a multiple of 8; at most 64 for sign in gossip.

    >>> x, e, out = np.array([3, -1], np.float32), np.zeros(2, np.float32), np.empty(2, np.float32)
    >>> payload = np.empty(OneBit().nbytes(2, x.dtype), np.uint8)
    >>> OneBit().encode_feedback(x, e, payload)
    >>> OneBit().decode(payload, out)
    >>> out.tolist(), e.tolist()
    ([2.0, -2.0], [1.0, 1.0])
    """

    scale: Literal["l1", "l2"] = "l1"
    bucket: int = 2048

    def __post_init__(self) -> None:
        if self.scale not in ("l1", "l2"):
            raise ValueError(f'scale must be "l1" or "l2", not {self.scale!r}')
        _check_bucket(self.bucket)

    def nbytes(self, count: int, dtype: DTypeLike) -> int:
        return -(-count // 8) + _float_type(dtype).itemsize * -(-count // self.bucket)

    def encode(self, x: Floats, payload: Payload, *, key: Key = Key(), offset: int = 0) -> None:
        if size := _check(self, x, payload):
            kernels_for(x).sign(x, payload[:size], bucket=self.bucket, l2=self.scale == "l2")

    def encode_feedback(
        self, x: Floats, residual: Floats, payload: Payload, *, key: Key = Key(), offset: int = 0
    ) -> None:
        _check_residual(x, residual)
        if size := _check(self, x, payload):
            kernels_for(x).sign_feedback(
                x, residual, payload[:size], bucket=self.bucket, l2=self.scale == "l2"
            )

    def decode(self, payload: Payload, out: Floats) -> None:
        if size := _check(self, out, payload):
            kernels_for(out).unsign(payload[:size], out, bucket=self.bucket, add=False)

    def decode_add(self, payload: Payload, out: Floats) -> None:
        if size := _check(self, out, payload):
            kernels_for(out).unsign(payload[:size], out, bucket=self.bucket, add=True)


def _float_type(dtype: DTypeLike) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise TypeError(f"codecs take float32 and float64, not {kind}; convert with astype first")
    return kind


def _check_numbers(x: Floats, what: str) -> None:
    _float_type(x.dtype)
    if x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(
            f"{what} must be one-dimensional and contiguous, not of shape {x.shape} and strides "
            f"{x.strides}; pass numpy.ravel(x), which copies if it must"
        )


def _check(codec: Codec, x: Floats, payload: Payload, offset: int = 0) -> int:
    """Check the arguments, and return the size of the payload."""
    _check_numbers(x, "the array of numbers")
    if payload.dtype != np.uint8:
        raise TypeError(f"the payload must be uint8, not {payload.dtype}; use payload.view('u1')")
    size = codec.nbytes(x.size, x.dtype)
    if payload.ndim != 1 or payload.size < size or not payload.flags.c_contiguous:
        raise ValueError(
            f"the payload of {x.size} numbers needs {size} contiguous bytes, not shape "
            f"{payload.shape}; allocate codec.nbytes(x.size, x.dtype)"
        )
    if offset < 0:
        raise ValueError(f"offset is an index into the whole buffer, not {offset}")
    return size


def _check_residual(x: Floats, residual: Floats) -> None:
    _check_numbers(residual, "the residual")
    if residual.dtype != x.dtype or residual.shape != x.shape:
        raise ValueError(
            f"the residual must be like x, {x.shape} of {x.dtype}, not {residual.shape} of "
            f"{residual.dtype}; keep one residual for each buffer"
        )


def _check_bucket(bucket: int) -> None:
    if bucket < 1 or bucket % 8:
        raise ValueError(f"bucket must be a positive multiple of 8, not {bucket!r}")
