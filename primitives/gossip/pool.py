"""Works that may complete in any order: the lane of the neighbour verbs beside a Comm's queue."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from relaxmpi.primitives.errors import RelaxError
from relaxmpi.primitives.queue import WORTH_WATCHING, Queue
from relaxmpi.primitives.work import Work, agreed

if TYPE_CHECKING:
    from relaxmpi.primitives.stats import Stats
    from relaxmpi.primitives.transport import Request
    from relaxmpi.primitives.work import Patience
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

    @property
    def alone(self) -> bool:
        """Whether a call has this pool, and the queues that move with it, to itself."""
        return super().alone and not self._beside.filled

    def _ran(self, patience: Patience) -> None:
        """Nobody counts the calls of this lane."""

    def _ran_badly(self, work: Work[Any], error: BaseException) -> None:
        self._world.keep(error)  # and with it memory that messages may write to

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
