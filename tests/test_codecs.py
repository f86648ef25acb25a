"""Laws of the codecs; numbers in comments are those of the checks in the literature."""

import doctest
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relaxmpi.primitives import codecs, kernels, philox
from relaxmpi.primitives.codecs import Cast, Identity, Key, MinMaxUInt8, OneBit, Quantizer

SIZES = [0, 1, 7, 8, 9, 511, 512, 513, 1000, 1001, 1025]
QUANTIZERS = [
    Quantizer(bits, bucket=bucket, norm=norm, stochastic=stochastic)
    for bits, bucket in [(2, 512), (3, 64), (4, 512), (5, 8), (6, 512), (7, 512), (8, 512)]
    for norm in ("max", "l2")
    for stochastic in (False, True, None)
]
SIGNS = [OneBit(scale, bucket) for scale in ("l1", "l2") for bucket in (2048, 64)]
ALL = [Identity(), Cast("fp16"), Cast("bf16"), MinMaxUInt8(), *QUANTIZERS, *SIGNS]

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


def encoded(codec, x, **keywords):
    payload = np.full(codec.nbytes(x.size, x.dtype), 0xA5, np.uint8)
    codec.encode(x, payload, **keywords)
    return payload


def decoded(codec, payload, like):
    out = np.full_like(like, np.nan)
    codec.decode(payload, out)
    return out


def through(codec, x, **keywords):
    return decoded(codec, encoded(codec, x, **keywords), x)


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


@laws
@given(arrays, st.sampled_from(ALL))
def test_decode_add_adds(x, codec):
    payload = encoded(codec, x)
    out = np.random.default_rng(1).standard_normal(x.size).astype(x.dtype)
    expected = out + decoded(codec, payload, x)
    codec.decode_add(payload, out)
    assert (out == expected).all()


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


@pytest.mark.parametrize("codec", [MinMaxUInt8(), *QUANTIZERS, *SIGNS], ids=repr)
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
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("stochastic", [False, True])
def test_largest_element_is_exact(dtype, bits, stochastic):
    codec = Quantizer(bits, bucket=8, stochastic=stochastic)
    rng = np.random.default_rng(bits)
    exponents = rng.integers(-37, 38, 500) if dtype == np.float32 else rng.integers(-300, 300, 500)
    x = (rng.uniform(-1, 1, (500, 8)) * 10.0 ** exponents[:, None]).astype(dtype).ravel()
    most = np.abs(x.reshape(-1, 8)).argmax(axis=1) + 8 * np.arange(500)
    assert (through(codec, x)[most] == x[most]).all()


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


