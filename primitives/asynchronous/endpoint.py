"""What the free-running endpoints have in common: a mailbox, a lane of their own, an end."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

from relaxmpi.primitives.agreement import nothing
from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.devices import Flat, device_of
from relaxmpi.primitives.errors import BrokenComm, PeerLeft, PeerTimeout, RelaxError
from relaxmpi.primitives.hierarchy import Hierarchy
from relaxmpi.primitives.primitive import door_of
from relaxmpi.primitives.work import Flow, Work

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm
    from relaxmpi.primitives.world import Mailbox

__all__ = ["Endpoint", "agree", "numbers_of"]

T = TypeVar("T")

_log = logging.getLogger("relaxmpi")


def agree(comm: Comm, kind: str, what: Callable[[], tuple[Hashable, ...]]) -> None:
    """Meet all ranks; the same error on all where their arguments differ or one's are refused."""
    with door_of(comm, kind):
        try:
            if isinstance(comm, Hierarchy):
                raise TypeError(f"{kind} knows no nodes: pass the Comm, not its Hierarchy")
            call = Call((kind, *what()))
        except Exception as error:
            call = Call((kind,), error)
        comm.submit(call, nothing()).wait()


def numbers_of(x: Any, name: str) -> Flat:
    """View a buffer that an endpoint can mix, and see that the name is one."""
    flat = device_of(x).flat(x)
    if flat.device.name != "cpu" or flat.dtype not in ("float32", "float64"):
        raise TypeError(
            f"x must be float32 or float64 in host memory, not {flat.dtype} on {flat.device.name}"
        )
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    return flat


class Endpoint(ABC):
    """One rank's end of an exchange whose ranks need not call at the same time.

    Its calls are short flows on a lane of their own, which moves whenever the Comm's stream does
    (`comm.progress()`, `comm.background()`, any wait), under the same lock.
    """

    kind = ""

    def __init__(
        self,
        comm: Comm,
        name: str,
        length: int,
        peers: tuple[Collection[int], Collection[int]],
        ring: int,
    ) -> None:
        self.comm, self.name = comm, name
        self.closed = False
        self._open = True  # whether messages may be read
        self._title = f"{self.kind} {name!r}" if name else self.kind
        self._failed: RelaxError | None = None
        self._gave_up: set[int] = set()
        self._box: Mailbox = comm.mailbox(self._title, length, peers, ring)
        self._queue = comm.lane()
        self._patience = _Edges(self)
        comm.queue.poll(self._poll)

    def _tell(self, dest: int, note: bytes) -> None:
        self._box.tell(dest, note)
        self.comm.stats.header_bytes += len(note)

    @abstractmethod
    def _look(self) -> None:
        """Take what has arrived."""

    @abstractmethod
    def _missing(self) -> dict[int, str]:
        """Return the ranks that the call under way waits for, and a word on each edge."""

    @abstractmethod
    def _say_broken(self) -> None:
        """Tell the peers that this rank will not go on."""

    def _poll(self) -> None:
        if self._failed is None and self._open and not self.closed:
            try:
                self._look()
            except RelaxError as error:
                self._failed = error

    def _run(self, what: str, flow: Flow[T]) -> T:
        """Run a flow of this endpoint to its end."""
        title = f"{self._title}.{what}"
        comm = self.comm
        with comm.door(title):
            self._usable(title)
            flow = comm.recorded(title, flow)
            return self._queue.submit(flow, lambda: title, self._patience).wait()

    def _usable(self, title: str) -> None:
        if self.closed:
            raise RelaxError(f"{title}: this endpoint is closed")
        if self.comm.closed:
            raise RelaxError(f"{title}: its Comm is closed")
        broken = self._broken()
        if broken is not None:
            raise BrokenComm(f"{title}: this endpoint broke earlier: {broken}")
        if self._queue.inside():
            raise RelaxError(f"{title}: an endpoint cannot be used inside a primitive")

    def _collective(self, what: str, flow: Flow[T]) -> T:
        """Run a flow on the stream of the Comm, after all ranks have made this call."""
        title = f"{self._title}.{what}"
        with self.comm.door(title):
            return self.comm.submit(Call((title,)), flow).wait()

    def _broken(self) -> RelaxError | None:
        return self._failed or self._queue.broken

    def _abandoned(self) -> bool:
        """Where it has broken, end it alone: MPI may still write to what it has."""
        if self._broken() is None and self.comm.queue.broken is None:
            return False
        self._stop_looking()
        self.comm.keep_mailbox(self._box)
        return True

    def _end(self) -> Flow[None]:
        """The end of the mailbox; nothing may be read there any more."""
        self.closed = True
        yield self._box.end()

    def _release(self) -> None:
        """End it, after the mailbox has ended."""
        self._stop_looking()
        self.comm.free_mailbox(self._box)

    def _stop_looking(self) -> None:
        self.closed = True
        self.comm.queue.unpoll(self._poll)
        self._queue.close()

    def __repr__(self) -> str:
        comm = self.comm
        end = ", closed" if self.closed else ""
        return f"<{self._title} rank {comm.rank} of {comm.size}{end}>"


class _Edges:
    """Patience with the peers of an endpoint: names the edge that nothing comes on."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self.size = endpoint, endpoint.comm.size
        self._begun, self._warned = 0, -1

    def begin(self) -> int:
        """Count a call."""
        self._begun += 1
        return self._begun - 1

    def end(self) -> None:
        """Nobody else counts these calls."""

    def due(self, work: Work[Any]) -> float:
        """Return the seconds of waiting until the warning or the timeout."""
        settings = self._endpoint.comm.settings
        first = min(settings.warn_after, settings.timeout / 2)
        return first if self._warned < work.seq else settings.timeout

    def look(self, work: Work[Any]) -> RelaxError | None:
        """Give up at the timeout, or where a peer has done so or has left."""
        endpoint = self._endpoint
        comm, settings = endpoint.comm, endpoint.comm.settings
        missing = endpoint._missing()
        edges = "; ".join(f"edge {r} -> {comm.rank}: {said}" for r, said in missing.items())
        waits = f"rank {comm.rank} waits in {work.call()} for {edges}"
        gone = missing.keys() & comm.left()
        if gone:
            return PeerLeft(f"{waits}; the program of {_ranks(gone)} ended without close()")
        gave_up = missing.keys() & endpoint._gave_up
        if gave_up or work.waited > settings.timeout:
            endpoint._say_broken()
            why = f"{_ranks(gave_up)} gave up" if gave_up else f"waited {settings.timeout:g} s"
            return PeerTimeout(
                f"{waits}; {why}. This endpoint cannot be used any more; if the peers are only "
                "slow, raise Comm.world(timeout=...) or RELAXMPI_TIMEOUT"
            )
        if work.waited > min(settings.warn_after, settings.timeout / 2) > 0:
            if self._warned < work.seq:
                self._warned = work.seq
                _log.warning("%s, since %.3g s", waits, work.waited)
        return None

    def give_up(self, work: Work[Any]) -> None:
        """A call failed in the middle."""
        self._endpoint._say_broken()


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
