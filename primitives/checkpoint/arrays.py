"""Arrays and tensors as raw bytes with a format's name, and back."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from relaxmpi.primitives.errors import CheckpointError

__all__ = ["Raw", "is_array", "make", "raw_of", "stored", "torch_module"]

# How each format is called in a safetensors file. Complex numbers are pairs there, because not
# every reader of the format knows them.
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex128": "F64",
    "complex64": "F32",
}


class Raw(NamedTuple):
    """Numbers on the host.

    Attributes:
        data: Their bytes.
        dtype: As numpy and torch call it.
        shape: Shape.
        kind: "numpy" or "torch".
    """

    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    kind: str


def torch_module() -> Any:
    """Return torch if somebody has imported it: only then can there be a tensor."""
    return sys.modules.get("torch")


def is_array(x: object) -> bool:
    """Whether `x` is a numpy array or a torch tensor."""
    torch = torch_module()
    return isinstance(x, np.ndarray) or (torch is not None and isinstance(x, torch.Tensor))


def stored(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the format's name in a file and the shape there; KeyError for an unknown one."""
    return _CODES[dtype], (*shape, 2) if dtype.startswith("complex") else shape


def raw_of(x: Any) -> Raw:
    """Return the bytes of an array or tensor: its memory where that is contiguous.

    Raises:
        TypeError: It is of a kind that has no plain bytes.
    """
    if isinstance(x, np.ndarray):
        name = x.dtype.name
        if isinstance(x, np.ma.MaskedArray) or name not in _CODES:
            raise TypeError(f"a {type(x).__name__} of dtype {x.dtype} cannot be saved")
        native = x.astype(x.dtype.newbyteorder("="), copy=False)
        flat = np.ascontiguousarray(native).reshape(-1)
        return Raw(flat.view(np.uint8), name, x.shape, "numpy")
    torch = torch_module()
    name = str(x.dtype).removeprefix("torch.")
    if x.layout is not torch.strided or name not in _CODES:
        raise TypeError(f"a {x.layout} tensor of dtype {x.dtype} cannot be saved")
    shape = tuple(x.shape)
    x = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if x.is_complex():
        x = torch.view_as_real(x)
    data = x.reshape(-1).view(torch.uint8).numpy() if x.numel() else np.empty(0, np.uint8)
    return Raw(data, name, shape, "torch")


def make(raw: Raw) -> Any:
    """Return the array or tensor, over the memory of `raw.data`.

    Raises:
        CheckpointError: It is a torch tensor and there is no torch, or a bool is neither 0 nor 1.
    """
    if raw.dtype == "bool" and len(raw.data) and raw.data.max() > 1:
        raise CheckpointError("a bool is neither 0 nor 1")
    if raw.kind == "numpy":
        return raw.data.view(raw.dtype).reshape(raw.shape)
    torch = torch_module()
    if torch is None:
        raise CheckpointError("it holds torch tensors: import torch first")
    if not len(raw.data):
        return torch.empty(raw.shape, dtype=getattr(torch, raw.dtype))
    return torch.from_numpy(raw.data).view(getattr(torch, raw.dtype)).reshape(raw.shape)
