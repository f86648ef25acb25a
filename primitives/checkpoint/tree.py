"""Nested values as JSON, exactly: dicts with any keys, tuples, every float, arrays by name.

None, bools, ints, strings and lists stand for themselves, and so do finite floats; everything
else is an object with one key that says what it is. Nothing in it names code.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from relaxmpi.primitives.checkpoint.arrays import Raw, is_array, raw_of, stored, torch_module
from relaxmpi.primitives.errors import CheckpointError

__all__ = ["Encoder", "decode", "tensors_of"]

_DEEPEST = 64
_DICTS: dict[type, str] = {
    dict: "dict",
    defaultdict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
}
_MAKE = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


class Encoder:
    """Turns values into JSON, and keeps the arrays that it meets.

    Attributes:
        arrays: What it met, by names such as `model.linear.weight`.
        named: The names of these that it has used since somebody emptied this list.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Raw] = {}
        self.named: list[str] = []
        self._known: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return what `decode` turns into an equal value.

        Args:
            value: What to save.
            path: How messages and files call it.
            depth: How deep inside another value it is.

        Raises:
            TypeError: There is something in it that has no exact and safe form.
        """
        if depth > _DEEPEST:
            raise TypeError(f"{path} is nested more than {_DEEPEST} deep, or contains itself")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if is_array(value):
            return self._array(value, path)
        if kind is list:
            return [self.encode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value)]
        torch = torch_module()
        if kind is tuple or (torch is not None and kind is torch.Size):
            return {"tuple": self.encode(list(value), path, depth)}
        if kind in _DICTS:
            return self._dict(value, path, depth)
        if kind is bytes:
            return {"bytes": value.hex()}
        if isinstance(value, np.generic):
            return {"scalar": [raw_of(np.asarray(value)).dtype, value.tobytes().hex()]}
        if isinstance(value, np.dtype):
            return {"dtype": ["numpy", value.name]}
        if torch is not None and isinstance(value, torch.dtype):
            return {"dtype": ["torch", str(value).removeprefix("torch.")]}
        raise TypeError(f"{path} is a {kind.__name__}, which has no exact and safe form in a file")

    def _dict(self, value: Any, path: str, depth: int) -> Any:
        pairs = []
        for key, inner in value.items():
            told = self.encode(key, f"a key of {path}", depth + 1)
            pairs.append([told, self.encode(inner, f"{path}.{key}", depth + 1)])
        node = {_DICTS[type(value)]: pairs}
        if hasattr(value, "_metadata"):  # versions of the modules in torch's state_dict
            node["versions"] = self.encode(dict(value._metadata), f"{path}._metadata", depth + 1)
        return node

    def _array(self, value: Any, path: str) -> Any:
        try:
            raw = raw_of(value)
        except TypeError as error:
            raise TypeError(f"{path}: {error}") from None
        address = raw.data.__array_interface__["data"][0]
        # Tied parameters are one tensor with several names, and are written once.
        same = (address, raw.dtype, raw.shape, raw.kind)
        name = self._known.get(same) if len(raw.data) else None
        if name is None:
            name, twin = path, 1
            while name in self.arrays:
                twin += 1
                name = f"{path}~{twin}"
            self.arrays[name] = raw
            self._known[same] = name
        self.named.append(name)
        return {"array": [name, raw.kind, raw.dtype, list(raw.shape)]}


Read = Callable[[str, str, str, tuple[int, ...]], Any]


def decode(node: Any, read: Read, depth: int = 0) -> Any:
    """Return the value.

    Args:
        node: What `Encoder.encode` returned, or anything else.
        read: Returns an array, given its name, kind, dtype and shape.
        depth: How deep inside another value it is.

    Raises:
        CheckpointError: It was not made by an `Encoder`.
    """
    if depth > _DEEPEST:
        raise CheckpointError(f"a value is nested more than {_DEEPEST} deep")
    if isinstance(node, list):
        return [decode(inner, read, depth + 1) for inner in node]
    if not isinstance(node, dict):
        return node
    versions = node.get("versions")
    named = [key for key in node if key != "versions"]
    tag = named[0] if len(named) == 1 else None
    try:
        if tag in _MAKE:
            value = _MAKE[tag](dict(_pairs(node[tag], read, depth)))
            if versions is not None:
                value._metadata = decode(versions, read, depth + 1)
            return value
        if versions is None and tag == "tuple":
            return tuple([decode(inner, read, depth + 1) for inner in _list(node[tag])])
        if versions is None and tag == "array":
            name, kind, dtype, shape = node[tag]
            return read(name, kind, dtype, tuple(shape))
        if versions is None and tag in _PLAIN:
            return _PLAIN[tag](node[tag])
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, struct.error):
        raise CheckpointError(f"a value of kind {tag} is none") from None
    raise CheckpointError(f"a value of unknown kind: {', '.join(map(repr, node))[:80]}")


def _list(node: Any) -> list[Any]:
    if not isinstance(node, list):
        raise TypeError
    return node


def _pairs(node: Any, read: Read, depth: int) -> list[tuple[Any, Any]]:
    pairs = [
        (decode(key, read, depth + 1), decode(inner, read, depth + 1)) for key, inner in _list(node)
    ]
    if len({key for key, _ in pairs}) < len(pairs):
        raise CheckpointError("a key is there twice")
    return pairs


def _float(text: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


def _scalar(node: Any) -> Any:
    dtype, text = node
    stored(dtype, ())
    return np.frombuffer(bytes.fromhex(text), dtype)[0]


def _dtype(node: Any) -> Any:
    kind, name = node
    stored(name, ())  # a KeyError for whatever is no format of numbers
    if kind == "numpy":
        return np.dtype(name)
    torch = torch_module()
    if kind != "torch" or torch is None:
        raise CheckpointError("it holds a dtype of torch: import torch first")
    return getattr(torch, name)


_PLAIN: dict[str | None, Callable[[Any], Any]] = {
    "float": _float,
    "bytes": bytes.fromhex,
    "scalar": _scalar,
    "dtype": _dtype,
}


def tensors_of(node: Any) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield key, dtype and shape of the tensors directly inside a dict, without reading them."""
    pairs: Any = node.get("ordered", node.get("dict", [])) if isinstance(node, dict) else []
    for key, inner in pairs:
        if isinstance(inner, dict) and "array" in inner:
            _, _, dtype, shape = inner["array"]
            yield key, dtype, tuple(shape)
