"""All-reduces of full precision inside one host, by the ways that its memory offers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.devices import Device, Flat
from relaxmpi.primitives.learned import Learned, sent_by
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.shared_moves import SharedMoves, takes
from relaxmpi.primitives.turns import SharedTurn, Turns
from relaxmpi.primitives.wire import Plain, Wire, chunks
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.primitive import Plan
    from relaxmpi.primitives.pulls import Pulls
    from relaxmpi.primitives.slots import Slots
    from relaxmpi.primitives.stream import Stream

__all__ = ["SharedSchedule"]

# Bytes that each rank may move more in one turn than in two, because a turn costs. In one it moves
# n + 3 times the buffer, its own to its slot and all that are given to their sum, in two 5 - 2 / n.
_A_TURN = 640 * 1024

# All-reduces before numba is imported, for which a program with fewer of them would wait longer
# than for all of them.
_WARM_UP = 100


class SharedSchedule(SharedMoves):
    """Every rank puts its numbers where the others read them.

    Counted as what a bandwidth-optimal exchange of messages sends.

    Args:
        comm: The ranks.
        slots: Where their numbers go.
        pulls: How many numbers go.
        polite: Whether others may need the core of a rank that waits.
    """

    def __init__(self, comm: Stream, slots: Slots, pulls: Pulls, polite: bool) -> None:
        super().__init__(comm, slots)
        self._pulls, self._polite = pulls, polite
        self._cold = _WARM_UP
        self._turns: Turns | None = None
        self._learned = Learned(comm, slots.take_back)

    def undoing(self, device: Device) -> Callable[[], None] | None:
        """See `FlatSchedule`: a slot that nobody reads is as good as one that was never filled."""
        return self._slots.take_back if device.name == "cpu" else None

    def learn(self, call: Call, flat: Flat, op: Op, name: str) -> None:
        """See `FlatSchedule`: a compiled call is made again without its checks."""
        x, turns = flat.data, self._turns
        if turns is None or not op.additive or not turns.takes(x):
            return
        if self._pulls.takes(x):
            begin = partial(turns.pull, self._pulls, self._spans(x))
            self._learned.add(call, flat, op, name, begin, partial(self._pulled, turns))
        elif self._is_one(x):
            begin = partial(turns.again, turns.spans(x))
            self._learned.add(call, flat, op, name, begin, self._one_turn)

    def again(self, x: Any, out: Any, op: Op, name: str) -> Plan[Any] | None:
        """See `FlatSchedule`."""
        return self._learned.plan(x, out, op, name)

    def _is_one(self, x: Any) -> bool:
        """Whether one turn is enough for an all-reduce."""
        return self._at_one_go(x) and bool(0 < x.nbytes <= self._slots.nbytes)

    def _at_one_go(self, x: Any) -> bool:
        n = self._comm.size
        return bool((n - 2 + 2 / n) * x.nbytes <= _A_TURN)

    def allreduce(self, device: Device, x: Any, out: Any, op: Op, wire: Wire) -> Flow[None]:
        """Reduce `x` over the ranks into `out`, which may be `x`."""
        if not takes(wire, device):
            return super().allreduce(device, x, out, op, wire)
        turns = self._compiled() if op.additive else None
        if turns is not None and not (turns.takes(x) and turns.takes(out)):
            turns = None
        if turns is not None:
            return self._compiled_flow(turns, x, out, op is Op.MEAN)
        return self._in_python(device, x, out, op, wire)

    def _in_python(self, device: Device, x: Any, out: Any, op: Op, wire: Plain) -> Flow[None]:
        if self._pulls.takes(x):
            if (yield from self._pulls.allreduce(device, x, out, op, wire)):
                self._count(*sent_by(self._comm.size, x))
                return
            self._forget()
        yield from self._in_pieces(device, x, out, op, wire, self._at_one_go(x))

    def _compiled_flow(self, turns: Turns, x: Any, out: Any, mean: bool) -> Flow[None]:
        """Read the memory of the others, if it is long and all ranks can."""
        pulls = self._pulls
        if pulls.takes(x):
            pulled = turns.pull(pulls, self._spans(x), x, out, mean)
            yield from self._pulled(turns, pulled, x, out, mean)
        else:
            yield from self._by_turns(turns, x, out, mean, self._at_one_go(x))

    def _pulled(self, turns: Turns, pulled: SharedTurn, x: Any, out: Any, mean: bool) -> Flow[None]:
        try:
            yield pulled
        except BaseException:
            self._slots.withdraw()
            raise
        if pulled.refused:
            self._pulls.refused()
            self._forget()
            yield from self._by_turns(turns, x, out, mean, self._at_one_go(x))
        else:
            self._count(*sent_by(self._comm.size, x))

    def _forget(self) -> None:
        """Forget calls that begin by reading the memory of others, where one rank cannot."""
        if not self._pulls.able:
            self.forget()

    def forget(self) -> None:
        """See `FlatSchedule`."""
        self._learned.clear()

    def _one_turn(self, turn: SharedTurn, x: Any, _out: Any, _mean: bool) -> Flow[None]:
        yield turn
        self._count(*sent_by(self._comm.size, x))

    def _spans(self, x: Any) -> Any:
        return np.array(chunks(len(x), self._comm.size))

    def _compiled(self) -> Turns | None:
        """Return the compiled turns, once there have been so many calls that they are worth it."""
        if self._cold:
            self._cold -= 1
            if not self._cold and import_module("relaxmpi.primitives._jit").compiles():
                self._turns = Turns(self._slots, self._polite)
        return self._turns

    def _by_turns(self, turns: Turns, x: Any, out: Any, mean: bool, at_once: bool) -> Flow[None]:
        n = self._comm.size
        for lo, hi in self._pieces(x):
            if at_once:
                yield turns.at_once(x[lo:hi], out[lo:hi], mean)
                continue
            bounds = chunks(hi - lo, n)
            scatter = turns.scatter(x[lo:hi], out[lo:hi], bounds, self._each(x), mean)
            yield scatter
            yield turns.gather(out[lo:hi], bounds, scatter)
        self._count(*sent_by(n, x))

    def _pieces(self, x: Any) -> list[tuple[int, int]]:
        """Cut a buffer into what goes in one turn, or in two."""
        if self._is_one(x):
            return [(0, len(x))]
        return chunks(len(x), -(-len(x) // (self._each(x) * self._comm.size)))

    def _at_once(self, device: Device, x: Any, out: Any, op: Op, wire: Plain) -> Flow[None]:
        """Every rank reads and adds all."""
        comm, slots = self._comm, self._slots
        n = comm.size
        given = slots.turn(len(x), x.dtype)
        device.copy(given[comm.rank], x)
        yield slots.given()
        self._count(*sent_by(self._comm.size, x))
        wire.deliver(wire.reduced(given, out, op), out, op, n)

    def _in_pieces(
        self, device: Device, x: Any, out: Any, op: Op, wire: Plain, at_once: bool
    ) -> Flow[None]:
        n, me = self._comm.size, self._comm.rank
        for lo, hi in self._pieces(x):
            if at_once:
                yield from self._at_once(device, x[lo:hi], out[lo:hi], op, wire)
                continue
            bounds = chunks(hi - lo, n)
            place = out[lo:hi][slice(*bounds[me])]
            total = yield from self._scatter(device, x[lo:hi], place, op, wire, bounds)
            yield from self._gather(device, total, place, out[lo:hi], op, wire, bounds)
