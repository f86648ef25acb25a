"""Works and the in-order queue that drives them: the CPU's counterpart of a CUDA stream."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

from relaxmpi.primitives.errors import BrokenComm, RelaxError
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.world import World

__all__ = [
    "Flow",
    "Patience",
    "Queue",
    "Work",
    "agreed",
    "in_background",
    "run_in_background",
    "running_queue",
]

T = TypeVar("T")
Flow = Generator[Request, None, T]

_log = logging.getLogger("relaxmpi")
_here = threading.local()
_WATCH_EVERY = 1e-3
WORTH_WATCHING = 1e-2


def running_queue() -> Queue | None:
    """Return the queue whose flow this thread is advancing, if any."""
    return getattr(_here, "queue", None)


def in_background() -> bool:
    """Whether this thread is one that only makes progress."""
    return getattr(_here, "background", False)


def run_in_background() -> None:
    """Note that this thread only makes progress."""
    _here.background = True


def agreed(error: BaseException) -> bool:
    """Whether all ranks raise this error of a call, so that their streams stay in step."""
    return getattr(error, "agreed", False) is True


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
        "_seen",
        "_value",
        "call",
        "ended",
        "patience",
        "posted",
        "seq",
        "waited",
    )

    _error: BaseException | None
    _request: Request | None
    _value: T

    def __init__(
        self, queue: Queue, flow: Flow[T], call: Callable[[], str], patience: Patience
    ) -> None:
        self._queue, self._flow, self._request = queue, flow, None
        self._done, self._error, self._seen = False, None, False
        self.call, self.patience = call, patience
        self.ended = 0.0
        self.seq = patience.begin()
        self.post()

    def post(self) -> None:
        """Begin to wait for something new."""
        self.posted, self.waited = self._queue.now(), 0.0

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
        self._seen = True
        if self._error is not None:
            raise self._error
        return self._value

    def __del__(self) -> None:
        if self._error is not None and not self._seen:
            _log.error("nobody waited for a call that failed: %s", self._error)

    @property
    def request(self) -> Request | None:
        """What the flow waits for now."""
        return self._request

    def synchronize(self) -> T:
        """Wait until the host may read the result; on the CPU the same as `wait`."""
        return self.wait()

    def _advance(self) -> bool:
        """Run the flow until it ends (True) or must wait for its request (False)."""
        while True:
            failed = None
            if self._request is not None:
                try:
                    if not self._request.test():
                        return False
                except Exception as error:
                    if not hasattr(error, "Get_error_class"):
                        raise  # a signal handler's: the flow stays as it is
                    failed = error
            if self._run(failed):
                return True

    def _run(self, failed: Exception | None) -> bool:
        before, _here.queue = running_queue(), self._queue
        try:
            self._request = next(self._flow) if failed is None else self._flow.throw(failed)
        except StopIteration as stop:
            self._value = stop.value
        except BaseException as error:
            self._error = error
        else:
            self.post()
            return False
        finally:
            _here.queue = before
        self._done = True
        self.ended = self._queue.now()
        self.patience.end()
        return True

    def _fail(self, error: BaseException) -> None:
        self._error, self._done = error, True


class Patience(Protocol):
    """Who counts the calls of a Comm and looks after one that does not move."""

    size: int

    def begin(self) -> int:
        """Count a call that starts and return its number."""

    def end(self) -> None:
        """Count a call that ended."""

    def look(self, work: Work[Any]) -> RelaxError | None:
        """Return the error that breaks the queue, or None to go on waiting."""

    def due(self, work: Work[Any]) -> float:
        """Return the seconds of waiting after which a look does something by itself."""

    def give_up(self, work: Work[Any]) -> None:
        """Tell the peers that this rank will not finish a call."""


class Queue:
    """Flows in start order, one advancing at a time, under one lock.

    Args:
        stats: Where the time spent waiting is counted.
        world: Whose clock runs.
        beside: A queue to share the lock with: whoever moves or waits for one moves both.
    """

    def __init__(self, stats: Stats, world: World, beside: Queue | None = None) -> None:
        self._works: deque[Work[Any]] = deque()
        self._lock: threading.Lock = threading.Lock() if beside is None else beside._lock
        self._stats, self._world = stats, world
        self.now: Callable[[], float] = world.now
        self._watched = 0.0
        self.broken: RelaxError | None = None
        self.filled: threading.Event | None = None
        self.together: list[Queue] = [] if beside is None else beside.together
        self.together.append(self)
        # What looks after messages that nobody waits for, whenever somebody looks.
        self.pollers: list[Callable[[], None]] = [] if beside is None else beside.pollers

    def __len__(self) -> int:
        return len(self._works)

    def first(self) -> str:
        """Say which call is the head."""
        return self._works[0].call()

    def movable(self) -> list[Work[Any]]:
        """Return the works whose requests may complete next."""
        return [self._works[0]] if self._works else []

    @property
    def idle(self) -> bool:
        """Whether nothing is pending."""
        return not self._works

    @property
    def all_idle(self) -> bool:
        """Whether nothing is pending here or in a queue that moves with this one."""
        return all(queue.idle for queue in self.together)

    def submit(self, flow: Flow[T], call: Callable[[], str], patience: Patience) -> Work[T]:
        """Append a flow and let it run as far as it can."""
        return self._take(Work(self, flow, call, patience), None)

    def _take(self, work: Work[T], request: Request | None) -> Work[T]:
        """Append a work that waits for a request, or has not begun."""
        work._request = request
        with self._lock:
            self._works.append(work)
            self._advance()
        if not work._done:
            self._rouse()
        return work

    def poll(self, poller: Callable[[], None]) -> None:
        """Call this from now on whenever somebody looks, in whatever thread, under the lock."""
        with self._lock:
            self.pollers.append(poller)
        self._rouse()

    def unpoll(self, poller: Callable[[], None]) -> None:
        """Call it no more."""
        with self._lock:
            self.pollers.remove(poller)

    def _rouse(self) -> None:
        for queue in self.together:
            if queue.filled is not None:
                queue.filled.set()

    @property
    def busy(self) -> bool:
        """Whether there is anything to look after."""
        return bool(self.pollers) or not self.all_idle

    def close(self) -> None:
        """Leave the queues that move together."""
        with self._lock:
            if self in self.together:
                self.together.remove(self)

    def inside(self) -> bool:
        """Whether this thread is advancing a flow of this queue, or of one that moves with it."""
        running = running_queue()
        return running is not None and running.together is self.together

    def progress(self) -> None:
        """Advance whatever can move; never blocks on a peer."""
        if self.inside():
            return
        with self._lock:
            self._move()
        self._world.polled()

    def wait(self, work: Work[Any], timeout: float | None) -> None:
        """Drive the queue until `work` is done, the time is over or the queue breaks."""
        if self.inside():
            raise RelaxError(
                f"{work.call()}: a blocking call inside a primitive would wait for itself; "
                "write `yield from verb.flow(...)` there"
            )
        recorder = self._world.recorder
        if recorder is not None:
            recorder.enter()
        begin = self.now()
        try:
            while not work._done:
                with self._lock:
                    waited = self._move() - begin
                if work._done:
                    break
                if timeout is not None and waited > timeout:
                    late = f"{work.call()} was not done after {timeout:g} s; still pending"
                    raise TimeoutError(late)
                self._world.rest(self, waited, timeout)
        finally:
            end = self.now()
            self._stats.waited += end - begin
            if recorder is not None:
                recorder.waited(begin, end, work.call)

    def _move(self) -> float:
        for poll in self.pollers:
            poll()
        for queue in self.together:
            if not queue.idle:
                queue._advance()
        now = self.now()
        for queue in self.together:
            if queue._works and now - queue._watched > _WATCH_EVERY:
                queue._watch(now)
        return now

    def _advance(self) -> None:
        works = self._works
        while works and works[0]._advance():
            head = works.popleft()
            error = head._error
            if error is not None and head.patience.size > 1 and not agreed(error):
                self._fail(head, error)
                return
            if works:
                works[0].post()

    def _fail(self, work: Work[Any], error: BaseException) -> None:
        """Break, because a call ended in the middle on this rank; the others must hear of it."""
        work.patience.give_up(work)
        # The traceback keeps the memory alive that messages under way may still be written to.
        self._world.keep(error)
        self._break(
            BrokenComm(
                f"{work.call()} failed in the middle on this rank ({type(error).__name__}: "
                f"{error}), when others may have finished it: this Comm cannot be used any more"
            )
        )
        if not isinstance(error, Exception):
            raise error

    def _watch(self, now: float) -> None:
        """Ask whether the head has waited too long.

        Only time in which this rank looks counts: a peer must not be blamed for a pause here.
        """
        head = self._works[0]
        head.waited += min(now - max(self._watched, head.posted), self._world.look)
        self._watched = now
        if head.waited > WORTH_WATCHING:
            error = head.patience.look(head)
            if error is not None:
                self._works.popleft()._fail(error)
                self._world.keep(head)
                self._break(error)

    def _break(self, error: RelaxError) -> None:
        self.broken = error
        self._fail_all(error)
        _log.error("%s", error)

    def _fail_all(self, error: RelaxError) -> None:
        self._world.keep(self._works)
        works, self._works = self._works, deque()
        for work in works:
            work._fail(BrokenComm(f"{work.call()} was queued behind a call that failed: {error}"))
