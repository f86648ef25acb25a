"""What synchronisation costs, counted for `attach`."""

from __future__ import annotations

from dataclasses import astuple
from typing import NamedTuple

from relaxmpi.primitives import Comm, Hierarchy
from relaxmpi.primitives.stats import Stats

__all__ = ["Meter", "SyncStats"]


class SyncStats(NamedTuple):
    """What synchronisation cost this rank, on average over the steps so far.

    Attributes:
        steps: Steps of the optimizer since `attach`.
        payload_bytes: Numbers or encoded numbers sent, a step.
        header_bytes: Agreements sent, a step.
        messages: Messages sent, a step.
        waited: Seconds waited for communication that no computation hid, a step.
        overlap: Share of the time from the first bucket's start to the last one's end that was
            hidden behind computation, 0 to 1; 0 where parameters are mixed.
        buckets: Number of buckets; 0 on one rank, and before the first step of an algorithm that
            exchanges gradients.
        skipped: Steps left out because a gradient was not finite, in all; where parameters are
            mixed, those of this rank.
    """

    steps: int
    payload_bytes: float
    header_bytes: float
    messages: float
    waited: float
    overlap: float
    buckets: int
    skipped: int


class Meter:
    """Counts from `attach` on.

    Args:
        streams: What moves gradients; the list may grow.
        others: What moves small facts: all of it counts as headers.
    """

    def __init__(self, streams: list[Comm], others: list[Comm]) -> None:
        self._streams, self._others = streams, others
        self._before = self._now()
        self.steps = self.skipped = 0
        self._first = self._busy = self._exposed = 0.0

    def begin(self, now: float) -> None:
        """Take note that the first bucket of a window starts."""
        self._first = now

    def end(self, waiting: float, ended: float) -> None:
        """Take note that the last bucket ended, and since when somebody waited for it."""
        self._busy += ended - self._first
        self._exposed += max(0.0, ended - max(waiting, self._first))

    def exposed(self, seconds: float) -> None:
        """Take note that somebody waited."""
        self._exposed += seconds

    def stats(self, buckets: int) -> SyncStats:
        """Return the averages."""
        now, before, steps = self._now(), self._before, max(self.steps, 1)
        return SyncStats(
            self.steps,
            (now.payload_bytes - before.payload_bytes) / steps,
            (now.header_bytes - before.header_bytes) / steps,
            (now.messages - before.messages) / steps,
            self._exposed / steps,
            1.0 - self._exposed / self._busy if self._busy else 0.0,
            buckets,
            self.skipped,
        )

    def _now(self) -> Stats:
        moved, facts = _moved(self._streams), _moved(self._others)
        headers = moved.header_bytes + facts.header_bytes + facts.payload_bytes
        return Stats(moved.payload_bytes, headers, moved.messages + facts.messages)


def _moved(comms: list[Comm]) -> Stats:
    """Return what this rank has sent so far; a Hierarchy sends inside and between nodes."""
    parts = [p for c in comms if isinstance(c, Hierarchy) for p in (c.local, c.cross)]
    stats = [comm.stats for comm in (*comms, *parts) if comm is not None]
    return Stats(*map(sum, zip(*map(astuple, stats), strict=True)))
