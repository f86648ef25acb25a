"""What happens to the others when one rank ends: the job aborts, or they are told."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from types import TracebackType
from typing import Any

from mpi4py import MPI

from relaxmpi.primitives.comm import open_comms

__all__ = ["install"]

_log = logging.getLogger("relaxmpi")
_installed_in = 0


def install() -> None:
    """Chain the exception hooks and the exit of this process, once."""
    global _installed_in
    if _installed_in == os.getpid():
        return
    _installed_in = os.getpid()
    before, before_thread = sys.excepthook, threading.excepthook

    def on_exception(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        _abort(f"{kind.__name__}: {error}")

    def on_thread_exception(said: Any) -> None:
        before_thread(said)
        if not issubclass(said.exc_type, SystemExit):
            name = said.thread.name if said.thread else "a thread"
            _abort(f"{said.exc_type.__name__} in thread {name!r}: {said.exc_value}")

    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception
    atexit.register(_on_exit)


def _ours() -> bool:
    return (
        os.getpid() == _installed_in
        and MPI.Is_initialized()
        and not MPI.Is_finalized()
        and MPI.COMM_WORLD.size > 1
    )


def _abort(why: str) -> None:
    if not _ours():
        return
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    sys.stdout.flush()
    print(f"relaxmpi: rank {rank} of {size} failed and ends the job: {why}", file=sys.stderr)
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)


def _on_exit() -> None:
    if not _ours():
        return
    for comm in list(open_comms):
        if comm.queue.broken is not None:
            # MPI's own shutdown waits for the peer that this rank has already waited for.
            _abort(f"its program ended, and a Comm had broken: {comm.queue.broken}")
        comm.leave()
