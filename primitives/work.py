"""Works and the in-order queue that drives them: the CPU's counterpart of a CUDA stream."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

from relaxmpi.primitives.errors import BrokenComm, RelaxError
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.transport import Request

__all__ = ["Flow", "Patience", "Queue", "Work", "running_queue"]

T = TypeVar("T")
Flow = Generator[Request, None, T]

_log = logging.getLogger("relaxmpi")
_here = threading.local()
# Sleeping costs a wake-up per step of a collective; yielding costs nobody who has work to do.
_SPIN = 1e-2
_ALONE = 1e-4
_LONGEST_SLEEP = 5e-4
_WATCH_EVERY = 1e-3

# Whatever MPI may still write to when a Comm broke: kept until the process ends.
_kept: list[object] = []


def running_queue() -> Queue | None:
    """Return the queue whose flow this thread is advancing, if any."""
    return getattr(_here, "queue", None)


class Work(Generic[T]):
    """The handle of a started primitive.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> with rx.Comm.world() as comm:
        ...     work = rx.allreduce.start(comm, np.ones(3), op=rx.MEAN)
        ...     work.wait()
        array([1., 1., 1.])
    """

    __slots__ = (
        "_done",
        "_error",
        "_flow",
        "_queue",
        "_request",
        "_value",
        "call",
        "posted",
        "seq",
    )

    def __init__(self, queue: Queue, flow: Flow[T], call: Callable[[], str], seq: int) -> None:
        self._queue, self._flow, self._request = queue, flow, None
        self._done, self._error = False, None
        self._value: T
        self.call, self.seq = call, seq
        self.posted: float = 0.0

    _request: Request | None
    _error: BaseException | None

    def test(self) -> bool:
        """Make progress and say whether the work is done, well or badly; never blocks."""
        if not self._done:
            self._queue.progress()
        return self._done

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: Seconds to wait. When they are over TimeoutError is raised and the work
                stays pending. None waits as long as the Comm's own timeout allows.
        """
        if not self._done:
            self._queue.wait(self, timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def synchronize(self) -> T:
        """Wait until the host may read the result; on the CPU the same as `wait`."""
        return self.wait()

    def _advance(self) -> bool:
        """Run the flow until it ends (True) or must wait for its request (False)."""
        request = self._request
        before, _here.queue = running_queue(), self._queue
        try:
            while True:
                if request is not None and not request.test():
                    self._request = request
                    return False
                request = next(self._flow)
                self.posted = time.perf_counter()
        except StopIteration as stop:
            self._value = stop.value
        except BaseException as error:
            self._error = error
        finally:
            _here.queue = before
        self._request, self._done = None, True
        return True

    def _fail(self, error: BaseException) -> None:
        self._error, self._done = error, True


class Patience(Protocol):
    """Who looks after a queue that does not move: timeouts, and peers that left."""

    def look(self, work: Work[Any], waited: float) -> RelaxError | None:
        """Return the error that breaks the queue, or None to go on waiting."""


class Queue:
    """Flows in start order, one advancing at a time, under one lock."""

    def __init__(self, patience: Patience, stats: Stats, crowded: bool) -> None:
        self._works: deque[Work[Any]] = deque()
        self._lock = threading.Lock()
        self._patience, self._stats = patience, stats
        # Where every rank has a core, giving it away while the peer answers only costs.
        self._spin = 0.0 if crowded else _ALONE
        self._watched = 0.0
        self.broken: RelaxError | None = None
        self.submitted = 0
        self.finished = 0
        self.filled: threading.Event | None = None

    def __len__(self) -> int:
        return len(self._works)

    @property
    def idle(self) -> bool:
        """Whether nothing is pending."""
        return not self._works

    def submit(self, flow: Flow[T], call: Callable[[], str]) -> Work[T]:
        """Append a flow and let it run as far as it can."""
        work = Work(self, flow, call, self.submitted)
        self.submitted += 1
        work.posted = time.perf_counter()
        with self._lock:
            self._works.append(work)
            self._advance()
        if self.filled is not None and not work._done:
            self.filled.set()
        return work

    def progress(self) -> None:
        """Advance whatever can move; never blocks on a peer."""
        if running_queue() is self:
            return
        with self._lock:
            self._advance()
            self._watch()

    def wait(self, work: Work[Any], timeout: float | None) -> None:
        """Drive the queue until `work` is done, the time is over or the queue breaks."""
        if running_queue() is self:
            raise RelaxError(
                f"{work.call()}: a blocking call inside a primitive would wait for itself; "
                "write `yield from verb.flow(...)` there"
            )
        begin = time.perf_counter()
        pause = 2e-5
        while not work._done:
            with self._lock:
                self._advance()
                now = self._watch()
            if work._done:
                break
            waited = now - begin
            if timeout is not None and waited > timeout:
                raise TimeoutError(f"{work.call()} was not done after {timeout:g} s; still pending")
            if waited > _SPIN:
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_SLEEP)
            elif waited >= self._spin:
                os.sched_yield()
        self._stats.waited += time.perf_counter() - begin

    def _advance(self) -> None:
        works = self._works
        while works and works[0]._advance():
            works.popleft()
            self.finished += 1
            if works:
                works[0].posted = time.perf_counter()

    def _watch(self) -> float:
        """Now and then, ask whether the head has waited too long."""
        now = time.perf_counter()
        if now - self._watched > _WATCH_EVERY and self._works:
            self._watched = now
            head = self._works[0]
            waited = now - head.posted
            if waited > _SPIN:
                error = self._patience.look(head, waited)
                if error is not None:
                    self._break(error)
        return now

    def _break(self, error: RelaxError) -> None:
        _kept.extend(self._works)
        self.broken = error
        works, self._works = self._works, deque()
        first = works.popleft()
        first._fail(error)
        for work in works:
            work._fail(BrokenComm(f"{work.call()} was queued behind a call that failed: {error}"))
        _log.error("%s", error)