def test_minmax_with_a_large_offset():  # check 3
    x = (1 + 1e-6 * np.random.default_rng(0).standard_normal(1000)).astype(np.float32)
    step = (float(x.max()) - float(x.min())) / 255
    assert np.abs(through(MinMaxUInt8(), x).astype(np.float64) - x).max() <= step / 2 + 2**-23


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_largest_uniform_number(norm):  # check 4
    """u close to 1 neither leaves the grid, nor spills into the next code."""
    codec = Quantizer(4, bucket=8, norm=norm, stochastic=True)
    rng = np.random.default_rng(4)
    draws = philox.random_words(Key().stream(0), 0, 2**24)
    top = np.flatnonzero(draws >= 0xFFFFFF00)
    assert top.size
    for at in top[:4]:
        for sign in (1, -1):
            x = rng.uniform(-1, 1, 8).astype(np.float32)
            i = int(at % 8)
            x[i] = 7 * sign if norm == "max" else 0
            other = x.copy()
            y = through(codec, x, offset=int(at) - i)
            if norm == "max":
                assert y[i] == x[i]
                other[i] = -other[i]  # the neighbours do not see which code it is
                z = through(codec, other, offset=int(at) - i)
                assert (np.delete(y, i) == np.delete(z, i)).all()
            else:
                assert y[i] == 0
            on_grid = np.array([7, 3, -3, 0, 1, -7, 2, -1], np.float32)
            shifted = through(Quantizer(4, bucket=8, stochastic=True), on_grid, offset=int(at) - i)
            assert np.abs(shifted - on_grid).max() <= 4e-7 * 7


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_unbiased_with_the_variance_of_the_formula(norm, dtype):  # check 5
    codec = Quantizer(4, norm=norm, stochastic=True)
    x = np.random.default_rng(7).standard_normal(512).astype(dtype)
    draws = 4000
    y = np.array([through(codec, x, key=Key(step=t)) for t in range(draws)], np.float64)
    v = x.astype(np.float64)
    scale = np.abs(v).max() if norm == "max" else np.linalg.norm(v)
    a = 7 * np.abs(v) / scale
    p = a - np.floor(a)
    variance = (scale / 7) ** 2 * p * (1 - p)
    random = p * (1 - p) > 1e-6
    z = (y.mean(axis=0) - v)[random] / np.sqrt(variance[random] / draws)
    assert np.abs(z).max() < 5
    assert abs((z**2).sum() - random.sum()) < 5 * np.sqrt(2 * random.sum())
    measured = ((y - v) ** 2).sum(axis=1).mean()
    assert measured == pytest.approx(variance.sum(), rel=0.02)
    ratio = measured / (v @ v)
    assert ratio <= min(512 / (4 * 7**2), np.sqrt(512) / 7)
    assert ratio == pytest.approx({"max": 0.054, "l2": 1.53}[norm], rel=0.35)  # as published
    if norm == "l2":  # check 7
        assert (y != 0).sum(axis=1).mean() <= 7 * (7 + np.sqrt(512))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 9, 1000, 2048])
def test_sign_error_identities(dtype, size):  # check 9
    x = np.random.default_rng(9).standard_normal(size).astype(dtype)
    v = x.astype(np.float64)
    one, two = np.abs(v).sum(), np.linalg.norm(v)
    error = {s: float(((through(OneBit(s), x) - v) ** 2).sum()) for s in ("l1", "l2")}
    assert error["l1"] == pytest.approx(two**2 - one**2 / size, rel=1e-5, abs=1e-5)
    assert error["l2"] == pytest.approx(
        2 * two**2 - 2 * one * two / np.sqrt(size), rel=1e-5, abs=1e-5
    )


def test_l2_sign_is_no_contraction():  # check 9
    x = np.zeros(512, np.float32)
    x[100] = 3
    error = through(OneBit("l2"), x) - x
    assert (error @ error) / 9 == pytest.approx(1.9116, abs=1e-4)
    y = through(OneBit("l1"), np.array([0.0, -0.0, -2, 2], np.float32))
    assert y.tolist() == [1, 1, -1, 1]


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


@pytest.mark.parametrize("codec", [Identity(), Cast("bf16"), MinMaxUInt8(), OneBit()], ids=repr)
def test_inputs_may_be_read_only(codec):
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    payload, y = encoded(codec, x), through(codec, x)
    x.setflags(write=False)
    assert (encoded(codec, x) == payload).all()
    payload.setflags(write=False)
    assert (decoded(codec, payload, x) == y).all()


