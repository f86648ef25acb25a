"""What a world must be able to move: about ten non-blocking moves of contiguous numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from relaxmpi.primitives.ops import Op

__all__ = ["TAG", "Every", "Reduction", "Request", "Transport", "Turn", "pieces_of"]

# Of messages in the order of their Comm's calls; neighbour verbs use higher ones. MPI promises
# tags up to 32767.
TAG = 1

# Bytes of a piece of a long reduction: enough for what its messages cost, and no more, because
# what is under way to one host must fit into the buffers of its switch port: at 2 MiB and four
# hosts TCP lost frames, and 16 MiB took half as long again.
_PIECE = 1024 * 1024


def pieces_of(nbytes: float, nodes: int) -> int:
    """In how many pieces a reduction of so many bytes goes: several between nodes, if long.

    Example:
        >>> pieces_of(2**24, 2), pieces_of(2**22, 2), pieces_of(2**24, 1)
        (16, 4, 1)
    """
    return max(1, int(nbytes) // _PIECE) if nodes > 1 else 1


class Request(Protocol):
    """Something under way. It keeps its buffers alive until `test` has answered True."""

    def test(self) -> bool:
        """Whether it has completed; drives it, and never blocks."""


# Starts an all-reduce of the first array into the second, another one; MEAN is left as the sum.
Reduction = Callable[[Any, Any], Request]


class Every:
    """Several requests as one."""

    __slots__ = ("_left",)

    def __init__(self, requests: Sequence[Request]) -> None:
        self._left = list(requests)

    def test(self) -> bool:
        """Whether all have completed."""
        while self._left and self._left[-1].test():
            self._left.pop()
        return not self._left

    def first(self) -> Request | None:
        """Return the request that is tested next, if one is left."""
        return self._left[-1] if self._left else None


class Turn:
    """The request of something that happens in this process: `due` says when."""

    __slots__ = ("test",)

    def __init__(self, due: Callable[[], bool]) -> None:
        self.test = due


class Transport(Protocol):
    """Moves 1-D arrays of one device between the ranks of one communicator.

    Messages between two ranks arrive in the order they were sent, so flows, which run in the
    same order everywhere, need no tags. Neighbour verbs complete in any order: each of their
    calls has a tag on each edge, from `TAG` on.

    Attributes:
        longest: Bytes of the longest single message; longer buffers are cut.
    """

    longest: int

    def isend(self, data: Any, dest: int, tag: int = TAG) -> Request:
        """Start sending the bytes of `data`."""

    def irecv(self, data: Any, source: int, tag: int = TAG) -> Request:
        """Start receiving exactly the bytes of `data`."""

    def announce(self, header: Any, dest: int, tag: int) -> Request:
        """Start sending a short header, which is no payload, in host memory."""

    def ibroadcast(self, data: Any, root: int) -> Request:
        """Start a broadcast of the bytes of `data`."""

    def reduction(self, data: Any, dtype: str, op: Op) -> Reduction | None:
        """Return what all-reduces `data` where the library below does it exactly, and faster.

        None leaves it to messages. The answer depends on format, size and layout only, never on
        a measurement: ranks must agree, and a sum in another order differs in bits.
        """

    def pieces(self, data: Any) -> int:
        """In how many pieces a reduction of `data` should go, to keep the links busy."""
