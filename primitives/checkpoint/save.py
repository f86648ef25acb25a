"""`save`: write a checkpoint, together."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Generator, Sequence
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np

from relaxmpi.primitives.checkpoint.arrays import Raw, stored
from relaxmpi.primitives.checkpoint.folder import INDEX, Draft
from relaxmpi.primitives.checkpoint.index import CHUNK, SHARED, Index, Seal, rank_file
from relaxmpi.primitives.checkpoint.tensors import header
from relaxmpi.primitives.checkpoint.things import Thing, adapt
from relaxmpi.primitives.checkpoint.together import in_pieces, together
from relaxmpi.primitives.checkpoint.tree import Encoder
from relaxmpi.primitives.comm import Comm
from relaxmpi.primitives.errors import CheckpointError
from relaxmpi.primitives.ops import MAX
from relaxmpi.primitives.primitive import primitive
from relaxmpi.primitives.verbs import allgather, allreduce, barrier, broadcast
from relaxmpi.primitives.work import Flow

__all__ = ["save"]

_log = logging.getLogger("relaxmpi")
_DIGEST = 16
_FLUSH = 256 << 20
_SEAL = 8 + 32


def save(
    path: str | os.PathLike[str], comm: Comm, *, keep: int | None = None, **things: Any
) -> Path:
    """Write a checkpoint of all ranks into a folder of checkpoints; collective.

    What the ranks have in common, such as the model, is written once; what they have for
    themselves, such as residuals, once a rank. With `load`, going on equals never having stopped,
    bit for bit. The checkpoint is complete or absent, whenever a process is killed: `path` holds
    numbered ones, 00000001 and so on, and the newest is always loadable. They contain numbers and
    JSON, in files of the safetensors format, and no code.

    Messages in flight are waited for, so all ranks must be at the same place of the program, and
    `attach` between two steps. The counters of `comm` (`comm.steps`) are saved with it.

    Args:
        path: The folder, seen by all ranks. One job at a time may write to it.
        comm: The ranks.
        keep: Remove all but this many checkpoints once the new one is complete; None keeps all.
        **things: Whatever has `state_dict` and `load_state_dict`: bound algorithms, what `attach`
            returns, `ErrorFeedback`, torch modules, optimizers and schedulers. Arrays and tensors.
            Generators of random numbers of torch, numpy and Python. Plain values (numbers, text,
            lists, dicts, ...), which may differ between ranks too.

    Returns:
        The checkpoint's own folder.

    Raises:
        CheckpointError: On every rank, if any of them cannot write or does not see the folder.
        TypeError: A thing cannot be saved; MismatchError where other ranks' can.
        ValueError: An attached optimizer would be saved without what its algorithm needs.

    Example:
        >>> import numpy as np, relaxmpi as rx, tempfile
        >>> x = np.zeros(2)
        >>> with rx.Comm.world() as comm, tempfile.TemporaryDirectory() as folder:
        ...     opt = rx.SGD(momentum=0.9).bind(comm, x, lr=0.5)
        ...     opt.step(np.ones(2))
        ...     path = rx.save(folder, comm, keep=2, x=x, opt=opt, step=1)
        ...     opt.step(np.ones(2))
        ...     rx.load(folder, comm, x=x, opt=opt), x
        ({'step': 1}, array([-0.5, -0.5]))
    """
    found = adapt(things)
    _saving(comm, found, keep)
    found.extend(adapt({"comm": comm}))
    mine = _Mine()
    for thing in found:
        together(comm, f"save, before {thing.name}", thing.quiesce)
    for thing in found:  # one after the other: the state of some is told together
        together(comm, f"save {thing.name}", partial(mine.ask, thing))
    in_pieces(comm, "save", mine.condense(alone=comm.size == 1))
    mine.divide(comm)
    drafts: list[Draft] = []
    try:
        return _write(comm, Path(path), keep, mine, drafts)
    except BaseException:
        for draft in drafts:
            draft.abandon()
        raise


@primitive
def _saving(comm: Comm, things: Sequence[Thing], keep: int | None) -> Flow[None]:
    """Agree on what is saved."""
    if keep is not None and not (isinstance(keep, int) and keep > 0):
        raise ValueError(f"keep must be a number of checkpoints, 1 or more, or None, not {keep!r}")
    for thing in things:
        if thing.name == "comm" or thing.name.startswith("__"):
            raise ValueError(f"the name {thing.name} is taken: comm is the Comm's own counters")
        if missing := thing.alone(things):
            raise ValueError(missing)
    return barrier.flow(comm, name=f"save {[(t.name, t.kind) for t in things]}, keep {keep}")


_saving.__name__ = "save"  # as messages call it


class _Mine:
    """What this rank has to say, and which of it all ranks have in common."""

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._things: dict[str, dict[str, Any]] = {}
        self._arrays_of: dict[str, list[str]] = {}
        self._digests: dict[tuple[str, str], bytes] = {}
        self._common: set[bytes] | None = None

    def ask(self, thing: Thing) -> None:
        """Ask a thing for its state."""
        encoder = self._encoder
        encoder.named = []
        tree = encoder.encode(thing.state(), thing.name)
        self._things[thing.name] = {"kind": thing.kind, "tree": tree}
        self._arrays_of[thing.name] = encoder.named

    def condense(self, alone: bool) -> Generator[None, None, None]:
        """Unless this rank is alone, digest what there is, piece by piece."""
        if alone:
            return
        for name, told in self._things.items():
            self._digests["thing", name] = _digest(name, json.dumps(told))
        for name, raw in self._encoder.arrays.items():
            self._digests["array", name] = _digest(name, raw.dtype, raw.shape, raw.data)
            yield

    def divide(self, comm: Comm) -> None:
        """Find out what all ranks have in common; collective."""
        if comm.size == 1:
            return
        count = allreduce(comm, len(self._digests), op=MAX, name="save, how much")
        said = np.zeros((count, _DIGEST), np.uint8)
        for row, digest in zip(said, self._digests.values(), strict=False):
            row[:] = np.frombuffer(digest, np.uint8)
        heard = allgather(comm, said, name="save, what")
        rows = ({row.tobytes() for row in rank} for rank in heard)
        self._common = set.intersection(*rows)

    def _shared(self, what: str, name: str) -> bool:
        return self._common is None or self._digests[what, name] in self._common

    def _whole(self, name: str) -> bool:
        """Whether a thing is the same on all ranks, with all that it refers to."""
        arrays = self._arrays_of[name]
        return self._shared("thing", name) and all(self._shared("array", a) for a in arrays)

    def part(self, shared: bool) -> tuple[bytes, list[np.ndarray]]:
        """Return header and numbers of the file with what is shared, or with the rest."""
        names = [n for n in self._encoder.arrays if self._shared("array", n) is shared]
        raws = {n: self._encoder.arrays[n] for n in names}
        names.sort(key=lambda n: -_width(raws[n]))  # so that all numbers are aligned
        things = {n: told for n, told in self._things.items() if self._whole(n) is shared}
        entries = [(n, *stored(raws[n].dtype, raws[n].shape)) for n in names]
        head = header(entries, {"format": "pt", "relaxmpi": json.dumps(things)})
        return head, [raws[n].data for n in names]

    @property
    def private(self) -> bool:
        """Whether there is anything that not all ranks have in common."""
        return not all(self._whole(name) for name in self._things)


def _width(raw: Raw) -> int:
    return len(raw.data) // max(1, int(np.prod(raw.shape)))


def _digest(*parts: Any) -> bytes:
    digest = blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part.data if isinstance(part, np.ndarray) else f"{part!r}\0".encode())
    return digest.digest()


def _write(comm: Comm, parent: Path, keep: int | None, mine: _Mine, drafts: list[Draft]) -> Path:
    def begin() -> None:
        if comm.rank == 0:
            drafts.append(Draft(parent))

    together(comm, f"save to {parent}", begin)
    name = np.zeros(64, np.uint8)
    if drafts:
        told = drafts[0].folder.name.encode()
        name[: len(told)] = np.frombuffer(told, np.uint8)
    folder = parent / broadcast(comm, name, name="save, where").tobytes().rstrip(b"\0").decode()

    seals = np.zeros((2, _SEAL), np.uint8)
    done = _Progress(comm.rank == 0, parent)

    def write() -> Generator[None, None, None]:
        yield from _see(folder)
        if comm.rank == 0:
            yield from _write_file(folder / SHARED, *mine.part(shared=True), seals[0], done)
        if mine.private:
            own = folder / rank_file(comm.rank)
            yield from _write_file(own, *mine.part(shared=False), seals[1], done)

    in_pieces(comm, f"save to {parent}", write(), report=done.report)
    heard = allgather(comm, seals, name="save, seals")

    def finish() -> None:
        if not drafts:
            return
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} has gone meanwhile: another job saves to {parent}, too; give each job "
                "a folder of its own"
            )
        files = {SHARED: _opened(heard[0, 0])}
        if mine.private:
            files |= {rank_file(rank): _opened(seal) for rank, (_, seal) in enumerate(heard)}
        with (folder / INDEX).open("xb") as file:
            file.write(Index(comm.size, files).text())
            file.flush()
            os.fsync(file.fileno())
        drafts.pop().finish()

    final: Path = parent / folder.name.split(".")[0]
    draft = drafts[0] if drafts else None
    together(comm, f"save to {parent}", finish)
    if draft is not None and keep is not None:
        try:
            draft.keep(keep)
        except OSError as error:
            _log.warning(
                "%s is complete, but older checkpoints cannot be removed: %s", final, error
            )
    return final


def _see(folder: Path) -> Generator[None, None, None]:
    """Wait until this rank sees the folder that rank 0 has made: networks may take a moment."""
    until = time.monotonic() + 2.0
    while not folder.is_dir():
        if time.monotonic() > until:
            raise CheckpointError(
                f"{folder.parent} is not the folder that rank 0 sees, or another job saves there, "
                "too"
            )
        time.sleep(0.05)
        yield


class _Progress:
    """Says how far rank 0 is, if it takes seconds."""

    def __init__(self, speaks: bool, parent: Path) -> None:
        self.total = self.written = 0
        self._speaks, self._parent = speaks, parent

    def report(self) -> None:
        """Say it."""
        if self._speaks:
            _log.info(
                "checkpoint in %s: %.2f of %.2f GB written by rank 0",
                self._parent,
                self.written / 1e9,
                self.total / 1e9,
            )


def _write_file(
    path: Path, head: bytes, arrays: list[np.ndarray], seal: np.ndarray, done: _Progress
) -> Generator[None, None, None]:
    digest, size = sha256(), 0
    done.total += sum(map(len, arrays))
    with path.open("xb") as file:
        for data in (np.frombuffer(head, np.uint8), *arrays):
            for begin in range(0, len(data), CHUNK):
                piece = data[begin : begin + CHUNK].data
                file.write(piece)
                digest.update(piece)
                size += len(piece)
                done.written += len(piece)
                if size % _FLUSH < len(piece):  # a bounded time for each flush
                    file.flush()
                    os.fsync(file.fileno())
                yield
        file.flush()
        os.fsync(file.fileno())
    seal[:8] = np.frombuffer(size.to_bytes(8, "little"), np.uint8)
    seal[8:] = np.frombuffer(digest.digest(), np.uint8)


def _opened(seal: np.ndarray) -> Seal:
    text = seal.tobytes()
    return Seal(int.from_bytes(text[:8], "little"), text[8:].hex())
