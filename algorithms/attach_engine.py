"""What the handle of `attach` asks of that which moves gradients, or parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from relaxmpi.algorithms.attach_model import Watch
from relaxmpi.algorithms.attach_stats import Meter, SyncStats
from relaxmpi.algorithms.base import Bound
from relaxmpi.primitives import MAX, Comm, RelaxError, allreduce

__all__ = ["Engine"]


class Engine(ABC):
    """Hooks around a training loop, and the exchange behind them.

    Attributes:
        comm: The private Comm whose `progress()` moves all that is on its way.
        control: For what must not wait behind it.
        watch: The parameters that are trained together.
        meter: Counts.
        paused: Whether gradients add up locally.
        training: Whether this rank has a batch.
        weight: How much this rank's gradient counts; None for as much as any other.
    """

    meter: Meter
    weight: float | None = None

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, comm: Comm) -> None:
        self.comm, self.control = comm, Comm.dup(comm)
        self.watch = Watch(model, optimizer)
        self.paused, self.training = False, True

    @property
    @abstractmethod
    def bound(self) -> list[Bound]:
        """The state of the algorithm, one a bucket."""

    @abstractmethod
    def hooks(self) -> list[Any]:
        """Register hooks on the parameters and return their handles."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until `p.grad` is what the optimizer will see."""

    @abstractmethod
    def before_step(self) -> None:
        """What happens before the optimizer steps."""

    @abstractmethod
    def after_step(self) -> None:
        """What happens after the optimizer has stepped."""

    def objection(self) -> str:
        """Say what the user did that makes a step wrong; empty if nothing."""
        return self.watch.objection()

    def meet(self, what: str) -> None:  # noqa: B027 - where gradients meet, steps are equal
        """Wait for all ranks, which must have come equally far if the algorithm says so."""

    def averaged(self) -> AbstractContextManager[None]:
        """See `Sync.averaged`."""
        return nullcontext()

    @property
    def apart(self) -> str:
        """Say why the models of ranks may differ, for errors; empty if they may not."""
        return ""

    def spread(self) -> float:
        """See `Sync.spread`."""
        return 0.0

    @property
    def keeps_state(self) -> bool:
        """See `Sync.keeps_state`."""
        return False

    @abstractmethod
    def quiesce(self) -> None:
        """See `Sync.quiesce`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """See `Sync.state_dict`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], *, resized: bool) -> None:
        """See `Sync.load_state_dict`, and if it is resized `Sync.load_resized`."""

    def refuse(self, mine: bool, what: str) -> None:
        """Raise, on all ranks, if a call comes too early on any of them."""
        if allreduce(self.control, int(mine), op=MAX, name=what):
            raise RelaxError(
                f"{what} between backward and step would lose the gradients on their way: restore "
                "after sync.wait() or after the step, save after the step"
            )

    def stats(self) -> SyncStats:
        """Return what it cost."""
        return self.meter.stats(len(self.bound))

    @abstractmethod
    def end(self) -> None:
        """Wait for what is on its way and close all streams; collective."""

    @abstractmethod
    def abandon(self) -> None:
        """Forget what is on its way, because this rank fails."""
