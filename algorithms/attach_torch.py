"""`attach`: put an algorithm around a PyTorch training loop that stays as it is.

Where gradients are exchanged they become views of flat buckets. A hook on each parameter counts
its bucket down, and a full bucket is started while backward still computes; the optimizer's
pre-step hook waits for all. Where parameters are mixed, the optimizer's hooks copy them to flat
buckets and back, and those on parameters only let messages move during backward. Model and
optimizer are not subclassed, wrapped or patched, and `detach` removes every hook.
"""

from __future__ import annotations

import torch
from torch import nn

from relaxmpi.algorithms.attach_exchange import Exchange
from relaxmpi.algorithms.attach_flags import NonFinite
from relaxmpi.algorithms.attach_mixing import Mixing
from relaxmpi.algorithms.attach_model import attaching, broadcast_settings, broadcast_state
from relaxmpi.algorithms.attach_sync import Sync
from relaxmpi.algorithms.base import Algorithm
from relaxmpi.primitives import Comm

__all__ = ["attach"]

_BUCKET = 4 << 20
_EVERYTHING = 1 << 62


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm,
    *,
    comm: Comm,
    overlap: bool = True,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int = 1 << 20,
    nonfinite: NonFinite = NonFinite.PASS,
) -> Sync:
    """Train `model` on all ranks of `comm` together; collective.

    **Algorithms that exchange gradients** (`SGD`, `QSGD`, ...):
    from now on `optimizer.step()` sees, on every rank, the gradients that the algorithm makes of
    those of all ranks: for `SGD` and `QSGD` their mean. It is the mean of the ranks' gradients:
    for batches of different sizes or numbers see `Sync.join`. Parameters, buffers and the
    optimizer's state and settings (such as the learning rate) become those of rank 0 once, now.
    Settings must then change on all ranks alike. Buffers such as the statistics of BatchNorm go
    their own way; `Sync.average_buffers` makes them one again.

    The first step notes in which order gradients become ready and lays the buckets out in that
    order, that of rank 0, on all ranks; from the second step on each bucket leaves while the rest
    of backward computes.

    A parameter without a gradient on some rank counts as zero there; one without a gradient on
    every rank keeps none, as in one process. Sparse gradients become dense ones.

    Between `backward()` and `optimizer.step()` gradients are on their way, and whoever looks at
    them or changes them gets an error. To clip, unscale or log them, call `sync.wait()` first:

        loss.backward()
        sync.wait()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    A step may be skipped, on all ranks alike and after a backward on all of them: leave out
    `optimizer.step()` and set the gradients to None before the next backward.

    **Algorithms that mix parameters** (`OSGP`, `Decentralized`, ...): gradients stay on their
    rank, and so do momentum, schedulers and buffers; clip and accumulate as in one process. After
    each `optimizer.step()` the parameters are mixed with those of other ranks. Each rank has a
    model of its own: `with sync.averaged():` shows the mean of all, for evaluating and saving.
    Every rank must call `optimizer.step()` equally often (unless `Algorithm.lockstep` is false);
    `NonFinite.SKIP` leaves a step out on one rank, a GradScaler's skip would be a step less.

    Args:
        model: A module on the CPU.
        optimizer: It holds the local rule, so `algorithm` must not have one. Parameters that it
            does not hold are left alone: attach a second optimizer for them.
        algorithm: For instance `SGD()`, `QSGD(bits=8)` or `OSGP()`.
        comm: A Comm, or a Hierarchy (`comm.by_node()`) for full precision inside nodes and the
            codec between them; private duplicates are used.
        overlap: Start buckets during backward; False starts them all in `wait`. Where parameters
            are mixed: let messages move during backward.
        bucket_bytes: Size of a bucket, about; 1 sends each parameter by itself. Default 4 MiB for
            gradients, and everything of one dtype for parameters, which are ready all at once.
        first_bucket_bytes: The same for the bucket of gradients that is ready first.
        nonfinite: What to do about a NaN or an infinity in the gradient of any rank; where
            parameters are mixed it is this rank's own affair, and nothing of it is sent.

    Returns:
        The handle, also a context manager that detaches.

    Raises:
        MismatchError: The ranks have different models, optimizers, algorithms or arguments.
        ValueError: The model has no trainable parameter, the optimizer holds others than it, or
            a parameter is of a kind that cannot be exchanged; on every rank that has it.

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
    mixes = isinstance(algorithm, Algorithm) and algorithm.mixes
    limit = bucket_bytes if bucket_bytes is not None else (_EVERYTHING if mixes else _BUCKET)
    limits = (limit, limit if mixes else first_bucket_bytes)
    attaching(comm, model, optimizer, algorithm, limits, overlap, nonfinite)
    own = comm.dup()  # so that hooks and the caller's own calls cannot get into one order
    if comm.size > 1:
        broadcast_state(own, model, optimizer)
        broadcast_settings(own, optimizer)
    kind: type[Mixing | Exchange] = Mixing if mixes else Exchange
    engine = kind(model, optimizer, algorithm, own, limits, overlap, nonfinite)
    return Sync(model, optimizer, engine)
