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
        up: For which it keeps the sender's link: no less than its processor takes to feed it.
        down: For which it keeps the receiver's link.
        spread: From the arrival of the first batch to that of the last.
    """

    size: float
    pieces: int
    batches: int
    send: float
    first: float
    receive: float
    last: float
    delay: float
    up: float
    down: float
    spread: float


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
    first, last, delay = network.send_cost, network.receive_cost, 0.0
    if near:
        up = down = size / network.local_bandwidth
    else:
        batch, wire = min(size / pieces, BATCH), network.wire_bytes(size)
        send, first = send + size * network.send_byte, first + batch * network.send_byte
        receive, last = receive + size * network.receive_byte, last + batch * network.receive_byte
        delay = network.batch_delay * min(size, BATCH) / BATCH
        up, down = wire / network.bandwidth, wire / network.down_bandwidth
    # The sender's processor hands over one batch after the other.
    up = max(up, send - first + up / batches)
    spread = down * (1 - 1 / batches)
    return Load(size, pieces, batches, send, first, receive, last, delay, up, down, spread)
