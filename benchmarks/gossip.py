"""What `push_sum` and the fold cost beside a hand-written exchange of the same bytes.

    mpiexec -n 2 python benchmarks/gossip.py [megabytes ...]

By hand: x *= 0.5; Isend(x); Irecv(dx); Waitall; x += dx. Both are timed in turns of a few calls,
and the median of the ratios of neighbouring turns is printed: what else the machine does hits
both alike.
"""

import statistics
import sys
import time

import numpy as np
from mpi4py import MPI

import relaxmpi as rx

ROUNDS, CALLS = 300, 3


def by_hand(mpi, x, dx):
    """The least that push-sum over one peer can be."""
    peer = 1 - mpi.rank
    x *= np.float32(0.5)
    MPI.Request.Waitall([mpi.Irecv(dx, peer), mpi.Isend(x, peer)])
    x += dx


def pushed(comm, x, w, topology):
    """The same by the library."""
    dx, dw = rx.push_sum(comm, x, w, topology=topology)
    x += dx
    w += dw


def seconds(function, *args):
    """Time a few calls."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        function(*args)
    return (time.perf_counter() - begin) / CALLS


def main():
    """Measure each size."""
    sizes = [float(word) for word in sys.argv[1:]] or [4.0]
    with rx.Comm.world() as comm:
        if comm.size != 2:
            raise SystemExit("two ranks, please")
        ring = rx.Ring()
        for megabytes in sizes:
            x = np.ones(int(megabytes * 2**20) // 4, np.float32)
            dx, w = np.empty_like(x), np.ones(1)
            hand, ours = [], []
            for k in range(ROUNDS):
                comm.mpi.Barrier()
                first = seconds(by_hand, comm.mpi, x, dx)
                comm.mpi.Barrier()
                second = seconds(pushed, comm, x, w, ring)
                if k > 2:
                    hand.append(first)
                    ours.append(second)
            ratio = statistics.median(b / a for a, b in zip(hand, ours, strict=True))
            if comm.rank == 0:
                print(
                    f"{megabytes:g} MB: by hand {1e6 * statistics.median(hand):.0f} us, push_sum "
                    f"and fold {1e6 * statistics.median(ours):.0f} us, ratio {ratio:.3f}"
                )


if __name__ == "__main__":
    main()
