"""What happens to the others when one rank ends: the job aborts, or they are told."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

from mpi4py import MPI

from relaxmpi.primitives.world_mpi import open_comms, outliving

__all__ = ["install"]

_log = logging.getLogger("relaxmpi")
_installed_in = 0

# The launcher drops what a rank on another host has printed and it has not forwarded yet.
_FORWARDING = 0.3
# Two ranks that abort at the same moment can leave the launcher hanging: the lowest goes first.
_BETWEEN_RANKS = 0.25
_LONGEST_TURN = 2.0
_ABORTING = 5.0
_LEAVING = 2.0
_SENDING = 60.0


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
        with _unredirected():
            before(kind, error, trace)
        _abort(f"{kind.__name__}: {error}")

    def on_thread_exception(said: Any) -> None:
        with _unredirected():
            before_thread(said)
        if not issubclass(said.exc_type, SystemExit):
            name = said.thread.name if said.thread else "a thread"
            _abort(f"{said.exc_type.__name__} in thread {name!r}: {said.exc_value}")

    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception
    atexit.register(_on_exit)


def _unredirected() -> contextlib.AbstractContextManager[object]:
    """Print now: torch.distributed's own hook collects stderr to print it after this one."""
    return contextlib.redirect_stderr(sys.__stderr__ or sys.stderr)


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
    with _unredirected():
        print(f"relaxmpi: rank {rank} of {size} failed and ends the job: {why}", file=sys.stderr)
        sys.stderr.flush()
    time.sleep(_FORWARDING + min(_BETWEEN_RANKS * rank, _LONGEST_TURN))
    # Aborts of two ranks at once can block each other; MPICH's returns before the job ends.
    faulthandler.dump_traceback_later(_ABORTING, exit=True, file=sys.__stderr__ or sys.stderr)
    MPI.COMM_WORLD.Abort(1)
    time.sleep(2 * _ABORTING)


def _on_exit() -> None:
    if not _ours():
        return
    comms = list(open_comms)
    for comm in comms:
        if comm.queue.broken is not None:
            # MPI's own shutdown waits for the peer that this rank has already waited for.
            _abort(f"its program ended, and a Comm had broken: {comm.queue.broken}")
        comm.leave()
    # A peer that still needs this rank aborts the job now, which is best not met inside MPI's
    # shutdown; where all leave, this is over at once.
    end = time.monotonic() + _LEAVING
    while time.monotonic() < end and not all(comm.left_alone() for comm in comms):
        time.sleep(1e-3)
    # What was sent lies in memory that the interpreter frees before MPI's shutdown.
    end = time.monotonic() + _SENDING
    while outliving and time.monotonic() < end:
        outliving[:] = [send for send in outliving if not send.test()]
        time.sleep(1e-4)
