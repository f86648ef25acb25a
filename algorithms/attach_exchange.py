"""The windows of `attach`: what the buckets are, when they leave, what all ranks know then."""

from __future__ import annotations

from itertools import cycle
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn

from relaxmpi.algorithms.attach_bucket import OwnRule, Part, Slot
from relaxmpi.algorithms.attach_engine import Engine
from relaxmpi.algorithms.attach_flags import Facts, Flags, NonFinite
from relaxmpi.algorithms.attach_model import broadcast_bytes, settings
from relaxmpi.algorithms.attach_stats import Meter
from relaxmpi.algorithms.base import Algorithm, Bound
from relaxmpi.primitives import (
    MAX,
    Comm,
    NonFiniteError,
    RelaxError,
    allreduce,
    barrier,
    broadcast,
    buckets_of,
)

__all__ = ["Exchange"]

# Buckets under way at once: while the tail of one is gathered the next is reduced.
_STREAMS = 2

_TWICE = (
    "{} got another gradient while its bucket was on its way or already averaged: call "
    "optimizer.step() after each backward, or put all backward passes but the last one in "
    "`with sync.no_sync():`; to skip a step, set the gradients to None before the next backward"
)


class Exchange(Engine):
    """Exchanges gradients in windows, each from one step of the optimizer to the next.

    In a window every bucket is started once, in bucket order, so that all ranks make the same
    calls whatever arrives first. It ends with a message that tells all ranks what holds on any.

    Attributes:
        others: What moves no gradients.
        slots: One a parameter, in the reverse order of the model.
        parts: The buckets; none before the first window ends.
        order: The slots in the order of the buckets; first, that of arrival.
        facts: What holds on any rank, once everything is exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        comm: Comm,
        limits: tuple[int, int],
        overlap: bool,
        nonfinite: NonFinite,
    ) -> None:
        super().__init__(model, optimizer, comm)
        self.nonfinite = nonfinite
        self._optimizer, self._algorithm = optimizer, algorithm
        self._own_rule = optimizer if isinstance(optimizer, OwnRule) else None
        self._limits = limits
        self._overlap = overlap and (self._own_rule is None or self._own_rule.overlaps)
        # Backwards: what is not used in the first step probably becomes ready in this order.
        named = self.watch.trained[::-1]
        self.slots = [Slot(self, i, name, p) for i, (name, p) in enumerate(named)]
        self._streams, self.parts = [comm], list[Part]()
        beside = Comm.dup(comm, together=True)
        self._flags = Flags(beside, len(self.slots))
        self.others = [beside, self.control]
        for stream in (comm, beside):
            stream.rehearsed = True  # the calls to come and their order have been agreed on
        self.order: list[int] = []
        self._started = self._windows = 0
        self.facts: Facts | None = None
        self._error: RelaxError | None = None
        # Numbers leave as multiples of the last window's mean weight: half precision is narrow.
        self._unit = 1.0
        self._weighed: float | None = None
        self.meter = Meter(self._streams, self.others)

    @property
    def pending(self) -> bool:
        """Whether this window has gradients that no step has used."""
        return self._started > 0 or any(slot.arrived for slot in self.slots)

    @property
    def bound(self) -> list[Bound]:
        """None before the first step, nor on one rank."""
        return [part.bound for part in self.parts]

    def hooks(self) -> list[Any]:
        """A hook on each parameter, unless there is nobody to send its gradient to."""
        if self.comm.size == 1:
            return []
        # The method is untyped in torch.
        adders: list[Any] = [slot.param.register_post_accumulate_grad_hook for slot in self.slots]
        return [add(slot) for add, slot in zip(adders, self.slots, strict=True)]

    def arrived(self, slot: Slot) -> None:
        """Note the order in the first window; later start the buckets that are complete."""
        if not self.parts:
            self.order.append(slot.index)
        elif self._overlap:
            self._start_full()

    def _start_full(self) -> None:
        """Start the complete buckets; one that is ready early waits for its turn."""
        parts = self.parts
        while self._started < len(parts) and not parts[self._started].missing:
            if not self._started:
                self.meter.begin(self.comm.now())
                self._weighed = self.weight
            share = 1.0 if self._weighed is None else self._weighed / self._unit
            parts[self._started].start(share, self.nonfinite is not NonFinite.PASS)
            self._started += 1

    def lay_out(self, order: list[int]) -> None:
        """Make the buckets; collective, with the same order on all ranks."""
        slots = [self.slots[i] for i in order]
        sizes = [s.param.numel() * s.param.element_size() for s in slots]
        kind = self._own_rule.kind if self._own_rule else lambda _: None
        kinds = [(s.param.dtype, s.param.device, kind(s.param)) for s in slots]
        limit, first = self._limits
        groups = buckets_of(sizes, limit, kinds=kinds, first=first)
        for _ in groups[len(self._streams) : _STREAMS]:
            stream = self.comm.dup(together=True)
            stream.rehearsed, stream.mark = True, self.comm.mark
            self._streams.append(stream)
        self.parts = [
            Part([slots[i] for i in group], self._bind, stream, f"bucket {b}")
            for b, (group, stream) in enumerate(zip(groups, cycle(self._streams)))
        ]
        self.order = order

    def _bind(self, comm: Comm, params: list[Any], flat: Any, name: str) -> Bound:
        if self._own_rule is not None:
            return self._own_rule.bucket(comm, params, flat, name)
        return self._algorithm.bind(comm, None, lr=0.0, name=name)

    def _first_order(self) -> list[int]:
        """Return the order in which gradients became ready on rank 0, the unused ones last."""
        seen = set(self.order)
        order = self.order + [i for i in range(len(self.slots)) if i not in seen]
        agreed = broadcast(self.control, np.array(order, np.int64), name="order of gradients")
        return [int(i) for i in agreed]

    def finish(self, *, adopt: bool) -> Facts:
        """Start what is left of this window and wait for it, once.

        Args:
            adopt: Gradients that no hook has announced count, and the exchanged ones go to
                `p.grad`; otherwise this rank discards the result.
        """
        if self.facts is not None:
            return self.facts
        objection = self.objection() if adopt else ""
        if not self.parts:
            self.lay_out(self._first_order())
        for part in self.parts[self._started :]:
            part.complete(adopt)
        self._start_full()
        culprit = next((p.culprit for p in self.parts if p.culprit is not None), None)
        mine = (self.meter.steps, crc32(settings(self._optimizer).tobytes()))
        said = mine if self.training else None
        self._flags.start(self.slots, culprit, bool(objection), self._weighed, said)
        begin = self.comm.now()
        for part in self.parts:
            part.wait()
        facts = self.facts = self._flags.wait()
        self.meter.end(begin, max(part.ended for part in self.parts))
        self._error = self._judge(facts, objection)
        self._use(facts, adopt)
        return facts

    def objection(self) -> str:
        """Say what the user did to gradients or parameters that makes a step wrong."""
        if self._started and self.weight != self._weighed:
            return (
                f"sync.weight changed from {self._weighed} to {self.weight} between backward and "
                "step: set it before backward"
            )
        if self.parts:
            found = (part.objection() for part in self.parts)
        else:
            found = (slot.objection() for slot in self.slots)
        return super().objection() or next(filter(None, found), "")

    def _judge(self, facts: Facts, objection: str) -> RelaxError | None:
        """Return the error that all ranks raise, if any."""
        step = self.meter.steps
        if facts.objector is not None:
            told = broadcast_bytes(self.control, objection.encode(), facts.objector).decode()
            return RelaxError(f"on rank {facts.objector}, in step {step}: {told}")
        if facts.training and facts.steps[0] < facts.steps[1]:
            return RelaxError(
                "the ranks have taken {} to {} steps of the optimizer: a step was left out on some "
                "of them only".format(*facts.steps)
            )
        if not facts.alike:
            return RelaxError(
                f"the settings of the optimizers, such as the learning rate, differ between ranks "
                f"in step {step}: they must change everywhere alike (see join for schedulers)"
            )
        if facts.culprit is not None and self.nonfinite is NonFinite.RAISE:
            rank, index = facts.culprit
            return NonFiniteError(
                f"the gradient of {self.slots[index].name} is not finite on rank {rank} in step "
                f"{step}; NonFinite.SKIP would leave such steps out"
            )
        return None

    def _use(self, facts: Facts, adopt: bool) -> None:
        """Let the user see what would be seen in one process."""
        if self._weighed is not None and facts.weight:
            for part in self.parts:
                part.flat.mul_(self.comm.size * self._unit / facts.weight)
            self._unit = facts.weight / self.comm.size
        if facts.culprit is not None:
            for part in self.parts:
                part.undo()
            culprit = self.slots[facts.culprit[1]].view
            assert culprit is not None  # there are buckets
            culprit.fill_(torch.nan)  # codecs need not pass it on, and a GradScaler looks for it
            self.meter.skipped += self.nonfinite is NonFinite.SKIP
        for slot in self.slots:
            seen = slot.param.grad
            if seen is slot.sealed or (adopt and not slot.arrived and facts.used[slot.index]):
                slot.param.grad = slot.view

    def wait(self) -> None:
        """Exchange this window's gradients."""
        if self.comm.size > 1:
            self.finish(adopt=True)
            self.raise_error()

    def raise_error(self) -> None:
        """Raise what `finish` found to be wrong, again until the window is closed."""
        if self._error is not None:
            raise self._error

    def before_step(self) -> None:
        """Let the optimizer see nothing of a step that is left out, and close the window."""
        if self.comm.size == 1:
            if objection := self.objection():
                raise RelaxError(objection)
            return
        facts = self.finish(adopt=True)
        self.raise_error()
        if facts.culprit is not None and self.nonfinite is NonFinite.SKIP:
            for slot in self.slots:
                slot.param.grad = None
        if self._own_rule is not None:
            self._own_rule.exchanged(self._ready(facts))
        self.close_window()

    def _ready(self, facts: Facts) -> list[tuple[Any, Any, bool]]:
        """What an optimizer that is the algorithm's own rule must know in its step."""
        ready = list[tuple[Any, Any, bool]]()
        for part in self.parts:
            bound: Any = part.bound
            for slot, segment in zip(part.slots, bound.segments, strict=True):
                segment.used = bool(facts.used[slot.index])
            ready.append((bound, part.flat, facts.culprit is None and part.touched))
        return ready

    def after_step(self) -> None:
        """Nothing: parameters are equal."""

    def close_window(self) -> None:
        """End a window in which everything was exchanged."""
        self._started, self.facts, self._error = 0, None, None
        self._weighed = None
        self._windows += 1
        for stream in (*self._streams, self.others[0]):
            stream.mark = f"window {self._windows}"  # ranks in different windows are noticed
        for part in self.parts:
            part.open()

    def again(self, slot: Slot) -> None:
        """Deal with a second gradient of this window."""
        if slot.param.grad is slot.view or slot.param.grad is slot.sealed:
            raise RelaxError(_TWICE.format(slot.name))
        # Set to None since: a step was skipped (on all ranks alike) and a new window begins.
        if self.facts is None:
            self.finish(adopt=False)
            self.raise_error()
        self.close_window()

    def quiesce(self) -> None:
        """Nothing is on its way between two steps."""
        used = self.facts is not None and all(slot.param.grad is None for slot in self.slots)
        self.refuse(self.pending and not used, "save()")

    def state_dict(self) -> dict[str, Any]:
        """The layout, and the state of each bucket."""
        order = [self.slots[i].name for i in self.order] if self.parts else None
        buckets = {part.name: part.bound.state_dict() for part in self.parts}
        return {"order": order, "buckets": buckets, "unit": self._unit}

    def load_state_dict(self, state: dict[str, Any], *, resized: bool) -> None:
        """Lay the buckets out as they were, and fill them."""
        index = {slot.name: slot.index for slot in self.slots}
        order, buckets = state["order"], state["buckets"]
        barrier(self.control, name=f"restored order {order}")
        on_their_way = bool(self.parts) and self.pending and self.facts is None
        self.refuse(on_their_way, "load_state_dict()")
        if self.comm.size == 1:
            return
        if order is None:  # saved before the first step
            if self.parts:
                self.lay_out(self.order)
            return
        if sorted(order) != sorted(index):
            raise ValueError("this state is of a model with other trained parameters")
        self.lay_out([index[name] for name in order])
        if [part.name for part in self.parts] != list(buckets):
            raise ValueError("this state was saved with other bucket sizes: attach with those")
        self._unit = state["unit"]
        for part in self.parts:
            part.bound.load(buckets[part.name], resized=resized)

    def abandon(self) -> None:
        """Forget gradients that are on their way."""
        for slot in self.slots:
            if slot.sealed is not None and slot.param.grad is slot.sealed:
                slot.param.grad = None

    def end(self) -> None:
        """Wait for gradients that are on their way, and move all out of the buckets."""
        if allreduce(self.control, int(self.pending), op=MAX, name="detach"):
            self.finish(adopt=True)
        self.give_back()

    def give_back(self) -> None:
        """Move gradients out of the buckets, and close all streams."""
        for slot in self.slots:
            if slot.view is not None and slot.param.grad is slot.view:
                slot.param.grad = slot.view.clone()
        for stream in (*self._streams, *self.others):
            stream.close()
