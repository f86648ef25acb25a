"""Buckets: many tensors as one flat array, so that one message carries them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import prod
from typing import Any

from relaxmpi.primitives.devices import device_of

__all__ = ["Bucket", "buckets_of"]


class Bucket:
    """Many tensors as one flat array.

    The numbers are copied once, when the bucket is made; from then on the views share its memory.

    Args:
        tensors: numpy arrays or torch tensors of one dtype on one device, of any shapes.
        names: What to call them in messages; default their positions.
        align: The flat array is padded with zeros to a multiple of so many elements.

    Attributes:
        flat: All numbers, 1-D, in the given order, then the padding.
        views: For each tensor a view of `flat` of the same shape; writing to one changes `flat`.
        names: As given.
        nbytes: Bytes of the tensors, without the padding.

    Raises:
        TypeError: The tensors are of different dtypes or devices.
        ValueError: There is none, or the number of names is another one.

    Example:
        >>> import numpy as np
        >>> bucket = Bucket([np.ones((2, 2)), np.zeros(3)], align=8)
        >>> bucket.flat[:3] = 5
        >>> bucket.views[0].tolist(), bucket.flat.shape, bucket.nbytes
        ([[5.0, 5.0], [5.0, 1.0]], (8,), 56)
    """

    def __init__(
        self, tensors: Sequence[Any], names: Sequence[str] | None = None, align: int = 1
    ) -> None:
        self.names = tuple(str(i) for i in range(len(tensors))) if names is None else tuple(names)
        _check(tensors, self.names, align)
        shapes = [tuple(t.shape) for t in tensors]
        count = sum(prod(shape) for shape in shapes)
        self.flat: Any = device_of(tensors[0]).like(tensors[0], (-(-count // align) * align,))
        self.nbytes: int = count * self.flat.itemsize
        self.flat[count:] = 0
        views, begin = [], 0
        for tensor, shape in zip(tensors, shapes, strict=True):
            view = self.flat[begin : begin + prod(shape)].reshape(shape)
            view[...] = tensor.detach() if hasattr(tensor, "detach") else tensor
            views.append(view)
            begin += prod(shape)
        self.views: tuple[Any, ...] = tuple(views)

    def __repr__(self) -> str:
        return f"<Bucket of {len(self.views)} tensors, {self.nbytes} bytes>"


def _check(tensors: Sequence[Any], names: Sequence[str], align: int) -> None:
    if not tensors:
        raise ValueError("a bucket needs at least one tensor")
    if len(names) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors have {len(names)} names")
    if align < 1:
        raise ValueError(f"align must be at least 1, not {align}")
    first, device = tensors[0], device_of(tensors[0])
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype != first.dtype or device_of(tensor) is not device:
            raise TypeError(
                f"a bucket has one dtype and device: {names[0]} is {first.dtype} on "
                f"{device.name}, {name} is {tensor.dtype} on {device_of(tensor).name}"
            )


def buckets_of(
    sizes: Sequence[int],
    limit: int,
    *,
    kinds: Sequence[Hashable] | None = None,
    first: int | None = None,
) -> list[list[int]]:
    """Say which tensors share a bucket; every bucket keeps the given order.

    A bucket is closed once it holds `limit` bytes or more (the rule of BAGUA and of PyTorch's
    DDP), and tensors of different kinds never share one. Buckets come in the order in which
    they close, the incomplete ones last.

    Args:
        sizes: Bytes of each tensor, in the order in which they become ready.
        limit: Bytes at which a bucket is closed.
        kinds: What may not be mixed: the dtype (and device) of each tensor.
        first: Another limit for the first bucket: a small one starts early.

    Returns:
        Positions in `sizes`, a list a bucket.

    Example:
        >>> buckets_of([1, 2, 3, 4, 5], limit=4)
        [[0, 1, 2], [3], [4]]
    """
    if limit < 1:
        raise ValueError(f"limit must be at least one byte, not {limit}")
    kinds = [None] * len(sizes) if kinds is None else kinds
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    held: Counter[Hashable] = Counter()
    for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        filling.setdefault(kind, []).append(i)
        held[kind] += size
        if held[kind] >= (limit if closed or first is None else first):
            closed.append(filling.pop(kind))
            del held[kind]
    return closed + list(filling.values())
