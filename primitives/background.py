"""Progress while the caller computes."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from relaxmpi.primitives.errors import RelaxError
from relaxmpi.primitives.work import run_in_background

if TYPE_CHECKING:
    from typing_extensions import Self

    from relaxmpi.primitives.queue import Queue

__all__ = ["Background"]

# Large messages move a little at each poll; the pause leaves the interpreter to the caller.
_POLLS = 16
_PAUSE = 5e-5
# Nobody waits for what only arrives, such as the messages of an open endpoint.
_LONGER = 2e-4


class Background:
    """A thread that advances the pending works of one queue until it is closed.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> with rx.Comm.world() as comm, comm.background():
        ...     work = rx.allreduce.start(comm, np.ones(2))
        ...     work.wait()
        array([1., 1.])
    """

    def __init__(self, queue: Queue) -> None:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RelaxError(
                "background() needs an MPI library at MPI_THREAD_MULTIPLE; this one gave less. "
                "Call comm.progress() between pieces of computation instead"
            )
        if queue.filled is not None:
            raise RelaxError("this Comm has a background thread already")
        self._queue = queue
        self._filled = self._queue.filled = threading.Event()
        if self._queue.busy:
            self._filled.set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="relaxmpi-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        run_in_background()
        while not self._closing:
            self._filled.wait()
            self._filled.clear()
            while self._queue.busy and not self._closing:
                waited_for = not self._queue.all_idle
                for _ in range(_POLLS if waited_for else 1):
                    self._queue.progress()
                    os.sched_yield()
                time.sleep(_PAUSE if waited_for else _LONGER)

    def close(self) -> None:
        """Stop the thread; pending works go on when they are waited for. Twice does nothing."""
        if self._closing:
            return
        self._closing = True
        self._filled.set()
        self._thread.join()
        self._queue.filled = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.close()
