"""Buckets of parameters for `attach`, and the hook that keeps messages moving."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version

from relaxmpi.algorithms.arrays import divide
from relaxmpi.algorithms.base import Algorithm, Bound
from relaxmpi.primitives import Bucket, Comm

__all__ = ["Poke", "Portion"]


class Poke:
    """The hook of a parameter: messages move while backward computes."""

    relaxmpi = True  # how `attach` recognises its own hooks

    def __init__(self, bound: list[Bound]) -> None:
        self._bound = bound

    def __call__(self, param: torch.Tensor) -> None:
        """Make progress."""
        for bound in self._bound:
            bound.poll()


class Place(NamedTuple):
    """The part of a buffer that is one parameter's.

    Attributes:
        own: A view of the buffer.
        lent: The same memory, with a storage of its own, for the parameter: where torch moves that,
            nobody else's memory goes away, in particular not that of a message under way.
    """

    own: torch.Tensor
    lent: torch.Tensor


class Portion:
    """One bucket of parameters, whose memory is one buffer or another of the algorithm's.

    Some stay where they are, and are copied to the buffers and back: those whose memory has another
    layout or is shared, those that somebody moves, as by `share_memory()`, and all where a peer may
    change x at any moment.

    Attributes:
        flat: The x of the algorithm's state.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        algorithm: Algorithm,
        comm: Comm,
        name: str,
        tied: Container[int],
    ) -> None:
        self.name, self.named = name, named
        self._kinds = [(p.dtype, p.shape, p.nbytes) for _, p in named]
        self.flat = _real(Bucket([p for _, p in named], [n for n, _ in named]).flat)
        self.bound = algorithm.bind(comm, self.flat, lr=0.0, name=name)
        self._shown = self._own = self._cut(self.flat)
        self._other: tuple[Any, list[Place]] = None, []
        stay = self.bound.restless
        # Where each parameter was put; None for those that stay.
        self._put = [None if stay or not _movable(p, tied) else p.data_ptr() for _, p in named]
        self.show(self.flat)

    def versions(self) -> list[int]:
        """How often torch has seen each parameter change."""
        return [p._version for _, p in self.named]

    def changed(self) -> str:
        """Return the name of a parameter that somebody changed between steps; empty if none."""
        facts = zip(self.named, self.versions(), self.seen, self._put, self._shown, strict=True)
        for (name, p), now, before, put, shown in facts:
            moved = put is not None and p.data_ptr() != put
            own = shown.own
            if now != before or (moved and not torch.equal(p.detach().to(own.dtype), own)):
                return name
        return ""

    def fetch(self, flat: Any) -> None:
        """Have the parameters in a buffer."""
        self._let_stay()
        for (_, p), place in zip(self.named, self._places(flat), strict=True):
            if p.data_ptr() != place.own.data_ptr():
                place.own.copy_(p.detach())
        self.seen = self.versions()

    def show(self, flat: Any, by: float = 1.0) -> None:
        """Let the parameters be a buffer, or in `self.flat` the quotient of one."""
        if by != 1.0:
            divide(flat, by, self.flat)
            flat = self.flat
        self._let_stay()
        self._shown = self._places(flat)
        for k, ((_, p), place) in enumerate(zip(self.named, self._shown, strict=True)):
            if self._put[k] is None:
                p.detach().copy_(place.own)
            else:
                p.data = place.lent
                increment_version(p)  # autograd must not take it for what it was
                self._put[k] = p.data_ptr()
        self.seen = self.versions()

    def _let_stay(self) -> None:
        """Leave parameters alone from now on that somebody has moved."""
        for k, (_, p) in enumerate(self.named):
            if self._put[k] is not None and p.data_ptr() != self._put[k]:
                self._put[k] = None

    def show_model(self) -> None:
        """Let the parameters be where the next gradient is taken."""
        self.show(*self.bound.model())

    def release(self) -> None:
        """Let each parameter have memory of its own."""
        self._let_stay()
        for (_, p), put in zip(self.named, self._put, strict=True):
            if put is not None:
                p.data = p.detach().clone()

    @property
    def stepped_as_shown(self) -> bool:
        """Whether the optimizer steps the parameters as they are."""
        flat, by = self.bound.model()
        return flat is self.bound.stepped and by == 1.0

    def not_finite(self, tensors: list[torch.Tensor | None]) -> str:
        """Return the name of the first parameter whose tensor has a NaN or an infinity."""
        for (name, _), t in zip(self.named, tensors, strict=True):
            if t is not None and not bool(torch.isfinite(t.sum())) and not _finite(t):
                return name
        return ""

    def _places(self, flat: torch.Tensor) -> list[Place]:
        """Return the parts of a buffer; those of x and of the last other one are kept."""
        if flat is self.flat:
            return self._own
        if self._other[0] is not flat:
            self._other = flat, self._cut(flat)
        return self._other[1]

    def forget(self) -> None:
        """Let go of the last other buffer."""
        self._other = None, []

    def _cut(self, flat: torch.Tensor) -> list[Place]:
        """Cut a buffer like the bucket."""
        pieces = torch.split(flat.view(torch.uint8), [size for _, _, size in self._kinds])
        places = list[Place]()
        for piece, (dtype, shape, _) in zip(pieces, self._kinds, strict=True):
            lent = torch.from_numpy(piece.numpy()) if piece.device.type == "cpu" else piece
            places.append(Place(piece.view(dtype).view(shape), lent.view(dtype).view(shape)))
        return places


def _movable(p: torch.Tensor, tied: Container[int]) -> bool:
    """Whether a parameter has memory that nobody else uses, in the usual layout."""
    memory = p.untyped_storage()
    whole = p.is_contiguous() and memory.nbytes() == p.nbytes
    return whole and not memory.is_shared() and memory.data_ptr() not in tied


def _real(flat: torch.Tensor) -> torch.Tensor:
    """Mix real and imaginary parts like any numbers."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _finite(t: torch.Tensor) -> bool:
    return bool(torch.isfinite(t.coalesce().values() if t.is_sparse else t).all())
