"""Hierarchical calls equal flat ones, also with unequal nodes (emulated)."""

import numpy as np
import pytest

import relaxmpi as rx

MANY = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(params=[1, 2, 3])
def nodes(request, monkeypatch, nranks):
    monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", str(request.param))
    with rx.Comm.world(timeout=20) as flat, flat.by_node() as hierarchy:
        yield hierarchy


def draw(rank, d, dtype="f4"):
    return np.random.default_rng([rank, d]).standard_normal(d).astype(dtype)


@MANY
@pytest.mark.parametrize("op", [rx.SUM, rx.MEAN, rx.MAX])
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_equals_flat(comm, nodes, op, dtype):
    for d in (0, 1, 2, 3, 5, 1000):
        x = draw(comm.rank, d, dtype)
        flat = rx.allreduce(comm, x.copy(), op=op)
        out = np.empty_like(x)
        rx.allreduce(nodes, x, out, op=op)
        rx.allreduce(nodes, x, op=op)
        assert np.array_equal(x, out)
        assert np.allclose(x, flat, rtol=2e-3 if dtype == "f2" else 1e-5, atol=1e-5)
        assert len(set(comm.mpi.allgather(x.tobytes()))) == 1


@MANY
def test_the_identity_codec_changes_nothing(comm, nodes):
    for op in (rx.SUM, rx.MEAN):
        x = draw(comm.rank, 1001)
        flat = rx.allreduce(comm, x.copy(), op=op)
        rx.allreduce(nodes, x, op=op, codec=rx.Identity())
        assert np.allclose(x, flat, atol=1e-5)


@MANY
@pytest.mark.parametrize("codec", [rx.Quantizer(bits=8), rx.MinMaxUInt8()], ids=str)
def test_within_the_codecs_error(comm, nodes, codec):
    x = draw(comm.rank, 1000)
    exact = rx.allreduce(comm, x.copy(), op=rx.MEAN)
    step = 2 * np.abs(rx.allgather(comm, x)).max() / 127
    rx.allreduce(nodes, x, op=rx.MEAN, codec=codec)
    crossed = len(set(nodes.nodes)) > 1
    assert np.abs(x - exact).max() <= (2 * step if crossed else 1e-6)
    assert len(set(comm.mpi.allgather(x.tobytes()))) == 1


@MANY
@pytest.mark.parametrize("op", [rx.MEAN, rx.SUM])
def test_feedback_telescopes(comm, nodes, op):
    """Sum of results = sum of means - mean e - E, with the residuals that live on `cross`."""
    memory, d, steps = rx.ErrorFeedback(rx.OneBit()), 501, 25
    n = comm.size
    exact, got = np.zeros(d), np.zeros(d)
    for t in range(steps):
        x = np.random.default_rng([comm.rank, t]).standard_normal(d)
        exact += rx.allreduce(comm, x.copy(), op=rx.MEAN)
        y = rx.allreduce(nodes, x, op=op, codec=memory)
        got += y / n if op is rx.SUM else y
    lost = np.zeros(d)
    crossing = 1 if nodes.cross is None else nodes.cross.size
    for (lo, hi), e in memory.residual("worker").items():
        lost[lo:hi] += e / crossing
    for (lo, hi), e in memory.residual("owner").items():
        lost[lo:hi] += e
    rx.allreduce(comm, lost)
    assert np.abs(got - (exact - lost)).max() < 1e-9


@MANY
def test_broadcast(comm, nodes):
    for root in range(comm.size):
        x = draw(comm.rank, 100)
        rx.broadcast(nodes, x, root=root)
        assert np.array_equal(x, draw(root, 100))


@MANY
def test_other_verbs_run_flat(comm, nodes):
    assert np.array_equal(rx.allgather(nodes, np.array([comm.rank]))[:, 0], np.arange(comm.size))
    assert rx.allreduce(nodes, 1) == comm.size
    with nodes.dup() as twin:
        assert isinstance(twin, rx.Hierarchy)
        assert rx.allreduce(twin, np.ones(5), codec=rx.Identity())[0] == comm.size
    rx.barrier(nodes)
    assert len(rx.reduce_scatter(nodes, np.ones(comm.size))) == 1


@MANY
def test_layout(comm, nodes):
    per_node = comm.settings.ranks_per_node or nodes.settings.ranks_per_node
    assert nodes.local.size == sum(r // per_node == comm.rank // per_node for r in range(comm.size))
    assert nodes.local.rank == comm.rank % per_node


@pytest.mark.ranks(4)
def test_only_shares_cross_the_slow_link(comm, monkeypatch):
    monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", "2")
    with rx.Comm.world() as flat, flat.by_node() as nodes:
        rx.allreduce(nodes, draw(comm.rank, 1000), codec=rx.Identity())
        assert nodes.cross.stats.payload_bytes == 2 * 1 * 1000  # half of 500 floats, twice
        assert nodes.cross.stats.payload_bytes < nodes.local.stats.payload_bytes


@pytest.mark.ranks(1, 2, 4)
def test_the_real_hosts(comm):
    with comm.by_node() as nodes:
        assert nodes.local.size == comm.size
        assert nodes.cross.size == 1
        assert rx.allreduce(nodes, np.ones(10), codec=rx.OneBit())[0] == comm.size
