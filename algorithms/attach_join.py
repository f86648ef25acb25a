"""Uneven numbers of batches: a rank without one stands in until the last has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from relaxmpi.algorithms.attach_model import broadcast_rates, broadcast_state
from relaxmpi.primitives import MAX, RelaxError, allreduce, broadcast

if TYPE_CHECKING:
    from relaxmpi.algorithms.attach_sync import Sync

__all__ = ["joining"]


@contextmanager
def joining(sync: Sync) -> Iterator[None]:
    """See `Sync.join`."""
    if sync.weight is not None:
        raise RelaxError("join() inside join(), or with sync.weight set already")
    sync.weight = 1.0
    try:
        yield
        if sync.comm.size > 1:
            _stand_in(sync)
    finally:
        sync.weight, sync.training = None, True


def _stand_in(sync: Sync) -> None:
    if sync.pending:
        raise RelaxError(
            "join() ended between backward and step: take the step inside, on every rank"
        )
    sync.training, sync.weight = False, 0.0
    going = True
    while going:
        sync.optimizer.zero_grad(set_to_none=True)
        facts = sync.finish(adopt=False)
        assert facts is not None  # there are other ranks
        going = facts.training
        sync.close_window()
    control, size = sync.control, sync.comm.size
    root = allreduce(control, sync.steps * size + sync.comm.rank, op=MAX, name="last") % size
    _make_state(sync, root)
    broadcast_state(control, sync.model, sync.optimizer, root=root, buffers=False)
    broadcast_rates(control, sync.optimizer, root)


def _make_state(sync: Sync, root: int) -> None:
    """Make the optimizer's state where only the root has it; the broadcast then fills it."""
    optimizer = sync.optimizer
    params = [p for group in optimizer.param_groups for p in group["params"]]
    has = np.array([bool(optimizer.state.get(p)) for p in params], np.uint8)
    wanted = broadcast(sync.control, has.copy(), root=root, name="who has state")
    if (wanted > has).any():
        for param, make in zip(params, wanted > has, strict=True):
            param.grad = torch.zeros_like(param) if make else None
        optimizer.step()  # what it does to the parameters is overwritten
        optimizer.zero_grad(set_to_none=True)
