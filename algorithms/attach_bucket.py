"""Buckets of gradients for `attach`, and the hook of each parameter that fills them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from relaxmpi.algorithms.base import Algorithm
from relaxmpi.primitives import Bucket, Comm, Work

__all__ = ["Part", "Slot", "Window"]


class Window(Protocol):
    """What the hooks ask of the handle of `attach`: from one optimizer step to the next."""

    paused: bool

    def again(self, slot: Slot) -> None:
        """Deal with a second gradient of this window."""

    def start_full(self) -> None:
        """Start, in order, the buckets that are complete."""


class Part:
    """One bucket of gradients and where it is in this window."""

    def __init__(
        self,
        window: Window,
        named: list[tuple[str, nn.Parameter]],
        algorithm: Algorithm,
        comm: Comm,
        name: str,
    ) -> None:
        self.name, self.comm = name, comm
        bucket = Bucket([p for _, p in named], [name for name, _ in named])
        self.flat = bucket.flat
        self.bound = algorithm.bind(comm, None, lr=0.0, name=name)
        self.slots = [
            Slot(window, self, name, p, view)
            for (name, p), view in zip(named, bucket.views, strict=True)
        ]
        self.work: Work[Any] | None = None
        self.open()

    def open(self) -> None:
        """Begin a window: nothing has arrived."""
        self.started, self.missing = False, len(self.slots)
        for slot in self.slots:
            slot.arrived = False

    def start(self) -> None:
        """Hand the bucket to the algorithm."""
        self.started = True
        self.work = self.bound.on_grads(self.flat)

    def complete(self, adopt: bool) -> None:
        """Put what no hook has announced into the bucket: local gradients, or zero."""
        for slot in self.slots:
            if not slot.arrived:
                slot.fill(adopt, alone=self.comm.size == 1)
        self.missing = 0

    def wait(self) -> None:
        """Wait for what was started, once."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class Slot:
    """One parameter's place in its bucket, and the hook that runs when its gradient is there."""

    __slots__ = ("arrived", "name", "param", "part", "view", "window")
    relaxmpi = True  # how `attach` recognises its own hooks

    def __init__(
        self, window: Window, part: Part, name: str, param: nn.Parameter, view: torch.Tensor
    ) -> None:
        self.window, self.part, self.name = window, part, name
        self.param, self.view = param, view
        self.arrived = False

    def __call__(self, param: torch.Tensor) -> None:
        """Count the bucket down; autograd has just added to `param.grad`."""
        window, part = self.window, self.part
        if part.started or (self.arrived and param.grad is not self.view):
            window.again(self)
        if window.paused:
            return
        if param.grad is not self.view:
            self.adopt()
        if not self.arrived:
            self.arrived = True
            part.missing -= 1
            if not part.missing:
                window.start_full()
        part.comm.progress()

    def adopt(self) -> None:
        """Move the gradient into the bucket, and let `p.grad` be its view there."""
        grad = self.param.grad
        assert grad is not None  # both callers have looked
        if grad.layout is not torch.strided:
            raise TypeError(f"the gradient of {self.name} is {grad.layout}: only dense ones go")
        self.view.copy_(grad.detach())
        self.param.grad = self.view

    def fill(self, adopt: bool, alone: bool) -> None:
        """Do the same for a parameter without a gradient, which counts as zero."""
        grad = self.param.grad
        if grad is self.view:
            return
        if adopt and grad is not None:
            self.adopt()
        elif not alone:
            self.view.zero_()
            if adopt and self.param.requires_grad:
                self.param.grad = self.view
