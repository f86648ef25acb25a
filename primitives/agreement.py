"""Agreement: no call moves data before all ranks have said that they make the same call.

MPI does not notice that ranks reduce different things. Each call has a hash h of what it is;
one all-reduce of (h, -h) with MAX tells every rank whether all h are equal. If not, every rank
takes the same branch, gathers the descriptions and raises the same error. A rank whose
arguments were refused takes part with a hash of the refusal, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.errors import MismatchError
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.work import Flow
from relaxmpi.primitives.world import Link

__all__ = ["ByMaximum", "Lane", "Table", "Vote", "nothing"]

T = TypeVar("T")

_WIDTH = 240
_MASK = 2**62 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Vote(Protocol):
    """What one rank says in an agreement, under way to all others.

    Attributes:
        request: Done when all ranks have said theirs.
        equal: Whether all said the same; afterwards.
    """

    @property
    def request(self) -> Request:
        """See above."""

    @property
    def equal(self) -> bool:
        """See above."""


class Table(Protocol):
    """Where ranks vote, one vote after the other."""

    size: int

    def vote(self, code: int, along: Request | None = None) -> Vote:
        """Say a number of up to 62 bits.

        Args:
            code: The number.
            along: What moves data next; it may take the vote along, and then is the vote.
        """


class ByMaximum:
    """Votes over a link: one all-reduce of (code, -code) with MAX."""

    def __init__(self, link: Link) -> None:
        self._link, self.size = link, link.size
        self._spare: list[tuple[np.ndarray, np.ndarray]] = []

    def vote(self, code: int, along: Request | None = None) -> Vote:
        """See `Table`; messages take no other ones along."""
        mine, all_ = self._spare.pop() if self._spare else (np.empty(2, "i8"), np.empty(2, "i8"))
        mine[0], mine[1] = code, -code
        return _Maximum(self._link.imax(mine, all_), (mine, all_), self._spare)


class _Maximum:
    __slots__ = ("_arrays", "_spare", "request")

    def __init__(
        self,
        request: Request,
        arrays: tuple[np.ndarray, np.ndarray],
        spare: list[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self.request, self._arrays, self._spare = request, arrays, spare

    @property
    def equal(self) -> bool:
        _, all_ = self._arrays
        self._spare.append(self._arrays)
        return bool(all_[0] == -all_[1])


class Lane:
    """Agreements at one table, in order.

    A Comm has two: one for calls as they are started, whose agreement may overtake the data of
    earlier calls, and one for primitives inside primitives, which agree when they run.
    """

    def __init__(self, table: Table, ordered: Link, stats: Stats) -> None:
        # Descriptions are gathered when a flow runs, when later calls may have agreed already:
        # on a link that is only used in the order in which flows run.
        self._table, self._ordered, self._stats = table, ordered, stats
        self._count = self._salt = 0

    def after(self, call: Call, flow: Flow[T]) -> Flow[T]:
        """Vote now; the flow returned begins when all ranks have agreed.

        Nothing of `flow` runs where they do not.
        """
        if self._table.size == 1:
            return _alone(call, flow)
        return self._after(call, self.post(call), flow)

    def around(self, call: Call, flow: Flow[T], take_back: Callable[[], None]) -> Flow[T]:
        """Return the flow that takes the first step of `flow`, votes, and then goes on.

        Args:
            call: What this rank is about to do.
            flow: The flow.
            take_back: Undoes its first step, where the ranks do not agree.
        """
        begun = next(flow)
        return (yield from self.behind(call, self.post(call, begun), begun, flow, take_back))

    def behind(
        self,
        call: Call,
        posted: tuple[int, Vote],
        begun: Request,
        flow: Flow[T],
        take_back: Callable[[], None],
    ) -> Flow[T]:
        """Return the rest of `around`, once the flow has begun and the vote is under way."""
        number, vote = posted
        try:
            yield vote.request
            if not vote.equal:
                take_back()
                yield from self._disagree(call, number, True)
            if vote.request is not begun:
                yield begun
        except BaseException:
            flow.close()
            raise
        return (yield from flow)

    def before(self, call: Call, flow: Flow[T]) -> Flow[T]:
        """Vote now; the flow returned is that of a rehearsed call, which its agreement ends."""
        if self._table.size == 1:
            return _alone(call, flow)
        return self._before(call, self.post(call), flow)

    def post(self, call: Call, along: Request | None = None) -> tuple[int, Vote]:
        """Vote, with what moves data next if it can take the vote along: its number, and the vote.

        Whoever calls this must look at the vote, in the order of votes.
        """
        number = self._count
        self._count = number + 1
        self._stats.header_bytes += 16
        self._salt = (self._salt + _GOLDEN) & _MASK
        return number, self._table.vote((call.digest & _MASK) ^ self._salt, along)

    def _after(self, call: Call, posted: tuple[int, Vote], flow: Flow[T]) -> Flow[T]:
        number, vote = posted
        try:
            yield vote.request
            if not vote.equal:
                yield from self._disagree(call, number, True)
            if call.refusal is not None:
                raise call.agreed_refusal()
        except BaseException:
            flow.close()
            raise
        return (yield from flow)

    def _before(self, call: Call, posted: tuple[int, Vote], flow: Flow[T]) -> Flow[T]:
        number, vote = posted
        if call.refusal is not None:
            raise call.refusal  # the peers are in the middle of this call
        result = yield from flow
        yield vote.request
        if not vote.equal:
            yield from self._disagree(call, number, False)
        return result

    def _disagree(self, call: Call, number: int, first: bool) -> Flow[NoReturn]:
        said = np.frombuffer(str(call).encode()[:_WIDTH].ljust(_WIDTH), "u1").copy()
        heard = np.empty((self._ordered.size, _WIDTH), "u1")
        yield self._ordered.igather(said, heard)
        by_text: dict[str, list[int]] = {}
        for rank, row in enumerate(heard):
            by_text.setdefault(bytes(row).decode(errors="replace").strip(), []).append(rank)
        views = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
            for text, ranks in sorted(by_text.items(), key=lambda item: item[1])
        )
        error = MismatchError(
            f"the ranks disagree in call {number}: {views}; "
            + ("nothing was moved" if first else "their numbers are mixed")
        )
        error.agreed = first
        raise error


def _alone(call: Call, flow: Flow[T]) -> Flow[T]:
    if call.refusal is not None:
        flow.close()
        raise call.agreed_refusal()
    return (yield from flow)


def nothing() -> Flow[Any]:
    """Return a flow that has nothing to do."""
    yield from ()
