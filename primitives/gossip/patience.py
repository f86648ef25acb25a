"""Who looks after a neighbour verb that does not move: what its peers say, and the timeout."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from relaxmpi.primitives.errors import MismatchError, PeerTimeout, RelaxError

if TYPE_CHECKING:
    from relaxmpi.primitives.gossip.edges import Edges, Exchange
    from relaxmpi.primitives.work import Work

__all__ = ["EdgePatience"]

_log = logging.getLogger("relaxmpi")


class EdgePatience:
    """See `Patience`: of one call and its edges."""

    def __init__(self, edges: Edges, exchange: Exchange, number: int) -> None:
        self._edges, self.exchange, self._number = edges, exchange, number
        self.size = edges.board.size
        self._warned = False

    def begin(self) -> int:
        """Return the number of the call among the neighbour verbs of this rank."""
        return self._number

    def end(self) -> None:
        """Nothing is counted."""

    def look(self, work: Work[Any]) -> RelaxError | None:
        """Hear the peers, warn once, give up at the timeout."""
        board, edges, exchange = self._edges.board, self._edges, self.exchange
        board.hear()
        edges.sort()
        why = edges.refusal(exchange)
        if why is not None:
            edges.failed(exchange)
            return MismatchError(
                f"the ranks disagree on their edge: rank {edges.rank}: {exchange}; {why}"
            )
        for peer, number in exchange.waiting.items():
            gone = board.gone_before(peer, number)
            if gone is not None:
                self.break_off()
                return type(gone)(f"rank {edges.rank} waits in {exchange}, but {gone}")
        if work.waited > board.timeout:
            self.break_off()
            return PeerTimeout(
                f"rank {edges.rank} in {exchange}: {self._missing()} for {board.timeout:g} s"
                f"{self._elsewhere()}. This Comm cannot be used any more; call in the same order "
                "on both sides, or, if the peers are only slow, raise Comm.world(timeout=...) or "
                "RELAXMPI_TIMEOUT"
            )
        if work.waited > board.warn_after and not self._warned:
            self._warned = True
            board.tell(f"for {_ranks(self._peers())} in {exchange}")
            _log.warning(
                "rank %d in %s: %s for %.3g s; the timeout is %g s",
                edges.rank,
                exchange,
                self._missing(),
                work.waited,
                board.timeout,
            )
        return None

    def _missing(self) -> str:
        what = "nothing from" if self.exchange.silent() else "not taken by"
        return f"{what} {_ranks(self._peers())}"

    def _peers(self) -> list[int]:
        return list(self.exchange.silent() or self.exchange.sent)

    def _elsewhere(self) -> str:
        """Say what the peers were last heard to wait for, which may be somebody else."""
        heard = self._edges.board.waits
        said = [f"rank {peer} waits {heard[peer]}" for peer in self._peers() if peer in heard]
        return f"; as last heard, {', '.join(said)}" if said else ""

    def due(self, work: Work[Any]) -> float:
        """Return the seconds of waiting until the warning or the timeout."""
        board = self._edges.board
        return board.timeout if self._warned else board.warn_after

    def break_off(self) -> None:
        """Tell the neighbours that nothing more comes from this rank."""
        self._edges.board.break_off(str(self.exchange))

    def give_up(self, work: Work[Any]) -> None:
        """Nothing: what the peers need of this call is under way."""


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
