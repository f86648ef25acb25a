"""Buckets of gradients for `attach`, and the hook of each parameter that fills them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from relaxmpi.algorithms.base import Algorithm
from relaxmpi.primitives import Bucket, Comm, RelaxError, Work

__all__ = ["Part", "Slot", "Window"]


class Window(Protocol):
    """What the hooks ask of the handle of `attach`: from one optimizer step to the next."""

    paused: bool

    def again(self, slot: Slot) -> None:
        """Deal with a second gradient of this window."""

    def arrived(self, slot: Slot) -> None:
        """Take note of the first gradient of this window, and start what is complete."""


class Slot:
    """One parameter, its place in its bucket, and the hook that runs when its gradient is there.

    Attributes:
        view: The place in the bucket; before there are buckets, the gradient itself.
        arrived: Whether the hook has run in this window.
        used: Whether this rank had a gradient in this window.
    """

    __slots__ = ("arrived", "index", "name", "param", "part", "used", "view", "window")
    relaxmpi = True  # how `attach` recognises its own hooks

    def __init__(self, window: Window, index: int, name: str, param: nn.Parameter) -> None:
        self.window, self.index, self.name, self.param = window, index, name, param
        self.part: Part | None = None
        self.view: torch.Tensor | None = None
        self.arrived = self.used = False

    def __call__(self, param: torch.Tensor) -> None:
        """Count the bucket down; autograd has just added to `param.grad`."""
        window, part = self.window, self.part
        if part.started if part is not None else self.arrived:
            window.again(self)
            part = self.part
        elif self.arrived and param.grad is not self.view:
            window.again(self)
            part = self.part
        if window.paused:
            return
        if part is None:
            self.view = param.grad
        elif param.grad is not self.view:
            self.adopt()
        if not self.arrived:
            self.arrived = self.used = True
            if part is not None:
                part.missing -= 1
            window.arrived(self)
        if part is not None:
            part.comm.progress()

    def adopt(self) -> None:
        """Move the gradient into the bucket, and let `p.grad` be its view there."""
        grad = self.param.grad
        assert grad is not None  # callers have looked
        assert self.view is not None
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        self.view.copy_(grad.detach())
        self.param.grad = self.view

    def fill(self, adopt: bool) -> None:
        """Do the same for a parameter that no hook has announced; without a gradient, zero."""
        grad = self.param.grad
        if grad is not None and grad is self.view:
            self.used = True
        elif adopt and grad is not None:
            self.used = True
            self.adopt()
        else:
            assert self.view is not None
            self.view.zero_()
            if adopt and self.param.requires_grad:
                self.param.grad = self.view


class Part:
    """One bucket of gradients and where it is in this window."""

    def __init__(self, slots: list[Slot], algorithm: Algorithm, comm: Comm, name: str) -> None:
        self.name, self.comm, self.slots = name, comm, slots
        bucket = Bucket([slot.param for slot in slots], [slot.name for slot in slots])
        self.flat = bucket.flat
        # Real and imaginary parts are averaged, and encoded, like any numbers.
        self._sent = torch.view_as_real(self.flat).view(-1) if self.flat.is_complex() else self.flat
        self.bound = algorithm.bind(comm, None, lr=0.0, name=name)
        self.work: Work[Any] | None = None
        self.ended = 0.0
        self.culprit: Slot | None = None
        self._version = 0
        for slot, view in zip(slots, bucket.views, strict=True):
            slot.part, slot.view = self, view
            if slot.arrived:
                slot.adopt()
        self.started = False
        self.missing = sum(not slot.arrived for slot in slots)

    def open(self) -> None:
        """Begin a window: nothing has arrived."""
        self.started, self.missing = False, len(self.slots)
        for slot in self.slots:
            slot.arrived = slot.used = False

    def start(self, weight: float, guarded: bool) -> None:
        """Hand the bucket to the algorithm."""
        self.started = True
        self.culprit = self._not_finite() if guarded else None
        if weight != 1.0:
            self.flat.mul_(weight)
        self._version = self.flat._version
        self.work = self.bound.on_grads(self._sent)

    def complete(self, adopt: bool) -> None:
        """Put what no hook has announced into the bucket: local gradients, or zero."""
        for slot in self.slots:
            if not slot.arrived:
                slot.fill(adopt)
        self.missing = 0

    def wait(self) -> None:
        """Wait for what was started, once."""
        if self.work is None:
            return
        self.work.wait()
        self.ended, self.work = self.work.ended, None
        if self.flat._version != self._version:
            raise RelaxError(
                f"gradients of {self.name} ({self.slots[0].name} and others) were changed between "
                "backward and step, while they were on their way: call sync.wait() before you "
                "clip, unscale, add to or zero them"
            )

    def _not_finite(self) -> Slot | None:
        """Return the first slot with a NaN or an infinity."""
        if bool(torch.isfinite(self.flat.sum())):
            return None
        for slot in self.slots:
            assert slot.view is not None
            if not bool(torch.isfinite(slot.view).all()):
                return slot
        return None
