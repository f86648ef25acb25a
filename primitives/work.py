"""Works: the handles of started primitives, and the flows behind them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from relaxmpi.primitives.errors import RelaxError
from relaxmpi.primitives.transport import Request

if TYPE_CHECKING:
    from relaxmpi.primitives.queue import Queue

__all__ = [
    "Flow",
    "Patience",
    "Work",
    "agreed",
    "here",
    "in_background",
    "run_in_background",
    "running_queue",
]

T = TypeVar("T")
Flow = Generator[Request, None, T]

_log = logging.getLogger("relaxmpi")
# Of this thread: whose flow it is advancing, and whether that is all that it does. Set without a
# call, at whose beginning a signal's handler may raise.
here = threading.local()


def running_queue() -> Queue | None:
    """Return the queue whose flow this thread is advancing, if any."""
    return getattr(here, "queue", None)


def in_background() -> bool:
    """Whether this thread is one that only makes progress."""
    return getattr(here, "background", False)


def run_in_background() -> None:
    """Note that this thread only makes progress."""
    here.background = True


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
        self._error = None  # first: a signal's handler may end all this here
        self._queue, self._flow, self._request = queue, flow, None
        self._done, self._seen = False, False
        self.call, self.patience = call, patience
        self.ended = 0.0
        self.seq = patience.begin()
        self.post()

    def post(self) -> None:
        """Begin to wait for something new."""
        self.posted = self._queue.moved = self._queue.now()
        self.waited = 0.0

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
        before = running_queue()
        try:
            here.queue = self._queue
            self._request = next(self._flow) if failed is None else self._flow.throw(failed)
        except StopIteration as stop:
            self._value = stop.value
        except BaseException as error:
            self._error = error
        else:
            self.post()
            return False
        finally:
            here.queue = before
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
