"""What the scheduler of a simulated world knows of one rank."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from relaxmpi.primitives.recorder import Cause

if TYPE_CHECKING:
    from relaxmpi.primitives.queue import Queue

__all__ = ["Ended", "Rank", "Ticket"]


class Ended(BaseException):
    """Unwinds the thread of a rank that is killed, or of all; no `except Exception` stops it."""


class Rank:
    """What the scheduler knows of one rank.

    Attributes:
        clock: Its virtual time, in seconds.
        busy: When its processor has done with the messages that have arrived, in a call.
        inside: Whether it is in a call of the library, where long messages get its help.
        resting: Whether it waits for one of `awaits`, or for any request where there is none.
        listening: Whether a notice would wake it.
        dead: Whether a fault has killed it.
        over: Whether its thread has ended.
        held: It does not run before this time.
        lost: Seconds for which faults have held it so far.
        todo: What it must do for long messages as soon as it is in a call.
        unheard: Notices that have arrived and were not read.
        news: Whether one has arrived since it last read all.
        stolen: Seconds that messages have taken from its processor, while it was in a call.
        spun: Virtual seconds for which it has looked in vain, without resting.
        queue: What it waits in, for the report of a deadlock.
        cause: What ended its last rest.
    """

    __slots__ = (
        "awaits",
        "baton",
        "busy",
        "cause",
        "clock",
        "dead",
        "held",
        "hopeful",
        "index",
        "inside",
        "listening",
        "lost",
        "news",
        "over",
        "queue",
        "resting",
        "result",
        "spun",
        "stolen",
        "thread",
        "todo",
        "token",
        "unheard",
    )

    def __init__(self, index: int) -> None:
        self.index, self.clock, self.busy, self.held, self.spun = index, 0.0, 0.0, 0.0, 0.0
        self.token, self.unheard, self.stolen, self.lost = 0, 0, 0.0, 0.0
        self.inside = True
        self.resting = self.listening = self.dead = self.over = self.news = self.hopeful = False
        self.awaits: list[Ticket] = []
        self.queue: Queue | None = None
        self.cause: Cause | None = None
        self.result: Any = None
        self.todo: list[Callable[[float], None]] = []
        self.thread: threading.Thread
        self.baton = _thread.allocate_lock()
        self.baton.acquire()

    def owes(self, peer: int, sent: float) -> None:
        """Note what may end this rank's rest: `peer` did its part at `sent`."""
        if self.resting:
            self.cause = Cause(peer, sent)

    def pause(self, time: float, seconds: float) -> None:
        """Hold it from now on."""
        until = max(self.held, time + seconds)
        self.lost += until - max(self.held, time)
        self.held = until

    def catch_up(self) -> None:
        """Do what has been waiting for this rank to make a call."""
        while self.todo and not self.dead:
            todo, self.todo = self.todo, []
            for action in todo:
                action(self.clock)


class Ticket:
    """A request of one rank that something completes later."""

    __slots__ = ("done", "rank")

    def __init__(self, rank: Rank) -> None:
        self.rank, self.done = rank, False

    def test(self) -> bool:
        """Whether it has completed."""
        return self.done

    def missing(self) -> list[int]:
        """The ranks that it waits for, where it knows."""
        return []
