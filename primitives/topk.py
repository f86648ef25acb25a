"""The codec that keeps the largest numbers and drops the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relaxmpi.primitives._codec import Floats, KernelCodec, Key, Payload

__all__ = ["TopK"]


@dataclass(frozen=True)
class TopK(KernelCodec):
    """The k largest magnitudes as they are, zeros elsewhere; use it with error feedback.

    C(x)_i = x_i for the k = max(1, rint(fraction * count)) largest |x_i|, of equal ones those with
    the lower index, else 0 (Aji & Heafield 2017). No k numbers are nearer to x:
    |C(x) - x|^2 <= (1 - k / count) |x|^2, contraction d >= k / count. Biased: what is small stays
    away for ever unless `ErrorFeedback` lets it grow (Stich et al. 2018), where the residual is
    exactly 0 at what was taken and x + residual elsewhere.

    The bucket is one call: each chunk of an all-reduce. Deterministic; `key` and `offset` change
    nothing. `decode_add` leaves what was not taken as it is.

    Payload: k values in the type of x, then k increasing indices in the code of Elias (1974) and
    Fano (1971) with l = min(8, floor(log2(count / k))) low bits each:
    itemsize k + ceil(l k / 8) + ceil((k + floor((count - 1) / 2**l)) / 8) bytes. An index costs
    8.6 bits at 1 % and 5.3 at 10 %, where the entropy of such a set is 8.1 and 4.7.

    Args:
        fraction: what to keep of each call's numbers, in (0, 1].

    >>> import numpy as np
    >>> x, e, out = np.array([1, -4, 2, 3], np.float32), np.zeros(4, np.float32), np.empty(4, "f4")
    >>> payload = np.empty(TopK(0.5).nbytes(4, x.dtype), np.uint8)
    >>> TopK(0.5).encode_feedback(x, e, payload)
    >>> TopK(0.5).decode(payload, out)
    >>> payload.size, out.tolist(), e.tolist()
    (10, [0.0, -4.0, 0.0, 3.0], [1.0, 0.0, 2.0, 0.0])
    """

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], not {self.fraction!r}")

    def _shape(self, count: int) -> tuple[int, int]:
        keep = max(1, round(self.fraction * count))
        return keep, min(8, (count // keep).bit_length() - 1)

    def _nbytes(self, count: int, itemsize: int) -> int:
        keep, low = self._shape(count)
        return itemsize * keep + -(-low * keep // 8) + -(-(keep + (count - 1 >> low)) // 8)

    def _encode(self, kernels: Any, x: Floats, payload: Payload, key: Key, offset: int) -> None:
        keep, low = self._shape(x.size)
        kernels.sparsify(x, payload, keep=keep, low=low)

    def _encode_feedback(
        self, kernels: Any, x: Floats, residual: Floats, payload: Payload, key: Key, offset: int
    ) -> None:
        keep, low = self._shape(x.size)
        kernels.sparsify_feedback(x, residual, payload, keep=keep, low=low)

    def _decode(self, kernels: Any, payload: Payload, out: Floats, *, add: bool) -> None:
        keep, low = self._shape(out.size)
        kernels.densify(payload, out, keep=keep, low=low, add=add)
