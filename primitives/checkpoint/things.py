"""What can be saved: how each kind of thing tells its state and takes it back."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from relaxmpi.primitives.checkpoint.arrays import is_array, raw_of, torch_module
from relaxmpi.primitives.checkpoint.tree import tensors_of

__all__ = ["Thing", "adapt", "mean_of"]

_MOST = 6  # differences that a message lists


class Thing:
    """A plain value: saved as it is, and returned by `load`.

    Attributes:
        order: Things with a lower one are restored first: parameters before what depends on them.
        averaged: Whether it becomes the mean over all ranks where another number of ranks loads it.
    """

    order = 4
    averaged = False

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.thing = name, thing

    @property
    def kind(self) -> str:
        """What must be the same when it is loaded."""
        return "value"

    def quiesce(self) -> None:
        """Let nothing be on its way; collective."""

    def alone(self, things: Sequence[Thing]) -> str:
        """Say what is missing among the things to be saved with it; empty if nothing."""
        return ""

    def state(self) -> Any:
        """Return what to save."""
        return self.thing

    def differences(self, node: Any) -> list[str]:
        """Say why what was saved does not fit, without reading it."""
        return []

    def load(self, value: Any) -> None:
        """Restore."""

    def load_resized(self, value: Any, replicated: bool) -> str:
        """Restore from another number of ranks, and say what was lost, if anything.

        Args:
            value: As one of those ranks saved it.
            replicated: Whether it was the same on all of them.
        """
        if replicated:
            self.load(value)
            return ""
        return "left as it is"


class _Array(Thing):
    order, averaged = 0, True

    @property
    def kind(self) -> str:
        return "array"

    def differences(self, node: Any) -> list[str]:
        mine = raw_of(self.thing)
        if isinstance(self.thing, np.ndarray) and not self.thing.flags.writeable:
            return ["it is read-only here"]
        return _compare([("", mine.dtype, mine.shape)], list(tensors_of({"dict": [["", node]]})))

    def load(self, value: Any) -> None:
        torch = torch_module()
        if isinstance(self.thing, np.ndarray):
            self.thing[...] = value if isinstance(value, np.ndarray) else value.numpy()
        else:
            self.thing.detach()[...] = (
                torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            )


class _Object(Thing):
    """Anything with `state_dict` and `load_state_dict`."""

    @property
    def order(self) -> int:  # type: ignore[override]
        return 2 if hasattr(self.thing, "param_groups") else 3

    @property
    def kind(self) -> str:
        told = getattr(self.thing, "kind", None)  # of algorithms, which may be around others
        return f"state of {told if isinstance(told, str) else type(self.thing).__name__}"

    def quiesce(self) -> None:
        if hasattr(self.thing, "quiesce"):
            self.thing.quiesce()

    def alone(self, things: Sequence[Thing]) -> str:
        for hook in getattr(self.thing, "_optimizer_step_pre_hooks", {}).values():
            owner = getattr(hook, "__self__", None)  # what `attach` returned
            if getattr(owner, "keeps_state", False) and all(t.thing is not owner for t in things):
                return (
                    f"{self.name} is attached to an algorithm with state beside the parameters, "
                    "without which they cannot be restored: pass what attach returned, too, as "
                    "sync=sync"
                )
        return ""

    def state(self) -> Any:
        return self.thing.state_dict()

    def load(self, value: Any) -> None:
        self.thing.load_state_dict(value)

    def load_resized(self, value: Any, replicated: bool) -> str:
        if hasattr(self.thing, "load_resized"):
            self.thing.load_resized(value)
            return "what each rank had for itself reset"
        if not replicated and hasattr(self.thing, "reset"):
            self.thing.reset()
            return "reset"
        return super().load_resized(value, replicated)


class _Module(_Object):
    """A torch module, recognised by its `named_parameters`."""

    order, averaged = 1, True

    @property
    def kind(self) -> str:
        return "module"

    def differences(self, node: Any) -> list[str]:
        mine = [
            (key, str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for key, t in self.thing.state_dict().items()
            if is_array(t)
        ]
        return _compare(mine, list(tensors_of(node)))


class _Generator(Thing):
    """A source of random numbers, of torch, numpy or Python."""

    order = 3

    @property
    def kind(self) -> str:
        return f"random numbers of {type(self.thing).__name__}"

    def state(self) -> Any:
        if isinstance(self.thing, np.random.Generator):
            return self.thing.bit_generator.state
        if isinstance(self.thing, random.Random):
            return self.thing.getstate()
        return self.thing.get_state()

    def load(self, value: Any) -> None:
        if isinstance(self.thing, np.random.Generator):
            self.thing.bit_generator.state = value
        elif isinstance(self.thing, random.Random):
            self.thing.setstate(value)
        else:
            self.thing.set_state(value)


def adapt(things: dict[str, Any]) -> list[Thing]:
    """Return the things in the order in which they are saved and restored, on every rank."""
    found = [_kind_of(thing)(name, thing) for name, thing in things.items()]
    return sorted(found, key=lambda thing: (thing.order, thing.name))


def _kind_of(thing: Any) -> type[Thing]:
    torch = torch_module()
    if is_array(thing):
        return _Array
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return _Module if hasattr(thing, "named_parameters") else _Object
    sources = (np.random.Generator, np.random.RandomState, random.Random)
    if isinstance(thing, sources) or (torch is not None and isinstance(thing, torch.Generator)):
        return _Generator
    return Thing


Tensors = list[tuple[str, str, tuple[int, ...]]]


def _compare(mine: Tensors, saved: Tensors) -> list[str]:
    """Say how what was saved differs from what is here."""
    here = {key: (dtype, shape) for key, dtype, shape in mine}
    there = {key: (dtype, shape) for key, dtype, shape in saved}
    found = [f"{key or 'it'} is not in it" for key in here.keys() - there.keys()]
    found += [f"{key or 'it'} is not here" for key in there.keys() - here.keys()]
    found += [
        f"{key or 'it'} is {_words(*there[key])} and here {_words(*here[key])}"
        for key in here.keys() & there.keys()
        if here[key] != there[key]
    ]
    found.sort()
    more = len(found) - _MOST
    return [*found[:_MOST], f"and {more} more"] if more > 0 else found


def _words(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def mean_of(values: Iterable[Any]) -> Any:
    """Return the mean over ranks of arrays, or of dicts of them, added in order in float64.

    What is no array of real or complex floats is that of the first rank.
    """
    found = iter(values)
    first = next(found)
    if not isinstance(first, dict):
        return _mean(first, found)
    count, sums = 1, {key: _wide(x) for key, x in first.items() if _averages(x)}
    for value in found:
        count += 1
        for key in sums:
            sums[key] += value[key]
    for key, total in sums.items():
        first[key][...] = total / count
    return first


def _mean(first: Any, others: Iterator[Any]) -> Any:
    return mean_of({"": x} for x in [first, *others])[""]


def _averages(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return bool(np.issubdtype(x.dtype, np.inexact))
    return is_array(x) and (x.is_floating_point() or x.is_complex())


def _wide(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.astype(np.result_type(x, np.float64))
    torch = torch_module()
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
