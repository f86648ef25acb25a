"""Works that may complete in any order: the lane of the neighbour verbs beside a Comm's queue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from inspect import GEN_CLOSED, getgeneratorstate
from typing import TYPE_CHECKING, Any, TypeVar, cast

from relaxmpi.primitives.errors import RelaxError
from relaxmpi.primitives.queue import WORTH_WATCHING, Queue
from relaxmpi.primitives.work import Work, agreed

if TYPE_CHECKING:
    from relaxmpi.primitives.stats import Stats
    from relaxmpi.primitives.transport import Request
    from relaxmpi.primitives.work import Flow, Patience
    from relaxmpi.primitives.world import World

__all__ = ["Pool"]

T = TypeVar("T")


class Pool(Queue):
    """Works whose messages were posted when they were started; each ends when its own are there.

    An error stays with its work, because what the peers need of it is under way. Only a peer
    that does not come breaks the pool, and the queue beside it.

    Args:
        stats: Where the time spent waiting is counted.
        world: Whose clock runs.
        beside: The queue of the same Comm; whoever moves or waits for one moves both.
    """

    def __init__(self, stats: Stats, world: World, beside: Queue) -> None:
        super().__init__(stats, world, beside)
        self._beside = beside
        self._leaving: list[Request] = []

    @property
    def idle(self) -> bool:
        """Whether nothing is pending, nor on its way out."""
        return not (self._works or self._leaving)

    def movable(self) -> list[Work[Any]]:
        """Return all works: each may be the next to complete."""
        return list(self._works)

    def leave(self, sends: Sequence[Request]) -> None:
        """Look after sends that nobody waits for."""
        self._leaving = [send for send in (*self._leaving, *sends) if not send.test()]

    def run(self, flow: Flow[T], call: Callable[[], str], patience: Callable[[], Patience]) -> T:
        """Run a flow to its end and return its result.

        One that has this Comm to itself and ends soon never becomes a work: the upkeep of a work
        costs as much as the messages of a call.
        """
        request: Request | None = None
        if not (self.pollers or self._beside.filled or any(q._works for q in self.together)):
            begin, brisk = self.now(), self._world.brisk
            try:
                while (waited := self.now() - begin) < brisk:
                    try:
                        done = request is None or request.test()
                    except Exception as error:
                        if not hasattr(error, "Get_error_class"):
                            raise
                        request = flow.throw(error)
                        continue
                    if done:
                        request = next(flow)
                    else:
                        self._world.rest(self, waited, None)
            except StopIteration as stop:
                self._stats.waited += self.now() - begin
                return cast("T", stop.value)
            except BaseException as error:
                if getgeneratorstate(flow) == GEN_CLOSED:
                    self._world.keep(error)  # and with it memory that messages may write to
                else:  # a signal handler's: the messages are under way all the same
                    self._take(Work(self, flow, call, patience()), request)
                raise
            self._stats.waited += self.now() - begin
        return self._take(Work(self, flow, call, patience()), request).wait()

    def left(self) -> list[Request]:
        """Hand over the sends that nobody waits for."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def _advance(self) -> None:
        if self._leaving:
            self._leaving = [send for send in self._leaving if not send.test()]
        for work in list(self._works):
            if work._advance():
                with contextlib.suppress(ValueError):  # an error of another one broke the pool
                    self._works.remove(work)
                if work._error is not None:
                    # The traceback keeps the memory alive that messages may still be written to.
                    self._world.keep(work._error)
                    if not isinstance(work._error, Exception):
                        raise work._error

    def _watch(self, now: float) -> None:
        before, self._watched = self._watched, now
        for work in list(self._works):
            work.waited += min(now - max(before, work.posted), self._world.look)
            if work.waited <= WORTH_WATCHING:
                continue
            error = work.patience.look(work)
            if error is not None:
                self._works.remove(work)
                work._fail(error)
                self._world.keep(work)
                if not agreed(error):
                    self._break(error)
                    return

    def _break(self, error: RelaxError) -> None:
        if self._beside.broken is None:
            self._beside._break(error)
        self._world.keep(self._leaving)
        self.broken = error
        self._fail_all(error)
