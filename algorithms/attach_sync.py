"""The handle of `attach`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from relaxmpi.algorithms.attach_bucket import OwnRule
from relaxmpi.algorithms.attach_exchange import Exchange
from relaxmpi.algorithms.attach_flags import NonFinite
from relaxmpi.algorithms.attach_join import Stateful, joining
from relaxmpi.algorithms.attach_model import average_buffers, check_equal
from relaxmpi.algorithms.attach_stats import SyncStats
from relaxmpi.algorithms.base import Algorithm, Bound
from relaxmpi.primitives import MAX, Comm, RelaxError, allreduce, barrier

__all__ = ["Sync"]


class Sync:
    """What `attach` returns: the hooks, and the exchange of gradients behind them.

    Attributes:
        comm: A private Comm, whose `progress()` moves all buckets.
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
        self.comm, self._model, self._optimizer = comm, model, optimizer
        self._exchange = Exchange(model, optimizer, algorithm, comm, limits, overlap, nonfinite)
        self._joined = False
        self._own_rule = optimizer if isinstance(optimizer, OwnRule) else None
        if self._own_rule is not None:
            self._own_rule.taken_over(attached=True)
        self._ours = {id(slot.param) for slot in self._exchange.slots}
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            register_optimizer_step_pre_hook(self._before_any_step),
        ]
        if comm.size > 1:
            for slot in self._exchange.slots:
                add: Any = slot.param.register_post_accumulate_grad_hook  # untyped in torch
                self._hooks.append(add(slot))

    @property
    def bound(self) -> list[Bound]:
        """The algorithm's state, one a bucket; none before the first step, nor on one rank."""
        return [part.bound for part in self._exchange.parts]

    @property
    def weight(self) -> float | None:
        """How much this rank's gradient counts, such as its samples; to be set before backward.

        All ranks have one or none has: None outside `join` unless set, 1 at its start.
        """
        return self._exchange.weight

    @weight.setter
    def weight(self, value: float | None) -> None:
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"a weight must be finite and not negative, not {value}")
        if value is not None and self._own_rule is not None:
            raise RelaxError(
                f"{type(self._optimizer).__name__} takes no weights, and so no join(): they scale "
                "gradients, and momenta travel; give all ranks equally many batches"
            )
        self._exchange.weight = None if value is None else float(value)

    def wait(self) -> None:
        """Wait until the gradients of all ranks are in `p.grad`; collective.

        `optimizer.step()` does it by itself. Call it before whatever reads or changes gradients
        between backward and step, such as clipping. A second call does nothing.

        Raises:
            NonFiniteError: With `NonFinite.RAISE`, on every rank.
            RelaxError: On every rank: on one, gradients were changed while they were on their
                way, or parameters were replaced; or the ranks differ in their numbers of steps or
                in the settings of the optimizer.
        """
        if self.comm.size > 1:
            self._exchange.finish(adopt=True)
            self._exchange.raise_error()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        exchange = self._exchange
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise RelaxError(
                "step(closure) computes gradients after this library has exchanged them: call "
                "the closure yourself, then step()"
            )
        if not exchange.training:
            return
        if self.comm.size > 1:
            exchange.before_step()
        elif objection := exchange.objection():
            raise RelaxError(objection)
        exchange.meter.steps += 1

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
        exchange = self._exchange
        before, exchange.paused = exchange.paused, True
        try:
            yield
        finally:
            exchange.paused = before

    @contextmanager
    def join(self, *stateful: Stateful) -> Iterator[None]:
        """Context for loops over uneven numbers of batches, or of samples; collective.

        A rank that leaves it early stands in with nothing until the last one has left: the mean
        is over the ranks that still train. Weights count samples instead of ranks:

            with sync.join():
                for x, y in loader:
                    sync.weight = len(x)
                    loss(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        At the end all ranks get parameters, optimizer state and settings (the learning rate) of
        the rank that took the most steps. Buffers stay local. Inside, other calls that all ranks
        must make have no meaning.

        Args:
            stateful: What else all ranks get from that rank by `state_dict`: a learning-rate
                scheduler that is stepped inside.
        """
        if self._joined or self.weight is not None:
            raise RelaxError("join() inside join(), or with sync.weight set already")
        self.weight, self._joined = 1.0, True
        try:
            with joining(self._exchange, self._model, self._optimizer, stateful):
                yield
        finally:
            self._joined, self.weight = False, None

    def background(self) -> AbstractContextManager[Any]:
        """Return a thread that moves gradients while backward computes; a context manager."""
        return self.comm.background()

    def check(self) -> None:
        """Compare the parameters of all ranks bit by bit; collective.

        Raises:
            RelaxError: On every rank, naming the first parameter that differs and where.
        """
        self._outside("check")
        check_equal(self._exchange.control, self._model)

    def average_buffers(self) -> None:
        """Make floating-point buffers, such as BatchNorm's, the mean over the ranks; collective.

        Integer buffers become the largest of any rank. Call it before evaluating or saving.
        """
        self._outside("average_buffers")
        average_buffers(self._exchange.control, self._model)

    def _outside(self, what: str) -> None:
        if self._joined:
            raise RelaxError(f"{what}() inside join(): not all ranks may be there to take part")

    def stats(self) -> SyncStats:
        """Return what synchronisation cost since `attach`, on average a step."""
        return self._exchange.meter.stats(len(self._exchange.parts))

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save, besides model and optimizer, to resume exactly."""
        exchange = self._exchange
        order = [exchange.slots[i].name for i in exchange.order] if exchange.parts else None
        return {"order": order, "buckets": {p.name: p.bound.state_dict() for p in exchange.parts}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank; collective.

        Raises:
            ValueError: It is of another model, or of other bucket sizes.
            MismatchError: The ranks restore different layouts.
            RelaxError: Gradients are on their way: restore after `wait` or after the step.
        """
        exchange = self._exchange
        index = {slot.name: slot.index for slot in exchange.slots}
        order, buckets = state["order"], state["buckets"]
        on_their_way = bool(exchange.parts) and exchange.pending and exchange.facts is None
        barrier(exchange.control, name=f"restored order {order}, in flight: {on_their_way}")
        if on_their_way:
            raise RelaxError(
                "load_state_dict() between backward and step would lose the gradients on their "
                "way: call sync.wait() first, or restore after the step"
            )
        if self.comm.size == 1 or order is None:
            return
        if sorted(order) != sorted(index):
            raise ValueError("this state is of a model with other trained parameters")
        exchange.lay_out([index[name] for name in order])
        if [part.name for part in exchange.parts] != list(buckets):
            raise ValueError("this state was saved with other bucket sizes: attach with those")
        for part in exchange.parts:
            part.bound.load_state_dict(buckets[part.name])

    def detach(self) -> None:
        """Remove every hook and leave model and optimizer as they were; collective.

        Gradients that are on their way are waited for. A second call does nothing.
        """
        if not self._hooks:
            return
        exchange = self._exchange
        self._remove_hooks()
        if allreduce(exchange.control, int(exchange.pending), op=MAX, name="detach"):
            exchange.finish(adopt=True)
        exchange.give_back()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._own_rule is not None:
            self._own_rule.taken_over(attached=False)

    def __enter__(self) -> Sync:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        if kind is None:
            self.detach()
        else:
            self._remove_hooks()
            self._exchange.unseal()
