"""`load`: go on from a checkpoint, together."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from relaxmpi.primitives.checkpoint.contents import Contents
from relaxmpi.primitives.checkpoint.folder import newest
from relaxmpi.primitives.checkpoint.index import Index, parse_index, read_index
from relaxmpi.primitives.checkpoint.things import Thing, adapt, mean_of
from relaxmpi.primitives.checkpoint.together import in_pieces, together
from relaxmpi.primitives.comm import Comm
from relaxmpi.primitives.errors import CheckpointError
from relaxmpi.primitives.primitive import primitive
from relaxmpi.primitives.verbs import barrier, broadcast
from relaxmpi.primitives.work import Flow

__all__ = ["load"]

_log = logging.getLogger("relaxmpi")


def load(
    path: str | os.PathLike[str], comm: Comm, *, missing_ok: bool = False, **things: Any
) -> dict[str, Any]:
    """Restore what `save` wrote; collective.

    Everything is checked on all ranks before anything is changed: sizes and SHA-256 of all files,
    names, shapes and dtypes. No code of a checkpoint is ever run.

    Another number of ranks may load it: what all ranks had in common is restored; arrays and
    modules that differed become their mean over the old ranks; what each rank had for itself, such
    as residuals and random numbers, is reset or left as it is, which a warning lists.

    Args:
        path: The folder given to `save`, of which the newest checkpoint is taken, or one of the
            checkpoints in it. Seen by all ranks.
        comm: The ranks.
        missing_ok: Change nothing and return an empty dict if there is no checkpoint.
        **things: By the names given to `save`, the objects, arrays and tensors to restore, in
            place. What is left out is not restored, and listed in a warning.

    Returns:
        The plain values by their names.

    Raises:
        CheckpointError: On every rank: there is no checkpoint, or some ranks do not see it, it is
            damaged, forged, of another model or of a newer library.

    Example:
        >>> import relaxmpi as rx, tempfile
        >>> with rx.Comm.world() as comm, tempfile.TemporaryDirectory() as folder:
        ...     rx.load(folder, comm, missing_ok=True).get("step", 0)
        0
    """
    found = adapt(things)
    _loading(comm, found, missing_ok)
    found.extend(adapt({"comm": comm}))
    place = _find(comm, Path(path), missing_ok)
    if place is None:
        return {}
    folder, index = place
    what = f"load {folder}"
    with Contents(folder, index, comm.rank % index.ranks) as contents:
        in_pieces(comm, what, contents.open(resized=comm.size != index.ranks))
        together(comm, what, lambda: _match(contents, found))
        lost = _restore(comm, what, contents, found)
        values: dict[str, Any] = {}
        together(comm, what, lambda: values.update(contents.values()))
        if comm.rank == 0:
            _warn(comm, contents, found, lost)
    return values


@primitive
def _loading(comm: Comm, things: Sequence[Thing], missing_ok: bool) -> Flow[None]:
    """Agree on what is loaded."""
    if any(thing.name == "comm" for thing in things):
        raise ValueError("the name comm is taken by the Comm's own counters")
    told = [(t.name, t.kind) for t in things]
    return barrier.flow(comm, name=f"load {told}, missing_ok {missing_ok}")


_loading.__name__ = "load"  # as messages call it


def _find(comm: Comm, path: Path, missing_ok: bool) -> tuple[Path, Index] | None:
    """Have all ranks open the checkpoint that rank 0 finds."""
    what = f"load {path}"
    told = np.zeros(32 + 64, np.uint8)
    texts: list[bytes] = []

    def look() -> None:
        chosen = newest(path) if comm.rank == 0 else None
        if chosen is not None:
            texts.append(read_index(_inside(path, chosen)))
            name = b"." if chosen == path else chosen.name.encode()
            told[:32] = np.frombuffer(sha256(texts[0]).digest(), np.uint8)
            told[32 : 32 + len(name)] = np.frombuffer(name, np.uint8)

    together(comm, what, look)
    heard = broadcast(comm, told, name="load, which").tobytes()
    name = heard[32:].rstrip(b"\0").decode()

    def see() -> Generator[None, None, None]:
        if not name and newest(path) is not None:
            raise CheckpointError(f"{newest(path)} is here, but rank 0 does not see it")
        if name and comm.rank:
            yield from _same(_inside(path, path / name), heard[:32], texts)

    in_pieces(comm, what, see())
    if not name:
        if missing_ok:
            return None
        raise CheckpointError(f"{what}: there is no checkpoint")
    folder, indices = path / name, list[Index]()
    together(comm, what, lambda: indices.append(parse_index(texts[0], folder)))
    return folder, indices[0]


def _inside(path: Path, chosen: Path) -> Path:
    if chosen != path and chosen.is_symlink():
        raise CheckpointError(f"{chosen} is a link, which may lead anywhere: give its target")
    return chosen


def _same(folder: Path, digest: bytes, texts: list[bytes]) -> Generator[None, None, None]:
    """Read the index that rank 0 has read: networks may take a moment to show it."""
    until = time.monotonic() + 2.0
    while True:
        try:
            text = read_index(folder)
            if sha256(text).digest() == digest:
                texts.append(text)
                return
            why = f"{folder} is another checkpoint than the one that rank 0 sees"
        except CheckpointError as error:
            why = f"{error}, which rank 0 sees"
        if time.monotonic() > until:
            raise CheckpointError(why)
        time.sleep(0.05)
        yield


def _match(contents: Contents, things: Sequence[Thing]) -> None:
    """Compare what is there with what it shall be loaded into, before anything is changed."""
    for thing in things:
        if thing.name not in contents.things:
            names = ", ".join(sorted(contents.things.keys() - {"comm"}))
            raise CheckpointError(f"there is no {thing.name} in it, only {names}")
        kind, node = contents.things[thing.name]
        if kind != thing.kind:
            raise CheckpointError(f"{thing.name} is {kind} in it, and {thing.kind} here")
        if differences := thing.differences(node):
            raise CheckpointError(f"{thing.name} is another one: {'; '.join(differences)}")
    for name in contents.things:
        contents.check(name)


def _restore(comm: Comm, what: str, contents: Contents, things: Sequence[Thing]) -> dict[str, str]:
    """Restore one thing after the other and say what was lost."""
    same_size = comm.size == contents.index.ranks
    lost: dict[str, str] = {}

    def restore(thing: Thing) -> None:
        replicated = thing.name in contents.shared
        if not same_size and thing.averaged and not replicated:
            thing.load(mean_of(contents.all_ranks(thing.name)))
            lost[thing.name] = "averaged"
        elif same_size:
            thing.load(contents.value(thing.name))
        else:
            lost[thing.name] = thing.load_resized(contents.value(thing.name), replicated)

    for thing in things:
        together(comm, f"{what}, {thing.name}", lambda thing=thing: restore(thing))  # type: ignore[misc]
    return {name: words for name, words in lost.items() if words}


def _warn(comm: Comm, contents: Contents, things: Sequence[Thing], lost: dict[str, str]) -> None:
    if contents.index.ranks != comm.size:
        _log.warning(
            "%s was saved by %d ranks and is loaded by %d: %s",
            contents.folder,
            contents.index.ranks,
            comm.size,
            "; ".join(f"{name}: {words}" for name, words in lost.items()) or "nothing is lost",
        )
    left = _left_out(contents, {thing.name for thing in things})
    if forgotten := sorted(left):
        _log.warning("%s: not restored: %s", contents.folder, ", ".join(forgotten))


def _left_out(contents: Contents, asked: set[str]) -> Iterator[str]:
    for name, (kind, _) in contents.things.items():
        if name not in asked and kind != "value":
            yield name
