"""Kernels against the obvious numpy way, and the cache of compiled code."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from relaxmpi.primitives import kernels
from relaxmpi.primitives.philox import Stream, random_words, uniforms

SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1000, 1001, 1025]
DTYPES = [np.float32, np.float64]


def normal(count, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(dtype)


def packed_by_hand(codes, bits):
    """One bucket: fields of 8, 4, 2, 1 bits in split order, then the tail bit by bit."""
    whole = codes.size - codes.size % 8
    parts, shift = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            field = codes[:whole].astype(np.int64) >> shift & (2**width - 1)
            rows = field.reshape(8 // width, -1)
            parts.append(sum(row << width * j for j, row in enumerate(rows)))
            shift += width
    word = sum(int(c) << bits * j for j, c in enumerate(codes[whole:]))
    tail = word.to_bytes(-(-bits * (codes.size - whole) // 8), "little")
    return np.concatenate([*parts, np.frombuffer(tail, np.uint8)]).astype(np.uint8)


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_and_unpack(bits):
    for count in [*range(20), *SIZES]:
        codes = np.random.default_rng(count).integers(0, 2**bits, count).astype(np.uint8)
        for bucket in (64, 512, 2048):
            packed = np.full(-(-bits * count // 8), 0xFF, np.uint8)
            kernels.pack(codes, packed, bits=bits, bucket=bucket)
            expected = [
                packed_by_hand(codes[lo : lo + bucket], bits) for lo in range(0, count, bucket)
            ]
            assert packed.tolist() == np.concatenate([np.zeros(0, np.uint8), *expected]).tolist()
            back = np.full(count, 0xFF, np.uint8)
            kernels.unpack(packed, back, bits=bits, bucket=bucket)
            assert (back == codes).all()
            if count:
                kernels.pack(
                    np.full(count, 2**bits - 1, np.uint8), packed, bits=bits, bucket=bucket
                )
                set_bits = int(np.unpackbits(packed).sum())
                assert set_bits == bits * count  # so that all padding bits are zero


def every_half():
    return np.arange(2**16, dtype=np.uint16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp16_equals_numpy(dtype):
    out = np.empty(2**16, dtype)
    kernels.widen_fp16(every_half(), out)
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = every_half().view(np.float16).astype(dtype)
    assert np.array_equal(out, expected, equal_nan=True)
    assert (np.signbit(out) == np.signbit(expected)).all()
    # All halves, the middles between neighbours, and one ulp on either side of both.
    values = np.sort(expected[np.isfinite(expected)])
    values = np.concatenate([values, values[:-1] + np.diff(values) / 2]).astype(dtype)
    values = np.concatenate(
        [values, np.nextafter(values, dtype(np.inf)), np.nextafter(values, dtype(-np.inf))]
    )
    values = np.concatenate([values, np.array([np.inf, -np.inf, np.nan, 1e-30, -1e-30], dtype)])
    narrow = np.empty(values.size, np.uint16)
    with np.errstate(over="ignore", under="ignore"):
        reference = values.astype(np.float16)
    kernels.narrow_fp16(values, narrow, saturate=False)
    assert np.array_equal(narrow.view(np.float16), reference, equal_nan=True)
    assert (narrow >> 15 == reference.view(np.uint16) >> 15).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bf16_rounds_to_nearest_even(dtype):
    out = np.empty(2**16, dtype)
    kernels.widen_bf16(every_half(), out)
    with np.errstate(invalid="ignore"):
        expected = (every_half().astype(np.uint32) << 16).view(np.float32).astype(dtype)
    assert np.array_equal(out, expected, equal_nan=True)
    finite = np.isfinite(expected)
    narrow = np.empty(2**16, np.uint16)
    kernels.narrow_bf16(out, narrow, saturate=True)
    assert (narrow[finite] == every_half()[finite]).all()
    assert np.isnan(expected).sum() == ((narrow & 0x7FFF) > 0x7F80).sum()
    positive = np.arange(0x0000, 0x7F7F, dtype=np.uint16)  # halfway to the next one
    low, high = expected[positive], expected[positive + 1]
    middle = (low + (high - low) / 2).astype(dtype)
    for values, nearest in [
        (middle, positive + positive % 2),
        (np.nextafter(middle, dtype(np.inf)), positive + 1),
        (np.nextafter(middle, dtype(0)), positive),
    ]:
        narrow = np.empty(positive.size, np.uint16)
        kernels.narrow_bf16(values, narrow, saturate=True)
        assert (narrow == nearest).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_saturation_is_a_choice(dtype):
    x = np.array([65504, 65519.99, 65520, 1e30, -1e30, np.inf], dtype)
    for saturate, top in ((True, 0x7BFF), (False, 0x7C00)):
        half = np.empty(6, np.uint16)
        kernels.narrow_fp16(x, half, saturate=saturate)
        assert half.tolist() == [0x7BFF, 0x7BFF, top, top, top | 0x8000, 0x7C00]
    x = np.array([3.4e38, -3.4e38, np.inf], dtype)
    for saturate, top in ((True, 0x7F7F), (False, 0x7F80)):
        half = np.empty(3, np.uint16)
        kernels.narrow_bf16(x, half, saturate=saturate)
        assert half.tolist() == [top, top | 0x8000, 0x7F80]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_multiples(dtype):
    for count in SIZES:
        x, acc = normal(count, dtype, 1), normal(count, dtype, 2)
        expected = acc + x
        kernels.accumulate(acc, x)
        assert (acc == expected).all()
        kernels.scale(acc, 1 / 3)
        assert (acc == expected * dtype(1 / 3)).all()
    u = np.array([1, 2, 3], dtype)
    residual = np.array([7, 8, 9], dtype)
    kernels.leave(u, np.array([0.25, np.nan, np.inf], dtype), residual)
    assert residual.tolist() == [0.75, 8, 9]


def mean_in_lanes(x: np.ndarray) -> float:
    """Mean |x| of float32 in the order of additions that all machines keep."""
    sizes = np.abs(x.astype(np.float64))
    whole = x.size - x.size % 128
    lanes = np.zeros(32)
    for a, b, c, d in sizes[:whole].reshape(-1, 4, 32):
        lanes += (a + b) + (c + d)
    for j, size in enumerate(sizes[whole:]):
        lanes[j % 32] += size
    while lanes.size > 1:
        half = lanes.size // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0] / x.size


@pytest.mark.parametrize("bucket", [64, 1000, 1024, 2048])
def test_signs_equal_numpy(bucket):
    """Bits and scales of whole buckets, which take one pass, of others and of the last one."""
    for count in [*SIZES[1:], 1024, 2047, 2048, 3072, 4096 + 5]:
        x = normal(count, np.float32)
        x[:: count // 3 + 1] = -0.0
        x[1::97] = np.nan if count == 1000 else 0.0
        scales = -(-count // bucket)
        payload = np.full(4 * scales + sum(
            (min(lo + bucket, count) - lo + 7) // 8 for lo in range(0, count, bucket)
        ), 0xA5, np.uint8)  # fmt: skip
        kernels.sign(x, payload, bucket=bucket, l2=False)
        bits = np.empty(count, np.uint8)
        kernels.unpack(payload[4 * scales :], bits, bits=1, bucket=bucket)
        assert (bits == (x >= 0)).all()
        parts = [x[lo : lo + bucket] for lo in range(0, count, bucket)]
        want = np.array([mean_in_lanes(part) for part in parts], np.float32)
        np.testing.assert_array_equal(payload[: 4 * scales].copy().view(np.float32), want)
        fed = np.zeros_like(payload)
        kernels.sign_feedback(x, np.zeros_like(x), fed, bucket=bucket, l2=False)
        assert (fed[4 * scales :] == payload[4 * scales :]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("l2", [False, True])
def test_quantiser_equals_numpy(dtype, bits, l2):
    """Codes and scales of both roundings, from the formulas in double precision."""
    count, bucket, s = 1001, 64, 2 ** (bits - 1) - 1
    stream = Stream(3, 1, 4, 1)
    offset = 2**33 + 3
    x = normal(count, dtype)
    u01 = uniforms(random_words(stream, offset, count)).astype(np.float64)
    payload = np.empty(-(-bits * count // 8) + x.itemsize * 16, np.uint8)
    for random in (False, True):
        kernels.quantise(
            x, payload, bits=bits, bucket=bucket, l2=l2, stream=stream if random else None,
            offset=offset,
        )  # fmt: skip
        scales = payload[: x.itemsize * 16].view(dtype)
        codes = np.empty(count, np.uint8)
        kernels.unpack(payload[x.itemsize * 16 :], codes, bits=bits, bucket=bucket)
        ties = 0
        for b, scale in enumerate(scales):
            part = slice(b * bucket, min((b + 1) * bucket, count))
            v = x[part].astype(np.float64)
            if l2:
                assert scale == pytest.approx(np.linalg.norm(v), rel=2e-7)
            else:
                assert scale == np.abs(x[part]).max()
            a = s * np.abs(v) / np.float64(scale)
            exact = a + u01[part] if random else a + 0.5
            level = np.sign(v) * np.floor(exact)
            wrong = codes[part] != np.clip(level, -s, s) + s
            assert (np.abs(exact - np.rint(exact))[wrong] < 1e-4).all()
            ties += wrong.sum()
        assert ties <= 2


def test_same_bytes_from_many_threads():
    x = normal(200_000)
    stream = Stream(1, 2, 3, 4)

    def encode(_):
        payload = np.empty(4 * 391 + 100_000, np.uint8)
        kernels.quantise(x, payload, bits=4, bucket=512, l2=False, stream=stream, offset=0)
        return payload.tobytes()

    expected = encode(0)
    for threads in (1, 2, 4):
        with ThreadPoolExecutor(threads) as pool:
            assert set(pool.map(encode, range(8))) == {expected}


PROGRAM = """
import sys, warnings
import numpy as np
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from relaxmpi.primitives import kernels
    x = np.ones(3, np.float32)
    kernels.accumulate(x, x)
    kernels.scale(x, 2)
    assert x.tolist() == [4, 4, 4]
