"""Host memory: numpy arrays, torch CPU tensors and whatever offers DLPack on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from relaxmpi.primitives.devices import Flat
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.transport import Transport

__all__ = ["Cpu"]

_FORMATS = {
    np.dtype(name): name
    for name in (
        "float64 float32 float16 complex64 complex128 "
        "int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool"
    ).split()
}
_STORAGE = {**{name: dtype for dtype, name in _FORMATS.items()}, "bfloat16": np.dtype(np.uint16)}
_SHORT = {"float16": "fp16", "bfloat16": "bf16"}
_FOLD = {Op.SUM: np.add, Op.MEAN: np.add, Op.MAX: np.maximum, Op.MIN: np.minimum}


def _is_torch(x: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


class Cpu:
    """The device of host memory."""

    name = "cpu"

    @cached_property
    def kernels(self) -> Any:
        """The numba kernels, imported when the first codec needs them."""
        return import_module("relaxmpi.primitives.kernels")

    def owns(self, x: Any) -> bool:
        """Numpy arrays, torch tensors on the CPU, other arrays that DLPack places there."""
        if isinstance(x, np.ndarray):
            return True
        if _is_torch(x):
            return bool(x.device.type == "cpu")
        if hasattr(x, "__dlpack_device__") and not isinstance(x, np.generic):
            return bool(x.__dlpack_device__()[0] == 1)
        return False

    def flat(self, x: Any, *, writable: bool = True, strided: bool = False) -> Flat:
        """View `x` flat; refuse what MPI would scramble or could not write to."""
        if isinstance(x, np.ndarray):
            return self._flat(x, x.shape, writable, strided)
        if _is_torch(x):
            return self._flat_torch(x, writable, strided)
        array = np.from_dlpack(x)
        return self._flat(array, array.shape, writable, strided)

    def _flat_torch(self, x: Any, writable: bool, strided: bool) -> Flat:
        torch = sys.modules["torch"]
        if x.layout != torch.strided:
            raise TypeError(f"{x.layout} tensors are not buffers: pass .to_dense() or .values()")
        shape, x = tuple(x.shape), x.detach()
        if x.is_conj() or x.is_neg():
            if not strided:
                raise ValueError("a lazily conjugated tensor has no memory: .resolve_conj()")
            x = x.resolve_conj().resolve_neg()
        if x.dtype == torch.bfloat16:
            view = self._flat(x.view(torch.int16).numpy(), shape, writable, strided)
            return view._replace(data=view.data.view(np.uint16), dtype="bfloat16")
        return self._flat(x.numpy(), shape, writable, strided)

    def _flat(self, a: Any, shape: tuple[int, ...], writable: bool, strided: bool) -> Flat:
        if isinstance(a, np.ma.MaskedArray):
            raise TypeError("a masked array is not a buffer: pass x.filled(...), or x.data")
        if type(a) is not np.ndarray:
            a = a.view(np.ndarray)
        name = _FORMATS.get(a.dtype)
        if name is None:
            raise TypeError(
                f"dtype {a.dtype} cannot be sent: use native byte order and one of "
                f"{', '.join(_STORAGE)}"
            )
        if not a.flags.c_contiguous:
            if not strided:
                raise ValueError(
                    f"an array of shape {shape} and strides {a.strides} is not C-contiguous: "
                    "pass np.ascontiguousarray(x), or give out= so that it is copied"
                )
            a = np.ascontiguousarray(a)
        if writable and not a.flags.writeable:
            raise ValueError("the array is read-only: pass a copy, or a writable out=")
        return Flat(a if a.ndim == 1 else a.reshape(-1), name, shape, self)

    def empty(self, count: int, dtype: str) -> Any:
        """Return uninitialised scratch."""
        return np.empty(count, _STORAGE[dtype])

    def like(self, x: Any, shape: Sequence[int]) -> Any:
        """Make a torch tensor for a torch tensor, else a numpy array."""
        if _is_torch(x):
            return x.new_empty(tuple(shape))
        return np.empty(tuple(shape), x.dtype if isinstance(x, np.ndarray) else self.flat(x).dtype)

    def dress(self, data: Any, x: Any, shape: Sequence[int]) -> Any:
        """Make a torch tensor for a torch tensor, else a numpy array, of the same memory."""
        if _is_torch(x):
            torch = sys.modules["torch"]
            signed = data.view(np.int16) if x.dtype == torch.bfloat16 else data
            return torch.from_numpy(signed.reshape(tuple(shape))).view(x.dtype)
        return data.reshape(tuple(shape))

    def cast(self, data: Any, dtype: str, to: str) -> Any:
        """Convert between formats, to nearest even, overflow to an infinity."""
        if dtype == to:
            return data
        out = self.empty(len(data), to)
        if dtype in _SHORT:
            getattr(self.kernels, f"widen_{_SHORT[dtype]}")(data.view(np.uint16), out)
        elif to in _SHORT:
            narrow = getattr(self.kernels, f"narrow_{_SHORT[to]}")
            narrow(data, out.view(np.uint16), saturate=False)
        else:
            np.copyto(out, data)
        return out

    def zeros(self, count: int, dtype: str) -> Any:
        """Return zeros."""
        return np.zeros(count, _STORAGE[dtype])

    def copy(self, out: Any, data: Any) -> None:
        """Copy `data` into `out`."""
        np.copyto(out, data)

    def reduce(self, op: Op, a: Any, b: Any, out: Any) -> None:
        """Fold `a` and `b` into `out`; np.maximum and np.minimum keep NaN."""
        with np.errstate(invalid="ignore", over="ignore"):
            _FOLD[op](a, b, out=out)

    def scale(self, data: Any, factor: float) -> None:
        """Multiply in place."""
        data *= factor

    def divide(self, data: Any, by: int) -> None:
        """Divide in place."""
        data /= by

    def span(self, data: Any) -> tuple[int, int]:
        """Addresses of the first byte and of the byte after the last."""
        begin: int = data.__array_interface__["data"][0]
        return begin, begin + data.nbytes

    def enter(self) -> None:
        """Host memory needs no ordering."""

    def leave(self) -> None:
        """Host memory needs no ordering."""

    def transport(self, host: Transport) -> Transport:
        """Host memory moves by the host's transport itself."""
        return host
