"""Where numbers are rounded to: levels, randomness, and the errors of signs."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from roundtrip import encoded, through

from relaxmpi.primitives import philox
from relaxmpi.primitives.codecs import Key, OneBit, Quantizer


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


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_extreme_uniform_numbers(norm):  # check 4
    """u next to 1 neither leaves the grid nor spills into the next code, u = 0 loses no level."""
    codec = Quantizer(4, bucket=8, norm=norm, stochastic=True)
    rng = np.random.default_rng(4)
    extremes = {
        0xFFFFFF: (9320226, 28454925, 29038711),
        0: (59535980, 68676141, 71035964),
    }  # found by search
    for drawn, at in [(u, index) for u, found in extremes.items() for index in found]:
        assert philox.random_words(Key().stream(0), at, 1)[0] >> 8 == drawn
        i = at % 8
        offset = at - i
        for largest in [7, *rng.uniform(1, 2, 16), *rng.uniform(-2, -1, 16)]:
            x = rng.uniform(-1, 1, 8).astype(np.float32)
            x[i] = largest if norm == "max" else 0
            y = through(codec, x, offset=offset)
            assert y[i] == x[i]
            if norm == "max":
                other = x.copy()
                other[i] = -x[i]  # the neighbours do not see which code it is
                z = through(codec, other, offset=offset)
                assert z[i] == other[i]
                assert (np.delete(y, i) == np.delete(z, i)).all()
        one_hot = np.zeros(8, np.float32)
        one_hot[i] = largest
        assert (through(codec, one_hot, offset=offset) == one_hot).all()
        on_grid = np.array([7, 3, -3, 0, 1, -7, 2, -1], np.float32)
        shifted = through(Quantizer(4, bucket=8, stochastic=True), on_grid, offset=offset)
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
