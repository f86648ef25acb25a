"""The files of a checkpoint, opened and checked, and the things in them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from relaxmpi.primitives.checkpoint.arrays import Raw, make, stored
from relaxmpi.primitives.checkpoint.folder import open_file
from relaxmpi.primitives.checkpoint.index import SHARED, Index, rank_file, verify
from relaxmpi.primitives.checkpoint.tensors import (
    Place,
    header_length,
    parse_header,
    parse_json,
)
from relaxmpi.primitives.checkpoint.tree import decode
from relaxmpi.primitives.errors import CheckpointError

__all__ = ["Contents"]

Things = dict[str, tuple[str, Any]]


class _File:
    """One file, once it is known to be what was written and to be well formed."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        first = file.read(9)
        size = file.seek(0, 2)
        self._begin = 8 + header_length(first, size)
        file.seek(8)
        text = file.read(self._begin - 8)
        self.places: dict[str, Place]
        self.places, metadata = parse_header(text, size - self._begin)
        self.things = _things(parse_json(metadata.get("relaxmpi", "").encode()))

    def read(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor."""
        place = self.places[name]
        data = np.empty(place.end - place.begin, np.uint8)
        self._file.seek(self._begin + place.begin)
        if self._file.readinto(data.data) != len(data):
            raise CheckpointError(f"{self._file.name} has become shorter")
        return data


def _things(told: Any) -> Things:
    if not isinstance(told, dict):
        raise CheckpointError("it says nothing about its tensors")
    for name, entry in told.items():
        if not isinstance(entry, dict) or entry.keys() != {"kind", "tree"}:
            raise CheckpointError(f"{name!r:.80} has other keys than kind and tree")
        if not isinstance(entry["kind"], str):
            raise CheckpointError(f"the kind of {name!r:.80} is none")
    return {name: (entry["kind"], entry["tree"]) for name, entry in told.items()}


class Contents(ExitStack):
    """What one rank reads of a checkpoint; closes its files as a context manager.

    Attributes:
        folder: Where.
        index: The index.
        things: Kind and tree of each thing, as this rank has it.
        shared: The names of those that all ranks had in common.
    """

    def __init__(self, folder: Path, index: Index, rank: int) -> None:
        super().__init__()
        self.folder, self.index, self._rank = folder, index, rank
        self.things: Things = {}
        self.shared: set[str] = set()
        self._shared_file: _File
        self._rank_files: dict[int, _File] = {}

    def open(self, *, resized: bool) -> Generator[None, None, None]:
        """Open and check the files, piece by piece; those of all ranks if it is `resized`."""
        self._shared_file = yield from self._open(SHARED)
        self.things.update(self._shared_file.things)
        self.shared.update(self.things)
        if not self.index.per_rank:
            return
        for rank in range(self.index.ranks) if resized else [self._rank]:
            file = self._rank_files[rank] = yield from self._open(rank_file(rank))
            twice = [*(file.things.keys() & self.shared), *(file.places.keys() & self._places)]
            if twice:
                raise CheckpointError(f"{rank_file(rank)} repeats {', '.join(twice):.200}")
        self.things.update(self._rank_files[self._rank].things)

    @property
    def _places(self) -> set[str]:
        return set(self._shared_file.places)

    def _open(self, name: str) -> Generator[None, None, _File]:
        file = self.enter_context(open_file(self.folder, name))
        try:
            yield from verify(file, self.index.files[name])
            file.seek(0)
            return _File(file)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder / name}: {error}") from None

    def value(self, name: str) -> Any:
        """Return the state of a thing as this rank has it."""
        return self._decode(self.things[name][1], self._rank)

    def all_ranks(self, name: str) -> Iterator[Any]:
        """Yield the state of a thing as each rank had it, in order."""
        for rank, file in sorted(self._rank_files.items()):
            if name not in file.things:
                raise CheckpointError(f"{rank_file(rank)} has no {name}")
            yield self._decode(file.things[name][1], rank)

    def values(self) -> dict[str, Any]:
        """Return the plain values."""
        return {
            name: self.value(name) for name, (kind, _) in self.things.items() if kind == "value"
        }

    def check(self, name: str) -> None:
        """Make sure that the state of a thing can be read, without reading its arrays."""

        def found(*told: Any) -> list[Any]:
            self._place(self._rank, *told)
            return []  # like an array no key of a dict

        decode(self.things[name][1], found)

    def _decode(self, node: Any, rank: int) -> Any:
        def read(name: str, kind: str, dtype: str, shape: tuple[int, ...]) -> Any:
            file = self._place(rank, name, kind, dtype, shape)
            return make(Raw(file.read(name), dtype, shape, kind))

        return decode(node, read)

    def _place(self, rank: int, name: str, kind: str, dtype: str, shape: tuple[int, ...]) -> _File:
        """Return the file that holds a tensor."""
        file = self._rank_files.get(rank, self._shared_file)
        if name not in file.places:
            file = self._shared_file
        place = file.places.get(name)
        if place is None or stored(dtype, shape) != (place.code, place.shape):
            raise CheckpointError(f"tensor {name!r:.80} of {dtype!r:.20} is not in it")
        if kind not in ("numpy", "torch"):
            raise CheckpointError(f"tensor {name!r:.80} is of no known kind")
        return file
