"""The index of a checkpoint: what files it has, and whether they are those that were written."""

from __future__ import annotations

import json
from collections.abc import Generator
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from relaxmpi.primitives.checkpoint.folder import INDEX, open_file
from relaxmpi.primitives.checkpoint.tensors import parse_json
from relaxmpi.primitives.errors import CheckpointError

__all__ = ["CHUNK", "SHARED", "Index", "Seal", "parse_index", "rank_file", "read_index", "verify"]

SHARED = "shared.safetensors"
CHUNK = 8 << 20
_FORMAT = "relaxmpi checkpoint"
_VERSION = 1
_LARGEST = 256 << 20


class Seal(NamedTuple):
    """What tells whether a file is the one that was written."""

    size: int
    sha256: str


class Index(NamedTuple):
    """See above.

    Attributes:
        ranks: How many wrote it.
        files: Their seals, by name.
    """

    ranks: int
    files: dict[str, Seal]

    @property
    def per_rank(self) -> bool:
        """Whether ranks have files of their own."""
        return len(self.files) > 1

    def text(self) -> bytes:
        """Return the file."""
        files = {name: seal._asdict() for name, seal in self.files.items()}
        told = {
            "format": _FORMAT,
            "version": _VERSION,
            "library": _library(),
            "ranks": self.ranks,
            "files": files,
        }
        return json.dumps(told, indent=1).encode() + b"\n"


def _library() -> str:
    try:
        return version("relaxmpi")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


def rank_file(rank: int) -> str:
    """Return the name of the file with what one rank had for itself."""
    return f"rank-{rank:05}.safetensors"


def read_index(folder: Path) -> bytes:
    """Return the text of an index."""
    with open_file(folder, INDEX) as file:
        text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise CheckpointError(f"{folder / INDEX} has more than {_LARGEST} bytes")
    return text


def parse_index(text: bytes, folder: Path) -> Index:
    """Check an index and return it.

    Raises:
        CheckpointError: It is none, is of a newer version or names other files than it may.
    """
    try:
        return _parse(parse_json(text))
    except CheckpointError as error:
        raise CheckpointError(f"{folder / INDEX}: {error}") from None


def _parse(told: Any) -> Index:
    if not isinstance(told, dict) or told.get("format") != _FORMAT:
        raise CheckpointError("it is not the index of a checkpoint")
    if type(told.get("version")) is not int or told["version"] != _VERSION:
        raise CheckpointError(
            f"it has version {told.get('version')!r:.20} of the format, written by relaxmpi "
            f"{told.get('library')!r:.40}; this is relaxmpi {_library()}, which reads {_VERSION}"
        )
    if told.keys() != {"format", "version", "library", "ranks", "files"}:
        raise CheckpointError(f"unknown or missing keys: {', '.join(map(repr, told)):.200}")
    ranks, files = told["ranks"], told["files"]
    if type(ranks) is not int or ranks < 1 or not isinstance(files, dict):
        raise CheckpointError("its ranks or files are none")
    names = {SHARED}
    if len(files) > 1:
        if len(files) != ranks + 1:
            raise CheckpointError(f"{ranks} ranks cannot have {len(files) - 1} files")
        names.update(map(rank_file, range(ranks)))
    if files.keys() != names:
        strange = ", ".join(map(repr, sorted(files.keys() ^ names)))
        raise CheckpointError(f"files that should not or should be there: {strange:.200}")
    return Index(ranks, {name: _seal(name, entry) for name, entry in files.items()})


def _seal(name: str, entry: Any) -> Seal:
    if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
        raise CheckpointError(f"{name} has other keys than size and sha256")
    size, digest = entry["size"], entry["sha256"]
    if type(size) is not int or not isinstance(digest, str):
        raise CheckpointError(f"size or sha256 of {name} is none")
    return Seal(size, digest)


def verify(file: Any, seal: Seal) -> Generator[None, None, None]:
    """Compare an open file with its seal, piece by piece.

    Raises:
        CheckpointError: It is another one.
    """
    size = file.seek(0, 2)
    if size != seal.size:
        raise CheckpointError(f"it is damaged: {size} bytes, not {seal.size}")
    file.seek(0)
    digest, piece = sha256(), memoryview(bytearray(min(CHUNK, max(size, 1))))
    while count := file.readinto(piece):
        digest.update(piece[:count])
        yield
    if digest.hexdigest() != seal.sha256:
        raise CheckpointError("it is damaged: its SHA-256 is another one")
