"""The min-max codec: what BAGUA computes, without what its arithmetic loses."""

import numpy as np
import pytest
from roundtrip import encoded, through

from relaxmpi.primitives.codecs import MinMaxUInt8


def test_minmax_with_a_large_offset():  # check 3
    x = (1 + 1e-6 * np.random.default_rng(0).standard_normal(1000)).astype(np.float32)
    step = (float(x.max()) - float(x.min())) / 255
    assert np.abs(through(MinMaxUInt8(), x).astype(np.float64) - x).max() <= step / 2 + 2**-23


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_minmax_of_not_finite_is_not_finite(bad, dtype):
    for size in (1, 2, 1000):
        x = np.linspace(-1, 1, size).astype(dtype)
        x[size // 2] = bad
        assert not np.isfinite(through(MinMaxUInt8(), x)).any()


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


def test_a_range_of_a_few_ulps_is_exact():
    for start in (1, -1000):
        x = np.full(12, start, np.float32)
        for i in range(1, 12):
            x[i:] = np.nextafter(x[i], np.float32(np.inf))
        assert (through(MinMaxUInt8(), x) == x).all()
