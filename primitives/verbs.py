"""The centralised verbs: what users call. Arguments are checked here, moves are made elsewhere.

Where `out` is None a verb that keeps the shape works in place and returns its buffer, and a verb
that changes it returns a new buffer of the caller's kind. A buffer given to `.start` belongs to
the Work until it is done. Every verb raises `MismatchError` on all ranks where they disagree,
`PeerTimeout` or `PeerLeft` where a peer does not come, and TypeError or ValueError, on every
rank that passed it, for a wrong argument.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.arguments import (
    Lossy,
    apart,
    call_of,
    check_op,
    claimed,
    like,
    ordered,
    wire_of,
)
from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.devices import Flat, device_of
from relaxmpi.primitives.ops import SUM, Op
from relaxmpi.primitives.primitive import Plan, Verb
from relaxmpi.primitives.wire import chunks
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm

__all__ = ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "reduce_scatter"]

_NUMBERS = (int, float, complex, np.number)


@Verb
def allreduce(
    comm: Comm,
    x: Any,
    out: Any = None,
    *,
    op: Op = SUM,
    codec: Lossy | None = None,
    name: str = "",
    step: int | None = None,
) -> Plan[Any]:
    """Reduce a buffer over all ranks; every rank ends with the same bytes.

    Without a codec half precision is summed in float32 and rounded once, and MAX and MIN keep
    NaN. With one, every value is quantised twice (scatter-reduce, then all-gather), whatever
    the number of ranks.

    Args:
        comm: A Comm, or a Hierarchy for full precision inside nodes and the codec between them.
        x: Any shape, C-contiguous; or a Python number, and a number is returned.
        out: Same shape and dtype; None reduces in place.
        op: SUM, MEAN (floats only), MAX or MIN.
        codec: A Codec, or an ErrorFeedback of this buffer's own; SUM and MEAN of real floats.
        name: Told apart by the agreement: two buffers of one shape cannot be swapped unnoticed.
        step: Step of the codec's random numbers; default: how often this name was reduced here.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> with rx.Comm.world() as comm:
        ...     rx.allreduce(comm, np.ones(2), op=rx.MEAN), rx.allreduce(comm, 3)
        (array([1., 1.]), 3)
    """
    usual = codec is None and step is None
    if usual and (again := comm.schedule.again(x, out, op, name)) is not None:
        return again
    if isinstance(x, _NUMBERS):
        return _reduce_number(comm, x, out, op, codec, name)
    flat = device_of(x).flat(x, writable=out is None, strided=out is not None)
    target = flat if out is None else _place(flat, out)
    check_op(flat.dtype, op, codec)
    call = call_of("allreduce", flat, op.value, codec, name, step)
    if usual:
        comm.schedule.learn(call, flat, op, name)
    return _reduction(comm, call, flat, target, op, codec, name, step, x if out is None else out)


def _reduction(
    comm: Comm,
    call: Call,
    flat: Flat,
    target: Flat,
    op: Op,
    codec: Lossy | None,
    name: str,
    step: int | None,
    result: Any,
) -> Plan[Any]:
    def flow() -> Flow[Any]:
        if comm.size == 1:
            if target is not flat:
                flat.device.copy(target.data, flat.data)
        elif len(flat.data):
            wire = wire_of(comm, flat, codec, name, step)
            yield from comm.schedule.allreduce(flat.device, flat.data, target.data, op, wire)
        return result

    take_back = comm.schedule.undoing(flat.device) if codec is None and len(flat.data) else None
    return Plan(call, claimed(comm, codec, "allreduce", flat, flow()), take_back)


def _reduce_number(
    comm: Comm, x: Any, out: Any, op: Op, codec: Lossy | None, name: str
) -> Plan[Any]:
    if out is not None or codec is not None:
        raise TypeError("a Python number is reduced without out= and codec=")
    if isinstance(x, (int, np.integer)) and op is Op.MEAN:
        x = float(x)
    if isinstance(x, int) and not -(2**63) <= x < 2**63:
        raise ValueError(f"a Python integer is reduced in 64 bits, which {x} does not fit")
    array = np.array([x], np.int64 if isinstance(x, int) else None)
    flat = device_of(array).flat(array)
    check_op(flat.dtype, op, None)
    call = call_of("allreduce of a number", flat, op.value, None, name, None)
    plan = _reduction(comm, call, flat, flat, op, None, name, None, array)

    def flow() -> Flow[Any]:
        yield from plan.flow
        return array[0] if isinstance(x, np.generic) else array[0].item()

    return Plan(call, flow(), plan.take_back)


@Verb
def reduce_scatter(
    comm: Comm,
    x: Any,
    out: Any = None,
    *,
    op: Op = SUM,
    codec: Lossy | None = None,
    name: str = "",
    step: int | None = None,
) -> Plan[Any]:
    """Reduce a buffer of d elements over all ranks; rank r returns its chunk of the result.

    With c = ceil(d / n) chunk r is the flat elements r c to min((r + 1) c, d): 1-D, and empty
    where d is small. With a codec each value is quantised once, by its contributor.

    Args:
        comm: A Comm.
        x: Any shape; C-contiguous, or strided and then copied. It is not changed.
        out: 1-D buffer for the chunk; None makes one.
        op: As in `allreduce`, like `codec`, `name` and `step`.
        codec: See `allreduce`.
        name: See `allreduce`.
        step: See `allreduce`.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> with rx.Comm.world() as comm:
        ...     rx.reduce_scatter(comm, np.arange(3.0))
        array([0., 1., 2.])
    """
    device = device_of(x)
    flat = device.flat(x, writable=False, strided=True)
    check_op(flat.dtype, op, codec)
    bounds = chunks(len(flat.data), comm.size)
    lo, hi = bounds[comm.rank]
    result = device.like(x, (hi - lo,)) if out is None else out
    target = like(flat, result, (hi - lo,))
    apart(device, flat.data, target.data, flat.data[lo:hi])
    call = call_of("reduce_scatter", flat, op.value, codec, name, step)

    def flow() -> Flow[Any]:
        if comm.size == 1:
            device.copy(target.data, flat.data)
        elif len(flat.data):
            wire = wire_of(comm, flat, codec, name, step)
            total = yield from comm.schedule.reduce_scatter(
                device, flat.data, target.data, op, wire, bounds
            )
            wire.deliver(total, target.data, op, comm.size)
        return result

    return Plan(call, claimed(comm, codec, "reduce_scatter", flat, flow()))


@Verb
def allgather(
    comm: Comm,
    x: Any,
    out: Any = None,
    *,
    codec: Lossy | None = None,
    name: str = "",
    step: int | None = None,
) -> Plan[Any]:
    """Give every rank the buffers of all ranks.

    Args:
        comm: A Comm.
        x: Any shape, the same on all ranks; with `out`, chunk r of `out` as `reduce_scatter`
            returns it. It is not changed.
        out: None makes a buffer of shape (n, *x.shape). Otherwise any shape; it is filled from
            the chunks of all ranks.
        codec: Each buffer is encoded once; every rank, the sender too, keeps what is decoded.
        name: See `allreduce`.
        step: See `allreduce`.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> with rx.Comm.world() as comm:
        ...     rx.allgather(comm, np.arange(2)).shape == (comm.size, 2)
        True
    """
    device = device_of(x)
    flat = device.flat(x, writable=False, strided=True)
    n = comm.size
    result = device.like(x, (n, *flat.shape)) if out is None else out
    target = like(flat, result, None)
    if out is None:
        count = len(flat.data)
        bounds = [(r * count, (r + 1) * count) for r in range(n)]
    else:
        bounds = chunks(len(target.data), n)
        lo, hi = bounds[comm.rank]
        if len(flat.data) != hi - lo:
            raise ValueError(
                f"out has {len(target.data)} elements, of which rank {comm.rank} of {n} gives "
                f"{hi - lo}, but x has {len(flat.data)}"
            )
    apart(device, target.data, flat.data, target.data[slice(*bounds[comm.rank])])
    call = call_of("allgather", target, None, codec, name, step)

    def flow() -> Flow[Any]:
        places = [target.data[lo:hi] for lo, hi in bounds]
        if n == 1:
            device.copy(target.data, flat.data)
        elif len(target.data):
            wire = wire_of(comm, flat, codec, name, step)
            yield from comm.schedule.allgather(device, flat.data, places, wire)
        return result

    return Plan(call, claimed(comm, codec, "allgather", flat, flow()))


@Verb
def broadcast(comm: Comm, x: Any, *, root: int = 0, name: str = "") -> Plan[Any]:
    """Fill `x` on every rank with the numbers of rank `root`, in place; returns `x`.

    Args:
        comm: A Comm, or a Hierarchy: then first between nodes.
        x: Same shape and dtype on all ranks, C-contiguous and writable.
        root: The rank that has the numbers.
        name: See `allreduce`.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> with rx.Comm.world() as comm:
        ...     rx.broadcast(comm, np.ones(2))
        array([1., 1.])
    """
    root = index(root)
    if not 0 <= root < comm.size:
        raise ValueError(f"root must be a rank, 0 to {comm.size - 1}, not {root}")
    flat = device_of(x).flat(x)

    def flow() -> Flow[Any]:
        if comm.size > 1 and len(flat.data):
            yield from comm.schedule.broadcast(flat.device, flat.data, root)
        return x

    call = call_of("broadcast", flat, f"from rank {root}", None, name, None)
    return Plan(call, ordered(comm, flat, flow()))


@Verb
def alltoall(comm: Comm, x: Any, out: Any = None, *, name: str = "") -> Plan[Any]:
    """Send row r of `x` to rank r and receive row r from it: a transpose over the ranks.

    Args:
        comm: A Comm.
        x: Shape (n, ...).
        out: Same shape and dtype; None works in place.
        name: See `allreduce`.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> with rx.Comm.world() as comm:
        ...     rx.alltoall(comm, np.full((comm.size, 2), comm.rank))[0].tolist()
        [0, 0]
    """
    flat = device_of(x).flat(x, writable=out is None, strided=out is not None)
    if not flat.shape or flat.shape[0] != comm.size:
        raise ValueError(f"x must have shape ({comm.size}, ...), a row a rank, not {flat.shape}")
    target = flat if out is None else _place(flat, out)

    def flow() -> Flow[Any]:
        if comm.size == 1 or not len(flat.data):
            if target is not flat:
                flat.device.copy(target.data, flat.data)
            return x if out is None else out
        received = target.data
        if target is flat:
            received = comm.scratch(flat.device, len(flat.data), flat.dtype)
        yield from comm.schedule.alltoall(flat.device, flat.data, received)
        if target is flat:
            flat.device.copy(flat.data, received)
        return x if out is None else out

    return Plan(call_of("alltoall", flat, None, None, name, None), ordered(comm, flat, flow()))


@Verb
def barrier(comm: Comm, *, name: str = "") -> Plan[None]:
    """Wait until every rank has come here.

    Example:
        >>> import relaxmpi as rx
        >>> with rx.Comm.world() as comm:
        ...     rx.barrier(comm)
    """

    def flow() -> Flow[None]:
        yield from ()  # the agreement that goes before every flow is the barrier

    return Plan(Call(("barrier", name)), flow())


def _place(flat: Flat, out: Any) -> Flat:
    """View `out`; `flat` itself where they are one buffer, and the verb works in place."""
    target = like(flat, out, flat.shape)
    return target if apart(flat.device, target.data, flat.data, target.data) else flat
