"""Buckets of parameters for `attach`, and the hook that keeps messages moving."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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


class Portion:
    """One bucket of parameters, which are views of one buffer or another of the algorithm's.

    Those that cannot be, such as channels-last ones, and all where a peer may change x at any
    moment, stay where they are, and are copied to the buffers and back.

    Attributes:
        flat: The x of the algorithm's state.
    """

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], algorithm: Algorithm, comm: Comm, name: str
    ) -> None:
        self.name, self.named = name, named
        bucket = Bucket([p for _, p in named], [n for n, _ in named])
        self._bucket = bucket
        self.flat = _real(bucket.flat)
        self.bound = algorithm.bind(comm, self.flat, lr=0.0, name=name)
        self._cut = self.flat, bucket.views
        self._movable = [p.is_contiguous() and not self.bound.restless for _, p in named]
        self.show(self.flat)

    def versions(self) -> list[int]:
        """How often torch has seen each parameter change."""
        return [p._version for _, p in self.named]

    def changed(self) -> str:
        """Return the name of a parameter that somebody changed between steps; empty if none."""
        pairs = zip(self.versions(), self.seen, self.named, strict=True)
        return next((name for now, before, (name, _) in pairs if now != before), "")

    def fetch(self, flat: Any) -> None:
        """Have the parameters in a buffer."""
        for (_, p), view in zip(self.named, self._views(flat), strict=True):
            if p.data_ptr() != view.data_ptr():
                view.copy_(p.detach())
        self.seen = self.versions()

    def show(self, flat: Any, by: float = 1.0) -> None:
        """Let the parameters be a buffer, or in `self.flat` the quotient of one."""
        if by != 1.0:
            divide(flat, by, self.flat)
            flat = self.flat
        views = self._views(flat)
        for (_, p), view, movable in zip(self.named, views, self._movable, strict=True):
            if movable:
                p.data = view
            else:
                p.detach().copy_(view)
        self.seen = self.versions()

    def show_model(self) -> None:
        """Let the parameters be where the next gradient is taken."""
        self.show(*self.bound.model())

    def release(self) -> None:
        """Let each parameter have memory of its own."""
        for (_, p), movable in zip(self.named, self._movable, strict=True):
            if movable:
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

    def _views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut a buffer like the bucket."""
        if flat is self.flat:
            return self._bucket.views
        if self._cut[0] is not flat:
            complex_ = self._bucket.flat.is_complex()
            whole = torch.view_as_complex(flat.view(-1, 2)) if complex_ else flat
            pieces = torch.split(whole, [p.numel() for _, p in self.named])
            cut = (t.view_as(p) for t, (_, p) in zip(pieces, self.named, strict=True))
            self._cut = flat, tuple(cut)
        return self._cut[1]


def _real(flat: torch.Tensor) -> torch.Tensor:
    """Mix real and imaginary parts like any numbers."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _finite(t: torch.Tensor) -> bool:
    return bool(torch.isfinite(t.coalesce().values() if t.is_sparse else t).all())
