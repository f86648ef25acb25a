"""What one message costs the processors and the links on its way."""

from __future__ import annotations

import math
from typing import NamedTuple

from relaxmpi.primitives.simulation.network import BATCH, Network

__all__ = ["Load", "load_of"]


class Load(NamedTuple):
    """A message's costs, in seconds, for idle processors.

    Processors and links work on its batches one after the other: while one is on the wire the
    sender prepares the next, and the receiver takes the one before.

    Attributes:
        size: Bytes, scaled.
        pieces: MPI messages into which it is cut.
        batches: Parts that are handed on as a whole.
        send: Of the sender's processor.
        first: What is a part of `send` and comes before the first byte leaves.
        receive: Of the receiver's processor.
        last: What is a part of `receive` and comes after the last byte has arrived.
        delay: By which it arrives later than latency and bandwidth say.
    """

    size: float
    pieces: int
    batches: int
    send: float
    first: float
    receive: float
    last: float
    delay: float


def load_of(network: Network, size: float, longest: float, near: bool) -> Load:
    """Return the costs of a message.

    Args:
        network: The prices.
        size: Bytes, scaled.
        longest: Bytes of the longest MPI message.
        near: Whether it stays in its node, where `local_bandwidth` says what bytes cost.

    Example:
        >>> costs = load_of(Network(send_cost=1e-6, send_byte=1e-10), 100_000, 50_000, False)
        >>> costs.pieces, costs.batches, round(costs.send, 9), round(costs.first, 9)
        (2, 4, 1.2e-05, 4.277e-06)
    """
    pieces = max(1, math.ceil(size / longest))
    batches = max(pieces, math.ceil(size / BATCH))
    send, receive = pieces * network.send_cost, pieces * network.receive_cost
    if near:
        costs = send, network.send_cost, receive, network.receive_cost, 0.0
        return Load(size, pieces, batches, *costs)
    batch = min(size / pieces, BATCH)
    return Load(
        size,
        pieces,
        batches,
        send + size * network.send_byte,
        network.send_cost + batch * network.send_byte,
        receive + size * network.receive_byte,
        network.receive_cost + batch * network.receive_byte,
        network.batch_delay * min(size, BATCH) / BATCH,
    )
