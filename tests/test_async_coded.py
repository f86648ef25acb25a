"""AsyncPushSum in low precision: replicas at both ends, mass as exact as without a codec."""

import numpy as np
import pytest

import relaxmpi as rx
from relaxmpi import faults

LATE = [faults.Delay(0.5, seconds=s) for s in (1, 2, 2)]
LOSSY = [faults.Drop(0.3), faults.Duplicate(0.1, later=2.0), faults.Reorder(0.8, within=5.0)]
CODECS = [rx.Identity(), rx.Quantizer(bits=4), rx.MinMaxUInt8(), rx.TopK(0.3), rx.OneBit(bucket=32)]


def averaging(comm, codec, topology, steps, kept=None, tau=2, dtype=np.float64):
    """Average, each rank at its own pace, and return x, w and the endpoint."""
    memory = rx.DifferenceCompression(codec, gamma=0.5)
    x = np.random.default_rng((3, comm.rank)).standard_normal(40).astype(dtype)
    begin = x.copy()
    mix = rx.AsyncPushSum(comm, x, topology, max_staleness=tau, codec=memory, name="coded")
    if kept is not None:
        kept.append(mix)
    for _ in range(steps):
        comm.compute(1e-3 if dtype == np.float32 else 1.0)
        mix.send()
        mix.fold()
    mix.close()
    return begin, x, mix.w, mix


@pytest.mark.parametrize("faulty", [[], LATE, LOSSY], ids=["healthy", "late", "lossy"])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_mass_is_exact_whatever_the_codec_and_the_network_do(codec, faulty):
    """Law 4; on a bad network each message is sent until it is acknowledged, and taken once."""
    kept = []

    def program():
        with rx.Comm.world(timeout=1000) as comm:
            return averaging(comm, codec, rx.Ring(), 100, kept)

    slow = faults.SlowDown(2, factor=4.0)
    ends = rx.SimulatedWorld(4, faults=[*faulty, slow], jitter=0.3, seed=5).run(program)
    total = sum(begin for begin, *_ in ends)
    assert abs(sum(x for _, x, *_ in ends) - total).max() < 1e-11
    assert abs(sum(w for *_, w, _ in ends) - 4) < 1e-12
    points = {point.comm.rank: point for point in kept}
    for point in kept:
        for peer, edge in point._out.items():
            assert (edge.phi == points[peer]._in[point.comm.rank].rho).all(), "replicas differ"
    spread = max(abs(x / w - total / 4).max() for _, x, w, _ in ends)
    first = max(abs(begin - total / 4).max() for begin, *_ in ends)
    assert spread < 0.2 * first


def test_messages_that_are_here_before_the_replicas_are_wait():
    """Another lane carries the replicas; a slow one must not be overtaken."""

    def program():
        with rx.Comm.world() as comm:
            return averaging(comm, rx.Quantizer(bits=4), rx.Ring(), 20, tau=None, dtype=np.float32)

    late = [faults.Delay(nth=0, source=0, dest=1, seconds=8e-3), faults.Delay(0.3, seconds=3e-3)]
    for seed in range(5):
        ends = rx.SimulatedWorld(4, faults=late, seed=seed).run(program)
        total = sum(begin for begin, *_ in ends)
        assert abs(sum(x for _, x, *_ in ends) - total).max() < 1e-5


def test_a_varying_topology_has_a_replica_an_edge():
    def program():
        with rx.Comm.world() as comm:
            return averaging(comm, rx.Quantizer(bits=8), rx.OnePeerExponential(), 200)

    ends = rx.SimulatedWorld(5, jitter=0.5).run(program)
    total = sum(begin for begin, *_ in ends)
    assert abs(sum(x for _, x, *_ in ends) - total).max() < 1e-11
    assert max(abs(x / w - total / 5).max() for _, x, w, _ in ends) < 1e-3


def test_ranks_that_agree_go_on_agreeing():
    """Replicas begin as what z is, and follow z, whatever the weights do: no error to code."""

    def program():
        with rx.Comm.world() as comm:
            x = np.random.default_rng(1).standard_normal(40)
            z = x.copy()
            memory = rx.DifferenceCompression(rx.Quantizer(bits=2))
            mix = rx.AsyncPushSum(comm, x, rx.Ring(), codec=memory)
            for _ in range(50):
                comm.compute(1e-3)
                mix.send()
                mix.fold()
                assert abs(mix.debiased - z).max() < 1e-13
            mix.close()
            return mix.w

    assert set(rx.SimulatedWorld(3, jitter=2.0).run(program)) != {1.0}


def test_bytes_are_those_of_the_codec():
    def program():
        with rx.Comm.world() as comm:
            *_, mix = averaging(comm, rx.Quantizer(bits=4), rx.Ring(), 10)
            assert mix.stats.bytes == mix.stats.messages * (
                64 + rx.Quantizer(bits=4).nbytes(40, "f8")
            )

    rx.SimulatedWorld(3).run(program)


def test_resuming_is_exact():
    """Law 9: the replicas, and the codec's random numbers, are part of the state."""
    saved, codec = {}, rx.Quantizer(bits=4)

    def steps(comm, mix, x, begin, end):
        for step in range(begin, end):
            comm.compute(1.0)
            x -= 0.1 * (x / mix.w - comm.rank - step)
            mix.send()
            mix.fold()
        return x.copy(), mix.w

    def endpoint(comm, x):
        memory = rx.DifferenceCompression(codec)
        return rx.AsyncPushSum(comm, x, rx.OnePeerExponential(), max_staleness=0, codec=memory)

    def first():
        with rx.Comm.world() as comm:
            x = np.full(9, float(comm.rank), np.float32)
            mix = endpoint(comm, x)
            steps(comm, mix, x, 0, 9)
            state = mix.state_dict()
            saved[comm.rank] = state, x.copy()
            end = steps(comm, mix, x, 9, 20)
            mix.close()
            return end

    def second():
        with rx.Comm.world() as comm:
            state, x = saved[comm.rank]
            mix = endpoint(comm, x)
            mix.load_state_dict(state)
            end = steps(comm, mix, x, 9, 20)
            mix.close()
            return end

    one, two = (rx.SimulatedWorld(4).run(program) for program in (first, second))
    for (x, w), (y, v) in zip(one, two, strict=True):
        assert w == v
        assert (x == y).all()


@pytest.mark.ranks(2, 3)
def test_on_real_ranks(comm):
    begin, x, w, _ = averaging(comm, rx.Quantizer(bits=8), rx.Ring(), 40, dtype=np.float32)
    total = rx.allreduce(comm, begin.astype("f8"))
    assert abs(rx.allreduce(comm, x.astype("f8")) - total).max() < 1e-5
    assert rx.allreduce(comm, w) == pytest.approx(comm.size)
    assert abs(x / w - total / comm.size).max() < 0.05
