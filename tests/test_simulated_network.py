"""What simulated messages cost: latency, rates, queues, rendezvous, and many as one event."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relaxmpi as rx
from relaxmpi.primitives.devices import device_of
from relaxmpi.primitives.simulation.fabric import Fabric
from relaxmpi.primitives.transport import Every

FREE = {"send_cost": 0.0, "receive_cost": 0.0, "agree_cost": 0.0}
# One second for a megabyte, and a tenth for a word.
PLAIN = rx.Network(
    latency=0.1, bandwidth=1e6, local_latency=0.01, local_bandwidth=1e7, eager=10**7, **FREE
)


@rx.primitive
def messages(comm, sends, receives, begin=0.0):
    """Send `{dest: count}` bytes and receive `{source: count}`, but not before `begin`."""
    transport = comm.transport(device_of(np.empty(0)))
    inbox = {r: np.empty(count, "u1") for r, count in receives.items()}

    def flow():
        comm.compute(max(0.0, begin - comm.now()))  # an agreement ends at its own time everywhere
        requests = [transport.irecv(inbox[r], r) for r in inbox]
        for r, count in sends.items():
            requests.append(transport.isend(np.full(count, comm.rank, "u1"), r))
        yield Every(requests)
        return inbox

    return flow()


def times(plan, n, network=PLAIN, **others):
    """Seconds each rank takes if all begin at once; `plan` is `{(source, dest): count}`."""
    begin = 1.0

    def program():
        with rx.Comm.world() as comm:
            inbox = messages(
                comm,
                {d: count for (s, d), count in plan.items() if s == comm.rank},
                {s: count for (s, d), count in plan.items() if d == comm.rank},
                begin,
            )
            assert all((data == source).all() for source, data in inbox.items())
            return comm.now() - begin

    return rx.SimulatedWorld(n, network=network, **others).run(program)


def test_a_message_takes_latency_and_size_over_bandwidth():
    assert np.allclose(times({(0, 1): 1_000_000}, 2), [0, 1.1])
    assert np.allclose(times({(0, 1): 0}, 2), [0, 0.1])
    assert np.allclose(times({(0, 1): 1_000_000}, 2, ranks_per_node=2), [0, 0.11])


def test_both_directions_at_once():
    assert np.allclose(times({(0, 1): 1_000_000, (1, 0): 1_000_000}, 2), 1.1)


def test_one_host_sends_one_after_the_other():
    assert np.allclose(times({(0, 1): 1_000_000, (0, 2): 1_000_000}, 3), [0, 1.1, 2.1])


def test_incast_takes_the_sum():
    plan = {(r, 0): 1_000_000 for r in range(1, 5)}
    assert np.allclose(times(plan, 5)[0], 4.1)


def test_other_pairs_do_not_interfere():
    assert np.allclose(times({(0, 1): 1_000_000, (2, 3): 500_000}, 4), [0, 1.1, 0, 0.6])


def test_ranks_of_a_node_share_its_link():
    plan = {(0, 2): 1_000_000, (1, 3): 1_000_000}
    assert np.allclose(sorted(times(plan, 4, ranks_per_node=2)), [0, 0, 1.1, 2.1])
    assert np.allclose(times(plan, 4), [0, 0, 1.1, 1.1])


def test_a_slower_link_down():
    network = rx.Network(latency=0.1, bandwidth=1e6, down=5e5, **FREE)
    assert np.allclose(times({(0, 1): 1_000_000}, 2, network), [0, 2.1])
    network = rx.Network(latency=0.1, bandwidth=1e6, down=5e6, **FREE)
    assert np.allclose(times({(0, 1): 1_000_000}, 2, network), [0, 1.1])


def test_processors_and_packets_cost():
    network = rx.Network(latency=0.1, bandwidth=1e6, send_cost=0.02, receive_cost=0.03)
    sent, received = times({(0, 1): 1000}, 2, network)
    assert np.isclose(sent, 0.02)
    assert np.isclose(received, 0.1 + 0.001 + 0.02 + 0.03)
    # In segments, as over MPI, each a message.
    network = replace(network, segment=32 * 1024)
    sent, received = times({(0, 1): 100 * 1024}, 2, network)
    assert np.isclose(sent, 4 * 0.02)
    # For each byte, too: one batch of 32 KiB while another is on the wire.
    network = replace(network, segment=2**20, send_byte=1e-7, receive_byte=2e-7)
    small, large, batch = 1000, 128 * 1024, 32 * 1024
    for near, bytes_cost, way in ((1, 1.0, 0.1), (2, 0.0, network.local_latency)):
        for size, last in ((small, small), (large, batch)):
            sent, received = times({(0, 1): size}, 2, network, ranks_per_node=near)
            rate = network.local_bandwidth if bytes_cost == 0 else network.bandwidth
            processors = 0.05 + bytes_cost * 3e-7 * last
            assert np.isclose(sent, 0.02 + bytes_cost * 1e-7 * size)
            assert np.isclose(received, way + size / rate + processors)
    # Where the processor is slower than the link, the link waits for it.
    slow = rx.Network(latency=0.1, bandwidth=1e9, segment=2**20, **FREE | {"send_byte": 1e-6})
    assert np.isclose(times({(0, 1): large}, 2, slow)[1], 0.1 + 1e-6 * large + batch / 1e9)
    slow = rx.Network(latency=0.1, bandwidth=1e9, segment=2**20, **FREE | {"receive_byte": 1e-6})
    assert np.isclose(times({(0, 1): large}, 2, slow)[1], 0.1 + 1e-6 * large + batch / 1e9)
    late = rx.Network(latency=0.1, bandwidth=1e6, batch_delay=0.5, **FREE)
    for size, delay in ((0, 0.0), (batch // 4, 0.125), (batch, 0.5), (large, 0.5)):
        assert np.isclose(times({(0, 1): size}, 2, late)[1], 0.1 + size / 1e6 + delay)
        assert np.isclose(
            times({(0, 1): size}, 2, late, ranks_per_node=2)[1], size / 5e9, atol=1e-5
        )
    full = rx.Network(latency=0.1, bandwidth=1e6, packet=1000, overhead=100, **FREE)
    assert np.allclose(times({(0, 1): 999_500}, 2, full)[1], 0.1 + 1.0995)
    assert np.isclose(rx.Network.ethernet(1e9).wire_bytes(1448e3) / 1448e3, 1.0622, atol=1e-4)


def test_scale_lets_a_small_array_stand_for_a_large_one():
    def program(d):
        with rx.Comm.world() as comm:
            x = np.ones(d, "f4")
            rx.allreduce(comm, x, op=rx.MEAN)
            rx.broadcast(comm, x)
            return comm.now()

    small = rx.Network(latency=1e-4, bandwidth=1e8, overhead=90, scale=64)
    large = rx.Network(latency=1e-4, bandwidth=1e8, overhead=90)
    for n in (2, 5):
        a = max(rx.SimulatedWorld(n, network=small).run(program, 2000))
        b = max(rx.SimulatedWorld(n, network=large).run(program, 128_000))
        assert np.isclose(a, b, rtol=1e-6)


def overlap(network, background, monkeypatch=None):
    """A megabyte sent, then two seconds of computation on both sides, then the wait."""

    def program():
        with rx.Comm.world() as comm:
            rx.barrier(comm)
            work = messages.start(
                comm, {1: 1_000_000} if comm.rank == 0 else {}, {0: 1_000_000} if comm.rank else {}
            )
            if background:
                with comm.background():
                    comm.compute(2.0)
            else:
                comm.progress()  # the agreement is made: the bytes are on offer
                comm.compute(1.0)
                comm.progress()
                comm.compute(1.0)
            work.wait()
            return comm.now()

    return max(rx.SimulatedWorld(2, network=network).run(program))


def test_eager_bytes_travel_during_computation_and_others_wait_for_a_call():
    eager = rx.Network(latency=1e-3, bandwidth=1e6, **FREE)
    waits = rx.Network(latency=1e-3, bandwidth=1e6, eager=1000, **FREE)
    assert 2.0 < overlap(eager, False) < 2.02
    assert 2.0 < overlap(eager, True) < 2.02
    assert 2.0 < overlap(waits, True) < 2.02
    assert 2.9 < overlap(waits, False) < 3.1


@rx.primitive
def broadcast_at(comm, x, root, begin):
    """The broadcast alone, without what ranks agree on before one."""

    def flow():
        comm.compute(begin - comm.now())
        yield comm.transport(device_of(x)).ibroadcast(x, root)

    return flow()


def test_a_broadcast_is_a_tree():
    network = rx.Network(latency=1.0, bandwidth=1e9, **FREE)

    def program(root):
        with rx.Comm.world() as comm:
            x = np.full(10, comm.rank)
            broadcast_at(comm, x, root, 100.0)
            assert (x == root).all()
            return comm.now() - 100.0

    for n in (2, 3, 4, 8, 11, 16):
        rounds = max(place.bit_count() for place in range(n))
        for root in (0, n - 1):
            world = rx.SimulatedWorld(n, network=network)
            assert np.isclose(max(world.run(program, root)), rounds, atol=1e-3)
            assert world.counts.sent == n - 1


def test_an_agreement_climbs_a_tree_to_rank_0_and_comes_down_another():
    def program(late):
        with rx.Comm.world() as comm:
            comm.compute(7.0 if comm.rank == late else 0.0)
            rx.barrier(comm)
            return round(comm.now() - 7.0, 9)

    def hops(n, per_node, late):
        return rx.SimulatedWorld(n, network=PLAIN, ranks_per_node=per_node).run(program, late)

    assert hops(2, 1, 0) == [0, 0.1]
    assert hops(2, 1, 1) == [0.1, 0.2]
    assert hops(4, 1, 0) == [0, 0.1, 0.1, 0.2]
    assert hops(4, 1, 3) == [0.2, 0.3, 0.3, 0.4]
    assert hops(5, 1, 4) == [0.1, 0.2, 0.2, 0.3, 0.2]
    assert hops(4, 4, 1) == [0.01, 0.02, 0.02, 0.03]
    assert max(hops(16, 4, 15)) == 0.44


# ------------------------------------------------------------------------------ laws


class Seen:
    """Every message's way, recorded."""

    def __init__(self, monkeypatch):
        self.left, self.arrived, self.begun = [], [], {}
        enter, arrive, leave = Fabric._enter, Fabric._arrive, Fabric._leave

        def _leave(fabric, time, flight):
            self.begun.setdefault(id(flight), time)
            leave(fabric, time, flight)

        def _enter(fabric, time, flight, last):
            self.left.append((last - fabric.latency(flight.source, flight.dest), flight))
            enter(fabric, time, flight, last)

        def _arrive(fabric, time, flight):
            self.arrived.append((time, self.begun[id(flight)], flight))
            arrive(fabric, time, flight)

        monkeypatch.setattr(Fabric, "_leave", _leave)
        monkeypatch.setattr(Fabric, "_enter", _enter)
        monkeypatch.setattr(Fabric, "_arrive", _arrive)


