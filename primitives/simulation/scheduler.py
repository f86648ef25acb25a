"""Threads that take turns under a virtual clock: a conservative discrete-event scheduler.

Every rank is a thread, and exactly one thread runs at a time: the one that holds the baton. All
that happens to a rank from outside is an event on one heap, ordered by virtual time, ties by the
seed. A rank that lets time pass hands the baton to whoever is due first. Nothing here looks at
the real clock but the watchdog, which only reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf
from random import Random
from typing import Any

from relaxmpi.primitives.errors import Deadlock
from relaxmpi.primitives.simulation.rank import Ended, Rank, Ticket
from relaxmpi.primitives.simulation.watchdog import Watchdog

__all__ = ["Scheduler"]

# Enough for torch and numba; a thousand of them are cheap, because pages come on demand.
_STACK = 512 * 1024
_ROOMY = 8 * 1024 * 1024
_FEW = 64
# Alarms that have lost their meaning are thrown away when there are so many, and half of all.
_STALE = 256
# Real seconds that a thread gets to unwind before its neighbours are ended, too, and in the end.
_UNWIND = 0.5
_LAST = 5.0


class Scheduler:
    """The heap of events, the baton and the end of the world.

    Attributes:
        lossy: Whether a fault has lost something, so that timeouts are the way out.
        steps: Scheduling points passed: the watchdog sees whether anything moves.
        failure: What ended the run early, and the rank that it happened on.
    """

    def __init__(self, n: int, seed: int, watchdog: float) -> None:
        self.ranks = [Rank(r) for r in range(n)]
        self.heap: list[tuple[float, float, int, Any, Any, bool]] = []
        self.lossy = self.ending = False
        self.steps = self._pushed = self._hopes = self._stale = 0
        self.failure: tuple[BaseException, Rank | None] | None = None
        self.holder = self.ranks[0]
        self._tie = Random(seed).random
        self._live = n
        self._done = threading.Event()
        self._watchdog = Watchdog(self, watchdog)

    # ----------------------------------------------------------------------- events

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        """Call `action(time, *args)` at that time; this gives hope that somebody can move."""
        self._hopes += 1
        self._pushed += 1
        heappush(self.heap, (time, self._tie(), self._pushed, action, args, True))

    def fate(self, time: float, action: Callable[..., None], *args: Any) -> None:
        """The same for a fault that is only due: nobody may wait for it."""
        self._push(time, action, args, False)

    def _push(self, time: float, action: Any, args: Any, hopeful: bool) -> None:
        self._pushed += 1
        heappush(self.heap, (time, self._tie(), self._pushed, action, args, hopeful))

    def _alarm(self, rank: Rank, time: float, hopeful: bool) -> None:
        rank.hopeful = hopeful
        if hopeful:
            self._hopes += 1
        self._push(time, rank, rank.token, hopeful)

    def wake(self, rank: Rank, time: float) -> None:
        """Let a rank that sleeps run at `time`, and no later."""
        rank.token += 1
        if rank.hopeful:
            self._hopes -= 1
        rank.resting = rank.listening = False
        self._alarm(rank, max(time, rank.clock), True)
        self._stale += 1
        if self._stale > _STALE and 2 * self._stale > len(self.heap):
            self._sweep()

    def _sweep(self) -> None:
        """Throw away what ranks were to be woken by, had nobody done it before."""
        heap = self.heap
        heap[:] = [e for e in heap if not isinstance(e[3], Rank) or e[4] == e[3].token]
        heapify(heap)
        self._stale = 0

    def completed(self, rank: Rank, request: Ticket, time: float) -> None:
        """Wake a rank that waits for this request."""
        rank.spun = 0.0
        if rank.resting and (not rank.awaits or request in rank.awaits):
            self.wake(rank, time)

    def kill(self, time: float, rank: Rank) -> None:
        """End a rank that sleeps; nothing that it has not sent by now will be."""
        if not (rank.over or rank.dead):
            self.doom(rank)
            self.wake(rank, time)

    def doom(self, rank: Rank) -> None:
        """End the rank that runs, as soon as it lets time pass."""
        rank.dead = self.lossy = True
        rank.held = 0.0

    def help(self, rank: Rank, time: float, action: Callable[[float], None]) -> None:
        """Do `action` now if this rank is in a call, or else when it next is."""
        if not rank.inside:
            rank.todo.append(action)
        elif time < rank.held:
            self.at(rank.held, action)
        elif not rank.dead:
            action(time)

    # ------------------------------------------------------------------ taking turns

    def sleep(self, me: Rank, until: float, *, hopeful: bool = True) -> None:
        """Let others run until this rank's time is `until`, or somebody wakes it.

        Args:
            me: The rank whose thread calls.
            until: Virtual seconds.
            hopeful: Whether something new happens then; False for a timeout.
        """
        self.steps += 1
        if self.ending or me.dead:
            raise Ended
        if hopeful and until >= me.held and not (self.heap and self.heap[0][0] <= until):
            me.clock = until
            me.resting = me.listening = False
            return
        self._alarm(me, until, hopeful)
        following = self._next()
        if following is None:
            self._done.set()
            raise Ended
        if following is not me:
            self.holder = following
            following.baton.release()
            me.baton.acquire()
        if self.ending or me.dead:
            raise Ended

    def _next(self) -> Rank | None:
        """Let everything happen up to the time when a rank runs; None when the world ends."""
        heap = self.heap
        while not self.ending:
            if not heap or not (self._hopes or self.lossy):
                self.fail(Deadlock(self._stuck()), None)
                return None
            time, _, _, action, args, hopeful = heappop(heap)
            if time == inf:  # what is left would wait for ever
                self.fail(Deadlock(self._stuck()), None)
                return None
            if isinstance(action, Rank):
                if args != action.token:
                    self._stale -= 1
                    continue
                if hopeful:
                    self._hopes -= 1
                if time < action.held:
                    self._alarm(action, action.held, hopeful)
                    continue
                action.token += 1
                action.hopeful = action.resting = action.listening = False
                action.clock = max(action.clock, time)
                return action
            if hopeful:
                self._hopes -= 1
            action(time, *args)
        return None

    def _stuck(self) -> str:
        said: dict[tuple[str, str], list[int]] = {}
        for rank in self.ranks:
            said.setdefault(_plight(rank), []).append(rank.index)
        views = "; ".join(
            f"{_ranks(ranks)} {verbs[len(ranks) > 1]}{what}"
            for (verb, what), ranks in said.items()
            for verbs in [verb.split("/")]
        )
        when = max(rank.clock for rank in self.ranks)
        return f"nothing is in flight and nobody can move after {when:.6g} s: {views}"

    # ------------------------------------------------------------------- life and end

    def fail(self, error: BaseException, rank: Rank | None) -> None:
        """End the run; the first reason counts."""
        if self.failure is None:
            self.failure = error, rank
        self.ending = True

    def _body(self, rank: Rank, body: Callable[[Rank], Any]) -> None:
        rank.baton.acquire()
        try:
            if not (self.ending or rank.dead):
                rank.result = body(rank)
        except Ended:
            pass
        except BaseException as error:
            self.fail(error, rank)
        rank.over = rank.inside = True
        self._live -= 1
        rank.catch_up()
        following = None
        if self._live and not self.ending:
            try:
                following = self._next()
            except BaseException as error:
                self.fail(error, rank)
        if following is None:
            self._done.set()
        else:
            self.holder = following
            following.baton.release()

    def run(self, body: Callable[[Rank], Any]) -> None:
        """Run `body(rank)` in a thread a rank; raises nothing: see `failure`."""
        before = threading.stack_size(_ROOMY if len(self.ranks) <= _FEW else _STACK)
        try:
            for rank in self.ranks:
                rank.thread = threading.Thread(
                    target=self._body, args=(rank, body), name=f"rank {rank.index}", daemon=True
                )
                rank.thread.start()
                self._alarm(rank, 0.0, True)
        except BaseException as error:  # no more threads here, or Ctrl-C
            self.fail(error, None)
        finally:
            threading.stack_size(before)
        try:
            first = None if self.ending else self._next()
            if first is not None:
                self.holder = first
                first.baton.release()
                self._watchdog.wait(self._done)
        except BaseException as error:  # Ctrl-C
            self.fail(error, None)
        finally:
            self._end()

    def _end(self) -> None:
        """Unwind what still runs, the holder of the baton first, one thread after the other."""
        ranks = [rank for rank in self.ranks if hasattr(rank, "thread")]
        threads = [rank for rank in ranks if rank.thread.ident is not None]
        if threads and not self.holder.over:
            self._unwind(self.holder, release=False)
        for rank in threads:
            if rank is not self.holder and not rank.over:
                self._unwind(rank, release=True)
        left = []
        for rank in threads:
            rank.thread.join(_LAST)
            if rank.thread.is_alive():
                left.append(rank.index)
        self._watchdog.left(left)

    def _unwind(self, rank: Rank, *, release: bool) -> None:
        if release:
            rank.baton.release()
        rank.thread.join(_UNWIND)


def _plight(rank: Rank) -> tuple[str, str]:
    """Why a rank does not move: a verb, for one and for many, and the rest of the sentence."""
    if rank.dead:
        return "was/were", " killed"
    if rank.over:
        return "has/have", " returned"
    where = "split" if rank.queue is None or rank.queue.idle else rank.queue.first()
    missing = rank.awaits[0].missing() if rank.awaits else []
    return "waits/wait", f" in {where}" + (f" for {_ranks(missing)}" if missing else "")


def _ranks(ranks: list[int]) -> str:
    """Ranks in words, without listing a thousand."""
    shown = ", ".join(str(r) for r in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
