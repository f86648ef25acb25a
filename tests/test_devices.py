"""The device seam, driven by a fake device: verbs touch its arrays only through the protocol."""

from types import SimpleNamespace

import numpy as np
import pytest

import relaxmpi as rx
from relaxmpi.primitives import devices
from relaxmpi.primitives.cpu import Cpu
from relaxmpi.primitives.devices import Flat, device_of

RANKS = pytest.mark.ranks(1, 2, 3, 4)


class FakeArray:
    """Memory that the host may not touch: no buffer, no __array__, no arithmetic."""

    def __init__(self, hidden):
        self.hidden = hidden
        self.dtype, self.shape, self.ndim = hidden.dtype, hidden.shape, hidden.ndim
        self.nbytes = hidden.nbytes
        self.size, self.flags, self.strides = hidden.size, hidden.flags, hidden.strides

    def __len__(self):
        return len(self.hidden)

    def __getitem__(self, where):
        assert isinstance(where, slice)
        return FakeArray(self.hidden[where])

    def __setitem__(self, where, value):
        assert isinstance(where, slice)
        self.hidden[where] = bare(value)

    def __array__(self, *_args, **_kwargs):
        raise AssertionError("a verb read device memory on the host")

    def view(self, dtype):
        return FakeArray(self.hidden.view(dtype))

    def copy(self):
        return FakeArray(self.hidden.copy())


def bare(value):
    return value.hidden if isinstance(value, FakeArray) else value


class FakeKernels:
    """The CPU's kernels on hidden memory."""

    def __getattr__(self, name):
        kernel = getattr(Cpu().kernels, name)
        return lambda *args, **kwargs: kernel(
            *map(bare, args), **{key: bare(value) for key, value in kwargs.items()}
        )


class FakeTransport:
    def __init__(self, host, device):
        self.host, self.device = host, device

    def __getattr__(self, name):
        def move(*args):
            assert self.device.open, "a move outside enter() and leave()"
            self.device.moves.append(name)
            found = getattr(self.host, name)(*map(bare, args))
            return self.reducing(found) if name == "reduction" and found else found

        return move

    def reducing(self, reduction):
        def reduce(*arrays):
            self.device.moves.append("reduce")
            return reduction(*map(bare, arrays))

        return reduce


class Fake:
    """Another place for buffers."""

    name = "fake"
    kernels = FakeKernels()

    def __init__(self):
        self.host, self.open, self.moves, self.orders = Cpu(), False, [], []

    def owns(self, x):
        return isinstance(x, FakeArray)

    def flat(self, x, *, writable=True, strided=False):
        view = self.host.flat(x.hidden, writable=writable, strided=strided)
        return Flat(FakeArray(view.data), view.dtype, view.shape, self)

    def empty(self, count, dtype):
        return FakeArray(self.host.empty(count, dtype))

    def zeros(self, count, dtype):
        return FakeArray(self.host.zeros(count, dtype))

    def like(self, x, shape):
        return FakeArray(np.empty(tuple(shape), x.dtype))

    def dress(self, data, x, shape):
        return FakeArray(data.hidden.reshape(tuple(shape)))

    def cast(self, data, dtype, to):
        return data if dtype == to else FakeArray(self.host.cast(data.hidden, dtype, to))

    def copy(self, out, data):
        self.host.copy(out.hidden, data.hidden)

    def reduce(self, op, a, b, out):
        self.host.reduce(op, a.hidden, b.hidden, out.hidden)

    def scale(self, data, factor):
        self.host.scale(data.hidden, factor)

    def divide(self, data, by):
        self.host.divide(data.hidden, by)

    def span(self, data):
        return self.host.span(data.hidden)

    def enter(self):
        self.open = True
        self.orders.append("enter")

    def leave(self):
        self.open = False
        self.orders.append("leave")

    def transport(self, host):
        return FakeTransport(host, self)


@pytest.fixture
def fake(monkeypatch):
    device = Fake()
    monkeypatch.setattr(devices, "_devices", [device, *devices._devices])
    monkeypatch.setattr(devices, "_by_type", {})
    return device


def draw(rank, d, dtype):
    return (np.random.default_rng([rank, d]).standard_normal(d) * 4).astype(dtype)


@RANKS
@pytest.mark.parametrize("nodes", ["0", "1"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i4"])
def test_every_verb_equals_the_host(comm, fake, dtype, nodes, monkeypatch):
    monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", nodes)
    monkeypatch.setenv("RELAXMPI_SHARED_MEMORY", "0")  # which adds in an order of its own
    n = comm.size
    with rx.Comm.world() as stream:
        for d in (0, 1, n + 1, 1000):
            x = draw(comm.rank, d, dtype)

            def both(verb, array=x, **kwargs):
                there = FakeArray(array.copy())
                result = verb(stream, there, **kwargs)
                expected = verb(stream, array.copy(), **kwargs)
                assert isinstance(result, FakeArray)
                assert np.array_equal(result.hidden, expected)
                assert result.hidden.dtype == expected.dtype

            both(rx.allreduce)
            both(rx.allreduce, op=rx.MAX)
            both(rx.reduce_scatter)
            both(rx.allgather)
            both(rx.broadcast, root=n - 1)
            both(rx.alltoall, np.arange(n * d).reshape(n, d).astype(dtype))
            if dtype != "i4":
                both(rx.allreduce, op=rx.MEAN)
                for codec in (
                    rx.Identity(), rx.Quantizer(bits=4), rx.OneBit(), rx.MinMaxUInt8(), rx.TopK(0.1)
                ):  # fmt: skip
                    both(rx.allreduce, op=rx.MEAN, codec=codec, step=3)
                    both(rx.allgather, codec=codec, step=3)
    assert fake.orders[::2] == ["enter"] * (len(fake.orders) // 2)
    assert fake.orders[1::2] == ["leave"] * (len(fake.orders) // 2)
    assert bool(fake.moves) == (n > 1)


@pytest.mark.ranks(2, 4)
def test_feedback_and_hierarchy(comm, fake, monkeypatch):
    monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", "2")
    memories = rx.ErrorFeedback(rx.OneBit()), rx.ErrorFeedback(rx.OneBit())
    with rx.Comm.world() as flat, flat.by_node() as nodes:
        for stream in (flat, nodes):
            for memory in memories:
                memory.reset()
            for step in range(5):
                x = draw(comm.rank, 1001, "f4") * (step + 1)
                there = rx.allreduce(stream, FakeArray(x.copy()), op=rx.MEAN, codec=memories[0])
                here = rx.allreduce(stream, x.copy(), op=rx.MEAN, codec=memories[1])
                assert np.array_equal(there.hidden, here)


@pytest.mark.ranks(2)
def test_devices_do_not_mix(comm, fake):
    with pytest.raises(TypeError, match="live on fake"):
        rx.allreduce(comm, FakeArray(np.ones(3)), np.ones(3))


def test_the_newest_device_is_asked_first(fake):
    assert device_of(FakeArray(np.ones(1))) is fake
    assert device_of(np.ones(1)).name == "cpu"


def test_dlpack_objects_are_buffers():
    exporter = np.arange(3.0)
    foreign = SimpleNamespace(__dlpack__=exporter.__dlpack__)
    foreign.__dlpack_device__ = exporter.__dlpack_device__
    view = device_of(foreign).flat(foreign)
    assert view.dtype == "float64"
    view.data[0] = 7
    assert exporter[0] == 7


@pytest.mark.parametrize("what", [[1.0], "text", {"a": 1}, None, (1, 2)])
def test_other_objects_are_refused(what):
    with pytest.raises(TypeError, match=r"comm\.mpi"):
        device_of(what)