for w in caught:
    print(w.category.__name__, w.message)
d = kernels.accumulate
print("hits", sum(d.stats.cache_hits.values()), file=sys.stderr)
"""


def run_with_cache(folder):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines(), "hits 1" in done.stderr


def cached(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.rglob(pattern))
    assert found
    return found


@pytest.mark.long
def test_cache_is_used_and_damage_costs_one_warning(tmp_path):
    assert run_with_cache(tmp_path) == ([], False)
    assert run_with_cache(tmp_path) == ([], True)
    code = cached(tmp_path, "*accumulate*.nbc")[0]
    good = code.read_bytes()
    middle = len(good) // 2
    flipped = good[:middle] + bytes([good[middle] ^ 0xFF]) + good[middle + 1 :]
    for bad in (b"", good[: len(good) // 2], flipped, b"garbage" * 100):
        code.write_bytes(bad)
        warnings, hit = run_with_cache(tmp_path)
        assert len(warnings) == 1
        assert warnings[0].startswith("RuntimeWarning relaxmpi compiles its kernels without the")
        assert not hit
    code.write_bytes(good)
    cached(tmp_path, "*accumulate*.nbi")[0].write_bytes(b"\x80garbage")
    assert len(run_with_cache(tmp_path)[0]) == 1


def test_unwritable_cache_costs_one_warning(tmp_path):
    # A file where the folder should be: unlike permissions, it also stops a superuser. Every
    # other place that numba would try is closed in the same way.
    file = tmp_path / "file"
    file.write_text("not a folder")
    program = "from numba.core import caching\n"
    program += "caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]\n"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(file)}
    done = subprocess.run(
        [sys.executable, "-c", program + PROGRAM],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(done.stdout.splitlines()) == 1
    assert "without the cache on disk" in done.stdout


def test_many_processes_may_fill_one_cache(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]  # fmt: skip
    results = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert [out for out, _ in results] == ["", "", ""]
    assert sorted("hits 1" in err for _, err in results) == [False, True, True]