def within_rate(ends, rate):
    """No two messages are on a link at once: each ends its own length after the one before."""
    ends = sorted(ends)
    return all(b - a >= size / rate * (1 - 1e-9) for (a, _), (b, size) in pairwise(ends))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_link_is_used_beyond_its_rate_and_no_message_is_early(data):
    n, per_node = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] != p[1])
    plan = data.draw(st.dictionaries(pairs, st.integers(0, 100_000), min_size=1, max_size=12))
    network = rx.Network(
        latency=data.draw(st.sampled_from([0.0, 1e-5, 1e-2])),
        bandwidth=1e6,
        local_bandwidth=1e7,
        eager=data.draw(st.sampled_from([0, 10_000, 10**9])),
        send_cost=data.draw(st.sampled_from([0.0, 1e-5])),
    )
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen(patch)
        times(plan, n, network, seed=data.draw(st.integers(0, 99)), ranks_per_node=per_node)
    assert len(seen.arrived) == len(plan)
    node = [r // per_node for r in range(n)]
    for time, begin, flight in seen.arrived:
        near = node[flight.source] == node[flight.dest]
        wait, rate = (1e-6, 1e7) if near else (network.latency, 1e6)
        assert time - begin >= (wait + flight.load.size / rate) * (1 - 1e-9)
    for where in set(node):
        up = [
            (t, f.load.size)
            for t, f in seen.left
            if f.load.size and node[f.source] == where != node[f.dest]
        ]
        down = [
            (t, f.load.size)
            for t, _, f in seen.arrived
            if f.load.size and node[f.dest] == where != node[f.source]
        ]
        assert within_rate(up, 1e6)
        assert within_rate(down, 1e6)
