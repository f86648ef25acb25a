"""Difference compression: gossip sends what has changed since the last message, encoded.

Every holder of a replica follows the same messages, so that all hold the same bits, and what an
encoding has lost is in the next difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relaxmpi.primitives.codecs import Codec, Quantizer
from relaxmpi.primitives.devices import Device
from relaxmpi.primitives.errors import RelaxError

__all__ = ["DCD", "Ahead", "DifferenceCompression", "Replicas"]


class Ahead:
    """The place of a call in the order in which a memory's messages are taken in."""

    __slots__ = ("_before", "_done", "_failed")

    def __init__(self, before: Ahead | None) -> None:
        self._before, self._done, self._failed = before, False, False

    def due(self) -> bool:
        """Whether the call before has ended.

        Raises:
            RelaxError: It has failed, so that the replicas have missed a message.
        """
        before = self._before
        if before is None:
            return True
        if before._failed:
            raise RelaxError("an earlier call with this memory failed: reset it on all ranks")
        return before._done

    def end(self) -> None:
        """Let the next call go on."""
        self._before, self._done = None, True

    def fail(self) -> None:
        """Let no later call go on."""
        self._failed = True

    @property
    def over(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._done or self._failed


class Replicas:
    """The memory around a codec in gossip: of what each rank was told; see `DifferenceCompression`.

    Attributes:
        codec: What encodes differences.
    """

    def __init__(self, codec: Codec) -> None:
        if not isinstance(codec, Codec):
            raise TypeError(f"{type(self).__name__} wraps a Codec, not {type(codec).__name__}")
        self.codec = codec
        self._held: dict[tuple[str, int], Any] = {}
        self._ages: dict[tuple[str, int], int] = {}
        self._layout: tuple[str, ...] | None = None
        self._last: Ahead | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.codec!r})"

    def describe(self) -> str:
        """What the ends of an edge must agree on."""
        return f"{type(self).__name__}({self.codec.describe()})"

    def claim(self, *layout: str, alone: bool) -> None:
        """Bind to a buffer's layout at the first use.

        Args:
            layout: What the buffer is, and where it is averaged.
            alone: Whether the last call must have ended.

        Raises:
            ValueError: The layout is another one, or the last call has not ended.
        """
        if alone and self._last is not None and not self._last.over:
            raise ValueError(
                f"this {type(self).__name__} is in use by a call that is not done: give each "
                "buffer one of its own"
            )
        if self._layout not in (None, layout):
            assert self._layout is not None
            raise ValueError(
                f"this {type(self).__name__} holds the replicas of {', '.join(self._layout)}, not "
                f"of {', '.join(layout)}: make one for each buffer, or call reset()"
            )
        self._layout = layout

    def queue(self) -> Ahead:
        """Take the next place in the order of calls."""
        self._last = Ahead(self._last)
        return self._last

    def held(self, side: str, peer: int, device: Device, count: int, dtype: str) -> Any:
        """Return a replica, which is 0 before the first message: "own", "sent" or "heard"."""
        found = self._held.get((side, peer))
        if found is None:
            found = self._held[side, peer] = device.zeros(count, dtype)
        return found

    def age(self, side: str, peer: int) -> int:
        """Count a message on an edge and return how many there were before."""
        age = self._ages.get((side, peer), 0)
        self._ages[side, peer] = age + 1
        return age

    def replicas(self, side: str) -> dict[int, Any]:
        """Return the replicas of one side by rank.

        Args:
            side: "own", what the neighbours know of this rank; "heard", what this rank knows of
                each of them; "sent", in push-sum, what each of them knows of this rank.
        """
        return {peer: array for (s, peer), array in sorted(self._held.items()) if s == side}

    def reset(self) -> None:
        """Forget the replicas and the layout; on all ranks, or the next messages do not fit."""
        self._settled("reset")
        self._held.clear()
        self._ages.clear()
        self._layout = self._last = None

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's replicas; every rank saves its own.

        Raises:
            RelaxError: A call is not done: its messages belong to the state.
        """
        self._settled("saved")
        return {
            "layout": self._layout,
            "replicas": {key: value.copy() for key, value in self._held.items()},
            "ages": dict(self._ages),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank; all ranks restore the same step."""
        self._settled("restored")
        self._layout, self._last = state["layout"], None
        self._held = {key: value.copy() for key, value in state["replicas"].items()}
        self._ages = dict(state["ages"])

    def load_resized(self, state: dict[str, Any]) -> None:
        """Replicas belong to pairs of ranks: among another number of them they begin anew."""
        self.reset()

    def _settled(self, what: str) -> None:
        if self._last is not None and not self._last.over:
            raise RelaxError(
                f"this {type(self).__name__} cannot be {what} while a call that uses it is not "
                "done: wait for it first"
            )


