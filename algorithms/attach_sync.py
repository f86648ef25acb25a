"""The handle of `attach`: hooks, buckets and windows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from relaxmpi.algorithms.attach_bucket import Part, Slot
from relaxmpi.algorithms.attach_flags import Facts, Flags, NonFinite
from relaxmpi.algorithms.attach_join import joining
from relaxmpi.algorithms.attach_model import Watch, average_buffers, check_equal
from relaxmpi.algorithms.attach_stats import Meter, SyncStats
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

__all__ = ["Sync"]

# Buckets under way at once: while the tail of one is gathered the next is reduced.
_STREAMS = 2

_TWICE = (
    "{} got another gradient while its bucket was on its way or already averaged: call "
    "optimizer.step() after each backward, or put all backward passes but the last one in "
    "`with sync.no_sync():`"
)


class Sync:
    """What `attach` returns: the hooks, the buckets and the state of the algorithm.

    A window lasts from one step of the optimizer to the next. In it every bucket is started
    once, in bucket order, so that all ranks make the same calls whatever arrives first.

    Attributes:
        comm: The private Comm of the first bucket, whose `progress()` moves all of them.
        weight: Inside `join`, how much this rank's gradient counts, such as its samples.
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
        self.comm, self.model, self.optimizer = comm, model, optimizer
        self._algorithm, self._limits, self._overlap = algorithm, limits, overlap
        self._nonfinite = nonfinite
        self.control = Comm.dup(comm)  # for what must not wait behind gradients
        self._watch = Watch(model, optimizer)
        # Backwards: what is not used in the first step probably becomes ready in this order.
        named = self._watch.trained[::-1]
        self._slots = [Slot(self, i, name, p) for i, (name, p) in enumerate(named)]
        self._streams, self._parts = [comm], list[Part]()
        beside = Comm.dup(comm, together=True)
        self._flags = Flags(beside, len(self._slots))
        self._others = [beside, self.control]
        for stream in (comm, beside):
            stream.rehearsed = True  # the calls to come and their order have been agreed on
        self._order: list[int] = []
        self._started = self._windows = 0
        self._facts: Facts | None = None
        self.paused, self.training = False, True
        self.weight: float | None = None
        self._meter = Meter(self._streams, self._others)
        self._ours = {id(slot.param) for slot in self._slots}
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            register_optimizer_step_pre_hook(self._before_any_step),
        ]
        if comm.size > 1:
            for slot in self._slots:
                add: Any = slot.param.register_post_accumulate_grad_hook  # untyped in torch
                self._hooks.append(add(slot))

    @property
    def bound(self) -> list[Bound]:
        """The algorithm's state, one a bucket; none before the first step, nor on one rank."""
        return [part.bound for part in self._parts]

    def arrived(self, slot: Slot) -> None:
        """Note the order in the first window; later start the buckets that are complete."""
        if not self._parts:
            self._order.append(slot.index)
        elif self._overlap:
            self._start_full()

    def _start_full(self) -> None:
        """Start the complete buckets; one that is ready early waits for its turn."""
        parts = self._parts
        while self._started < len(parts) and not parts[self._started].missing:
            if not self._started:
                self._meter.begin(self.comm.now())
            weight = 1.0 if self.weight is None else self.weight
            parts[self._started].start(weight, self._nonfinite is not NonFinite.PASS)
            self._started += 1

    def _lay_out(self, order: list[int]) -> None:
        """Make the buckets; collective, with the same order on all ranks."""
        slots = [self._slots[i] for i in order]
        sizes = [s.param.numel() * s.param.element_size() for s in slots]
        kinds = [(s.param.dtype, s.param.device) for s in slots]
        limit, first = self._limits
        groups = buckets_of(sizes, limit, kinds=kinds, first=first)
        for _ in groups[len(self._streams) : _STREAMS]:
            stream = self.comm.dup(together=True)
            stream.rehearsed, stream.mark = True, self.comm.mark
            self._streams.append(stream)
        self._parts = [
            Part([slots[i] for i in group], self._algorithm, stream, f"bucket {b}")
            for b, (group, stream) in enumerate(zip(groups, cycle(self._streams)))
        ]
        self._order = order

    def _first_order(self) -> list[int]:
        """Return the order in which gradients became ready on rank 0, the unused ones last."""
        seen = set(self._order)
        order = self._order + [i for i in range(len(self._slots)) if i not in seen]
        agreed = broadcast(self.control, np.array(order, np.int64), name="order of gradients")
        return [int(i) for i in agreed]

    def wait(self) -> None:
        """Wait until the gradients of all ranks are in `p.grad`; collective.

        `optimizer.step()` does it by itself. Call it before whatever reads or changes gradients
        between backward and step, such as clipping. A second call does nothing.

        Raises:
            NonFiniteError: With `NonFinite.RAISE`, on every rank.
            RelaxError: The gradients were changed while they were on their way.
        """
        self.finish(adopt=True)

    def finish(self, *, adopt: bool) -> Facts | None:
        """Start what is left of this window, wait for it and say what holds on any rank.

        None on one rank, where nothing is exchanged.
        """
        if self.comm.size == 1 or self._facts is not None:
            return self._facts
        if not self._parts:
            self._lay_out(self._first_order())
        for part in self._parts[self._started :]:
            part.complete(adopt)
        self._start_full()
        culprit = next((p.culprit for p in self._parts if p.culprit is not None), None)
        self._flags.start(self._slots, culprit, self.training, self.weight)
        begin = self.comm.now()
        for part in self._parts:
            part.wait()
        facts = self._facts = self._flags.wait()
        self._meter.end(begin, max(part.ended for part in self._parts))
        if adopt:
            self._use(facts)
        return facts

    def _use(self, facts: Facts) -> None:
        """Let the optimizer see what it would see in one process."""
        if self.weight is not None and facts.weight:
            for part in self._parts:
                part.flat.mul_(self.comm.size / facts.weight)
        if facts.culprit is not None and self._nonfinite is NonFinite.RAISE:
            rank, index = facts.culprit
            raise NonFiniteError(
                f"the gradient of {self._slots[index].name} is not finite on rank {rank} in step "
                f"{self._meter.steps}; NonFinite.SKIP would leave such steps out"
            )
        skip = facts.culprit is not None and self._nonfinite is NonFinite.SKIP
        self._meter.skipped += skip
        for slot in self._slots:
            if skip or not facts.used[slot.index]:
                slot.param.grad = None

    def close_window(self) -> None:
        """End a window in which everything was exchanged."""
        self._started, self._facts = 0, None
        self._windows += 1
        for stream in (*self._streams, self._others[0]):
            stream.mark = f"window {self._windows}"  # ranks in different windows are noticed
        for part in self._parts:
            part.open()

    def again(self, slot: Slot) -> None:
        """Deal with a second gradient of this window."""
        if slot.param.grad is slot.view:
            raise RelaxError(_TWICE.format(slot.name))
        # Set to None since: a step was skipped (on all ranks alike) and a new window begins.
        if self._parts:
            self.finish(adopt=False)
            self.close_window()
        else:
            self._order.clear()
            for each in self._slots:
                each.arrived = each.used = False

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise RelaxError(
                "step(closure) computes gradients after this library has exchanged them: call "
                "the closure yourself, then step()"
            )
        if not self.training:
            return
        self._watch.check()
        self.wait()
        self.close_window()
        self._meter.steps += 1

    def _before_any_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self.optimizer:
            return
        if any(id(p) in self._ours for group in optimizer.param_groups for p in group["params"]):
            raise RelaxError(
                f"a {type(optimizer).__name__} that is not attached steps parameters that are: "
                "their gradients may be on their way; detach, and attach the new optimizer"
            )

    @property
    def steps(self) -> int:
        """Steps of the optimizer since `attach`."""
        return self._meter.steps

    @property
    def pending(self) -> bool:
        """Whether this window has gradients that no step has used."""
        return self._started > 0 or any(slot.arrived for slot in self._slots)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up locally; the first backward outside exchanges their sums.

        Without one, `optimizer.step()` does.
        """
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def join(self) -> AbstractContextManager[None]:
        """Return a context for loops over uneven numbers of batches, or of samples; collective.

        A rank that leaves it early stands in with nothing until the last one has left: the mean
        is over the ranks that still train. Weights count samples instead of ranks:

            with sync.join():
                for x, y in loader:
                    sync.weight = len(x)
                    loss(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        At the end all ranks get parameters, optimizer state and learning rates of the rank that
        took the most steps. Buffers stay local.
        """
        return joining(self)

    def background(self) -> AbstractContextManager[Any]:
        """Return a thread that moves gradients while backward computes; a context manager."""
        return self.comm.background()

    def check(self) -> None:
        """Compare the parameters of all ranks bit by bit; collective.

        Raises:
            RelaxError: On every rank, naming the first parameter that differs and where.
        """
        check_equal(self.control, self.model)

    def average_buffers(self) -> None:
        """Make floating-point buffers, such as BatchNorm's, the mean over the ranks; collective.

        Integer buffers become the largest of any rank. Call it before evaluating or saving.
        """
        average_buffers(self.control, self.model)

    def stats(self) -> SyncStats:
        """Return what synchronisation cost since `attach`, on average a step."""
        return self._meter.stats(len(self._parts))

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save, besides model and optimizer, to resume exactly."""
        order = [self._slots[i].name for i in self._order] if self._parts else None
        return {"order": order, "buckets": {p.name: p.bound.state_dict() for p in self._parts}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank; collective.

        Raises:
            ValueError: It is of another model, or of other bucket sizes.
            MismatchError: The ranks restore different layouts.
        """
        index = {slot.name: slot.index for slot in self._slots}
        order, buckets = state["order"], state["buckets"]
        barrier(self.control, name=f"restored order {order}")
        if self.comm.size == 1 or order is None:
            return
        if sorted(order) != sorted(index):
            raise ValueError("this state is of a model with other trained parameters")
        self._lay_out([index[name] for name in order])
        if [part.name for part in self._parts] != list(buckets):
            raise ValueError("this state was saved with other bucket sizes: attach with those")
        for part in self._parts:
            part.bound.load_state_dict(buckets[part.name])

    def detach(self) -> None:
        """Remove every hook and leave model and optimizer as they were; collective.

        Gradients that are on their way are waited for. A second call does nothing.
        """
        if not self._hooks:
            return
        self._remove_hooks()
        if allreduce(self.control, int(self.pending), op=MAX, name="detach"):
            self.wait()
        for slot in self._slots:
            if slot.part is not None and slot.param.grad is slot.view:
                assert slot.view is not None
                slot.param.grad = slot.view.clone()
        for stream in (*self._streams, *self._others):
            stream.close()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Sync:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        if kind is None:
            self.detach()
        else:
            self._remove_hooks()
