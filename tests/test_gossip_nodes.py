"""Neighbour verbs on a Hierarchy: ranks of a node share one model, nodes gossip."""

import numpy as np
import pytest

import relaxmpi as rx

RING = rx.Ring()


def nodes_of(comm):
    return sorted(set(comm.nodes))


def program(d, dtype):
    with rx.Comm.world(timeout=5) as comm, comm.by_node() as tree:
        numbers = nodes_of(tree)
        me, n = numbers.index(tree.nodes[comm.rank]), len(numbers)
        xs = [
            np.random.default_rng([2, r]).standard_normal(d).astype(dtype) for r in range(comm.size)
        ]
        means = [
            np.mean([x for r, x in enumerate(xs) if tree.nodes[r] == node], axis=0)
            for node in numbers
        ]
        mean, near = np.mean(means, axis=0), 2e-2 if dtype == "f2" else 1e-6
        x, out = xs[comm.rank].copy(), np.empty(d, dtype)
        expected = sum(weight * m for weight, m in zip(RING.matrix(n)[me], means, strict=True))
        assert rx.neighbor_allreduce(tree, x, out, topology=RING) is out
        assert np.allclose(out, expected, atol=near)
        assert np.array_equal(x, xs[comm.rank])
        rx.neighbor_allreduce(tree, x, topology=RING)
        assert np.array_equal(x, out)
        x, w = xs[comm.rank].copy(), np.ones(1)
        for k in range(40):
            dx, dw = rx.push_sum(tree, x, w, topology=rx.OnePeerExponential(), step=k)
            x += dx
            w += dw
        assert np.allclose(x / w, mean, atol=5 * near)
        if n == 2:
            rx.pairwise_average(tree, x, peer=1 - me)
        for memory, far in (
            (rx.DifferenceCompression(rx.Quantizer(bits=8)), 1e-2),
            (rx.DCD(rx.Quantizer(bits=8)), 5e-2),
        ):
            y = xs[comm.rank].astype("f4")
            for _ in range(40):
                rx.neighbor_allreduce(tree, y, topology=RING, codec=memory)
            assert np.allclose(y, mean, atol=far)
        return x.tobytes() + y.tobytes()


@pytest.mark.parametrize(("n", "each"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (4, 1), (7, 3)])
def test_nodes_mix_and_their_ranks_are_equal(n, each):
    for d, dtype in ((0, "f2"), (1, "f8"), (7, "f2"), (130, "f8")):
        ends = rx.SimulatedWorld(n, ranks_per_node=each).run(program, d, dtype)
        assert all(ends[r] == ends[r // each * each] for r in range(n))


@pytest.mark.ranks(2, 3, 4)
def test_on_real_ranks(comm, monkeypatch):
    monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", "2")
    assert (
        program(130, "f4")
        == rx.SimulatedWorld(comm.size, ranks_per_node=2).run(program, 130, "f4")[comm.rank]
    )


def test_one_node_holds_the_mean():  # bagua 20, and law 8 instead of a quantisation alone
    def once():
        with rx.Comm.world() as comm, comm.by_node() as tree:
            x, memory = np.full(3, float(comm.rank), np.float32), rx.DCD(rx.MinMaxUInt8())
            for _ in range(10):
                rx.neighbor_allreduce(tree, x, topology=RING, codec=memory)
            return x.tolist()

    assert rx.SimulatedWorld(4, ranks_per_node=4).run(once) == [[1.5] * 3] * 4


@pytest.mark.parametrize("each", [1, 2])
def test_nodes_that_disagree_or_do_not_come(each):
    def run(wrong):
        def once():
            with rx.Comm.world(timeout=5) as comm, comm.by_node() as tree:
                rx.neighbor_allreduce(tree, np.ones(3), topology=RING)
                try:
                    wrong(comm, tree)
                except (rx.RelaxError, TypeError) as error:
                    return error
                return None

        return rx.SimulatedWorld(4, ranks_per_node=each).run(once)

    def sizes(comm, tree):
        rx.neighbor_allreduce(tree, np.ones(3 if comm.rank < 2 else 4), topology=RING)

    assert all(isinstance(error, rx.MismatchError) for error in run(sizes))

    def late(comm, tree):
        if comm.rank == 0:
            comm.compute(100)
        rx.neighbor_allreduce(tree, np.ones(3), topology=RING)

    errors = run(late)
    assert all(isinstance(errors[r], rx.PeerTimeout) for r in ((1, 3) if each == 1 else (1, 2, 3)))

    def refused(comm, tree):
        rx.neighbor_allreduce(tree, np.ones(3, int), topology=RING)

    assert all(isinstance(error, TypeError) for error in run(refused))
