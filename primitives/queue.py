"""The in-order queue that drives works: the CPU's counterpart of a CUDA stream."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, Protocol, TypeVar

from relaxmpi.primitives.agreement import nothing
from relaxmpi.primitives.errors import BrokenComm, RelaxError
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.work import Flow, Patience, Work, agreed, here
from relaxmpi.primitives.world import World

__all__ = ["WORTH_WATCHING", "Queue"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_log = logging.getLogger("relaxmpi")
_WATCH_EVERY = 1e-3
WORTH_WATCHING = 1e-2


def _kept(flow: Flow[T], result: list[T]) -> Flow[T]:
    """Keep what a flow returns, which a loop over it does not see."""
    value = yield from flow
    result.append(value)
    return value


class Once(Protocol[T_co]):
    """A call that ends with its first request, unless that takes long.

    Attributes:
        begun: Whether the peers may see that it has begun.
    """

    begun: bool

    def begin(self) -> bool:
        """Begin it, look once, and say whether it has ended well."""

    def end(self) -> T_co:
        """Return its result, if so."""

    def rest(self) -> Flow[T_co]:
        """Return the flow of what is left to do, if not; one that is not run changes nothing."""


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
        self.moved = 0.0  # when something was last begun to be waited for
        self.broken: RelaxError | None = None
        # What takes back, when this breaks, what peers could still act on.
        self.withdrawals: list[Callable[[], None]] = []
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
    def alone(self) -> bool:
        """Whether a call has this queue, and those that move with it, to itself."""
        if self.pollers or self.filled:
            return False
        for queue in self.together:
            if queue._works:
                return False
        return True

    @property
    def all_idle(self) -> bool:
        """Whether nothing is pending here or in a queue that moves with this one."""
        return all(queue.idle for queue in self.together)

    def submit(self, flow: Flow[T], call: Callable[[], str], patience: Patience) -> Work[T]:
        """Append a flow and let it run as far as it can."""
        return self._take(Work(self, flow, call, patience), None)

    def run(self, flow: Flow[T], call: Callable[[], str], patience: Patience) -> T:
        """Run a flow to its end and return its result.

        One that is `alone` and ends soon never becomes a work: the upkeep of a work costs as
        much as the messages of a call.
        """
        request: Request | None = None
        world, brisk = self._world, self._world.brisk
        if brisk and self.alone:
            result: list[T] = []
            flow = _kept(flow, result)
            begin = now = self.now()
            outer = getattr(here, "queue", None)
            try:
                here.queue = self
                # Not by `next`: a signal's handler may raise when a call returns, and the request
                # that it returned would be lost.
                for request in flow:
                    looked = late = False
                    while not late:
                        try:
                            if request.test():
                                break
                        except Exception as error:
                            if not hasattr(error, "Get_error_class"):
                                raise
                            request = flow.throw(error)
                            continue
                        now = self.now()
                        late = now - begin >= brisk
                        if not looked:
                            looked, self.moved = True, now
                        world.rest(self, now - begin, None)
                    else:
                        break
            except StopIteration:
                pass  # thrown into, the flow has ended
            except BaseException as error:
                work = Work(self, flow, call, patience)
                if getgeneratorstate(flow) == GEN_CLOSED:
                    self._ran_badly(work, error)
                else:  # a signal handler's: the messages are under way all the same
                    self._take(work, request)
                raise
            finally:
                here.queue = outer
            self._stats.waited += self.now() - begin
            if result:
                self._ran(patience)
                return result[0]
        return self._take(Work(self, flow, call, patience), request).wait()

    def run_once(self, once: Once[T], call: Callable[[], str], patience: Patience) -> T:
        """Run what is over after one request in most cases, and a work only where it is not.

        This queue is `alone`.
        """
        begin, work = self.now(), None
        outer = getattr(here, "queue", None)
        try:
            here.queue = self
            if not once.begin():
                work = Work(self, once.rest(), call, patience)
                self._take(work, None)
        except BaseException as error:
            if not once.begun:
                self._ran_badly(Work(self, nothing(), call, patience), error)
            elif work is None or not (work._done or self._works):
                # A signal handler's: the numbers are under way all the same.
                self._take(Work(self, once.rest(), call, patience), None)
            raise
        finally:
            here.queue = outer
        if work is not None:
            return work.wait()
        self._stats.waited += self.now() - begin
        self._ran(patience)
        return once.end()

    def _ran(self, patience: Patience) -> None:
        """Count a call that never became a work."""
        patience.begin()
        patience.end()

    def _ran_badly(self, work: Work[Any], error: BaseException) -> None:
        """Count such a call that failed, and see who must hear of it."""
        work.patience.end()
        if work.patience.size > 1 and not agreed(error):
            self._fail(work, error)

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
        running = getattr(here, "queue", None)
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
                self._withdraw()  # before anybody sees that the call has failed
                self._works.popleft()._fail(error)
                self._world.keep(head)
                self._break(error)

    def _break(self, error: RelaxError) -> None:
        self._withdraw()
        self.broken = error
        self._fail_all(error)
        _log.error("%s", error)

    def _withdraw(self) -> None:
        for withdraw in self.withdrawals:
            withdraw()

    def _fail_all(self, error: RelaxError) -> None:
        self._world.keep(self._works)
        works, self._works = self._works, deque()
        for work in works:
            work._fail(BrokenComm(f"{work.call()} was queued behind a call that failed: {error}"))
