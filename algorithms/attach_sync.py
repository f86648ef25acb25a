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
from relaxmpi.algorithms.attach_engine import Engine
from relaxmpi.algorithms.attach_exchange import Exchange
from relaxmpi.algorithms.attach_join import Stateful, joining
from relaxmpi.algorithms.attach_model import average_buffers, check_equal
from relaxmpi.algorithms.attach_stats import SyncStats
from relaxmpi.algorithms.base import Bound
from relaxmpi.primitives import RelaxError

__all__ = ["Sync"]


class Sync:
    """What `attach` returns: the hooks, and the exchange behind them.

    Where parameters are mixed instead of gradients (`Algorithm.mixes`), gradients stay local:
    `wait` and `no_sync` have nothing to do there, so that one loop serves all algorithms, and
    `weight` and `join` are refused.

    Attributes:
        comm: A private Comm, whose `progress()` moves all buckets.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self.comm, self._model, self._optimizer = engine.comm, model, optimizer
        self._engine = engine
        self._joined = False
        self._own_rule = optimizer if isinstance(optimizer, OwnRule) else None
        if self._own_rule is not None:
            self._own_rule.taken_over(attached=True)
        self._ours = {id(p) for _, p in engine.watch.trained}
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            register_optimizer_step_pre_hook(self._before_any_step),
            *engine.hooks(),
        ]

    @property
    def bound(self) -> list[Bound]:
        """The algorithm's state, one a bucket.

        There is none on one rank, unless the algorithm does something there, nor, where gradients
        are exchanged, before the first step.
        """
        return self._engine.bound

    @property
    def weight(self) -> float | None:
        """How much this rank's gradient counts, such as its samples; to be set before backward.

        All ranks have one or none has: None outside `join` unless set, 1 at its start.
        """
        return self._engine.weight

    @weight.setter
    def weight(self, value: float | None) -> None:
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"a weight must be finite and not negative, not {value}")
        if value is not None and self._own_rule is not None:
            raise RelaxError(
                f"{type(self._optimizer).__name__} takes no weights, and so no join(): they scale "
                "gradients, and momenta travel; give all ranks equally many batches"
            )
        self._exchange("weight").weight = None if value is None else float(value)

    def _exchange(self, what: str) -> Exchange:
        if not isinstance(self._engine, Exchange):
            raise RelaxError(
                f"{what} is for algorithms that exchange gradients: this one mixes parameters, "
                "whatever the batches they come from"
            )
        return self._engine

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
        self._engine.wait()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise RelaxError(
                "step(closure) computes gradients after this library has exchanged them: call "
                "the closure yourself, then step()"
            )
        if self._engine.training:
            self._engine.before_step()
            self._engine.meter.steps += 1

    def _after_step(self, *_: Any) -> None:
        if self._engine.training:
            self._engine.after_step()

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
        engine = self._engine
        before, engine.paused = engine.paused, True
        try:
            yield
        finally:
            engine.paused = before

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
        exchange = self._exchange("join()")
        self.weight, self._joined = 1.0, True
        try:
            with joining(exchange, self._model, self._optimizer, stateful):
                yield
        finally:
            self._joined, self.weight = False, None

    def background(self) -> AbstractContextManager[Any]:
        """Return a thread that moves gradients while backward computes; a context manager."""
        return self.comm.background()

    def check(self) -> None:
        """Compare the parameters of all ranks bit by bit; collective.

        Raises:
            RelaxError: On every rank, naming the first parameter that differs and where. Where
                parameters are mixed they do, but inside `averaged` all have the mean.
        """
        self._outside("check")
        self._engine.meet("check()")
        check_equal(self._engine.control, self._model, self._engine.apart)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the parameters are the mean model of all ranks; collective.

        For evaluating and saving. Afterwards they are this rank's own again. Where gradients are
        exchanged all ranks have one model anyway. Buffers stay local: see `average_buffers`.

        Raises:
            MismatchError: The ranks have taken different numbers of steps, and the algorithm is
                one in which that must not happen.
        """
        with self._engine.averaged():
            yield

    @property
    def keeps_state(self) -> bool:
        """Whether model and optimizer cannot be restored without it, as push-sum without weights.

        `save` refuses the optimizer alone then.
        """
        return self._engine.keeps_state

    def spread(self) -> float:
        """Return how far the ranks are apart; collective, and the same on all.

        The consensus distance (mean_i ||x_i - m||^2)^(1/2), with m the mean model, divided by
        ||m||. Zero where gradients are exchanged.
        """
        return self._engine.spread()

    def average_buffers(self) -> None:
        """Make floating-point buffers, such as BatchNorm's, the mean over the ranks; collective.

        Integer buffers become the largest of any rank. Call it before evaluating or saving.
        """
        self._outside("average_buffers")
        self._engine.meet("average_buffers()")
        average_buffers(self._engine.control, self._model)

    def _outside(self, what: str) -> None:
        if self._joined:
            raise RelaxError(f"{what}() inside join(): not all ranks may be there to take part")

    def stats(self) -> SyncStats:
        """Return what synchronisation cost since `attach`, on average a step."""
        return self._engine.stats()

    def quiesce(self) -> None:
        """Wait for what the algorithm has on its way; collective, and called by `save`.

        Raises:
            RelaxError: On every rank: gradients are on their way on some. Save after the step.
        """
        self._outside("save")
        self._engine.quiesce()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save, besides model and optimizer, to resume exactly."""
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank; collective.

        Raises:
            ValueError: It is of another model, or of other bucket sizes.
            MismatchError: The ranks restore different layouts.
            RelaxError: Gradients are on their way: restore after `wait` or after the step.
        """
        self._engine.load_state_dict(state, resized=False)

    def load_resized(self, state: dict[str, Any]) -> None:
        """Restore from another number of ranks, without what each had for itself; collective."""
        self._engine.load_state_dict(state, resized=True)

    def detach(self) -> None:
        """Remove every hook and leave model and optimizer as they were; collective.

        Gradients that are on their way are waited for. A second call does nothing.
        """
        if not self._hooks:
            return
        self._engine.end()
        self._remove_hooks()

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
            self._engine.abandon()
