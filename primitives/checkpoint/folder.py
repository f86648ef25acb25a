"""A folder of numbered checkpoints, of which each is complete or absent.

A checkpoint is written to `NUMBER.CHANCE.partial` beside the others, flushed to the disk and
renamed to `NUMBER`, which is atomic; an old one is renamed to `NUMBER.old` before its files go.
So whatever has a number for a name is complete, at whatever moment a process is killed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from io import BufferedReader
from pathlib import Path

from relaxmpi.primitives.errors import CheckpointError

__all__ = ["INDEX", "Draft", "is_checkpoint", "newest", "open_file", "sync_folder"]

INDEX = "index.json"
_NUMBER = re.compile(r"[0-9]{8,18}")
_LEFT = re.compile(r"[0-9]{8,18}\.([0-9a-f]{16}\.partial|old)")


def _numbered(folder: Path) -> list[str]:
    names = [entry.name for entry in os.scandir(folder) if _NUMBER.fullmatch(entry.name)]
    return sorted(names, key=int)


def is_checkpoint(path: Path) -> bool:
    """Whether it is one checkpoint, and not a folder of them."""
    return os.path.lexists(path / INDEX)


def newest(path: Path) -> Path | None:
    """Return the newest checkpoint in a folder, or the one that `path` is; or None."""
    if is_checkpoint(path):
        return path
    names = _numbered(path) if path.is_dir() else []
    return path / names[-1] if names else None


def sync_folder(path: Path) -> None:
    """Have the disk hold the names in a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_file(folder: Path, name: str) -> BufferedReader:
    """Open a file of a checkpoint to read it.

    Raises:
        CheckpointError: It is not there, or is a link, a device or a pipe.
    """
    try:
        # A link may lead anywhere, and opening a pipe would wait for a writer.
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{folder / name}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{folder / name} is not a regular file")
    return os.fdopen(fd, "rb")


class Draft:
    """A checkpoint that is being written; rank 0 makes, finishes and abandons it.

    Attributes:
        folder: Where its files go meanwhile.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        if is_checkpoint(parent):
            raise CheckpointError(f"{parent} is itself a checkpoint: give the folder around it")
        parent.mkdir(parents=True, exist_ok=True)
        for entry in list(os.scandir(parent)):  # what killed processes have left
            if _LEFT.fullmatch(entry.name):
                shutil.rmtree(entry.path)
        names = _numbered(parent)
        self.final = parent / f"{int(names[-1]) + 1 if names else 1:08}"
        # By the unique name the other ranks tell whether they see this folder or one like it.
        self.folder = parent / f"{self.final.name}.{secrets.token_hex(8)}.partial"
        self.folder.mkdir()

    def finish(self) -> None:
        """Make it the newest checkpoint."""
        sync_folder(self.folder)
        self.folder.rename(self.final)
        sync_folder(self._parent)

    def abandon(self) -> None:
        """Remove it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def keep(self, count: int) -> None:
        """Remove all checkpoints but the newest ones."""
        for name in _numbered(self._parent)[:-count]:
            old = self._parent / f"{name}.old"
            (self._parent / name).rename(old)
            shutil.rmtree(old)
