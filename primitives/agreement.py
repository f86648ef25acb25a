"""Agreement: no call moves data before all ranks have said that they make the same call.

MPI does not notice that ranks reduce different things. Each call has a hash h of what it is;
one all-reduce of (h, -h) with MAX tells every rank whether all h are equal. If not, every rank
takes the same branch, gathers the descriptions and raises the same error. A rank whose
arguments were refused takes part with a hash of the refusal, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NoReturn, TypeVar

import numpy as np

from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.errors import MismatchError
from relaxmpi.primitives.stats import Stats
from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.work import Flow
from relaxmpi.primitives.world import Link

__all__ = ["Lane", "after", "before", "nothing"]

T = TypeVar("T")

_WIDTH = 240
_MASK = 2**62 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@lru_cache(maxsize=4096)
def _hash(what: tuple[Hashable, ...]) -> int:
    text = repr(what).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


class Lane:
    """Agreements on one link, in order.

    A Comm has two: one for calls as they are started, whose agreement may overtake the data of
    earlier calls, and one for primitives inside primitives, which agree when they run.
    """

    def __init__(self, link: Link, ordered: Link, stats: Stats) -> None:
        # Descriptions are gathered when a flow runs, when later calls may have agreed already:
        # on a link that is only used in the order in which flows run.
        self._link, self._ordered, self._stats = link, ordered, stats
        self._count = 0
        self._spare: list[tuple[np.ndarray, np.ndarray]] = []

    def post(self, call: Call, *, first: bool = True) -> Flow[None]:
        """Take part at once; the flow returned completes, or raises, when all ranks have.

        Args:
            call: What this rank is about to do.
            first: Whether the agreement comes before the data, or ends the call.
        """
        if self._link.size == 1:
            return self._alone(call)
        mine, all_ = self._spare.pop() if self._spare else (np.empty(2, "i8"), np.empty(2, "i8"))
        number = self._count
        self._count += 1
        refused = "" if call.refusal is None else type(call.refusal).__name__
        code = (_hash((refused, *call.what) if refused else call.what) ^ (number * _GOLDEN)) & _MASK
        mine[0], mine[1] = code, -code
        request = self._link.imax(mine, all_)
        self._stats.header_bytes += 16
        return self._finish(call, number, request, mine, all_, first)

    def _alone(self, call: Call) -> Flow[None]:
        if call.refusal is not None:
            raise call.agreed_refusal()
        yield from ()

    def _finish(
        self,
        call: Call,
        number: int,
        request: Request,
        mine: np.ndarray,
        all_: np.ndarray,
        first: bool,
    ) -> Flow[None]:
        yield request
        equal = all_[0] == -all_[1]
        self._spare.append((mine, all_))
        if not equal:
            yield from self._disagree(call, number, first)
        if call.refusal is not None:
            raise call.agreed_refusal()

    def _disagree(self, call: Call, number: int, first: bool) -> Flow[NoReturn]:
        said = np.frombuffer(str(call).encode()[:_WIDTH].ljust(_WIDTH), "u1").copy()
        heard = np.empty((self._link.size, _WIDTH), "u1")
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


def after(agreement: Flow[None], flow: Flow[T]) -> Flow[T]:
    """Return the flow behind its agreement; nothing of it runs where that fails."""
    try:
        yield from agreement
    except BaseException:
        flow.close()
        raise
    return (yield from flow)


def before(agreement: Flow[None], flow: Flow[T], call: Call) -> Flow[T]:
    """Return the flow of a rehearsed call, which its agreement ends."""
    if call.refusal is not None:
        raise call.refusal  # the peers are in the middle of this call
    result = yield from flow
    yield from agreement
    return result


def nothing() -> Flow[Any]:
    """Return a flow that has nothing to do."""
    yield from ()
