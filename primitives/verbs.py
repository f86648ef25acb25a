"""The centralised verbs: what users call. Arguments are checked here, moves are made elsewhere.

Where `out` is None a verb that keeps the shape works in place and returns its buffer, and a verb
that changes it returns a new buffer of the caller's kind. A buffer given to `.start` belongs to
the Work until it is done. Every verb raises `MismatchError` on all ranks where they disagree,
`PeerTimeout` or `PeerLeft` where a peer does not come, and TypeError or ValueError, on every
rank that passed it, for a wrong argument.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.codecs import Codec, Key
from relaxmpi.primitives.devices import Flat, device_of
from relaxmpi.primitives.feedback import ErrorFeedback
from relaxmpi.primitives.ops import SUM, Op
from relaxmpi.primitives.primitive import Plan, Verb
from relaxmpi.primitives.wire import Wire, chunks, wire_for
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm

__all__ = ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "reduce_scatter"]

Lossy = Codec | ErrorFeedback
_NO_KEY = Key()
_NUMBERS = (int, float, complex, np.number)
_CODED = ("float64", "float32", "float16", "bfloat16")


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
    if isinstance(x, _NUMBERS):
        return _reduce_number(comm, x, out, op, codec, name)
    flat = device_of(x).flat(x, writable=out is None, strided=out is not None)
    target = flat if out is None else _same(flat, out, "out")
    _check_op(flat.dtype, op, codec)
    call = _call("allreduce", flat, op.value, codec, name, step)
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
    release = _claim(comm, codec, "allreduce", flat)

    def flow() -> Flow[Any]:
        if comm.size == 1:
            if target is not flat:
                flat.device.copy(target.data, flat.data)
        elif len(flat.data):
            wire = _wire(comm, flat, codec, name, step)
            yield from comm.schedule.allreduce(flat.device, flat.data, target.data, op, wire)
        return result

    return Plan(call, _ordered(comm, flat, flow()), release)


def _reduce_number(
    comm: Comm, x: Any, out: Any, op: Op, codec: Lossy | None, name: str
) -> Plan[Any]:
    if out is not None or codec is not None:
        raise TypeError("a Python number is reduced without out= and codec=")
    if isinstance(x, (int, np.integer)) and op is Op.MEAN:
        x = float(x)
    array = np.array([x], np.int64 if isinstance(x, int) else None)
    flat = device_of(array).flat(array)
    _check_op(flat.dtype, op, None)
    call = _call("allreduce of a number", flat, op.value, None, name, None)
    plan = _reduction(comm, call, flat, flat, op, None, name, None, array)

    def flow() -> Flow[Any]:
        yield from plan.flow
        return array[0] if isinstance(x, np.generic) else array[0].item()

    return Plan(call, flow(), plan.release)


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
    _check_op(flat.dtype, op, codec)
    bounds = chunks(len(flat.data), comm.size)
    lo, hi = bounds[comm.rank]
    result = device.like(x, (hi - lo,)) if out is None else out
    target = _like(flat, result, (hi - lo,), "out")
    call = _call("reduce_scatter", flat, op.value, codec, name, step)
    release = _claim(comm, codec, "reduce_scatter", flat)

    def flow() -> Flow[Any]:
        if comm.size == 1:
            device.copy(target.data, flat.data)
        elif len(flat.data):
            wire = _wire(comm, flat, codec, name, step)
            total = yield from comm.schedule.reduce_scatter(
                device, flat.data, target.data, op, wire, bounds
            )
            wire.deliver(total, target.data, op, comm.size)
        return result

    return Plan(call, _ordered(comm, flat, flow()), release)


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
    target = device.flat(result)
    _check_dtype(flat, target, "out")
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
    _check_coded(flat.dtype, codec)
    call = _call("allgather", target, None, codec, name, step)
    release = _claim(comm, codec, "allgather", flat)

    def flow() -> Flow[Any]:
        places = [target.data[lo:hi] for lo, hi in bounds]
        if n == 1:
            device.copy(target.data, flat.data)
        elif len(target.data):
            wire = _wire(comm, flat, codec, name, step)
            yield from comm.schedule.allgather(device, flat.data, places, wire)
        return result

    return Plan(call, _ordered(comm, flat, flow()), release)


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
    if not 0 <= root < comm.size:
        raise ValueError(f"root must be a rank, 0 to {comm.size - 1}, not {root}")
    flat = device_of(x).flat(x)

    def flow() -> Flow[Any]:
        if comm.size > 1 and len(flat.data):
            yield from comm.schedule.broadcast(flat.device, flat.data, root)
        return x

    call = _call("broadcast", flat, f"from rank {root}", None, name, None)
    return Plan(call, _ordered(comm, flat, flow()))


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
    target = flat if out is None else _same(flat, out, "out")

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

    return Plan(_call("alltoall", flat, None, None, name, None), _ordered(comm, flat, flow()))


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


def _call(
    verb: str, flat: Flat, how: str | None, codec: Lossy | None, name: str, step: int | None
) -> Call:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    told = None if codec is None else f"codec {codec.describe()}"
    when = None if step is None else f"step {step}"
    return Call((verb, how, flat.dtype, str(flat.shape), told, name and f"name {name!r}", when))


def _wire(comm: Comm, flat: Flat, codec: Lossy | None, name: str, step: int | None) -> Wire:
    if codec is None:
        return wire_for(flat, None, _NO_KEY, comm.scratch)
    when = comm.next_step(name) if step is None else step
    return wire_for(flat, codec, Key(name=name, step=when, rank=comm.rank), comm.scratch)


def _claim(comm: Comm, codec: Lossy | None, verb: str, flat: Flat) -> Any:
    _check_coded(flat.dtype, codec)
    if not isinstance(codec, ErrorFeedback):
        return None
    return codec.claim(verb, f"{len(flat.data)} x {flat.dtype}", f"{comm.size} ranks")


def _ordered(comm: Comm, flat: Flat, flow: Generator[Any, None, Any]) -> Flow[Any]:
    comm.begin()
    flat.device.enter()
    result = yield from flow
    flat.device.leave()
    return result


def _same(flat: Flat, other: Any, what: str) -> Flat:
    return _like(flat, other, flat.shape, what)


def _like(flat: Flat, other: Any, shape: tuple[int, ...], what: str) -> Flat:
    view = device_of(other).flat(other)
    if view.shape != shape:
        raise ValueError(f"{what} must have shape {shape}, not {view.shape}")
    _check_dtype(flat, view, what)
    return view


def _check_dtype(flat: Flat, other: Flat, what: str) -> None:
    if other.dtype != flat.dtype:
        raise TypeError(f"{what} must have dtype {flat.dtype} like x, not {other.dtype}")
    if other.device is not flat.device:
        raise TypeError(f"{what} must live on {flat.device.name} like x, not {other.device.name}")


def _check_op(dtype: str, op: Op, codec: Lossy | None) -> None:
    if not isinstance(op, Op):
        raise TypeError(f"op must be SUM, MEAN, MAX or MIN of relaxmpi, not {op!r}")
    if codec is not None and not op.additive:
        raise TypeError(f"{op.name} has no codec: only SUM and MEAN of lossy numbers make sense")
    if op is Op.MEAN and not dtype.startswith(("float", "bfloat", "complex")):
        raise TypeError(f"the MEAN of {dtype} is not an integer: convert to a float dtype first")
    if not op.additive and dtype.startswith("complex"):
        raise TypeError(f"{op.name} has no meaning for {dtype}: complex numbers have no order")
    if op is Op.SUM and dtype == "bool":
        raise TypeError("the SUM of bool overflows: convert to an integer, or use MAX for any()")


def _check_coded(dtype: str, codec: Lossy | None) -> None:
    if codec is None:
        return
    if not isinstance(codec, (Codec, ErrorFeedback)):
        raise TypeError(
            f"codec must be a Codec such as Quantizer(bits=8), or an ErrorFeedback, not {codec!r}"
        )
    if dtype not in _CODED:
        raise TypeError(f"codecs encode {', '.join(_CODED)}, not {dtype}")
