"""What looks after a simulated world from outside: a rank that blocks for real stops all."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from types import FrameType
from typing import TYPE_CHECKING

from relaxmpi.primitives.errors import RelaxError

if TYPE_CHECKING:
    from relaxmpi.primitives.simulation.scheduler import Scheduler

__all__ = ["Watchdog"]

_log = logging.getLogger("relaxmpi")
_LOOKS = 20  # in the time after which it reports
_GIVE_UP = 6  # times that, without using the processor: not a computation, but a lock
_IDLE = 0.1
_SHOWN = 8  # calls at each end of a stack


class Watchdog:
    """Reports the stack of a rank that keeps the baton for long, and ends a world that is stuck.

    Only its own looks count, never the time between them: a machine that is stopped for a while
    must not be taken for a rank that is.
    """

    def __init__(self, scheduler: Scheduler, seconds: float) -> None:
        self._scheduler, self._seconds = scheduler, seconds

    def wait(self, done: threading.Event) -> None:
        """Wait for the end of the world; RelaxError where a rank blocks for real."""
        every = self._seconds / _LOOKS
        steps, looks, used = -1, 0, 0.0
        while not done.wait(every):
            if self._scheduler.steps != steps:
                steps, looks, used = self._scheduler.steps, 0, time.process_time()
                continue
            looks += 1
            if looks == _LOOKS:
                _log.warning("%s", self._words(looks * every))
            busy = time.process_time() - used
            if looks >= _GIVE_UP * _LOOKS and busy < _IDLE * looks * every:
                raise RelaxError(self._words(looks * every))

    def _words(self, seconds: float) -> str:
        rank = self._scheduler.holder
        frame = sys._current_frames().get(rank.thread.ident or 0)
        stack = _of_the_program(frame) if frame else "(it has just ended)"
        return (
            f"rank {rank.index} of the simulated world has run for {seconds:.3g} real seconds "
            "without a call that lets others run: it computes for long, or it waits for a real "
            f"lock that another rank holds across a call. It is at\n{stack}"
        )

    def left(self, ranks: list[int]) -> None:
        """Say whose threads could not be ended."""
        if ranks:
            _log.error("the threads of ranks %s block for real and could not be ended", ranks)


def _of_the_program(frame: FrameType) -> str:
    """The stack below `run`, without the middle of a deep one."""
    calls = traceback.format_stack(frame)
    inside = [k for k, call in enumerate(calls) if "result = fn(*args)" in call]
    calls = calls[inside[-1] + 1 :] if inside else calls
    if len(calls) > 2 * _SHOWN:
        calls = [*calls[:_SHOWN], "  ...\n", *calls[-_SHOWN:]]
    return "".join(calls)