@pytest.mark.parametrize("codec", [Quantizer(3, stochastic=True), Quantizer(4), OneBit(bucket=512)])
def test_pieces_have_the_bytes_of_the_whole(codec):  # checks 29 and 46
    bits, count, start = getattr(codec, "bits", 1), 5000, 2**33 + 1024
    x = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    whole = encoded(codec, x, key=Key("w"), offset=start)
    heads = 4 * -(-count // 512)
    scales, codes = [], []
    for lo, hi in ((0, 512), (512, 3072), (3072, 5000)):
        piece = encoded(codec, x[lo:hi], key=Key("w"), offset=start + lo)
        n = 4 * -(-(hi - lo) // 512)
        scales.append(piece[:n])
        codes.append(piece[n:])
        assert codes[-1].size == -(-bits * (hi - lo) // 8)
    assert (np.concatenate(scales) == whole[:heads]).all()
    assert (np.concatenate(codes) == whole[heads:]).all()


def test_random_numbers_belong_to_key_and_index():  # checks 29 and 46
    codec = Quantizer(4, stochastic=True)
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    keys = [Key(), Key("w"), Key(step=1), Key(rank=1), Key(site=1)]
    payloads = [encoded(codec, x, key=key).tobytes() for key in keys]
    payloads += [encoded(codec, x, offset=o).tobytes() for o in (1, 4, 2**31, 2**33, 2**34)]
    payloads.append(encoded(Quantizer(4, stochastic=True, seed=1), x).tobytes())
    assert len(set(payloads)) == len(payloads)
    assert payloads[0] == encoded(codec, x).tobytes()
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda key: encoded(codec, x, key=key).tobytes(), keys * 4))
    assert again == payloads[:5] * 4
    # What an index beyond 2**33 draws is what the oracle says.
    offset = 2**33 + 5
    u = philox.uniforms(philox.random_words(Key("w").stream(0), offset, 1000))
    half = np.full(1000, 0.5, np.float32)
    half[0] = 7  # so that one level is one
    y = through(Quantizer(4, bucket=1000, stochastic=True), half, key=Key("w"), offset=offset)
    assert (y[1:] == np.where(u[1:] >= 0.5, 1, 0)).all()


def test_ranks_round_independently():
    codec = Quantizer(4, stochastic=True)
    x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    errors = np.array([through(codec, x, key=Key(rank=r)) - x for r in range(8)])
    correlation = np.corrcoef(errors) - np.eye(8)
    assert np.abs(correlation).max() < 5 / np.sqrt(x.size)
    single = np.sqrt((errors**2).mean())
    assert np.sqrt((errors.mean(axis=0) ** 2).mean()) == pytest.approx(single / np.sqrt(8), rel=0.1)


def test_default_rounding_is_unbiased_without_feedback_and_nearest_with_it():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    nearest = encoded(Quantizer(4, stochastic=False), x)
    stochastic = encoded(Quantizer(4, stochastic=True), x)
    assert (encoded(Quantizer(4), x) == stochastic).all()
    assert (nearest != stochastic).any()
    payload = np.empty_like(nearest)
    Quantizer(4).encode_feedback(x, np.zeros_like(x), payload)
    assert (payload == nearest).all()
    Quantizer(4, stochastic=True).encode_feedback(x, np.zeros_like(x), payload)
    assert (payload == stochastic).all()


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
    other = np.ones(x.size, bool)
    other[hit] = False
    assert (y[other] == clean[other]).all()
    residual = np.full_like(x, 0.5)
    payload = np.empty(codec.nbytes(x.size, dtype), np.uint8)
    codec.encode_feedback(x, residual, payload)
    assert not np.isfinite(decoded(codec, payload, x)[hit]).any()
    assert (residual[hit] == 0.5).all()
    assert np.isfinite(residual).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_minmax_of_not_finite_is_not_finite(bad, dtype):
    for size in (1, 2, 1000):
        x = np.linspace(-1, 1, size).astype(dtype)
        x[size // 2] = bad
        assert not np.isfinite(through(MinMaxUInt8(), x)).any()


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


def codes_of(x):
    return encoded(MinMaxUInt8(), np.array(x, np.float32))[32 : 32 + len(x)].tolist()


def bagua(x):
    return through(MinMaxUInt8(), np.array(x, np.float32))


def test_bagua_codes():  # BAGUA 1, 2, 3, 5
    assert codes_of(range(8)) == [0, 36, 73, 109, 146, 182, 219, 255]
    np.testing.assert_allclose(
        bagua(range(8)),
        [0, 0.98823535, 2.0039217, 2.9921570, 4.0078435, 4.9960785, 6.0117650, 7.0000005],
        rtol=1e-6,
    )
    assert codes_of([0, 0.25, 0.5, 0.75, 1]) == [0, 64, 127, 191, 255]
    assert codes_of([-3, 2, 0.1, -0.1]) == [0, 255, 158, 148]
    np.testing.assert_allclose(
        bagua([-3, 2, 0.1, -0.1]), [-3, 2, 0.09803922, -0.09803922], rtol=1e-6
    )
    assert codes_of([-1, -0.5, 0, 0.5, 1]) == [0, 63, 127, 191, 255]
    assert bagua([-1, -0.5, 0, 0.5, 1])[0] == pytest.approx(-0.99607843, rel=1e-6)
    x = np.array([1000, 1000.005, 1000.01], np.float32)
    assert codes_of(x)[-1] == 255
    assert np.abs(bagua(x) - x).max() <= (x.max() - x.min()) / 64


def test_bagua_zeros_and_constants():  # BAGUA 4
    assert codes_of([0, 0, 0]) == [255, 255, 255]
    assert bagua([0, 0, 0]).tolist() == [0, 0, 0]
    for c in (1, -0.5, 100):
        assert (np.abs(bagua([c] * 5) - c) <= 4 * np.spacing(np.float32(abs(c)))).all()


def test_bagua_error_bounds():  # BAGUA 6
    rng = np.random.default_rng(6)
    for _ in range(1500):
        x = rng.standard_normal(int(rng.integers(2, 300))) * 10.0 ** rng.uniform(-2, 3)
        x = (x + 10.0 ** rng.uniform(-3, 6) * rng.choice([-1, 0, 1])).astype(np.float32)
        spread = float(x.max()) - float(x.min())
        if spread == 0:
            continue
        most = float(np.abs(x).max()) * 255 / spread
        error = np.abs(through(MinMaxUInt8(), x).astype(np.float64) - x).max()
        step = (spread + 1e-7) / 255
        if most < 2**14:
            assert error <= 0.501 * step
        elif most < 2**20:
            assert error <= 0.6 * step


def test_bagua_layout():  # BAGUA 7
    x = np.random.default_rng(0).standard_normal(15).astype(np.float32)
    for dtype in (np.float32, np.float64):
        payload = encoded(MinMaxUInt8(), x[:5].astype(dtype))
        size = np.dtype(dtype).itemsize
        assert payload.size == 64
        assert payload[: 2 * size].view(dtype).tolist() == [x[:5].min(), x[:5].max()]
        assert not payload[2 * size : 32].any()
        assert not payload[37:].any()
    for chunk in range(3):
        part = x[5 * chunk : 5 * chunk + 5]
        assert np.abs(through(MinMaxUInt8(), part) - part).max() < 0.51 * np.ptp(part) / 255


def test_minmax_keeps_small_gradients():
    x = (1e-9 * np.random.default_rng(0).standard_normal(1000)).astype(np.float32)
    assert np.abs(through(MinMaxUInt8(), x) - x).max() <= 0.501 * np.ptp(x) / 255


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
    ],
)
def test_wrong_schemes(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("codec", [Identity(), Cast("fp16"), MinMaxUInt8(), Quantizer(4), OneBit()])
def test_wrong_arguments(codec):
    x = np.ones(100, np.float32)
    payload = np.empty(codec.nbytes(100, x.dtype), np.uint8)
    for call in (
        codec.encode,
        lambda x, p: codec.decode(p, x),
        lambda x, p: codec.decode_add(p, x),
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
    with pytest.raises(ValueError, match="residual must be like x"):
        codec.encode_feedback(x, np.zeros(99, np.float32), payload)
    with pytest.raises(ValueError, match="residual must be like x"):
        codec.encode_feedback(x, np.zeros(100), payload)
    with pytest.raises(ValueError, match="offset"):
        codec.encode(x, payload, offset=-1)
    with pytest.raises(TypeError, match="float32 and float64"):
        codec.nbytes(3, np.int64)


def test_descriptions_tell_codecs_apart():
    assert len({codec.describe() for codec in ALL}) == len(set(ALL)) == len(ALL)
    assert Quantizer(4) == Quantizer(bits=4, bucket=512)
    assert Quantizer(4).describe() == repr(Quantizer(4))


@pytest.mark.parametrize("module", [codecs, philox, kernels])
def test_examples_of_the_docstrings(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted or module is kernels
