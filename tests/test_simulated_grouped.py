"""Many messages of a collective as one event: as good as one by one, and ranks share its work."""

import numpy as np
import pytest

import relaxmpi as rx


def collectives(skew, codec):
    with rx.Comm.world() as comm:
        n, r = comm.size, comm.rank
        held, ends = [], []
        rng = np.random.default_rng([5, r])
        for d in (1, n - 1, 1000, 30_001):
            x = rng.standard_normal(d).astype("f4")
            for call in (
                lambda x=x: rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=codec),
                lambda x=x: rx.reduce_scatter(comm, x, codec=codec),
                lambda x=x: rx.allgather(comm, x, codec=codec),
                lambda x=x: rx.alltoall(comm, np.outer(np.arange(n) + r, x[:50])),
            ):
                comm.compute(skew * ((r * 7) % 5))
                begin = comm.now()
                held.append(np.asarray(call()).tobytes())
                rx.barrier(comm)
                ends.append(comm.now() - begin)
        return held, ends, comm.stats.payload_bytes, comm.stats.messages


@pytest.mark.parametrize("per_node", [1, 3])
@pytest.mark.parametrize("codec", [None, rx.Quantizer(bits=4)])
@pytest.mark.parametrize(
    ("n", "skew", "network"),
    [
        (8, 0.0, rx.Network()),
        (13, 1e-4, rx.Network(latency=1e-4, bandwidth=1e8, overhead=90)),
        (24, 0.0, rx.Network(latency=5e-6, bandwidth=1e9, eager=100)),
        (
            9,
            0.0,
            rx.Network(
                bandwidth=1e8, segment=9000, send_byte=3e-9, receive_byte=9e-9, batch_delay=2e-4
            ),
        ),
    ],
)
def test_one_event_is_as_many_messages(n, per_node, codec, skew, network):
    runs = []
    for above in (1000, 2):
        world = rx.SimulatedWorld(
            n, network=network, ranks_per_node=per_node, grouped_above=above, seed=4
        )
        runs.append((world.run(collectives, skew, codec), world))
    (slow, by_message), (fast, as_one) = runs
    assert [rank[0] for rank in slow] == [rank[0] for rank in fast]
    assert [rank[2:] for rank in slow] == [rank[2:] for rank in fast]
    assert by_message.counts == as_one.counts
    a, b = (np.max([rank[1] for rank in ranks], axis=0) for ranks in (slow, fast))
    # One event lets no rank go before the last has come.
    hop = network.latency + network.send_cost + network.receive_cost
    assert np.allclose(a, b, rtol=0.05, atol=hop)
    assert np.allclose(by_message.clocks, as_one.clocks, rtol=0.05)


def reductions(make):
    with rx.Comm.world() as comm:
        held, memory = [], make()
        for d in (1, 5, 1000, 1001):
            for op in (rx.SUM, rx.MEAN):
                for dtype in ("f2", "f4", "f8"):
                    x = np.random.default_rng([6, comm.rank]).standard_normal(d).astype(dtype)
                    codec = make() if isinstance(memory, rx.ErrorFeedback) else memory
                    rx.allreduce(comm, x, op=op, codec=codec)
                    held.append(x.tobytes())
        return held, comm.now(), comm.stats.payload_bytes, comm.stats.messages


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: rx.Quantizer(bits=4),
        lambda: rx.MinMaxUInt8(),
        lambda: rx.ErrorFeedback(rx.OneBit()),
        lambda: rx.ErrorFeedback(rx.TopK(0.1)),
    ],
)
def test_what_ranks_share_of_an_exchange_is_what_each_would_make(make):
    """Where anything has a price, ranks do all their work themselves."""
    shared = rx.SimulatedWorld(5, ranks_per_node=2, grouped_above=1)
    alone = rx.SimulatedWorld(
        5,
        ranks_per_node=2,
        grouped_above=1,
        network=rx.Network(work={"nothing of this program": (1.0, 1.0)}),
    )
    assert shared.run(reductions, make) == alone.run(reductions, make)
    assert shared.clocks == alone.clocks
    assert shared.counts == alone.counts


def collect(codec):
    with rx.Comm.world() as comm:
        rx.allreduce(comm, np.ones(900, "f4"), op=rx.MEAN, codec=codec)


def test_a_gathered_chunk_is_decoded_once_for_all_ranks(monkeypatch):
    decoded = []
    decode = rx.Quantizer.decode
    monkeypatch.setattr(rx.Quantizer, "decode", lambda *args: decoded.append(1) or decode(*args))
    rx.SimulatedWorld(9, grouped_above=1).run(collect, rx.Quantizer(bits=4))
    # Each rank: the first contribution and its own chunk; one of them: the eight other chunks.
    assert len(decoded) == 9 * 2 + 8
