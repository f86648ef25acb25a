"""What `attach` must know about a PyTorch model and its optimizer, and what it sends once."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from relaxmpi.algorithms.attach_bucket import OwnRule
from relaxmpi.algorithms.attach_flags import NonFinite
from relaxmpi.algorithms.base import Algorithm, made
from relaxmpi.primitives import (
    MAX,
    MEAN,
    Bucket,
    Comm,
    RelaxError,
    allgather,
    allreduce,
    barrier,
    broadcast,
    buckets_of,
    primitive,
)
from relaxmpi.primitives.work import Flow

__all__ = [
    "Watch",
    "attaching",
    "average_buffers",
    "broadcast_bytes",
    "broadcast_settings",
    "broadcast_state",
    "check_equal",
    "settings",
]

_BUCKET = 4 << 20  # bytes sent at a time

# What says how a step is computed, not what it is.
_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


class _Place(NamedTuple):
    module: nn.Module
    attribute: str
    name: str
    param: nn.Parameter
    trained: bool


class Watch:
    """The parameters of a model and its optimizer, and that they stay the same objects.

    Attributes:
        trained: Names and parameters that need a gradient and that the optimizer holds.

    Raises:
        ValueError: There is none, or the optimizer holds parameters of another model.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        held = set(self._held())
        named = list(model.named_parameters())
        self.trained = [(name, p) for name, p in named if p.requires_grad and id(p) in held]
        if not self.trained:
            raise ValueError(
                "the model has no trainable parameter that the optimizer holds: there is nothing "
                "to train together"
            )
        strange = len(held - {id(p) for _, p in named})
        if strange:
            raise ValueError(
                f"the optimizer holds {strange} parameters that are not the model's: their "
                "gradients would stay local; attach the module that contains them all"
            )
        self._count = sum(1 for _ in self._held())
        ours = {id(p) for _, p in self.trained}
        self._places = [
            _Place(module, attribute, f"{path}.{attribute}".lstrip("."), p, id(p) in ours)
            for path, module in model.named_modules()
            for attribute, p in module._parameters.items()
            if p is not None and id(p) in held
        ]

    def _held(self) -> Iterator[int]:
        for group in self._optimizer.param_groups:
            yield from map(id, group["params"])

    def objection(self) -> str:
        """Say why gradients would stay local, because something was replaced; or nothing."""
        for place in self._places:
            if place.module._parameters.get(place.attribute) is not place.param:
                return (
                    f"parameter {place.name} was replaced after attach: neither its gradient nor "
                    "the optimizer would see it; change it in place, or detach, make a new "
                    "optimizer and attach again"
                )
            if place.param.requires_grad and not place.trained:
                return (
                    f"parameter {place.name} was frozen when the model was attached and is "
                    "trained now: its gradient would stay local; detach and attach again"
                )
        if sum(1 for _ in self._held()) != self._count:
            return "the optimizer got or lost parameters after attach: detach and attach again"
        return ""


@primitive
def attaching(
    comm: Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm,
    limits: tuple[int, int],
    overlap: bool,
    nonfinite: NonFinite,
) -> Flow[None]:
    """Agree on model, optimizer and algorithm, or raise on every rank."""
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"algorithm must be one such as SGD() or QSGD(bits=8), not {algorithm!r}"
            f"{made(algorithm)}"
        )
    if objection := algorithm.refuses(optimizer):
        raise ValueError(objection)
    if isinstance(optimizer, OwnRule) and optimizer.algorithm != algorithm:
        raise ValueError(
            f"this {type(optimizer).__name__} is for {optimizer.algorithm!r}: attach it with that"
        )
    if algorithm.own_rule:
        raise ValueError(
            f"{algorithm.own_rule} has no effect here: the local rule is the optimizer's, so set "
            f"it in {type(optimizer).__name__}"
        )
    if algorithm.acts_alone and not algorithm.mixes:
        raise ValueError(
            f"{algorithm!r} moves parameters after each step, which attach leaves to algorithms "
            "that mix parameters: use it on arrays, or around one of those"
        )
    if not isinstance(nonfinite, NonFinite):
        raise TypeError(f"nonfinite must be NonFinite.PASS, RAISE or SKIP, not {nonfinite!r}")
    if min(limits) < 1:
        raise ValueError(f"buckets need at least one byte, not {min(limits)}")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError("SparseAdam needs sparse gradients, which become dense here: use Adam")
    watch = Watch(model, optimizer)
    for name, p in watch.trained:
        if any(
            hasattr(hook, "relaxmpi") for hook in (p._post_accumulate_grad_hooks or {}).values()
        ):
            raise ValueError(f"{name} is attached already: detach that first")
    for name, t in _tensors(model):
        _check_dense(name, t)
    trained = [(name, p.shape, p.dtype) for name, p in watch.trained]
    parts = [(name, t.shape, t.dtype) for name, t in _tensors(model)]
    state = [(name, t.shape, t.dtype) for name, t in _state(optimizer)]
    keys = [[(k, len(v)) for k, v in _settings(group)] for group in optimizer.param_groups]
    what = (
        f"model of {len(trained)} trained parameters ({_short(trained, parts)}), "
        f"{type(optimizer).__name__} with {len(state)} tensors of state ({_short(state, keys)}), "
        f"{algorithm!r}, buckets of {limits}, overlap {overlap}, {nonfinite}"
    )
    return barrier.flow(comm, name=what)


