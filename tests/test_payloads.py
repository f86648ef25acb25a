"""Payloads: sizes, layout in memory, and arguments that are refused."""

import doctest

import numpy as np
import pytest
from roundtrip import decoded, encoded, through

from relaxmpi.primitives import codecs, kernels, philox
from relaxmpi.primitives.codecs import Cast, Identity, MinMaxUInt8, OneBit, Quantizer
from relaxmpi.primitives.topk import TopK

SIZES = [0, 1, 7, 8, 9, 511, 512, 513, 1000, 1001, 1025]
QUANTIZERS = [Quantizer(bits) for bits in range(2, 9)]
QUANTIZERS += [Quantizer(3, bucket=8, norm="l2"), Quantizer(4, stochastic=False, seed=1)]
SIGNS = [OneBit(scale, bucket) for scale in ("l1", "l2") for bucket in (2048, 64)]
SPARSE = [TopK(0.01), TopK(0.3)]
ALL = [Identity(), Cast("fp16"), Cast("bf16"), MinMaxUInt8(), *QUANTIZERS, *SIGNS, *SPARSE]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 511, 512, 513, 10**6 + 3])
def test_wire_sizes(count):  # check 14
    for dtype, itemsize in ((np.float32, 4), (np.float64, 8)):
        for codec in (*QUANTIZERS, *SIGNS):
            bits = getattr(codec, "bits", 1)
            size = -(-bits * count // 8) + itemsize * -(-count // codec.bucket)
            assert codec.nbytes(count, dtype) == size
        assert Identity().nbytes(count, dtype) == itemsize * count
        assert Cast("bf16").nbytes(count, dtype) == 2 * count
        assert MinMaxUInt8().nbytes(count, dtype) == (count and 32 + (count + 31) // 32 * 32)


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_payload_is_filled_exactly_and_of_any_alignment(codec):
    for size in SIZES:
        x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        n = codec.nbytes(size, np.float32)
        reference = encoded(codec, x)
        for shift in (1, 3):
            room = np.full(n + 8, 0x5A, np.uint8)
            codec.encode(x, room[shift : shift + n])
            assert (room[shift : shift + n] == reference).all()
            assert (room[:shift] == 0x5A).all()
            assert (room[shift + n :] == 0x5A).all()
            assert (
                decoded(codec, room[shift : shift + n], x) == decoded(codec, reference, x)
            ).all()


@pytest.mark.parametrize(
    "codec", [Identity(), Cast("bf16"), MinMaxUInt8(), OneBit(), TopK(0.1)], ids=repr
)
def test_inputs_may_be_read_only(codec):
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    payload, y = encoded(codec, x), through(codec, x)
    x.setflags(write=False)
    assert (encoded(codec, x) == payload).all()
    payload.setflags(write=False)
    assert (decoded(codec, payload, x) == y).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Quantizer(bits=9), "2 to 8 bits"),
        (lambda: Quantizer(bits=0), "2 to 8 bits"),
        (lambda: Quantizer(bits=1), "OneBit"),
        (lambda: Quantizer(bits=4, bucket=0), "multiple of 8"),
        (lambda: Quantizer(bits=4, bucket=12), "multiple of 8"),
        (lambda: Quantizer(bits=4, norm="l3"), '"max" or "l2"'),
        (lambda: Quantizer(bits=4, seed=-1), "seed"),
        (lambda: OneBit(scale="max"), '"l1" or "l2"'),
        (lambda: OneBit(bucket=-8), "multiple of 8"),
        (lambda: Cast("fp8"), '"fp16" or "bf16"'),
        (lambda: TopK(0), "fraction"),
        (lambda: TopK(1.01), "fraction"),
        (lambda: TopK(-0.1), "fraction"),
        (lambda: TopK(float("nan")), "fraction"),
    ],
)
def test_wrong_schemes(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "codec", [Identity(), Cast("fp16"), MinMaxUInt8(), Quantizer(4), OneBit(), TopK(0.1)]
)
def test_wrong_arguments(codec):
    x = np.ones(100, np.float32)
    payload = np.empty(codec.nbytes(100, x.dtype), np.uint8)
    for call in (
        codec.encode,
        lambda x, p: codec.decode(p, x),
        lambda x, p: codec.decode_add(p, x),
        lambda x, p: codec.decode_follow(p, x),
    ):
        with pytest.raises(ValueError, match=r"needs \d+ contiguous bytes"):
            call(x, payload[:-1])
        with pytest.raises(TypeError, match="float32 and float64, not int32"):
            call(x.astype(np.int32), payload)
        with pytest.raises(TypeError, match="astype"):
            call(x.astype(np.float16), payload)
        with pytest.raises(TypeError, match="float32 and float64, not >f4"):
            call(x.astype(">f4"), payload)
        with pytest.raises(ValueError, match="one-dimensional and contiguous"):
            call(np.ones(200, np.float32)[::2], payload)
        with pytest.raises(ValueError, match="one-dimensional and contiguous"):
            call(x.reshape(10, 10), payload)
        with pytest.raises(TypeError, match="must be uint8"):
            call(x, payload.view(np.int8))
        with pytest.raises(TypeError, match="frombuffer"):
            call(x, payload.tobytes())
        with pytest.raises(TypeError, match="must be an array, not list"):
            call([1.0], payload)
    with pytest.raises(ValueError, match="residual must be like x"):
        codec.encode_feedback(x, np.zeros(99, np.float32), payload)
    with pytest.raises(ValueError, match="residual must be like x"):
        codec.encode_feedback(x, np.zeros(100), payload)
    with pytest.raises(ValueError, match="offset"):
        codec.encode(x, payload, offset=-1)
    with pytest.raises(TypeError, match="float32 and float64"):
        codec.nbytes(3, np.int64)
    with pytest.raises(ValueError, match="zero or more numbers"):
        codec.nbytes(-1, np.float32)
    with pytest.raises(ValueError, match="replica must be like x"):
        codec.encode_difference(x, np.zeros(99, np.float32), payload)


