"""When each rank knows what all have said: the tree of an agreement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxmpi.primitives.simulation.network import Network

__all__ = ["told"]


def told(network: Network, nodes: Sequence[int], arrivals: Sequence[float]) -> list[float]:
    """Return when each rank knows the maximum over all ranks.

    What is said climbs a binomial tree to rank 0 and comes down another, as in MPI_Iallreduce of
    Open MPI (libnbc's binomial, its choice for short data) and of MPICH for few bytes and an
    unlike count. So rank 0 knows first, and others up to ceil(log2 n) hops later: the next call
    of a program begins as far apart. A hop takes the latency and
    `agree_cost`.

    Args:
        network: What a hop takes.
        nodes: For each rank, the number of its node.
        arrivals: Seconds at which each rank has said its part.

    Example:
        >>> net = Network(latency=1.0, agree_cost=0)
        >>> told(net, [0, 1, 2, 3], [0.0, 0.0, 0.0, 5.0])
        [7.0, 8.0, 8.0, 9.0]
    """
    node, times = np.asarray(nodes), np.array(arrivals, float)
    n = len(times)
    strides = [1 << k for k in range((n - 1).bit_length())]

    def hop(low: Any, high: Any) -> Any:
        near = node[low] == node[high]
        return np.where(near, network.local_latency, network.latency) + network.agree_cost

    for stride in strides:
        high = np.arange(stride, n, 2 * stride)
        low = high - stride
        times[low] = np.maximum(times[low], times[high] + hop(low, high))
    for stride in strides:
        high = np.arange(stride, min(2 * stride, n))
        low = high - stride
        times[high] = times[low] + hop(low, high)
    return [float(time) for time in times]
