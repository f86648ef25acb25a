"""What the centralised verbs have in common: checks, and what is made of checked arguments."""

from __future__ import annotations

from collections.abc import Generator
from operator import index
from typing import TYPE_CHECKING, Any

from relaxmpi.primitives.calls import Call
from relaxmpi.primitives.codecs import Codec, Key
from relaxmpi.primitives.devices import Device, Flat, device_of
from relaxmpi.primitives.feedback import ErrorFeedback
from relaxmpi.primitives.gossip.difference import Replicas
from relaxmpi.primitives.ops import Op
from relaxmpi.primitives.wire import Plain, Wire, wire_for
from relaxmpi.primitives.work import Flow

if TYPE_CHECKING:
    from relaxmpi.primitives.comm import Comm

__all__ = [
    "Lossy",
    "apart",
    "call_of",
    "check_op",
    "claimed",
    "like",
    "ordered",
    "whole",
    "wire_of",
]

Lossy = Codec | ErrorFeedback

_CODED = ("float64", "float32", "float16", "bfloat16")


def check_op(dtype: str, op: Op, codec: Lossy | None) -> None:
    """Refuse operations that have no meaning for these numbers."""
    if not isinstance(op, Op):
        raise TypeError(f"op must be SUM, MEAN, MAX or MIN of relaxmpi, not {op!r}")
    if codec is not None and not op.additive:
        raise TypeError(f"{op.name} has no codec: only SUM and MEAN of lossy numbers make sense")
    if op is Op.MEAN and not dtype.startswith(("float", "bfloat", "complex")):
        raise TypeError(
            f"MEAN needs a float dtype, for means are seldom integers: convert the {dtype} first"
        )
    if dtype.startswith("complex") and not op.additive:
        raise TypeError(f"{op.name} has no meaning for {dtype}: complex numbers have no order")
    if op is Op.SUM and dtype == "bool":
        raise TypeError("the SUM of bool overflows: convert to an integer, or use MAX for any()")


def check_coded(dtype: str, codec: Lossy | None) -> None:
    """Refuse what is no codec, and numbers that codecs do not encode."""
    if codec is None:
        return
    if isinstance(codec, Replicas):
        raise TypeError(
            f"{type(codec).__name__} belongs to gossip; an all-reduce remembers what it has lost: "
            "use ErrorFeedback(codec)"
        )
    if not isinstance(codec, (Codec, ErrorFeedback)):
        raise TypeError(
            f"codec must be a Codec such as Quantizer(bits=8), or an ErrorFeedback, not {codec!r}"
        )
    if dtype not in _CODED:
        raise TypeError(f"codecs encode {', '.join(_CODED)}, not {dtype}")


def like(flat: Flat, out: Any, shape: tuple[int, ...] | None) -> Flat:
    """View `out`, which must have this shape, if any, and the format and device of `flat`."""
    view = device_of(out).flat(out)
    if shape is not None and view.shape != shape:
        raise ValueError(f"out must have shape {shape}, not {view.shape}")
    if view.dtype != flat.dtype:
        raise TypeError(f"out must have dtype {flat.dtype} like x, not {view.dtype}")
    if view.device is not flat.device:
        raise TypeError(f"out must live on {flat.device.name} like x, not {view.device.name}")
    return view


def apart(device: Device, whole: Any, part: Any, own: Any) -> bool:
    """Whether `part` lies outside `whole`; False if it is its slice `own`, an error otherwise."""
    lo, hi = device.span(part)
    begin, end = device.span(whole)
    if hi <= begin or end <= lo or lo == hi or begin == end:
        return True
    if (lo, hi) == device.span(own):
        return False
    raise ValueError("x and out share memory, but are not the same: pass a copy of one of them")


def whole(step: Any) -> Any:
    """Return a whole number, such as one of numpy's, as an int; what is none as it is."""
    if step is None:
        return None
    try:
        return index(step)
    except TypeError:
        return step


def call_of(
    verb: str, flat: Flat, how: str | None, codec: Lossy | None, name: str, step: int | None
) -> Call:
    """What the ranks must agree on."""
    check_coded(flat.dtype, codec)
    if step is not None and not isinstance(whole(step), int):
        raise TypeError(f"step must be an int, not {step!r}")
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    told = None if codec is None else f"codec {codec.describe()}"
    when = None if step is None else f"step {step}"
    where = None if flat.device.name == "cpu" else f"on {flat.device.name}"
    named = name and f"name {name!r}"
    return Call((verb, how, flat.dtype, str(flat.shape), told, named, when, where))


def claimed(
    comm: Comm, codec: Lossy | None, verb: str, flat: Flat, flow: Generator[Any, None, Any]
) -> Flow[Any]:
    """The flow in order, to which the memory around the codec, if any, belongs until it ends."""
    flow = ordered(comm, flat, flow)
    if isinstance(codec, ErrorFeedback):
        codec.claim(flow, verb, f"{len(flat.data)} x {flat.dtype}", comm.layout)
    return flow


def wire_of(comm: Comm, flat: Flat, codec: Lossy | None, name: str, step: int | None) -> Wire:
    """The wire of a call that has been agreed on."""
    device = comm.priced(flat.device)
    if codec is None:
        return Plain(device, flat.dtype, comm.scratch)
    when = comm.next_step(name) if step is None else whole(step)
    key = Key(name=name, step=when, rank=comm.rank)
    return wire_for(flat._replace(device=device), codec, key, comm.scratch, comm.priced)


def ordered(comm: Comm, flat: Flat, flow: Generator[Any, None, Any]) -> Flow[Any]:
    """The flow, in the order of its Comm's scratch and of its device's queue."""
    comm.begin()
    try:
        flat.device.enter()
        result = yield from flow
        flat.device.leave()
    finally:
        comm.end()
    return result
