"""The safetensors format: a length of eight bytes, a header in JSON, raw numbers without gaps.

https://github.com/huggingface/safetensors: no code in it, and every size can be checked before
anything is read. Only the header is trusted here, and only after it has been checked in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

from relaxmpi.primitives.errors import CheckpointError

__all__ = ["Place", "header", "header_length", "parse_header", "parse_json"]

_BITS = {"64": 8, "32": 4, "16": 2, "8": 1}
_BYTES = {"BF16": 2, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1} | {
    kind + bits: size for kind in "FIU" for bits, size in _BITS.items() if kind + bits != "F8"
}
_LARGEST_HEADER = 100_000_000  # the limit of the reference implementation
_LARGEST_COUNT = 2**62
_METADATA = "__metadata__"


class Place(NamedTuple):
    """Where a tensor lies.

    Attributes:
        code: Its format, such as "F32".
        shape: Shape.
        begin: First byte, counted from the end of the header.
        end: The byte after the last.
    """

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """Return what comes before the numbers.

    Args:
        tensors: Name, format and shape of each, in the order in which their numbers follow.
        metadata: Text to go with them.
    """
    entries: dict[str, Any] = {_METADATA: metadata}
    begin = 0
    for name, code, shape in tensors:
        end = begin + _BYTES[code] * prod(shape)
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    if len(text) > _LARGEST_HEADER:
        raise ValueError(f"names and structure take {len(text)} bytes: too much for one file")
    return len(text).to_bytes(8, "little") + text


def header_length(first: bytes, size: int) -> int:
    """Return the length of the header, given the first bytes and the size of the file."""
    length = int.from_bytes(first[:8], "little")
    if len(first) < 9 or length > min(size - 8, _LARGEST_HEADER) or first[8:9] != b"{":
        raise CheckpointError(f"it is not a safetensors file{_guess(first)}")
    return length


def _guess(first: bytes) -> str:
    if first[:1] == b"\x80" or first[:2] == b"PK":
        return " but looks like a pickle, which can run any code: it was not opened"
    return ""


def parse_header(text: bytes, rest: int) -> tuple[dict[str, Place], dict[str, str]]:
    """Check a header and return the tensors by name, and the metadata.

    Args:
        text: The header.
        rest: Bytes that follow it.

    Raises:
        CheckpointError: It is not one, or tensors lie outside the file, overlap or leave gaps.
    """
    entries = parse_json(text)
    if not isinstance(entries, dict):
        raise CheckpointError("its header is no JSON object")
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("its metadata are not text")
    places = {name: _place(name, entry) for name, entry in entries.items()}
    at = 0
    for name, place in sorted(places.items(), key=lambda item: item[1][2:]):
        if place.begin != at:
            raise CheckpointError(f"tensor {_cut(name)} begins at byte {place.begin}, not {at}")
        at = place.end
    if at != rest:
        raise CheckpointError(f"its tensors take {at} bytes, and there are {rest}")
    return places, metadata


def _place(name: str, entry: Any) -> Place:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"tensor {_cut(name)} has other keys than dtype, shape, data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _BYTES:
        raise CheckpointError(f"tensor {_cut(name)} has the unknown dtype {_cut(code)}")
    if not (_counts(shape) and _counts(offsets) and len(offsets) == 2 and len(shape) <= 64):
        raise CheckpointError(f"tensor {_cut(name)} has an impossible shape or place")
    begin, end = offsets
    if _BYTES[code] * prod(shape) != end - begin:
        raise CheckpointError(
            f"tensor {_cut(name)} of {code} {_cut(shape)} is not {end - begin} bytes"
        )
    return Place(code, tuple(shape), begin, end)


def _counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(
        type(x) is int and 0 <= x < _LARGEST_COUNT for x in numbers
    )


def _cut(thing: object) -> str:
    text = repr(thing)
    return text if len(text) < 80 else text[:76] + "..."


def parse_json(text: bytes) -> Any:
    """Parse JSON strictly: no key twice, no NaN, no nesting beyond Python's own limit.

    Raises:
        CheckpointError: It is anything else.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise CheckpointError("its JSON is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"it is not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
