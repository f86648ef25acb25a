"""The neighbour verbs: decentralised averaging along the edges of a topology.

They run on a lane of their own beside the Comm's stream: all messages are posted when a call is
started, calls complete in any order, and centralised calls wait for none of them. Only the
first use of a topology on a Comm is an agreement of all ranks; later calls meet nobody but their
neighbours, whom each message tells in its header what it is.

All raise, on both ends of an edge, `MismatchError` where they disagree, `PeerTimeout` naming the
rank that nothing came from, and `PeerLeft`. Wrong arguments are TypeError or ValueError on the
rank that passed them, at once, and MismatchError on its neighbours.
"""

from __future__ import annotations

from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.agreement import nothing
from relaxmpi.primitives.arguments import apart, like, whole
from relaxmpi.primitives.codecs import Codec, Identity, Key
from relaxmpi.primitives.devices import Flat, device_of
from relaxmpi.primitives.feedback import ErrorFeedback
from relaxmpi.primitives.gossip import difference_moves, moves
from relaxmpi.primitives.gossip.difference import DCD, DifferenceCompression, Replicas
from relaxmpi.primitives.gossip.routes import Route, pair_with
from relaxmpi.primitives.gossip.verb import EdgePlan, EdgeVerb, Move

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm
    from relaxmpi.primitives.gossip.edges import Exchange
    from relaxmpi.primitives.topology import Topology
    from relaxmpi.primitives.work import Flow

__all__ = ["neighbor_allreduce", "pairwise_average", "push_sum"]

_FLOAT64 = np.dtype(np.float64)


@EdgeVerb
def neighbor_allreduce(
    comm: Comm,
    x: Any,
    out: Any = None,
    *,
    topology: Topology,
    step: int | None = None,
    codec: Any = None,
    name: str = "",
) -> EdgePlan:
    """Average with the neighbours: x_i <- sum_j W_ij x_j (D-PSGD; Lian et al. 2017).

    W must be doubly stochastic, so that the mean over all ranks stays what it is and every x_i
    goes to it. Sums are made in the order of ranks, the own term in its place.

    Args:
        comm: A Comm; or a Hierarchy, whose nodes are then what the topology connects.
        x: Floats or complex numbers of any shape, C-contiguous; the same shape on all ranks.
        out: Same shape and dtype; None averages in place. Until the call is done both belong
            to it.
        topology: A Topology whose rows sum to 1, such as Ring().
        step: Of the topology; required where it varies.
        codec: None, or a `DifferenceCompression` or `DCD` of this buffer's own.
        name: Told apart by the header: two buffers of one shape cannot be swapped unnoticed.

    Returns:
        x, or out.

    Raises:
        ValueError: The topology is not doubly stochastic (use `push_sum`), or needs a step.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def program():
        ...     with rx.Comm.world() as comm:
        ...         x = np.full(2, float(comm.rank))
        ...         return rx.neighbor_allreduce(comm, x, topology=rx.Ring()).tolist()
        >>> rx.SimulatedWorld(4).run(program)[1]
        [1.0, 1.0]
    """
    step = whole(step)

    def check() -> Move:
        flat = device_of(x).flat(x, writable=out is None, strided=out is not None)
        target = flat if out is None else _place(flat, out)
        what = _told(
            "neighbor_allreduce", flat, topology, codec, name, (DifferenceCompression, DCD)
        )
        if isinstance(codec, Replicas):
            _claim_static(comm, codec, flat, topology)

        def post(exchange: Exchange, route: Route, part: Flat, goal: Any) -> Flow[None]:
            part = _priced(comm, part)
            if isinstance(codec, DCD):
                tools = comm.priced(codec.codec), _key(comm, name, step)
                return difference_moves.dcd(exchange, part, goal, route, codec, *tools)
            if isinstance(codec, DifferenceCompression):
                tools = comm.priced(codec.codec), _key(comm, name, step)
                return difference_moves.choco(exchange, part, goal, route, codec, *tools)
            return moves.average(exchange, part, goal, route)

        return Move(what, flat, target, post, lambda _: x if out is None else out)

    return EdgePlan("neighbor_allreduce", check, topology, step, doubly=True)


