"""`attach`: put an algorithm around a PyTorch training loop that stays as it is.

Gradients become views of flat buckets. A hook on each parameter counts its bucket down, and a
full bucket is started while backward still computes; the optimizer's pre-step hook waits for
all. Nothing is subclassed, wrapped or patched, and `detach` removes every hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from relaxmpi.algorithms.attach_bucket import Part, Slot
from relaxmpi.algorithms.attach_model import Watch, attaching, broadcast_state, moved
from relaxmpi.algorithms.base import Algorithm, Bound
from relaxmpi.primitives import MAX, Comm, RelaxError, allreduce, buckets_of

__all__ = ["Sync", "SyncStats", "attach"]

# Buckets under way at once: while the tail of one is gathered the next is reduced.
_STREAMS = 2

_TWICE = (
    "{} got another gradient while its bucket was on its way or already averaged: call "
    "optimizer.step() after each backward, or put all backward passes but the last one in "
    "`with sync.no_sync():`"
)


class SyncStats(NamedTuple):
    """What synchronisation cost this rank, on average over the steps so far.

    Attributes:
        steps: Steps of the optimizer since `attach`.
        payload_bytes: Numbers or encoded numbers sent, a step.
        header_bytes: Agreements sent, a step.
        messages: Messages sent, a step.
        waited: Seconds waited for communication, a step.
        buckets: Number of buckets.
    """

    steps: int
    payload_bytes: float
    header_bytes: float
    messages: float
    waited: float
    buckets: int


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm,
    *,
    comm: Comm,
    bucket_bytes: int = 4 << 20,
    first_bucket_bytes: int = 1 << 20,
) -> Sync:
    """Train `model` on all ranks of `comm` together; collective.

    From now on `optimizer.step()` sees, on every rank, the gradients that the algorithm makes of
    those of all ranks: for `SGD` and `QSGD` their mean. It is the mean of the ranks' gradients:
    with a loss averaged over batches of different sizes it is not the mean over all samples.
    Parameters, buffers and the optimizer's state become those of rank 0 once, now; buffers such
    as the statistics of BatchNorm go their own way from then on.

    A parameter without a gradient on some rank counts as zero there, and with more than one rank
    one without a gradient on any rank gets a zero gradient instead of none: the optimizer's
    weight decay and momentum act on it. Freeze it (`requires_grad = False`) to leave it alone.

    Between `backward()` and `optimizer.step()` gradients may still be on their way. To clip, log
    or unscale them, call `sync.wait()` first:

        loss.backward()
        sync.wait()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    A step may be skipped, on all ranks alike and after a backward on all of them: leave out
    `optimizer.step()` and set the gradients to None before the next backward.

    Args:
        model: A module with dense gradients on the CPU.
        optimizer: It holds the local rule, so `algorithm` must not have one.
        algorithm: For instance `SGD()` or `QSGD(bits=8)`.
        comm: A Comm, or a Hierarchy; a private duplicate is used.
        bucket_bytes: Gradients are exchanged in buckets of about this size.
        first_bucket_bytes: The same for the bucket that is ready first.

    Returns:
        The handle, also a context manager that detaches.

    Raises:
        MismatchError: The ranks have different models, optimizers or algorithms.
        ValueError: The model has no trainable parameter, or the optimizer holds others than it.

    Example:
        >>> import torch, relaxmpi as rx
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with rx.Comm.world() as comm, rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     optimizer.step()
        ...     sync.stats().steps
        1
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "attach(model, optimizer, algorithm, comm=comm) takes a Module and an Optimizer, not "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    attaching(comm, model, optimizer, algorithm, bucket_bytes, first_bucket_bytes)
    own = comm.dup()  # so that hooks and the caller's own calls cannot get into one order
    broadcast_state(own, model, optimizer, bucket_bytes)
    return Sync(model, optimizer, algorithm, own, bucket_bytes, first_bucket_bytes)


