"""Notices between ranks that wait: who waits in which call, who gave up, who left.

They travel point to point and eagerly, need nobody's help, and are looked for only by ranks
that already wait, so a healthy run pays nothing for them.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from relaxmpi.primitives.errors import PeerLeft, PeerTimeout, RelaxError
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.work import Work
from relaxmpi.primitives.world import Link, World

__all__ = ["NoticeBoard"]

_log = logging.getLogger("relaxmpi")
_LAYOUT = struct.Struct("<qq112s")
_GRACE = 1.0


class _Kind(IntEnum):
    WAITING = 1
    BROKEN = 2
    LEFT = 3


class NoticeBoard:
    """The notices of one queue, over a private link of all its ranks."""

    def __init__(
        self, world: World, link: Link, timeout: float, warn_after: float, stats: Stats
    ) -> None:
        self._world, self._link, self._stats = world, link, stats
        self.timeout, self.size = timeout, link.size
        self._begun = self._ended = 0
        self._warn_after = min(warn_after, timeout / 2)
        self._warned = -1
        self._waiting: dict[int, int] = {}
        self._gone: dict[int, tuple[_Kind, int, str]] = {}
        self._sent: list[Request] = []

    def begin(self) -> int:
        """Count a call that starts and return its number."""
        self._begun += 1
        return self._begun - 1

    def end(self) -> None:
        """Count a call that ended."""
        self._ended += 1

    def look(self, work: Work[Any]) -> RelaxError | None:
        """Patience of the queue: hear the peers, warn once a call, give up at the timeout."""
        if self.size == 1:
            return None
        waited = work.waited
        self._hear()
        gone = {r: said for r, said in self._gone.items() if said[1] <= work.seq}
        if gone:
            return self._explain_gone(work, gone)
        if waited > self.timeout:
            return self._blame(work, f"waited {self.timeout:g} s")
        if waited > self._warn_after and self._warned < work.seq:
            self._warned = work.seq
            self._post(_Kind.WAITING, work.seq, work.call())
            _log.warning(
                "rank %d has waited %.3g s in call %d, %s; the timeout is %g s",
                self._link.rank,
                waited,
                work.seq,
                work.call(),
                self.timeout,
            )
        return None

    def due(self, work: Work[Any]) -> float:
        """Return the seconds of waiting until the warning or the timeout."""
        if self.size == 1:
            return float("inf")
        return self._warn_after if self._warned < work.seq else self.timeout

    def give_up(self, work: Work[Any]) -> None:
        """Tell everybody that this rank will not finish a call."""
        self._post(_Kind.BROKEN, work.seq, work.call())

    def leave(self) -> None:
        """Tell everybody that this rank's program ends, and after how many calls."""
        self._post(_Kind.LEFT, self._ended, "")

    def left(self) -> set[int]:
        """Hear the peers, and return those whose programs have ended."""
        self._hear()
        return {r for r, said in self._gone.items() if said[0] is _Kind.LEFT}

    def all_gone(self) -> bool:
        """Whether every other rank has left; one that has given up may be about to abort."""
        return len(self.left()) == self.size - 1

    def _explain_gone(self, work: Work[Any], gone: dict[int, tuple[_Kind, int, str]]) -> RelaxError:
        left = sorted(r for r, said in gone.items() if said[0] is _Kind.LEFT)
        if left:
            self.give_up(work)
            return PeerLeft(
                f"rank {self._link.rank} waits in call {work.seq}, {work.call()}, but "
                f"{_ranks(left)} ended after {gone[left[0]][1]} calls; every rank must make the "
                "same calls (an early exit, or fewer batches on one rank?)"
            )
        first = min(gone)
        return self._blame(work, f"rank {first} gave up in call {gone[first][1]}, {gone[first][2]}")

    def _blame(self, work: Work[Any], why: str) -> RelaxError:
        self.give_up(work)
        others = set(range(self.size)) - {self._link.rank}
        end = self._world.now() + _GRACE
        while self._world.now() < end and not others <= self._heard(work.seq):
            self._world.listen(end)
            self._hear()
        silent = sorted(others - self._heard(work.seq))
        missing = f"not heard from {_ranks(silent)}" if silent else "all ranks are heard from"
        return PeerTimeout(
            f"rank {self._link.rank} in call {work.seq}, {work.call()}: {why}; {missing}. This "
            "Comm cannot be used any more; if the peers are only slow, raise "
            "Comm.world(timeout=...) or RELAXMPI_TIMEOUT"
        )

    def _heard(self, seq: int) -> set[int]:
        waiting = {r for r, call in self._waiting.items() if call >= seq}
        return waiting | {r for r, said in self._gone.items() if said[0] is _Kind.BROKEN}

    def _post(self, kind: _Kind, seq: int, text: str) -> None:
        message = _LAYOUT.pack(kind, seq, text.encode()[:112])
        for peer in range(self.size):
            if peer != self._link.rank:
                self._sent.append(self._link.notify(peer, message))
                self._stats.header_bytes += len(message)

    def _hear(self) -> None:
        self._sent = [request for request in self._sent if not request.test()]
        while (found := self._link.heard(_LAYOUT.size)) is not None:
            source, message = found
            code, seq, text = _LAYOUT.unpack(message)
            if code == _Kind.WAITING:
                self._waiting[source] = seq
            else:
                words = text.rstrip(b"\0").decode(errors="replace")
                self._gone.setdefault(source, (_Kind(code), seq, words))


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
