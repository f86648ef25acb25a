"""Arithmetic on the buffers of any device that algorithms need beside operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from relaxmpi.primitives.devices import device_of

__all__ = ["copy_of", "divide"]


def copy_of(x: Any) -> Any:
    """Return a copy, of the same kind."""
    out = device_of(x).like(x, tuple(x.shape))
    out[...] = x
    return out


def divide(y: Any, w: float, out: Any) -> None:
    """Make `out` y / w, in one pass over memory where numpy knows the numbers."""
    flat = device_of(y).flat(y)
    if flat.dtype == "bfloat16":
        out[...] = y
        out /= w
    else:
        np.divide(flat.data, w, out=device_of(out).flat(out).data)
