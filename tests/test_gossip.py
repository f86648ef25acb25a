"""Laws of the neighbour verbs, on real ranks and in simulated worlds."""

import numpy as np
import pytest

import relaxmpi as rx

RANKS = pytest.mark.ranks(1, 2, 3, 4)
DTYPES = ["f8", "f4", "f2", "c8", "c16"]
STATIC = [rx.Ring(), rx.Complete(), rx.Exponential()]


def start(rank, d, dtype="f8"):
    values = np.random.default_rng([3, rank, d]).standard_normal(d)
    return (values * (1 + 2j) if np.dtype(dtype).kind == "c" else values).astype(dtype)


def mixed(topology, xs, step=0):
    """W x in the order of ranks, with every product and sum rounded: the oracle."""
    W, n = topology.matrix(len(xs), step), len(xs)
    work = np.float32 if xs[0].dtype == np.float16 else xs[0].dtype
    real = xs[0].real.dtype.type(0).astype(work).real.dtype.type
    out = []
    for i in range(n):
        total = None
        for j in range(n):
            if W[i, j]:
                term = xs[j].astype(work) * real(W[i, j])
                total = term if total is None else total + term
        out.append(total.astype(xs[0].dtype))
    return out


@RANKS
@pytest.mark.parametrize("dtype", DTYPES)
def test_average_is_w_times_x(comm, dtype):
    n, r = comm.size, comm.rank
    for topology in STATIC:
        for d in (0, 1, 7, 513):
            xs = [start(k, d, dtype) for k in range(n)]
            expected = mixed(topology, xs)[r] if n > 1 else xs[r]
            x, out = xs[r].copy(), np.empty_like(xs[r])
            assert rx.neighbor_allreduce(comm, x, out, topology=topology) is out
            assert np.array_equal(x, xs[r])
            assert rx.neighbor_allreduce(comm, x, topology=topology) is x
            assert np.array_equal(x, expected)
            assert np.array_equal(out, expected)


@RANKS
def test_push_sum_reaches_the_mean(comm):
    n, r = comm.size, comm.rank
    for topology in (rx.OnePeerExponential(), rx.Exponential()):
        for d in (0, 1, 7, 513):
            xs = [start(k, d) for k in range(n)]
            x, w = xs[r].copy(), np.ones(1)
            for k in range(60):
                dx, dw = rx.push_sum(comm, x, w, topology=topology, step=k)
                assert isinstance(dw, float)
                assert dx.shape == x.shape
                x += dx
                w += dw
            assert np.allclose(x / w, np.mean(xs, axis=0), atol=1e-12)


@RANKS
@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_end_with_the_same_bits(comm, dtype):
    peer = comm.rank ^ 1
    if peer >= comm.size:
        return
    for d in (0, 1, 7, 513):
        x, theirs = start(comm.rank, d, dtype), start(peer, d, dtype)
        expected = (x.astype("c16") + theirs.astype("c16")) / 2
        assert rx.pairwise_average(comm, x, peer=peer) is x
        assert np.allclose(x, expected, rtol=2e-3 if dtype == "f2" else 1e-6)
        other = np.empty_like(x)
        comm.mpi.Sendrecv(x.view("u1"), peer, 0, other.view("u1"), peer, 0)
        assert x.tobytes() == other.tobytes()
