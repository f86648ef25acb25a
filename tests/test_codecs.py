"""Laws of the codecs; numbers in comments are those of the checks in the literature."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roundtrip import decoded, encoded, through

from relaxmpi.primitives.codecs import Cast, Identity, Key, MinMaxUInt8, OneBit, Quantizer
from relaxmpi.primitives.topk import TopK

SIZES = [0, 1, 7, 8, 9, 511, 512, 513, 1000, 1001, 1025]
QUANTIZERS = [
    Quantizer(bits, bucket=bucket, norm=norm, stochastic=stochastic)
    for bits, bucket in [(2, 512), (3, 64), (4, 512), (5, 8), (6, 512), (7, 512), (8, 512)]
    for norm in ("max", "l2")
    for stochastic in (False, True, None)
]
SIGNS = [OneBit(scale, bucket) for scale in ("l1", "l2") for bucket in (2048, 64)]
SPARSE = [TopK(0.01), TopK(0.3)]
ALL = [Identity(), Cast("fp16"), Cast("bf16"), MinMaxUInt8(), *QUANTIZERS, *SIGNS, *SPARSE]

laws = settings(derandomize=True, deadline=None, max_examples=120, database=None)
arrays = st.builds(
    lambda seed, size, dtype, exponent: (
        np.random.default_rng(seed).standard_normal(size) * 10.0**exponent
    ).astype(dtype),
    st.integers(0, 2**32 - 1),
    st.sampled_from(SIZES),
    st.sampled_from([np.float32, np.float64]),
    st.integers(-4, 3),
)


def buckets(codec, x):
    size = getattr(codec, "bucket", max(x.size, 1))
    return [slice(lo, min(lo + size, x.size)) for lo in range(0, x.size, size)]


def error_bound(codec, v):
    """Largest |C(v) - v| that the docstrings allow for one bucket."""
    most = np.abs(v).max()
    ulp = 4 * np.finfo(v.dtype).eps * most
    if isinstance(codec, Identity):
        return 0
    if isinstance(codec, Cast):
        return most * 2.0 ** (-11 if codec.to == "fp16" else -8) + 2.0**-25
    if isinstance(codec, MinMaxUInt8):
        return 0.501 * (v.max() - v.min() + 1e-7) / 255 + ulp
    if isinstance(codec, Quantizer):
        scale = most if codec.norm == "max" else np.linalg.norm(v.astype(np.float64))
        levels = 0.5 if codec.stochastic is False else 1.0
        return scale * levels * 1.0001 / (2 ** (codec.bits - 1) - 1) + ulp
    return 2 * most + ulp


@laws
@given(arrays, st.sampled_from(ALL))
def test_error_is_within_the_bound(x, codec):
    before = x.copy()
    y = through(codec, x, key=Key("w", 3, 2, 1), offset=1024)
    assert (x == before).all()
    for part in buckets(codec, x):
        assert np.abs(y[part] - x[part]).max() <= error_bound(codec, x[part])


@laws
@given(arrays, st.sampled_from(ALL))
def test_decoded_plus_residual_is_u(x, codec):
    residual = np.random.default_rng(x.size).standard_normal(x.size).astype(x.dtype) * x.dtype.type(
        0.1
    )
    u = x + residual
    before = x.copy()
    payload = np.full(codec.nbytes(x.size, x.dtype), 0xA5, np.uint8)
    codec.encode_feedback(x, residual, payload, key=Key("w", 1), offset=512)
    assert (x == before).all()
    y = decoded(codec, payload, x)
    assert (np.abs(y + residual - u) <= np.spacing(np.maximum(np.abs(u), np.abs(y)))).all()
    assert (residual == u - y).all()
    if getattr(codec, "stochastic", False) is None:
        codec = Quantizer(codec.bits, codec.bucket, codec.norm, stochastic=False)
    assert (payload == encoded(codec, u, key=Key("w", 1), offset=512)).all()  # fused = composed


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_feedback_where_u_is_zero(codec):
    for dtype in (np.float32, np.float64):
        x = np.arange(-8, 11, dtype=dtype)
        residual = np.where(x == 3, -x, 0)
        u = x + residual
        payload = np.empty(codec.nbytes(x.size, dtype), np.uint8)
        codec.encode_feedback(x, residual, payload)
        assert (residual == u - decoded(codec, payload, x)).all()


@laws
@given(arrays, st.sampled_from(ALL))
def test_decode_add_adds(x, codec):
    payload = encoded(codec, x)
    out = np.random.default_rng(1).standard_normal(x.size).astype(x.dtype)
    expected = out + decoded(codec, payload, x)
    codec.decode_add(payload, out)
    assert (out == expected).all()


@laws
@given(arrays, st.sampled_from(ALL), st.sampled_from([0, np.nan, np.inf, -np.inf, 3e38, -3e38]))
def test_decode_follow_adds_what_is_finite(x, codec, odd):
    if odd and x.size:
        x[x.size // 2] = odd
        if x.size > 2 and abs(odd) == 3e38:
            x[-1] = -odd  # a range that no float32 holds
    payload = encoded(codec, x)
    replica = np.random.default_rng(1).standard_normal(x.size).astype(x.dtype)
    change = decoded(codec, payload, x)
    expected = np.where(np.isfinite(change), replica + change, replica)
    codec.decode_follow(payload, replica)
    assert (replica == expected).all()


@laws
@given(arrays, st.sampled_from(ALL), st.sampled_from([0, np.nan, np.inf, -np.inf, 3e38, -3e38]))
def test_encode_difference_is_subtract_encode_and_follow(x, codec, odd):
    if odd and x.size:
        x[x.size // 2] = odd
    held = np.random.default_rng(1).standard_normal(x.size).astype(x.dtype)
    before, expected = x.copy(), held.copy()
    payload, other = (np.full(codec.nbytes(x.size, x.dtype), 0xA5, np.uint8) for _ in range(2))
    with np.errstate(over="ignore"):
        codec.encode(x - held, other, key=Key("w", 3), offset=512)
    codec.decode_follow(other, expected)
    codec.encode_difference(x, held, payload, key=Key("w", 3), offset=512)
    assert (payload == other).all()
    assert (held.view(np.uint8) == expected.view(np.uint8)).all()
    assert np.isfinite(held).all()
    assert (x == before).all() or odd != 0


def test_what_decodes_beyond_the_largest_float_is_not_followed():
    codec, replica = MinMaxUInt8(), np.ones(64, np.float32)
    most = 0.999 * float(np.finfo(np.float32).max)
    x = np.linspace(-most, most, 64).astype(np.float32)
    payload = encoded(codec, x)
    with np.errstate(over="ignore"):
        change = decoded(codec, payload, x)
        codec.decode_follow(payload, replica)
    assert not np.isfinite(change).all()
    assert (replica == np.where(np.isfinite(change), 1 + change, 1)).all()


@pytest.mark.parametrize("codec", ALL, ids=repr)
def test_zeros_stay_zero(codec):  # check 1
    for dtype in (np.float32, np.float64):
        x, residual = np.zeros(1000, dtype), np.zeros(1000, dtype)
        assert not through(codec, x).any()
        payload = np.empty(codec.nbytes(1000, dtype), np.uint8)
        codec.encode_feedback(x, residual, payload)
        assert not decoded(codec, payload, x).any()
        assert not residual.any()
        assert not through(codec, -x).any()


@pytest.mark.parametrize("codec", [MinMaxUInt8(), *QUANTIZERS, *SIGNS, *SPARSE], ids=repr)
def test_a_zero_among_others_stays_zero_where_it_can(codec):
    x = np.random.default_rng(0).standard_normal(1001).astype(np.float32)
    x[::3] = 0
    y = through(codec, x)
    assert isinstance(codec, OneBit) or not y[::3].any()


@pytest.mark.parametrize("c", [1, -1, 3e-5, 1e30, 3e38, 1e-37])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_constants(c, dtype):  # check 2
    for size in (1, 7, 1000):
        x = np.full(size, c, dtype)
        assert (through(MinMaxUInt8(), x) == x).all()
        for codec in QUANTIZERS:
            if codec.norm == "max":
                assert (through(codec, x) == x).all()
        for codec in SIGNS:
            assert (np.abs(through(codec, x) - x) <= 4 * np.spacing(np.abs(x))).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tiny_and_huge_numbers(dtype):
    limits = np.finfo(dtype)
    for scale in (limits.max / 8, limits.tiny * 8, limits.smallest_subnormal * 100):
        x = (np.random.default_rng(0).uniform(-1, 1, 512).astype(dtype) * scale).astype(dtype)
        for codec in (Quantizer(8, stochastic=False), Quantizer(4), MinMaxUInt8(), OneBit("l2")):
            error = np.abs(through(codec, x) / dtype(2) - x / dtype(2)).max() * dtype(2)
            half = x / dtype(2)
            spread = (half.max() - half.min()) * dtype(2)
            bound = {8: 0.5 / 127, 4: 1 / 7}.get(getattr(codec, "bits", 0), 0.6)
            assert error <= bound * (np.abs(x).max() + limits.smallest_subnormal * 200)
            if isinstance(codec, MinMaxUInt8):
                assert error <= 0.51 * spread / 255 + 256 * limits.smallest_subnormal


@pytest.mark.parametrize("codec", [Cast("fp16"), Cast("bf16"), *QUANTIZERS, *SIGNS], ids=repr)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_not_finite_is_visible_and_stays_in_its_bucket(codec, bad, dtype):
    bucket = getattr(codec, "bucket", 1)
    x = np.random.default_rng(0).standard_normal(3 * max(bucket, 64)).astype(dtype)
    clean = through(codec, x)
    at = x.size // 2
    x[at] = bad
    y = through(codec, x)
    lo = at // bucket * bucket
    hit = slice(lo, lo + bucket)
    assert not np.isfinite(y[hit]).any()
    assert isinstance(codec, Cast) or np.isnan(y[hit]).all()
    other = np.ones(x.size, bool)
    other[hit] = False
    assert (y[other] == clean[other]).all()
    residual = np.full_like(x, 0.5)
    payload = np.empty(codec.nbytes(x.size, dtype), np.uint8)
    codec.encode_feedback(x, residual, payload)
    assert not np.isfinite(decoded(codec, payload, x)[hit]).any()
    assert (residual[hit] == 0.5).all()
    assert np.isfinite(residual).all()


def test_cast_saturates():  # check 23
    x = np.array([7e4, -7e4, 1e30, 65504, np.inf, -np.inf, np.nan, 1e-9], np.float32)
    y = through(Cast("fp16"), x)
    assert y[:6].tolist() == [65504, -65504, 65504, 65504, np.inf, -np.inf]
    assert np.isnan(y[6])
    assert y[7] == 0
    y = through(Cast("bf16"), np.array([3.4e38, -3.4e38, np.inf], np.float32))
    assert np.isfinite(y[:2]).all()
    assert y[2] == np.inf
    assert (np.abs(y[:2]) > 3.38e38).all()


@pytest.mark.parametrize("scale", ["l1", "l2"])
def test_scale_of_widened_halves_does_not_overflow(scale):  # check 19
    x = np.full(1000, 3000, np.float32)
    assert (through(OneBit(scale), x) == x).all()
    y = through(Quantizer(8, norm="l2", stochastic=False, bucket=1000), x)
    assert np.abs(y - x).max() <= np.sqrt(1000) * 3000 / 127 / 2