class Sync:
    """What `attach` returns: the hooks, the buckets and the state of the algorithm.

    A window lasts from one step of the optimizer to the next. In it every bucket is started
    once, in bucket order, so that all ranks make the same calls whatever arrives first.

    Attributes:
        comm: The private Comm of the first bucket, whose `progress()` moves all of them.
        bound: The algorithm's state, one a bucket.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        algorithm: Algorithm,
        comm: Comm,
        bucket_bytes: int,
        first_bucket_bytes: int,
    ) -> None:
        self.comm, self._optimizer = comm, optimizer
        self._control = Comm.dup(comm)  # for what must not wait behind gradients
        self._watch = Watch(model, optimizer)
        backwards = self._watch.trained[::-1]  # the order in which gradients become ready
        sizes = [p.numel() * p.element_size() for _, p in backwards]
        kinds = [(p.dtype, p.device) for _, p in backwards]
        groups = buckets_of(sizes, bucket_bytes, kinds=kinds, first=first_bucket_bytes)
        self._streams = [comm, *(comm.dup(together=True) for _ in groups[1:_STREAMS])]
        for stream in self._streams:
            stream.rehearsed = True  # `attaching` has agreed on the buckets; their order is fixed
        self._parts = [
            Part(self, [backwards[i] for i in group], algorithm, stream, f"bucket {b}")
            for b, (group, stream) in enumerate(zip(groups, cycle(self._streams)))
        ]
        self._slots = [slot for part in self._parts for slot in part.slots]
        self._started = 0
        self.paused = False
        self._steps, self._begin = 0, moved(self._streams)
        self._windows = 0
        self._ours = {id(slot.param) for slot in self._slots}
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            register_optimizer_step_pre_hook(self._before_any_step),
        ]
        for slot in self._slots:
            add: Any = slot.param.register_post_accumulate_grad_hook  # untyped in torch
            self._hooks.append(add(slot))

    @property
    def bound(self) -> list[Bound]:
        """The algorithm's state, one a bucket."""
        return [part.bound for part in self._parts]

    def start_full(self) -> None:
        """Start the buckets that are complete; one that is ready early waits for its turn."""
        parts = self._parts
        while self._started < len(parts) and not parts[self._started].missing:
            parts[self._started].start()
            self._started += 1

    def wait(self) -> None:
        """Wait until the gradients of all ranks are in `p.grad`; collective.

        `optimizer.step()` does it by itself. Call it before whatever reads or changes gradients
        between backward and step, such as clipping. A second call does nothing.
        """
        self._finish(adopt=True)

    def _finish(self, *, adopt: bool) -> None:
        for part in self._parts[self._started :]:
            part.complete(adopt)
        self.start_full()
        for part in self._parts:
            part.wait()

    def _close_window(self) -> None:
        self._started = 0
        self._windows += 1
        for stream in self._streams:
            stream.mark = f"window {self._windows}"  # ranks in different windows are noticed
        for part in self._parts:
            part.open()

    def again(self, slot: Slot) -> None:
        """Deal with a second gradient of this window."""
        if slot.param.grad is slot.view:
            raise RelaxError(_TWICE.format(slot.name))
        # Set to None since: a step was skipped (on all ranks alike) and a new window begins.
        self._finish(adopt=False)
        self._close_window()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise RelaxError(
                "step(closure) computes gradients after this library has exchanged them: call "
                "the closure yourself, then step()"
            )
        self._watch.check()
        self.wait()
        self._close_window()
        self._steps += 1

    def _before_any_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._optimizer:
            return
        if any(id(p) in self._ours for group in optimizer.param_groups for p in group["params"]):
            raise RelaxError(
                f"a {type(optimizer).__name__} that is not attached steps parameters that are: "
                "their gradients may be on their way; detach, and attach the new optimizer"
            )

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

    def stats(self) -> SyncStats:
        """Return what synchronisation cost since `attach`, on average a step."""
        now, begin, steps = moved(self._streams), self._begin, max(self._steps, 1)
        return SyncStats(
            self._steps,
            (now.payload_bytes - begin.payload_bytes) / steps,
            (now.header_bytes - begin.header_bytes) / steps,
            (now.messages - begin.messages) / steps,
            (now.waited - begin.waited) / steps,
            len(self._parts),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save, besides model and optimizer, to resume exactly."""
        return {part.name: part.bound.state_dict() for part in self._parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank."""
        for part in self._parts:
            part.bound.load_state_dict(state[part.name])

    def detach(self) -> None:
        """Remove every hook and leave model and optimizer as they were; collective.

        Gradients that are on their way are waited for. A second call does nothing.
        """
        if not self._hooks:
            return
        self._remove_hooks()
        if allreduce(self._control, self._started, op=MAX, name="detach"):
            self.wait()
        for slot in self._slots:
            if slot.param.grad is slot.view:
                slot.param.grad = slot.view.clone()
        for stream in (*self._streams, self._control):
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
