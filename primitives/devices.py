"""The device seam: what verbs ask of the place where a buffer lives.

A verb never names numpy, torch or CuPy. It asks `device_of(x)` for a flat view, scratch memory,
copies, the arithmetic of a reduction, the codec kernels and the transport; a GPU (or a test's
fake array) joins by `register`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from relaxmpi.primitives.ops import Op
    from relaxmpi.primitives.transport import Transport

__all__ = ["Device", "Flat", "device_of", "kernels_for", "register"]


class Flat(NamedTuple):
    """A buffer as a contiguous 1-D array of its device.

    Attributes:
        data: The 1-D view; bfloat16 is stored as uint16.
        dtype: The name of the number format, such as "float32" or "bfloat16".
        shape: The shape of the caller's buffer.
        device: Where it lives.
    """

    data: Any
    dtype: str
    shape: tuple[int, ...]
    device: Device


class Device(Protocol):
    """Where a buffer lives.

    Its own 1-D arrays have len, slices, view, copy, dtype, shape, size, ndim and flags, as those
    of numpy and CuPy do; everything else is asked of the device.
    """

    name: str

    @property
    def kernels(self) -> Any:
        """Module of codec kernels, the same names on every device."""

    def owns(self, x: object) -> bool:
        """Whether `x` is a buffer of this device."""

    def flat(self, x: Any, *, writable: bool = True, strided: bool = False) -> Flat:
        """View `x` flat, sharing its memory; a strided input is copied where `strided`."""

    def empty(self, count: int, dtype: str) -> Any:
        """Return uninitialised scratch."""

    def zeros(self, count: int, dtype: str) -> Any:
        """Return zeros."""

    def like(self, x: Any, shape: Sequence[int]) -> Any:
        """Make a new buffer of the caller's kind and dtype."""

    def dress(self, data: Any, x: Any, shape: Sequence[int]) -> Any:
        """Give a 1-D array of this device the caller's kind and a shape, sharing its memory."""

    def cast(self, data: Any, dtype: str, to: str) -> Any:
        """Convert numbers (round to nearest even); the same array where nothing changes."""

    def copy(self, out: Any, data: Any) -> None:
        """Copy `data` into `out`."""

    def reduce(self, op: Op, a: Any, b: Any, out: Any) -> None:
        """Fold `a` and `b` into `out`, which may be one of them: add, or NaN-keeping extremes."""

    def scale(self, data: Any, factor: float) -> None:
        """Multiply in place."""

    def divide(self, data: Any, by: int) -> None:
        """Divide in place."""

    def span(self, data: Any) -> tuple[int, int]:
        """Addresses of the first byte of a 1-D array and of the byte after the last."""

    def enter(self) -> None:
        """Let moves that follow see what the caller has queued on this device."""

    def leave(self) -> None:
        """Let what the caller queues next see what was moved."""

    def transport(self, host: Transport) -> Transport:
        """Return the transport for this device's arrays, given the one for host memory."""


_devices: list[Device] = []
_by_type: dict[type, Device] = {}


def register(device: Device) -> None:
    """Add a device; the newest is asked first."""
    _devices.insert(0, device)
    _by_type.clear()


def device_of(x: object) -> Device:
    """Find the device that owns `x`; TypeError where none does."""
    device = _by_type.get(type(x))
    if device is not None and device.owns(x):
        return device
    for device in _devices:
        if device.owns(x):
            _by_type[type(x)] = device
            return device
    raise TypeError(
        f"{type(x).__name__} is not a buffer: pass a numpy array, a torch tensor or an object "
        "with DLPack; send other objects with comm.mpi"
    )


def kernels_for(x: object) -> Any:
    """Return the module of codec kernels for the arrays of `x`'s device."""
    return device_of(x).kernels