@pytest.mark.parametrize(
    "codec", [Identity(), Cast("fp16"), MinMaxUInt8(), Quantizer(4), OneBit(), TopK(0.1)]
)
def test_what_is_filled_must_be_writable(codec):
    x = np.ones(100, np.float32)
    payload = np.empty(codec.nbytes(100, x.dtype), np.uint8)
    frozen, sealed = x.copy(), payload.copy()
    for array in (frozen, sealed):
        array.flags.writeable = False
    codec.encode(frozen, payload)
    codec.decode(sealed, x)
    for what, call in (
        ("payload", lambda: codec.encode(x, sealed)),
        ("payload", lambda: codec.encode_feedback(x, np.zeros_like(x), sealed)),
        ("payload", lambda: codec.encode_difference(x, np.zeros_like(x), sealed)),
        ("residual", lambda: codec.encode_feedback(x, frozen, payload)),
        ("replica", lambda: codec.encode_difference(x, frozen, payload)),
        ("array of numbers", lambda: codec.decode(payload, frozen)),
        ("array of numbers", lambda: codec.decode_add(payload, frozen)),
        ("array of numbers", lambda: codec.decode_follow(payload, frozen)),
    ):
        with pytest.raises(ValueError, match=f"the {what} is read-only"):
            call()


def test_descriptions_tell_codecs_apart():
    assert len({codec.describe() for codec in ALL}) == len(set(ALL)) == len(ALL)
    assert Quantizer(4) == Quantizer(bits=4, bucket=512)
    assert Quantizer(4).describe() == repr(Quantizer(4))


@pytest.mark.parametrize("module", [codecs, philox, kernels])
def test_examples_of_the_docstrings(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted or module is kernels
