"""Which kernels serve a buffer."""

from typing import Any


def kernels_for(x: Any) -> Any:
    """The module of kernels for the device that holds x."""
    from relaxmpi.primitives import kernels  # numba is slow to import: at first use

    return kernels
