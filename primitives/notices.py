"""Notices between ranks that wait: who waits in which call, who gave up, who left.

They travel point to point and eagerly, need nobody's help, and are looked for only by ranks
that already wait, so a healthy run pays nothing for them.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from relaxmpi.primitives.errors import PeerLeft, PeerTimeout, RelaxError
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.work import Work
from relaxmpi.primitives.world import Link, World

__all__ = ["NoticeBoard"]

_log = logging.getLogger("relaxmpi")
_LAYOUT = struct.Struct("<qqq104s")
_TEXT = 104
_GRACE = 1.0


class _Kind(IntEnum):
    WAITING = 1
    BROKEN = 2
    LEFT = 3
    UNSENT = 4
    UNFIT = 5
    EDGE = 6


class Gone(NamedTuple):
    """The last word of a rank: it gave up or left.

    Attributes:
        kind: Which of the two.
        seq: The first call in order that it takes no part in.
        messages: How many messages of neighbour verbs it has sent to this rank.
        text: The call that it gave up in.
    """

    kind: _Kind
    seq: int
    messages: int
    text: str


class NoticeBoard:
    """The notices of one queue, over a private link of all its ranks.

    Attributes:
        sent: How many messages of neighbour verbs went to each rank.
        unsent: Those that a rank has said will not come, by rank and number, and why.
        unfit: Those of this rank that did not fit a peer's call: peer, number, and why.
        waits: What a rank has last said to wait for.
    """

    def __init__(
        self, world: World, link: Link, timeout: float, warn_after: float, stats: Stats
    ) -> None:
        self._world, self._link, self._stats = world, link, stats
        self.timeout, self.size = timeout, link.size
        self._begun = self._ended = 0
        self.warn_after = min(warn_after, timeout / 2)
        self._warned = -1
        self._waiting: dict[int, int] = {}
        self._gone: dict[int, Gone] = {}
        self.sent: Counter[int] = Counter()
        self.unsent: dict[tuple[int, int], str] = {}
        self.unfit: list[tuple[int, int, str]] = []
        self.waits: dict[int, str] = {}
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
        self.hear()
        gone = {r: said for r, said in self._gone.items() if said.seq <= work.seq}
        if gone:
            return self._explain_gone(work, gone)
        if waited > self.timeout:
            return self._blame(work, f"waited {self.timeout:g} s")
        if waited > self.warn_after and self._warned < work.seq:
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
        return self.warn_after if self._warned < work.seq else self.timeout

    def give_up(self, work: Work[Any]) -> None:
        """Tell everybody that this rank will not finish a call."""
        self._post(_Kind.BROKEN, work.seq, work.call())

    def tell(self, text: str) -> None:
        """Tell everybody what this rank waits for in a neighbour verb."""
        self._post(_Kind.EDGE, 0, text)

    def unsend(self, peer: int, number: int, why: str) -> None:
        """Tell a peer that a message of a neighbour verb will not come."""
        self._say(peer, _Kind.UNSENT, 0, number, why)

    def refuse(self, peer: int, number: int, why: str) -> None:
        """Tell a peer that its message of a neighbour verb does not fit this rank's call."""
        self._say(peer, _Kind.UNFIT, 0, number, why)

    def break_off(self, text: str) -> None:
        """Tell everybody that this rank takes no part in any further call."""
        self._post(_Kind.BROKEN, self._ended, text)

    def gone_before(self, peer: int, number: int) -> RelaxError | None:
        """Return the error of waiting for this message of a peer that has had its last word."""
        said = self._gone.get(peer)
        if said is None or number < said.messages:
            return None
        if said.kind is _Kind.LEFT:
            return PeerLeft(f"rank {peer} has ended its program; nothing more comes from it")
        return PeerTimeout(f"rank {peer} gave up in {said.text}; nothing more comes from it")

    def leave(self) -> None:
        """Tell everybody that this rank's program ends, and after how many calls."""
        self._post(_Kind.LEFT, self._ended, "")

    def left(self) -> set[int]:
        """Hear the peers, and return those whose programs have ended."""
        self.hear()
        return {r for r, said in self._gone.items() if said.kind is _Kind.LEFT}

    def all_gone(self) -> bool:
        """Whether every other rank has left; one that has given up may be about to abort."""
        return len(self.left()) == self.size - 1

    def _explain_gone(self, work: Work[Any], gone: dict[int, Gone]) -> RelaxError:
        left = sorted(r for r, said in gone.items() if said.kind is _Kind.LEFT)
        if left:
            self.give_up(work)
            return PeerLeft(
                f"rank {self._link.rank} waits in call {work.seq}, {work.call()}, but "
                f"{_ranks(left)} ended after {gone[left[0]].seq} calls; every rank must make the "
                "same calls (an early exit, or fewer batches on one rank?)"
            )
        first = min(gone)
        return self._blame(
            work, f"rank {first} gave up in call {gone[first].seq}, {gone[first].text}"
        )

    def _blame(self, work: Work[Any], why: str) -> RelaxError:
        self.give_up(work)
        others = set(range(self.size)) - {self._link.rank}
        end = self._world.now() + _GRACE
        while self._world.now() < end and not others <= self._heard(work.seq):
            self._world.listen(end)
            self.hear()
        silent = sorted(others - self._heard(work.seq))
        missing = f"not heard from {_ranks(silent)}" if silent else "all ranks are heard from"
        return PeerTimeout(
            f"rank {self._link.rank} in call {work.seq}, {work.call()}: {why}; {missing}. This "
            "Comm cannot be used any more; if the peers are only slow, raise "
            "Comm.world(timeout=...) or RELAXMPI_TIMEOUT; those that wait in a call of another "
            "Comm, or had fewer batches (see sync.join), do not come at all"
        )

    def _heard(self, seq: int) -> set[int]:
        waiting = {r for r, call in self._waiting.items() if call >= seq}
        return waiting | {r for r, said in self._gone.items() if said.kind is _Kind.BROKEN}

    def _post(self, kind: _Kind, seq: int, text: str) -> None:
        for peer in range(self.size):
            if peer != self._link.rank:
                self._say(peer, kind, seq, self.sent[peer], text)

    def _say(self, peer: int, kind: _Kind, seq: int, number: int, text: str) -> None:
        message = _LAYOUT.pack(kind, seq, number, text.encode()[:_TEXT])
        self._sent.append(self._link.notify(peer, message))
        self._stats.header_bytes += len(message)

    def hear(self) -> None:
        """Take in what the peers have said."""
        self._sent = [request for request in self._sent if not request.test()]
        while (found := self._link.heard(_LAYOUT.size)) is not None:
            source, message = found
            code, seq, number, text = _LAYOUT.unpack(message)
            words = text.rstrip(b"\0").decode(errors="replace")
            if code == _Kind.WAITING:
                self._waiting[source], self.waits[source] = seq, f"in {words}"
            elif code == _Kind.EDGE:
                self.waits[source] = words
            elif code == _Kind.UNSENT:
                self.unsent[source, number] = words
            elif code == _Kind.UNFIT:
                self.unfit.append((source, number, words))
            else:
                self._gone.setdefault(source, Gone(_Kind(code), seq, number, words))


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
