"""Uneven numbers of batches: a rank without one stands in until the last has none."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from relaxmpi.algorithms.attach_exchange import Exchange
from relaxmpi.algorithms.attach_model import broadcast_bytes, broadcast_settings, broadcast_state
from relaxmpi.primitives import MAX, Comm, RelaxError, allreduce, broadcast

__all__ = ["Stateful", "joining"]


class Stateful(Protocol):
    """A learning-rate scheduler, for instance."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state."""


@contextmanager
def joining(
    exchange: Exchange,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stateful: Sequence[Stateful],
) -> Iterator[None]:
    """See `Sync.join`."""
    before = exchange.meter.steps
    yield
    if exchange.comm.size == 1:
        return
    if exchange.facts is not None:
        exchange.close_window()  # the last step was skipped after wait(), as a GradScaler does
    if exchange.pending:
        raise RelaxError(
            "join() ended between backward and step: take the step inside, on every rank"
        )
    exchange.training = False
    try:
        while _stand_in(exchange, optimizer):
            pass
        steps, root = _last(exchange.control, exchange.meter.steps - before)
        exchange.meter.steps = before + steps
        _follow(exchange.control, model, optimizer, stateful, root)
    finally:
        exchange.training = True


def _last(control: Comm, steps: int) -> tuple[int, int]:
    """Return the largest number of steps and a rank that took them."""
    code: int = allreduce(control, steps * control.size + control.rank, op=MAX, name="last")
    return divmod(code, control.size)


def _follow(
    control: Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stateful: Sequence[Stateful],
    root: int,
) -> None:
    """Take over what rank `root` has."""
    _make_state(control, optimizer, root)
    broadcast_state(control, model, optimizer, root=root, buffers=False)
    broadcast_settings(control, optimizer, root)
    for each in stateful:
        each.load_state_dict(
            pickle.loads(broadcast_bytes(control, pickle.dumps(each.state_dict()), root))
        )


def _stand_in(exchange: Exchange, optimizer: torch.optim.Optimizer) -> bool:
    """Take part in a window with nothing; return whether another rank still trains."""
    exchange.weight = 0.0
    optimizer.zero_grad(set_to_none=True)
    facts = exchange.finish(adopt=False)
    exchange.raise_error()
    exchange.close_window()
    return facts.training


def _make_state(control: Comm, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Make the optimizer's state where only the root has it; the broadcast then fills it."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    has = np.array([bool(optimizer.state.get(p)) for p in params], np.uint8)
    wanted = broadcast(control, has.copy(), root=root, name="who has state")
    if (wanted > has).any():
        for param, make in zip(params, wanted > has, strict=True):
            param.grad = torch.zeros_like(param) if make else None
        optimizer.step()  # what it does to the parameters is overwritten
        optimizer.zero_grad(set_to_none=True)
