"""What messages between the ranks of a Comm cost, measured: the numbers of a `Network`.

All is done with the transport's own moves, so that it takes what verbs take, and on the Comm's
own clock: in a simulated world the numbers come out that went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from relaxmpi.primitives.simulation.network import BATCH, Network
from relaxmpi.primitives.simulation.prices import arithmetic, code
from relaxmpi.primitives.simulation.probes import (
    BURST,
    WORD,
    Pairs,
    burst,
    exchange,
    host,
    paired,
    trips,
)
from relaxmpi.primitives.simulation.tree import told
from relaxmpi.primitives.verbs import allreduce, barrier

if TYPE_CHECKING:
    from relaxmpi.primitives.codecs import Codec
    from relaxmpi.primitives.comm import Comm
    from relaxmpi.primitives.feedback import ErrorFeedback

__all__ = ["measure"]

_ROUNDS = 5
_DEAREST = 2e-4  # no message costs a processor more
_MEETINGS = 20
_LEAST, _MOST = 256 * 1024, 16 * 1024 * 1024
_SECONDS = 0.15  # that the longest stream takes, about


class _Costs(NamedTuple):
    """What messages between two ranks cost: see `Network` for the names and units."""

    latency: float
    bandwidth: float
    send_cost: float
    receive_cost: float
    send_byte: float = 0.0
    receive_byte: float = 0.0
    batch_delay: float = 0.0


def measure(comm: Comm, codecs: Sequence[Codec | ErrorFeedback] = ()) -> Network:
    """See `Network.from_measurement`."""
    if comm.size < 2:
        raise ValueError("a network is measured between two ranks or more: start with mpirun -n 2")
    groups: dict[int, list[int]] = {}
    for rank, node in enumerate(comm.nodes):
        groups.setdefault(node, []).append(rank)
    firsts = [ranks[0] for ranks in groups.values()]
    inside = [pair for ranks in groups.values() for pair in paired(ranks)]
    network = Network()
    if inside:
        near = _costs(comm, inside)
        network = replace(
            network,
            local_latency=near.latency,
            local_bandwidth=near.bandwidth,
            **near._asdict(),
        )
    if len(firsts) > 1:
        segment = host(comm).longest
        network = replace(network, segment=segment, eager=2 * segment)
        network = replace(network, **_costs(comm, paired(firsts))._asdict())
    network = replace(network, agree_cost=_agreement(comm, network))
    work = {name: (_short(a), _short(b)) for name, (a, b) in arithmetic(comm, codecs).items()}
    network = replace(network, work=work)
    network = replace(network, call_cost=code(comm, network))
    numbers: dict[str, Any] = {
        f.name: _short(getattr(network, f.name)) for f in fields(network) if f.type == "float"
    }
    return replace(network, **numbers)


def _short(number: float) -> float:
    """Keep what is known, and what a person can read."""
    return float(f"{number:.4g}")


# ---------------------------------------------------------------------------- messages


def _costs(comm: Comm, pairs: Pairs) -> _Costs:
    firsts = [pair[0] for pair in pairs]
    # Few in each call: the longer a call has waited, the less often a rank looks. Many calls: what
    # the kernel does with ranks and cores in one moment, it does not do in another.
    calls = _count(_middle(comm, firsts, trips(comm, pairs, 1)), 3, 30)
    rounds = max(_ROUNDS, calls // 2)

    def way(size: int) -> float:
        return _middle(comm, firsts, median(trips(comm, pairs, size) for _ in range(calls))) / 2

    def crowd(count: int) -> float:
        taken = (exchange(comm, pairs, WORD, count) for _ in range(rounds))
        return _middle(comm, firsts, median(taken))

    def work(size: int) -> list[float]:
        pause = 4 * word + BURST * (min(2 * word, _DEAREST) + size / rate)
        cost = median(burst(comm, pairs, size, pause) for _ in range(rounds))
        return [_middle(comm, side, cost) for side in zip(*pairs, strict=True)]

    word, rate, full = way(WORD), _bandwidth(comm, pairs), min(BATCH, host(comm).longest)
    alone, whole = work(WORD), work(full)
    both = max(sum(alone), (crowd(1 + BURST) - crowd(1)) / BURST)
    send_cost, receive_cost = (both * cost / max(sum(alone), 1e-12) for cost in alone)
    latency = max(0.0, word - WORD / rate - both)
    found = _Costs(latency, rate, send_cost, receive_cost)
    if len(set(comm.nodes)) == 1:
        return found  # memory's bandwidth says what bytes cost
    per_byte = [max(0.0, b - a) / (full - WORD) for a, b in zip(alone, whole, strict=True)]
    late = way(full) - latency - full / rate - both - sum(per_byte) * (full - WORD)
    return found._replace(
        send_byte=per_byte[0],
        receive_byte=per_byte[1],
        batch_delay=max(0.0, late) * BATCH / full,
    )


def _count(seconds: float, least: int, most: int) -> int:
    """Return how many moves that take so long are tried."""
    return int(min(most, max(least, _SECONDS / (seconds + 1e-9))))


def _bandwidth(comm: Comm, pairs: Pairs) -> float:
    """Return the bytes per second that flow in each direction, both at once."""

    def seconds(size: int) -> float:
        return _middle(comm, [pair[0] for pair in pairs], exchange(comm, pairs, size, 1))

    seconds(_LEAST)
    rate = _LEAST / seconds(_LEAST)
    size = int(min(_MOST, max(_LEAST, rate * _SECONDS)))
    times = [(seconds(size), seconds(size // 4)) for _ in range(_ROUNDS + 1)]
    long = median(time for time, _ in times[1:])
    short = median(time for _, time in times[1:])
    return (size - size // 4) / max(long - short, 1e-9)


def _agreement(comm: Comm, network: Network) -> float:
    """Return the seconds of a hop besides its latency: barriers in a row take whole trees."""

    def seconds(count: int) -> float:
        barrier(comm)
        begin = comm.now()
        for _ in range(count):
            barrier(comm)
        return _middle(comm, [0], (comm.now() - begin) / count)

    period = seconds(_MEETINGS)
    more = _count(period, 1, 300)
    if more > _MEETINGS:
        period = seconds(more)

    def predicted(cost: float) -> float:
        some = replace(network, agree_cost=cost)
        times = told(some, comm.nodes, [0.0] * comm.size)
        begin = times[0]
        for _ in range(_MEETINGS):
            times = told(some, comm.nodes, times)
        return (times[0] - begin) / _MEETINGS

    low, high = 0.0, period
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < period else (low, middle)
    return low


# ---------------------------------------------------------------------------- together


def _middle(comm: Comm, ranks: Sequence[int], value: float) -> float:
    """Return the median of these ranks' values, on every rank."""
    values = np.zeros(comm.size)
    values[comm.rank] = value
    allreduce(comm, values)
    return float(np.median(values[list(ranks)]))
