"""Buckets of gradients for `attach`, and the hook of each parameter that fills them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import nn

from relaxmpi.algorithms.base import Bound
from relaxmpi.primitives import Bucket, Comm, RelaxError, Work

__all__ = ["InFlight", "OwnRule", "Part", "Slot", "Window"]

_GRAPH = (
    "backward(create_graph=True) is not supported: the graph of {} would be lost on its way to the "
    "other ranks; compute gradients of gradients with torch.autograd.grad(..., create_graph=True)"
)


@runtime_checkable
class OwnRule(Protocol):
    """An optimizer that is the local rule of its algorithm, and keeps the algorithm's state."""

    algorithm: Any

    def taken_over(self, *, attached: bool) -> None:
        """Be told who exchanges gradients from now on."""

    def kind(self, p: Any) -> Hashable:
        """Say what parameters that share a bucket must have in common."""

    def bucket(self, comm: Comm, params: list[Any], flat: Any, name: str) -> Bound:
        """Return the algorithm's state for a bucket."""

    @property
    def overlaps(self) -> bool:
        """Whether buckets may leave before all are full."""

    def exchanged(self, ready: list[tuple[Any, Any, bool]]) -> None:
        """Be told, before each step, of all buckets: state, gradients, whether those changed."""


class Window(Protocol):
    """What the hooks ask of the handle of `attach`: from one optimizer step to the next."""

    paused: bool

    def again(self, slot: Slot) -> None:
        """Deal with a second gradient of this window."""

    def arrived(self, slot: Slot) -> None:
        """Take note of the first gradient of this window, and start what is complete."""


class InFlight(torch.Tensor):
    """What `p.grad` is between backward and step: whoever looks at or changes it gets an error.

    Counting the versions of a tensor would not do: `GradScaler.unscale_`, `p.grad.data` and numpy
    arrays of the same memory change numbers without a trace.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse."""
        raise RelaxError(
            "this gradient is on its way to the other ranks: call sync.wait() before you read, "
            "clip, unscale, change or zero gradients between backward and optimizer.step()"
        )


class Slot:
    """One parameter, its place in its bucket, and the hook that runs when its gradient is there.

    Attributes:
        view: The place in the bucket; before there are buckets, the gradient itself.
        sealed: The same memory for the time that it is on its way.
        arrived: Whether the hook has run in this window.
        used: Whether this rank had a gradient in this window.
    """

    __slots__ = (
        *("address", "arrived", "index", "name", "param", "part", "sealed", "used", "view"),
        "window",
    )
    relaxmpi = True  # how `attach` recognises its own hooks

    def __init__(self, window: Window, index: int, name: str, param: nn.Parameter) -> None:
        self.window, self.index, self.name, self.param = window, index, name, param
        self.part: Part | None = None
        self.view: torch.Tensor | None = None
        self.sealed: torch.Tensor | None = None
        self.address = 0
        self.arrived = self.used = False

    def __call__(self, param: torch.Tensor) -> None:
        """Count the bucket down; autograd has just added to `param.grad`."""
        if torch.is_grad_enabled():
            raise RelaxError(_GRAPH.format(self.name))
        window, part = self.window, self.part
        late = self.arrived if part is None else part.started
        if late or (self.arrived and param.grad is not self.sealed):
            window.again(self)
        if window.paused:
            return
        part = self.part
        if part is None:
            grad = param.grad
            assert grad is not None  # autograd has just made it
            self.show(grad if grad.layout is torch.strided else grad.to_dense())
        elif param.grad is not self.view and param.grad is not self.sealed:
            self.adopt()
        param.grad = self.sealed
        if not self.arrived:
            self.arrived = self.used = True
            if part is not None:
                part.missing -= 1
            window.arrived(self)
        if part is not None:
            part.comm.progress()

    def show(self, view: torch.Tensor) -> None:
        """Set the memory of the gradient."""
        self.view, self.sealed = view, view.as_subclass(InFlight)
        self.address = view.data_ptr()

    def place(self, part: Part, view: torch.Tensor) -> None:
        """Take a place in a bucket, with the gradient that has arrived."""
        before, sealed = self.view, self.sealed
        self.part = part
        self.show(view)
        if self.arrived:
            assert before is not None
            view.copy_(before)
            if self.param.grad is sealed:
                self.param.grad = self.sealed

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

    def objection(self) -> str:
        """Say what is wrong with the gradient; empty if nothing is."""
        if self.arrived and self.param.grad is not self.sealed:
            return (
                f"the gradient of {self.name} was replaced, or set to None, between backward and "
                "step: call sync.wait() first"
            )
        if self.view is not None and self.view.data_ptr() != self.address:
            return (
                f"the gradient of {self.name} was moved, as by model.to(...) after attach: detach "
                "and attach again"
            )
        return ""

    def open(self) -> None:
        """Begin a window."""
        self.arrived = self.used = False


class Part:
    """One bucket of gradients and where it is in this window."""

    def __init__(
        self,
        slots: list[Slot],
        bind: Callable[[Comm, list[Any], Any, str], Bound],
        comm: Comm,
        name: str,
    ) -> None:
        self.name, self.comm, self.slots = name, comm, slots
        bucket = Bucket([slot.param for slot in slots], [slot.name for slot in slots])
        self.flat = bucket.flat
        # Real and imaginary parts are averaged, and encoded, like any numbers.
        self._sent = torch.view_as_real(self.flat).view(-1) if self.flat.is_complex() else self.flat
        self.bound = bind(comm, [slot.param for slot in slots], self.flat, name)
        self.work: Work[Any] | None = None
        self.ended = 0.0
        self.culprit: Slot | None = None
        self._version = 0
        self._before: dict[str, Any] = {}
        for slot, view in zip(slots, bucket.views, strict=True):
            slot.place(self, view)
        self.started = False
        self.missing = sum(not slot.arrived for slot in slots)

    def open(self) -> None:
        """Begin a window: nothing has arrived."""
        self.started, self.missing = False, len(self.slots)
        for slot in self.slots:
            slot.open()

    def start(self, weight: float, guarded: bool) -> None:
        """Hand the bucket to the algorithm."""
        self.started = True
        if guarded:
            self.culprit = self._not_finite()
            if not hasattr(self.bound, "leave_out"):
                self._before = self.bound.state_dict()
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
        self._version = self.flat._version

    def undo(self) -> None:
        """Make the algorithm forget this window, such as what a codec owes since."""
        if hasattr(self.bound, "leave_out"):
            self.bound.leave_out()
        else:
            self.bound.load_state_dict(self._before)

    @property
    def touched(self) -> bool:
        """Whether somebody has changed the gradients since they arrived, as far as torch knows."""
        return bool(self.flat._version != self._version)

    def objection(self) -> str:
        """Say what is wrong with the gradients that are on their way; empty if nothing is."""
        found = next(filter(None, (slot.objection() for slot in self.slots)), "")
        if not found and self.started and self.flat._version != self._version:
            found = (
                f"gradients of {self.name} ({self.slots[0].name} and others) were changed between "
                "backward and step: call sync.wait() first"
            )
        return found

    def _not_finite(self) -> Slot | None:
        """Return the first slot with a NaN or an infinity."""
        if bool(torch.isfinite(self.flat.sum())):
            return None
        for slot in self.slots:
            assert slot.view is not None
            if not bool(torch.isfinite(slot.view).all()):
                return slot
        return None
