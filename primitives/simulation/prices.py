"""What a verb takes besides its messages, measured: its arithmetic, and its own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.primitives.devices import device_of
from relaxmpi.primitives.feedback import ErrorFeedback
from relaxmpi.primitives.ops import MAX, MEAN, SUM
from relaxmpi.primitives.simulation.simulated import SimulatedWorld
from relaxmpi.primitives.verbs import allreduce, barrier

if TYPE_CHECKING:
    from relaxmpi.primitives.codecs import Codec
    from relaxmpi.primitives.comm import Comm
    from relaxmpi.primitives.simulation.network import Network

__all__ = ["arithmetic", "code"]

_FEW, _MANY = 1024, 1024 * 1024  # numbers of a call alone, and of one among many
_CACHED = 24 * 1024 * 1024  # numbers that no cache holds
_CALLS, _TURNS, _SECONDS = 5, (5, 40), 0.5  # short calls in a row, how often, for how long
_TOGETHER = 16  # ranks that the code of a call is measured on

# Finds the price of a call on so many arrays, and keeps it under this name.
Price = Callable[[str, int, Callable[..., object]], None]


class _Memory:
    """Numbers for calls to work on: the same ones for short calls, ever other ones for long ones.

    A long buffer that has been on its way is in no cache, and neither is its residual.
    """

    def __init__(self, rank: int) -> None:
        some = np.random.default_rng(rank).standard_normal(_MANY).astype(np.float32)
        self.all, self._next = np.resize(some, max(_CACHED, 4 * _MANY)), 0

    def take(self, count: int, arrays: int) -> list[Any]:
        """Return so many arrays of `count` numbers."""
        begin = self._next if count == _MANY else 0
        if begin + arrays * count > self.all.size:
            begin = 0
        self._next = begin + arrays * count
        return [self.all[begin + k * count :][:count] for k in range(arrays)]


def arithmetic(
    comm: Comm, codecs: Sequence[Codec | ErrorFeedback]
) -> dict[str, tuple[float, float]]:
    """Return the prices of sums and codecs, with all ranks at work at once."""
    memory, found = _Memory(comm.rank), {}
    device = comm.priced(device_of(memory.all))

    def price(name: str, arrays: int, call: Callable[..., object]) -> None:
        def seconds(count: int, calls: int) -> float:
            call(*memory.take(count, arrays))
            barrier(comm)
            begin = comm.now()
            for _ in range(calls):
                call(*memory.take(count, arrays))
            return float(allreduce(comm, (comm.now() - begin) / calls, op=MEAN))

        few, many = seconds(_FEW, 100), seconds(_MANY, 16)
        number = max(0.0, many - few) / (_MANY - _FEW)
        found[name] = max(0.0, few - number * _FEW), number

    price("reduce", 2, lambda x, y: device.reduce(SUM, x, y, y))
    price("divide", 1, lambda x: device.divide(x, 1))
    price("copy", 2, lambda x, y: device.copy(y, x))
    for given in codecs:
        _price_codec(comm, given, price)
    return found


def _price_codec(comm: Comm, given: Codec | ErrorFeedback, price: Price) -> None:
    plain = given.codec if isinstance(given, ErrorFeedback) else given
    codec, name = comm.priced(plain), plain.describe()
    payload = np.empty(plain.nbytes(_MANY, np.float32), np.uint8)
    if isinstance(given, ErrorFeedback):
        encode = codec.encode_feedback
        price(f"{name}.encode_feedback", 2, lambda x, residual: encode(x, residual, payload))
    else:
        difference = codec.encode_difference
        price(f"{name}.encode", 1, lambda x: codec.encode(x, payload))
        price(f"{name}.encode_difference", 2, lambda x, held: difference(x, held, payload))
    price(f"{name}.decode", 1, lambda y: codec.decode(payload, y))
    price(f"{name}.decode_add", 1, lambda y: codec.decode_add(payload, y))
    price(f"{name}.decode_follow", 1, lambda y: codec.decode_follow(payload, y))


def code(comm: Comm, network: Network) -> float:
    """Return the seconds of a verb's own code: of what a short call takes, what no model explains.

    Calls in a row are timed, and then the same calls in a simulated world on this network.
    """

    def seconds(comm: Comm) -> float:
        """Of one all-reduce among many, in which each rank owns a number."""
        x = np.zeros(comm.size, np.float32)
        allreduce(comm, x)
        begin = comm.now()
        for _ in range(_CALLS):
            allreduce(comm, x)
        return (comm.now() - begin) / _CALLS

    def program() -> float:
        from relaxmpi.primitives.comm import Comm

        with Comm.world() as simulated:
            return seconds(simulated)

    some = comm.split(comm.rank // _TOGETHER)
    assert some is not None  # every rank has a colour
    with some:
        once = allreduce(some, seconds(some) * _CALLS, op=MAX)
        turns = int(min(_TURNS[1], max(_TURNS[0], _SECONDS / (once + 1e-9))))
        taken = median(seconds(some) for _ in range(turns))
        together = some.nodes.count(some.nodes[0])
        predicted = 0.0
        if comm.rank == 0:
            world = SimulatedWorld(some.size, network=network, ranks_per_node=together)
            predicted = float(world.run(program)[0])
    return float(allreduce(comm, max(0.0, taken - predicted) if comm.rank == 0 else 0.0, op=MAX))
