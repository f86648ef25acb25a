"""Codecs turn numbers into bytes and back: low precision as a value that a verb is given.

A codec is a frozen dataclass without state. The memory that makes a biased one converge is
`ErrorFeedback`, around it. Sizes are known to both sides from the number of elements alone.

Notation of the docstrings: a bucket holds B elements x_i; M = max |x_i|; b bits; an unbiased
codec C has variance bound w when E C(x) = x and E |C(x) - x|^2 <= w |x|^2; a biased one is a
contraction d when |C(x) - x|^2 <= (1 - d) |x|^2. Buckets begin at the first element encoded.

A bucket that holds a NaN or an infinity decodes to NaN, all of it, and changes no other one.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from relaxmpi.primitives._codec import (
    Codec,
    Floats,
    KernelCodec,
    Key,
    Payload,
    scales_are_finite,
)

__all__ = ["Cast", "Codec", "Identity", "Key", "MinMaxUInt8", "OneBit", "Quantizer"]


@dataclass(frozen=True)
class Identity(KernelCodec):
    """The bytes themselves: the oracle, and sums in a fixed order.

    C(x) = x; itemsize bytes an element.

    >>> x, out = np.array([1.5, -2], np.float32), np.empty(2, np.float32)
    >>> payload = np.empty(Identity().nbytes(2, x.dtype), np.uint8)
    >>> Identity().encode(x, payload)
    >>> Identity().decode(payload, out)
    >>> out.tolist()
    [1.5, -2.0]
    """

    def _nbytes(self, count: int, itemsize: int) -> int:
        return count * itemsize

    def _encode(self, kernels: Any, x: Floats, payload: Payload, key: Key, offset: int) -> None:
        payload[:] = x.view(np.uint8)

    def _decode(self, kernels: Any, payload: Payload, out: Floats, *, add: bool) -> None:
        numbers = out.copy() if add else out
        numbers.view(np.uint8)[:] = payload
        if add:
            kernels.accumulate(out, numbers)


@dataclass(frozen=True)
class Cast(KernelCodec):
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

    def _nbytes(self, count: int, itemsize: int) -> int:
        return 2 * count

    def _encode(self, kernels: Any, x: Floats, payload: Payload, key: Key, offset: int) -> None:
        narrow = kernels.narrow_fp16 if self.to == "fp16" else kernels.narrow_bf16
        narrow(x, payload.view(np.uint16), saturate=True)

    def _decode(self, kernels: Any, payload: Payload, out: Floats, *, add: bool) -> None:
        widen = kernels.widen_fp16 if self.to == "fp16" else kernels.widen_bf16
        numbers = out.copy() if add else out
        widen(payload.view(np.uint16), numbers)
        if add:
            kernels.accumulate(out, numbers)


@dataclass(frozen=True)
class MinMaxUInt8(KernelCodec):
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
    contraction d >= 1 - B / 255**2. Not so at the ends of the type: above a quarter of its largest
    number some decode to infinities, and where r is less than 255 denormal steps all to min.

    Payload of one call: min and max in the type of x, zeros up to 32 bytes, the codes, zeros up
    to a multiple of 32: 32 + 32 * ceil(count / 32) bytes.

    >>> x, out = np.array([-1, -0.5, 0, 0.5, 1], np.float32), np.empty(5, np.float32)
    >>> payload = np.empty(MinMaxUInt8().nbytes(5, x.dtype), np.uint8)
    >>> MinMaxUInt8().encode(x, payload)
    >>> payload.size, payload[32:37].tolist()
    (64, [0, 63, 127, 191, 255])
    """

    def _nbytes(self, count: int, itemsize: int) -> int:
        return 32 + 32 * -(-count // 32)

    def _encode(self, kernels: Any, x: Floats, payload: Payload, key: Key, offset: int) -> None:
        kernels.quantise_minmax(x, payload)

    def _decode(self, kernels: Any, payload: Payload, out: Floats, *, add: bool) -> None:
        kernels.dequantise_minmax(payload, out, add=add)

    def _is_finite(self, payload: Payload, out: Floats) -> bool:
        low, high = payload[: 2 * out.itemsize].view(out.dtype)
        return bool(max(abs(low), abs(high)) < np.finfo(out.dtype).max / 4)  # not so for NaN


@dataclass(frozen=True)
class Quantizer(KernelCodec):
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

    def _nbytes(self, count: int, itemsize: int) -> int:
        return -(-self.bits * count // 8) + itemsize * -(-count // self.bucket)

    def _encode(self, kernels: Any, x: Floats, payload: Payload, key: Key, offset: int) -> None:
        kernels.quantise(x, payload, **self._how(self.stochastic is not False, key, offset))

    def _encode_feedback(
        self, kernels: Any, x: Floats, residual: Floats, payload: Payload, key: Key, offset: int
    ) -> None:
        how = self._how(self.stochastic is True, key, offset)
        kernels.quantise_beside(x, residual, payload, difference=False, **how)

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
        how = self._how(self.stochastic is not False, key, offset)
        kernels.quantise_beside(x, replica, payload, difference=True, give=give, **how)

    def _how(self, random: bool, key: Key, offset: int) -> dict[str, Any]:
        stream = key.stream(self.seed) if random else None
        form = {"bits": self.bits, "bucket": self.bucket, "l2": self.norm == "l2"}
        return {**form, "stream": stream, "offset": offset}

    def _decode(self, kernels: Any, payload: Payload, out: Floats, *, add: bool) -> None:
        kernels.dequantise(payload, out, bits=self.bits, bucket=self.bucket, add=add)

    def _decode_share(
        self, kernels: Any, payload: Payload, replica: Floats, part: float, share: Floats
    ) -> None:
        form = {"bits": self.bits, "bucket": self.bucket}
        kernels.dequantise(payload, replica, **form, add=True, part=part, share=share)

    def _is_finite(self, payload: Payload, out: Floats) -> bool:
        return scales_are_finite(payload, -(-out.size // self.bucket), out.dtype)


@dataclass(frozen=True)
class OneBit(KernelCodec):
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

    def _nbytes(self, count: int, itemsize: int) -> int:
        return -(-count // 8) + itemsize * -(-count // self.bucket)

    def _encode(self, kernels: Any, x: Floats, payload: Payload, key: Key, offset: int) -> None:
        kernels.sign(x, payload, bucket=self.bucket, l2=self.scale == "l2")

    def _encode_feedback(
        self, kernels: Any, x: Floats, residual: Floats, payload: Payload, key: Key, offset: int
    ) -> None:
        kernels.sign_feedback(x, residual, payload, bucket=self.bucket, l2=self.scale == "l2")

    def _decode(self, kernels: Any, payload: Payload, out: Floats, *, add: bool) -> None:
        kernels.unsign(payload, out, bucket=self.bucket, add=add)

    def _is_finite(self, payload: Payload, out: Floats) -> bool:
        return scales_are_finite(payload, -(-out.size // self.bucket), out.dtype)


def _check_bucket(bucket: int) -> None:
    if bucket < 1 or bucket % 8:
        raise ValueError(f"bucket must be a positive multiple of 8, not {bucket!r}")