class DifferenceCompression(Replicas):
    """Compressed gossip that keeps the mean, whatever the codec loses.

    In `neighbor_allreduce`, over a topology that does not vary, it is CHOCO (Koloskova, Stich and
    Jaggi 2019). With C the codec and x^_j what all neighbours know of rank j, 0 at first:
    q_i = C(x_i - x^_i); x^_j <- x^_j + q_j; x_i <- x_i + gamma sum_j W_ij (x^_j - x^_i).

    In `push_sum` each edge has a replica, so that the topology may vary: q = C(x_i - x^_ij);
    both ends x^_ij <- x^_ij + q; then rank i gives away gamma p_ji x^_ij and gamma p_ji w_i, and
    rank j receives the same numbers: the sums of x and w, with what is under way, never change.

    Replicas are kept in the work format (float32; float64 for float64), one a neighbour and one
    of its own, or two an edge; a change that is not finite is left out of them.

    Args:
        codec: What encodes. 4 bits and more; for sign, buckets of at most 64. Nearest rounding
            is used where the codec leaves the choice: what is lost comes in the next difference.
        gamma: How far x moves, in (0, 1]. Coarse codecs need less: at 2 bits and gamma = 1 gossip
            diverges, at 0.5 it converges.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def program():
        ...     memory = rx.DifferenceCompression(rx.Quantizer(bits=4))
        ...     with rx.Comm.world() as comm:
        ...         x = np.full(2, float(comm.rank), np.float32)
        ...         for _ in range(50):
        ...             rx.neighbor_allreduce(comm, x, topology=rx.Ring(), codec=memory)
        ...         return x.round(4).tolist()
        >>> rx.SimulatedWorld(4).run(program)[3]
        [1.5, 1.5]
    """

    def __init__(self, codec: Codec, gamma: float = 0.5) -> None:
        super().__init__(_nearest(codec))
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], not {gamma!r}")
        self.gamma = float(gamma)

    def __repr__(self) -> str:
        return f"DifferenceCompression({self.codec!r}, gamma={self.gamma})"

    def describe(self) -> str:
        """What the ends of an edge must agree on."""
        return f"DifferenceCompression({self.codec.describe()}, {self.gamma})"


def _nearest(codec: Codec) -> Codec:
    if isinstance(codec, Quantizer) and codec.stochastic is None:
        return replace(codec, stochastic=False)
    return codec


class DCD(Replicas):
    """Compressed gossip in which x is its own replica: DCD-PSGD (Tang et al. 2018), BAGUA's ring.

    In `neighbor_allreduce`, over a topology that does not vary: with x^_j what all neighbours hold
    of rank j, q_i = C(x_i - x^_i + sum_j W_ij (x^_j - x^_i)); x^_j <- x^_j + q_j; x_i <- x^_i.
    The first call gives the neighbours their replicas: x goes in full precision and stays as it
    is. Later x_i is there as soon as a call has started, because no message is needed for it. The
    ranks agree up to the codec's error, on a mean that drifts with it; codecs of less than 8 bits,
    and biased ones, are better off with `DifferenceCompression`.

    Args:
        codec: What encodes, such as MinMaxUInt8().

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def program():
        ...     memory = rx.DCD(rx.MinMaxUInt8())
        ...     with rx.Comm.world() as comm:
        ...         x = np.full(2, float(comm.rank), np.float32)
        ...         for _ in range(50):
        ...             rx.neighbor_allreduce(comm, x, topology=rx.Ring(), codec=memory)
        ...         return x.round(2).tolist()
        >>> rx.SimulatedWorld(3).run(program)[2]
        [1.0, 1.0]
    """
