"""Agreement on what happened to files: all ranks go on, or all raise the same error."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

import numpy as np

from relaxmpi.primitives.comm import Comm
from relaxmpi.primitives.errors import CheckpointError
from relaxmpi.primitives.ops import MAX
from relaxmpi.primitives.verbs import allreduce, broadcast

__all__ = ["in_pieces", "together"]

_TEXT = 1500
_PIECE = 2.0


def together(comm: Comm, what: str, do: Callable[[], None]) -> None:
    """Do something on every rank; if it fails on any, raise on all."""

    def whole() -> Generator[None, None, None]:
        do()
        yield

    in_pieces(comm, what, whole(), seconds=float("inf"))


def in_pieces(
    comm: Comm,
    what: str,
    work: Generator[None, None, None],
    *,
    seconds: float | None = None,
    report: Callable[[], None] = lambda: None,
) -> None:
    """Run an iterator to its end on every rank, with an agreement every few seconds.

    A rank that has less to do waits in short calls, so that the Comm's timeout does not limit
    how long files may take.

    Args:
        comm: Whose ranks work.
        what: What they do, for messages.
        work: Makes progress each time it is advanced.
        seconds: Between two agreements; a share of the Comm's timeout by default.
        report: Called on every rank after each agreement but the last.

    Raises:
        CheckpointError: On every rank, with what the first rank that failed says.
        BaseException: KeyboardInterrupt and SystemExit go on as themselves where they came.
    """
    piece = min(_PIECE, comm.settings.timeout / 10) if seconds is None else seconds
    busy = True
    failed: BaseException | None = None
    while True:
        until = time.monotonic() + piece
        try:
            while busy:
                busy = next(work, comm) is None
                if time.monotonic() > until:
                    break
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            failed, busy = error, False
        # The largest is that of the lowest rank.
        mine = np.array([0 if failed is None else comm.size - comm.rank, busy], np.int64)
        culprit, going = allreduce(comm, mine, op=MAX, name="checkpoint").tolist()
        if culprit:
            work.close()
            raise _agreed(comm, what, failed, comm.size - culprit)
        if not going:
            return
        report()


def _agreed(comm: Comm, what: str, failed: BaseException | None, rank: int) -> BaseException:
    why = (
        str(failed) if isinstance(failed, CheckpointError) else f"{type(failed).__name__}: {failed}"
    )
    said = f"{what}: {why}".encode(errors="replace")[:_TEXT].ljust(_TEXT)
    text = np.frombuffer(said, np.uint8).copy()
    told = broadcast(comm, text, root=rank, name="why a checkpoint failed").tobytes()
    if failed is not None and not isinstance(failed, Exception):
        return failed
    where = f" (on rank {rank})" if comm.size > 1 else ""
    error = CheckpointError(f"{told.decode(errors='replace').strip()}{where}")
    error.__cause__ = failed
    return error
