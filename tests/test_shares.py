"""What compressed push-sum does in one pass gives the bits of the separate steps."""

import numpy as np
import pytest
from roundtrip import encoded

import relaxmpi as rx
from relaxmpi.primitives import kernels
from relaxmpi.primitives.codecs import Cast, Identity, Key, MinMaxUInt8, OneBit, Quantizer
from relaxmpi.primitives.simulation.priced import priced
from relaxmpi.primitives.topk import TopK

SIZES = [0, 1, 7, 511, 512, 513, 1001, 5000]
CODECS = [
    Quantizer(bits, norm=norm, stochastic=stochastic)
    for bits in (2, 4, 8)
    for norm in ("max", "l2")
    for stochastic in (False, True, None)
]
CODECS += [Quantizer(3, bucket=64), MinMaxUInt8(), OneBit(), OneBit("l2", 64), TopK(0.1)]
CODECS += [Identity(), Cast("bf16")]
ODD = [0.25, np.nan, np.inf, -np.inf, 3e38]

every = pytest.mark.parametrize("codec", CODECS, ids=repr)
both = pytest.mark.parametrize("dtype", [np.float32, np.float64])


class Separate(Quantizer):
    """The same quantiser in separate steps."""

    def encode_difference(self, x, replica, payload, *, give=0.0, **others):
        super().encode_difference(x, replica, payload, **others)
        if give:
            kernels.mix(x, replica, -give, x)

    def decode_follow(self, payload, replica, *, part=0.0, share=None):
        super().decode_follow(payload, replica)
        if share is not None:
            kernels.scaled(replica, part, share)


def numbers(size, dtype, odd, seed=0):
    x = np.random.default_rng([seed, size]).standard_normal(size).astype(dtype)
    x[size // 2 : size // 2 + 1] = odd
    return x


@both
@every
@pytest.mark.filterwarnings("ignore:overflow")
def test_giving_is_encode_and_mix(codec, dtype):
    how = {"key": Key("w", 3, 1), "offset": 512}
    for size in SIZES:
        for odd in ODD:
            x, held = numbers(size, dtype, odd), numbers(size, dtype, 0.5, seed=1)
            y, follows = x.copy(), held.copy()
            payload, other = (np.full(codec.nbytes(size, dtype), 0xA5, np.uint8) for _ in "ab")
            codec.encode_difference(y, follows, other, **how)
            assert y.tobytes() == x.tobytes()
            kernels.mix(y, follows, -0.3, y)
            codec.encode_difference(x, held, payload, give=0.3, **how)
            assert payload.tobytes() == other.tobytes()
            assert held.tobytes() == follows.tobytes()
            assert x.tobytes() == y.tobytes()


@both
@every
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_share_is_a_part_of_the_replica(codec, dtype):
    for size in SIZES:
        for odd in ODD:
            payload = encoded(codec, numbers(size, dtype, odd), key=Key("w", 3))
            held = numbers(size, dtype, 0.5, seed=1)
            follows, expected = held.copy(), np.full_like(held, np.nan)
            share = expected.copy()
            codec.decode_follow(payload, follows)
            kernels.scaled(follows, 0.3, expected)
            codec.decode_follow(payload, held, part=0.3, share=share)
            assert held.tobytes() == follows.tobytes()
            assert share.tobytes() == expected.tobytes()


@pytest.mark.parametrize("codec", [Quantizer(8), MinMaxUInt8()], ids=repr)
def test_only_who_gives_writes_to_x(codec):
    x = numbers(600, np.float32, 0)
    x.setflags(write=False)
    payload = np.empty(codec.nbytes(x.size, x.dtype), np.uint8)
    codec.encode_difference(x, np.zeros_like(x), payload)
    with pytest.raises(ValueError, match="the array of numbers is read-only"):
        codec.encode_difference(x, np.zeros_like(x), payload, give=0.5)
    with pytest.raises(ValueError, match="the share is read-only"):
        codec.decode_follow(payload, np.zeros_like(x), part=0.5, share=x)
    with pytest.raises(ValueError, match="share must be like x"):
        codec.decode_follow(payload, np.zeros_like(x), part=0.5, share=np.empty(599, np.float32))


@pytest.mark.parametrize("topology", [rx.OnePeerExponential(), rx.Ring(), rx.Exponential()])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_push_sum_gives_the_bits_of_separate_steps(topology, dtype):
    def program(kind):
        with rx.Comm.world() as comm:
            x, w = numbers(1300, dtype, 0, seed=comm.rank), np.ones(1)
            memory = rx.DifferenceCompression(kind(8, stochastic=True))
            for step in range(6):
                dx, dw = rx.push_sum(comm, x, w, topology=topology, step=step, codec=memory)
                x += dx
                w += dw
            return x.tobytes(), w.tobytes()

    for n in (2, 3, 5):
        assert rx.SimulatedWorld(n).run(program, Quantizer) == rx.SimulatedWorld(n).run(
            program, Separate
        )


@pytest.mark.parametrize("codec", [Identity(), Quantizer(8)], ids=repr)
def test_all_receivers_are_told_of_the_same_numbers(codec):
    """Not of what the ones before have left."""

    def program():
        with rx.Comm.world() as comm:
            x, memory = numbers(600, "f8", 0, seed=comm.rank), rx.DifferenceCompression(codec)
            rx.push_sum(comm, x, np.ones(1), topology=rx.Exponential(), codec=memory)
            return [sent.tobytes() for sent in memory.replicas("sent").values()]

    for n in (3, 5):
        for told in rx.SimulatedWorld(n).run(program):
            assert len(told) > 1
            assert len(set(told)) == 1


def test_what_is_done_in_one_pass_has_its_price():
    codec, charged = Quantizer(8), []
    work = {f"{codec}.encode_difference": (1e-6, 1e-9), f"{codec}.decode_follow": (2e-6, 0)}
    counted = priced(codec, rx.Network(work=work), charged.append)
    x, held, share = np.ones(1000, np.float32), np.zeros(1000, np.float32), np.empty(1000, "f4")
    payload = np.empty(codec.nbytes(x.size, x.dtype), np.uint8)
    counted.encode_difference(x, held, payload, give=0.5)
    assert (x == 0.5).all()
    counted.decode_follow(payload, held, part=0.25, share=share)
    assert (share == 0.5).all()
    assert charged == pytest.approx([2e-6, 2e-6])