attaching.__name__ = "attach"  # as messages call it


def _check_dense(name: str, t: torch.Tensor) -> None:
    if nn.parameter.is_lazy(t):
        raise ValueError(f"{name} has no shape yet: run one forward pass before attach")
    if t.layout is not torch.strided:
        raise ValueError(f"{name} is {t.layout}: rank 0 can only send dense tensors to the others")
    if any(step == 0 and size > 1 for size, step in zip(t.shape, t.stride(), strict=True)):
        raise ValueError(f"{name} is an expanded view, which cannot be written to: clone it")


def _short(*parts: Any) -> str:
    return blake2b(repr(parts).encode(), digest_size=4).hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            for key, value in sorted(optimizer.state.get(p, {}).items()):
                if isinstance(value, torch.Tensor):
                    yield f"{key} of parameter {i} in group {g}", value


def broadcast_state(
    comm: Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    root: int = 0,
    buffers: bool = True,
) -> None:
    """Give every rank the parameters, buffers and optimizer state of rank `root`."""
    named = [*(_tensors(model) if buffers else model.named_parameters()), *_state(optimizer)]
    for bucket, tensors, name in _packed(named):
        broadcast(comm, bucket.flat, root=root, name=name)
        if comm.rank != root:
            _unpack(bucket, tensors)


def _settings(group: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the numbers that the rule depends on, such as lr, betas and nesterov."""
    for key in sorted(group.keys() - _HOW):
        value = group[key]
        numbers = list(value) if isinstance(value, (tuple, list)) else [value]
        if all(isinstance(x, (int, float, torch.Tensor)) for x in numbers):
            yield key, numbers


def settings(optimizer: torch.optim.Optimizer) -> np.ndarray:
    """Return the settings of all parameter groups."""
    groups = [_settings(group) for group in optimizer.param_groups]
    return np.array([float(x) for group in groups for _, xs in group for x in xs])


def broadcast_settings(comm: Comm, optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Give every rank the settings of rank `root`."""
    found = settings(optimizer)
    agreed = iter(broadcast(comm, found.copy(), root=root, name="settings").tolist())
    for group in optimizer.param_groups:
        for key, numbers in list(_settings(group)):
            told = [_like(x, value) for x, value in zip(numbers, agreed, strict=False)]
            group[key] = (
                type(group[key])(told) if isinstance(group[key], (tuple, list)) else told[0]
            )


def _like(x: Any, value: float) -> Any:
    if isinstance(x, torch.Tensor):
        return x.fill_(value)
    return x if x == value else bool(value) if isinstance(x, bool) else value


def broadcast_bytes(comm: Comm, data: bytes, root: int) -> bytes:
    """Return the bytes of rank `root`."""
    size = int(broadcast(comm, np.array([len(data)]), root=root, name="size of bytes")[0])
    held = np.frombuffer(data, np.uint8) if comm.rank == root else np.empty(size, np.uint8)
    return bytes(broadcast(comm, held.copy(), root=root, name="bytes"))


def average_buffers(comm: Comm, model: nn.Module) -> None:
    """See `Sync.average_buffers`."""
    for bucket, tensors, name in _packed(list(model.named_buffers())):
        floating = bucket.flat.is_floating_point() or bucket.flat.is_complex()
        allreduce(comm, bucket.flat, op=MEAN if floating else MAX, name=name)
        _unpack(bucket, tensors)


def check_equal(comm: Comm, model: nn.Module, hint: str = "") -> None:
    """See `Sync.check`; the hint is added to the error."""
    named = list(model.named_parameters())
    mine = np.array([_digest(p) for _, p in named], np.int64)
    all_ = allgather(comm, mine, name="digests of parameters")
    for i, (name, _) in enumerate(named):
        others = [r for r in range(comm.size) if all_[r, i] != all_[0, i]]
        if others:
            raise RelaxError(
                f"parameter {name} differs between rank 0 and ranks {others} (of {comm.size}){hint}"
            )


def _digest(p: torch.Tensor) -> int:
    raw = p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if p.numel() else b""
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "little", signed=True)


def _packed(
    named: list[tuple[str, torch.Tensor]],
) -> Iterator[tuple[Bucket, list[torch.Tensor], str]]:
    """Copy tensors into buckets of one kind each."""
    sizes = [t.numel() * t.element_size() for _, t in named]
    kinds = [(t.dtype, t.device) for _, t in named]
    for group in buckets_of(sizes, _BUCKET, kinds=kinds):
        tensors = [named[i][1] for i in group]
        yield Bucket(tensors), tensors, named[group[0]][0]


def _unpack(bucket: Bucket, tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, view in zip(tensors, bucket.views, strict=True):
            if not torch.equal(tensor, view):  # a write would be noticed as somebody's change
                tensor.copy_(view)
