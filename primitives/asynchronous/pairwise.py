"""Asynchronous pairwise averaging: ask a rank that runs at its own pace for its numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

from relaxmpi.primitives.asynchronous.edges import HEADER, Header
from relaxmpi.primitives.asynchronous.endpoint import Endpoint, agree, numbers_of
from relaxmpi.primitives.errors import MismatchError
from relaxmpi.primitives.transport import Request
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm

__all__ = ["AsyncPairwise"]

_QUESTION, _ANSWER = 11, 12  # forms of messages
_GAVE_UP = b"gave up"
_PATIENCE, _LATEST = 0.01, 1.0  # seconds until a question is asked again, where it may be lost


class _Sent(NamedTuple):
    stamp: int
    message: Any
    request: Request


class AsyncPairwise(Endpoint):
    """Averaging of two ranks at a time, at their own pace.

    This is the communication of AD-PSGD (Lian, Zhang, Zhang and Liu 2018). Even ranks ask, odd
    ranks answer. `ask(peer)` sends a snapshot s_i; whenever j next looks, in `serve()`, it takes
    a snapshot s_j, sends it and adds (s_i - s_j) / 2 to its x; the asker adds (s_j - s_i) / 2 in
    `fold()`. So x_i + x_j stays what it was, to rounding, whatever gradient steps were made in
    between. Askers wait for answers and nobody waits for askers, so there are no cycles; with an
    odd number of ranks one more asks than answers. Memory: a message for each rank of the other
    side, and two more.

    Args:
        comm: A Comm. Making and closing are collective calls on its stream.
        x: float32 or float64 in host memory, changed in place in `serve`, `fold`, `ask` and
            `close`.
        name: Tells endpoints apart, in errors and between ranks.

    Attributes:
        active: Whether this rank asks.
        exchanges: How many this rank has completed.

    Raises:
        MismatchError: On all ranks: they differ in format or length.
        PeerTimeout: In `ask` or `fold`: no answer came; it names the edge.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def program():
        ...     with rx.Comm.world() as comm:
        ...         x = np.full(2, float(comm.rank))
        ...         pairs = rx.AsyncPairwise(comm, x)
        ...         for step in range(30):
        ...             comm.compute(1e-3 * (1 + comm.rank))
        ...             if pairs.active:
        ...                 pairs.ask(pairs.peers[step % len(pairs.peers)])
        ...             else:
        ...                 pairs.serve()
        ...         pairs.close()
        ...         return x.round(3).tolist()
        >>> rx.SimulatedWorld(4).run(program)[0]
        [1.5, 1.5]
    """

    kind = "AsyncPairwise"

    def __init__(self, comm: Comm, x: Any, *, name: str = "") -> None:
        def what() -> tuple[Hashable, ...]:
            self._flat = numbers_of(x, name)
            return (self._flat.dtype, str(self._flat.shape), name and f"name {name!r}")

        agree(comm, self.kind, what)
        self._x = self._flat.data
        self.active = comm.rank % 2 == 0
        self.peers = tuple(range(1 if self.active else 0, comm.size, 2))
        self.exchanges = 0
        self._hash = crc32(name.encode())
        self._asked = 0
        self._question: tuple[int, _Sent] | None = None
        self._since, self._patience_left = 0.0, _PATIENCE
        self._answered: dict[int, _Sent] = {}
        self._leaving: deque[_Sent] = deque()
        self._spare: list[Any] = []
        self._serving = False
        length = HEADER + self._x.nbytes
        super().__init__(comm, name, length, (self.peers, self.peers), 1)

    def ask(self, peer: int) -> None:
        """Ask a rank for an exchange; an earlier question is waited for first.

        Raises:
            ValueError: This rank, or that one, is on the wrong side.
        """
        if not self.active or peer not in self.peers:
            raise ValueError(
                f"rank {self.comm.rank} cannot ask rank {peer}: even ranks ask, odd ranks answer"
            )
        self._run("ask", self._asking(peer))

    def fold(self, *, wait: bool = True) -> bool:
        """Take the answer.

        Args:
            wait: False: only if it is there.

        Returns:
            Whether no question is open any more.
        """
        self._run("fold", self._settling(wait))
        self.comm.polled()
        return self._question is None

    def serve(self) -> int:
        """Answer all questions that have arrived, and return how many there were."""
        before = self.exchanges
        self._run("serve", self._answering())
        self.comm.polled()
        return self.exchanges - before

    def drain(self) -> None:
        """Wait until no question of any rank is open; collective."""
        self._finish("drain", last=False)

    def close(self) -> None:
        """Wait until no question of any rank is open, and end; collective.

        Odd ranks go on answering here. A second call does nothing.
        """
        if self.closed or self._abandoned():
            return
        self._finish("close", last=True)
        self._release()

    def _finish(self, what: str, *, last: bool) -> None:
        self._run(what, self._settling(wait=True))

        def flow() -> Flow[None]:
            self._serving = False  # all ranks are here, so all questions have been answered
            if last:
                yield from self._end()

        self._serving = not self.active
        self._collective(what, flow())

    # --------------------------------------------------------------------------- asking

    def _asking(self, peer: int) -> Flow[None]:
        yield from self._settling(wait=True)
        self._asked += 1
        sent = self._send(peer, _QUESTION, self._asked, self._x)
        self._question = peer, sent
        self._since, self._patience_left = self.comm.now(), _PATIENCE

    def _settling(self, wait: bool) -> Flow[None]:
        self._notes()
        while self._box.take(self._read):
            pass
        while wait and self._question is not None:
            self._repeat(self._question)
            yield self._box.arrival()
            self._notes()
            while self._box.take(self._read):
                pass

    def _repeat(self, question: tuple[int, _Sent]) -> None:
        """Ask again where the question, or the answer, may have been lost."""
        if self._box.reliable:
            return
        now, (peer, sent) = self.comm.now(), question
        if now - self._since > self._patience_left:
            self._box.send(peer, sent.message)
            self._since, self._patience_left = now, min(2 * self._patience_left, _LATEST)
        self._box.alarm(self._since + self._patience_left - now + 1e-6)

    def _answering(self) -> Flow[None]:
        self._notes()
        while self._box.take(self._read):
            pass
        return
        yield

    def _look(self) -> None:
        """Between calls x is the caller's: only `close` and `drain` answer while they wait."""
        self._notes()
        while self._serving and self._box.take(self._read):
            pass

    def _notes(self) -> None:
        while (told := self._box.told()) is not None:
            self._gave_up.add(told[0])
        while self._leaving and self._leaving[0].request.test():
            self._spare.append(self._leaving.popleft().message)

    # ------------------------------------------------------------------------- messages

    def _send(self, peer: int, form: int, stamp: int, numbers: Any) -> _Sent:
        spare = self._spare
        message = spare.pop() if spare else np.empty(HEADER + self._x.nbytes, np.uint8)
        Header(form, 0, stamp, 0, len(self._x), 0.0, self._hash).write(message)
        np.copyto(self._numbers(message), numbers)
        self.comm.stats.payload_bytes -= HEADER
        self.comm.stats.header_bytes += HEADER
        return _Sent(stamp, message, self._box.send(peer, message))

    def _numbers(self, message: Any) -> Any:
        return message[HEADER:].view(self._x.dtype)

    def _read(self, source: int, message: Any) -> None:
        header = Header.read(message, source)
        form = _ANSWER if self.active else _QUESTION
        if (header.form, header.length, header.name) != (form, len(self._x), self._hash):
            raise MismatchError(
                f"edge {source} -> {self.comm.rank} of {self._title}: a message of "
                f"{header.length} numbers, form {header.form}, met {len(self._x)}, form {form}"
            )
        if self.active:
            self._settle(source, header.stamp, message)
        else:
            self._answer(source, header.stamp, message)

    def _settle(self, source: int, stamp: int, message: Any) -> None:
        if self._question is None or self._question[1].stamp != stamp:
            return  # the answer to a question that was asked twice
        sent = self._question[1]
        self._move(self._numbers(message), self._numbers(sent.message))
        self._question = None
        self._leaving.append(sent)

    def _answer(self, source: int, stamp: int, message: Any) -> None:
        last = self._answered.get(source)
        if last is not None and stamp <= last.stamp:
            if stamp == last.stamp:
                self._box.send(source, last.message)
            return
        sent = self._send(source, _ANSWER, stamp, self._x)
        self._move(self._numbers(message), self._numbers(sent.message))
        if self._box.reliable:
            self._leaving.append(sent)
        else:
            if last is not None:
                self._spare.append(last.message)
            self._answered[source] = sent

    def _move(self, theirs: Any, mine: Any) -> None:
        """Go half the way from one snapshot to the other: x += (theirs - mine) / 2."""
        self._flat.device.kernels.meet(self._x, mine, theirs)
        self.exchanges += 1

    def _missing(self) -> dict[int, str]:
        if self._question is None:
            return {}
        peer, sent = self._question
        return {peer: f"no answer to question {sent.stamp}"}

    def _say_broken(self) -> None:
        for peer in self.peers:
            self._tell(peer, _GAVE_UP)