@EdgeVerb
def push_sum(
    comm: Comm,
    x: Any,
    w: Any,
    *,
    topology: Topology,
    step: int | None = None,
    codec: Any = None,
    name: str = "",
) -> EdgePlan:
    """Push shares of x and of its weight w to the out-neighbours (Kempe, Dobra and Gehrke 2003).

    With p_ji the weight that rank i puts on what it sends to j, x and w are scaled by p_ii when
    the call starts, p_ji x and p_ji w travel together, and what comes from this step's
    in-neighbours is returned: add it, now or any number of steps later, and x / w goes to the
    mean of what the ranks began with, on any strongly connected schedule. The sums of x and of w
    over all ranks, with what is under way, never change (to rounding).

    Args:
        comm: A Comm; or a Hierarchy, whose nodes are then what the topology connects: x is scaled
            when its turn has come, w is the same on all ranks of a node.
        x: The biased numerator: floats or complex numbers of any shape, C-contiguous, writable.
        w: Its weight: writable float64 array of one number; 1 at the beginning.
        topology: A Topology; columns sum to 1.
        step: Of the topology; required where it varies.
        codec: None, or a `DifferenceCompression` of this buffer's own; calls in flight share it.
        name: See `neighbor_allreduce`.

    Returns:
        (dx, dw): a buffer like x, whose memory may be used again once nobody holds it, and a
        float.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def program():
        ...     with rx.Comm.world() as comm:
        ...         x, w = np.full(2, float(comm.rank)), np.ones(1)
        ...         for k in range(2):
        ...             dx, dw = rx.push_sum(comm, x, w, topology=rx.OnePeerExponential(), step=k)
        ...             x += dx; w += dw
        ...         return (x / w).tolist()
        >>> rx.SimulatedWorld(4).run(program)[0]
        [1.5, 1.5]
    """
    step = whole(step)
    kind = None
    if codec is None and step is None and type(x) is np.ndarray and type(name) is str:
        kind = x.shape, x.dtype, name
        usual = comm.edges.usual.get(kind)
        if usual is not None and usual.topology is topology and x.flags.carray and _is_weight(w):
            flat = Flat(x.reshape(-1), usual.dtype, x.shape, usual.device)
            move = _Push(comm, usual.what, flat, x, w)
            return EdgePlan("push_sum", nothing, topology, ready=(move, usual.route))  # type: ignore[arg-type]

    def check() -> Move:
        flat, weight = device_of(x).flat(x), _weight(w)
        what = _told("push_sum", flat, topology, codec, name, (DifferenceCompression,))
        if isinstance(codec, DifferenceCompression):
            codec.claim(f"push_sum of {len(flat.data)} x {flat.dtype}", comm.layout, alone=False)
        return _Push(comm, what, flat, x, weight, codec, name, step)

    return EdgePlan("push_sum", check, topology, step, kind=kind)


class _Push(Move):
    """A checked call of push-sum."""

    __slots__ = ("_codec", "_comm", "_name", "_step", "_x")

    def __init__(
        self,
        comm: Comm,
        what: tuple[Any, ...],
        flat: Flat,
        x: Any,
        w: Any,
        codec: Any = None,
        name: str = "",
        step: int | None = None,
    ) -> None:
        self.what, self.flat, self.target, self.w = what, flat, flat, w
        self._comm, self._x, self._codec, self._name, self._step = comm, x, codec, name, step

    def post(self, exchange: Exchange, route: Route, part: Flat, goal: Any) -> Flow[Any]:
        """See `Move`."""
        comm, codec, part = self._comm, self._codec, _priced(self._comm, part)
        if isinstance(codec, DifferenceCompression):
            tools = comm.priced(codec.codec), _key(comm, self._name, self._step)
            return difference_moves.push(exchange, part, self.w, route, codec, *tools)
        return moves.push(exchange, part, self.w, route)

    def give(self, result: tuple[Any, float]) -> tuple[Any, float]:
        """See `Move`."""
        flat = self.flat
        return flat.device.dress(result[0], self._x, flat.shape), result[1]


@EdgeVerb
def pairwise_average(comm: Comm, x: Any, *, peer: int, name: str = "") -> EdgePlan:
    """Average with one peer, which names this rank: x_i, x_j <- (x_i + x_j) / 2, atomically.

    Both start from what x was when they called (AD-PSGD; Lian et al. 2018): x += (theirs - mine)
    / 2. So x_i + x_j keeps its value to rounding whatever else is added to x meanwhile, and both
    hold the same bits if nothing was. With `comm.background()` x is written by the thread that
    calls `wait`, `test` or `progress`, never by the progress thread.

    Args:
        comm: A Comm; or a Hierarchy, whose nodes are then what the topology connects.
        x: Floats or complex numbers of any shape, C-contiguous and writable.
        peer: Another rank (on a Hierarchy: node); its next call with this rank must name this rank.
        name: See `neighbor_allreduce`.

    Returns:
        x.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def program():
        ...     with rx.Comm.world() as comm:
        ...         x = np.full(2, float(comm.rank))
        ...         return rx.pairwise_average(comm, x, peer=1 - comm.rank).tolist()
        >>> rx.SimulatedWorld(2).run(program)
        [[0.5, 0.5], [0.5, 0.5]]
    """
    peer = index(peer)
    me, n = comm.seat
    if peer == me:
        raise ValueError(f"peer {peer} is this rank: name another rank, which names {me}")
    if not 0 <= peer < n:
        raise ValueError(f"peer {peer} is none of {n} ranks: name another rank, 0 to {n - 1}")

    def check() -> Move:
        flat = device_of(x).flat(x)
        what = _told("pairwise_average", flat, None, None, name, ())

        def post(exchange: Exchange, route: Route, part: Flat, _goal: Any) -> Flow[None]:
            return moves.meet(exchange, _priced(comm, part), *route.out)

        return Move(what, flat, flat, post, lambda _: x)

    return EdgePlan("pairwise_average", check, route=pair_with(peer))


def _told(
    verb: str,
    flat: Flat,
    topology: Topology | None,
    codec: Any,
    name: str,
    memories: tuple[type[Replicas], ...],
) -> tuple[Any, ...]:
    """Check what the verbs have in common, and say what both ends of an edge compare."""
    if not flat.dtype.startswith(("float", "bfloat", "complex")):
        raise TypeError(f"{verb} averages floats and complex numbers, not {flat.dtype}")
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    if codec is not None and not isinstance(codec, Identity):
        _check_memory(verb, codec, flat.dtype, memories)
    told = None if codec is None else codec.describe()
    return _words(verb, flat.dtype, flat.shape, topology, told, name)


@lru_cache(maxsize=1024)
def _words(
    verb: str,
    dtype: str,
    shape: tuple[int, ...],
    topology: Topology | None,
    codec: str | None,
    name: str,
) -> tuple[Any, ...]:
    where = None if topology is None else f"over {topology!r}"
    told = None if codec is None else f"codec {codec}"
    return (verb, dtype, str(shape), where, told, name and f"name {name!r}")


def _check_memory(verb: str, codec: Any, dtype: str, memories: tuple[type[Replicas], ...]) -> None:
    if isinstance(codec, ErrorFeedback):
        raise TypeError(
            "ErrorFeedback belongs to all-reduces; gossip remembers what it has sent: use "
            "DifferenceCompression(codec)"
        )
    if isinstance(codec, Codec):
        raise TypeError(
            "quantising x itself adds noise that never goes away: wrap the codec in "
            f"DifferenceCompression({codec!r})"
        )
    if not isinstance(codec, memories):
        names = " or a ".join(memory.__name__ for memory in memories)
        raise TypeError(f"codec of {verb} must be a {names}, not {codec!r}")
    if dtype.startswith("complex"):
        raise TypeError(f"codecs encode real floats, not {dtype}")


def _claim_static(comm: Comm, memory: Replicas, flat: Flat, topology: Topology) -> None:
    if topology.varies:
        raise ValueError(
            f"the neighbours' replicas need a topology that does not vary, such as Ring() or "
            f"Exponential(), not {topology!r}; push_sum takes any"
        )
    what = f"neighbor_allreduce of {len(flat.data)} x {flat.dtype} over {topology!r}"
    memory.claim(what, comm.layout, alone=True)


def _key(comm: Comm, name: str, step: int | None) -> Key:
    when = comm.next_step(name) if step is None else step
    return Key(name=name, step=when, rank=comm.rank)


def _priced(comm: Comm, flat: Flat) -> Flat:
    device = comm.priced(flat.device)
    return flat if device is flat.device else flat._replace(device=device)


def _is_weight(w: Any) -> bool:
    """Whether it is what callers usually pass."""
    usual = type(w) is np.ndarray and w.dtype is _FLOAT64 and w.shape == (1,)
    return usual and bool(w.flags.writeable)


def _weight(w: Any) -> Any:
    if _is_weight(w):
        return w
    try:
        flat = device_of(w).flat(w)
    except TypeError:
        flat = None
    if flat is None or flat.dtype != "float64" or len(flat.data) != 1:
        raise TypeError("w must be a writable float64 array of one number, such as np.ones(1)")
    return flat.data


def _place(flat: Flat, out: Any) -> Flat:
    """View `out`; `flat` itself where they are one buffer, and the verb works in place."""
    target = like(flat, out, flat.shape)
    return target if apart(flat.device, target.data, flat.data, target.data) else flat
