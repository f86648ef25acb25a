"""The sparsifier against a sort, bit for bit; numbers in comments are those of the literature."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roundtrip import decoded, encoded, through

import relaxmpi as rx
from relaxmpi.primitives import _topk, kernels
from relaxmpi.primitives.codecs import Key
from relaxmpi.primitives.topk import TopK

SIZES = [0, 1, 7, 8, 9, 513, 1000, 1001]
FRACTIONS = [1e-6, 0.001, 0.01, 0.05, 0.1, 1 / 3, 0.5, 0.77, 1.0]
DTYPES = [np.float32, np.float64]
MANY = pytest.mark.ranks(2, 3, 4)

laws = settings(derandomize=True, deadline=None, max_examples=150, database=None)
sizes = st.one_of(st.sampled_from(SIZES), st.integers(0, 5000))
fractions = st.one_of(st.sampled_from(FRACTIONS), st.floats(1e-9, 1))
dtypes = st.sampled_from(DTYPES)


def unlike_each_other(rng, size, dtype):
    return rng.standard_normal(size).astype(dtype)


def many_ties(rng, size, dtype):
    return rng.integers(-3, 4, size).astype(dtype)


def mostly_zeros(rng, size, dtype):
    x = unlike_each_other(rng, size, dtype)
    x[rng.random(size) < rng.choice([0.5, 0.9, 0.99, 1])] = rng.choice([0.0, -0.0])
    return x


def tiny(rng, size, dtype):
    unit = np.finfo(dtype).smallest_subnormal
    return (rng.integers(-40, 41, size) * unit).astype(dtype)


def all_exponents(rng, size, dtype):
    top = np.finfo(dtype).maxexp - 1
    x = np.ldexp(rng.uniform(-1, 1, size), rng.integers(-top - 60, top, size))
    return x.astype(dtype)


def one_value(rng, size, dtype):
    return np.full(size, rng.choice([0.0, -0.0, 1.5, -1e30]), dtype)


def a_comb(rng, size, dtype):
    """Large where a sample of every 61st number looks, or where it does not."""
    x = unlike_each_other(rng, size, dtype)
    x[:: rng.choice([61, 122])] *= dtype(rng.choice([1e-3, 1e3]))
    return x


KINDS = [
    unlike_each_other, many_ties, mostly_zeros, tiny, all_exponents, one_value, a_comb
]  # fmt: skip
buffers = st.builds(
    lambda kind, seed, size, dtype: kind(np.random.default_rng(seed), size, dtype),
    st.sampled_from(KINDS),
    st.integers(0, 2**32 - 1),
    sizes,
    dtypes,
)


def taken(x, keep):
    """Increasing indices of the largest magnitudes, the lower index first among equals."""
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:keep])


def dense(x, keep):
    y = np.zeros_like(x)
    where = taken(x, keep)
    y[where] = x[where]
    return y


def keep_of(codec, count):
    return max(1, int(np.rint(codec.fraction * count))) if count else 0


def payload_by_hand(codec, x):
    """Values, low bits packed by the reference packer's kernel, and the row of bits as a number."""
    keep, count = keep_of(codec, x.size), x.size
    if not count:
        return b""
    low = min(8, int(np.floor(np.log2(count // keep))))
    where = taken(x, keep)
    packed = np.empty(-(-low * keep // 8), np.uint8)
    kernels.pack((where % 2**low).astype(np.uint8), packed, bits=low, bucket=keep)
    row = sum(1 << (int(i) // 2**low + j) for j, i in enumerate(where))
    length = -(-(keep + (count - 1) // 2**low) // 8)
    return x[where].tobytes() + packed.tobytes() + row.to_bytes(length, "little")


def same(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@laws
@given(buffers, fractions)
def test_equals_a_sort_bit_for_bit(x, fraction):
    codec, before = TopK(fraction), x.tobytes()
    payload = encoded(codec, x, key=Key("w", 3, 2, 1), offset=1024)
    assert x.tobytes() == before
    assert payload.tobytes() == payload_by_hand(codec, x)
    assert same(decoded(codec, payload, x), dense(x, keep_of(codec, x.size)))


@laws
@given(buffers, fractions)
def test_feedback_leaves_zero_or_everything(x, fraction):
    codec = TopK(fraction)
    residual = np.random.default_rng(x.size).permutation(x) * x.dtype.type(0.5)
    u, before = x + residual, x.tobytes()
    payload = np.full(codec.nbytes(x.size, x.dtype), 0xA5, np.uint8)
    codec.encode_feedback(x, residual, payload)
    assert x.tobytes() == before
    assert same(payload, encoded(codec, u))
    where = taken(u, keep_of(codec, x.size))
    left = u.copy()
    left[where] = 0
    assert same(residual, left)
    assert (decoded(codec, payload, x) + residual == u).all()


@laws
@given(buffers, fractions)
def test_contraction(x, fraction):
    keep = keep_of(TopK(fraction), x.size)
    v = x.astype(np.longdouble)
    error = ((through(TopK(fraction), x) - v) ** 2).sum()
    assert error <= (1 - keep / max(x.size, 1)) * (v**2).sum() * (1 + 1e-15)


@laws
@given(buffers, fractions)
def test_decode_add_adds_where_something_was_taken(x, fraction):
    codec = TopK(fraction)
    out = np.random.default_rng(1).standard_normal(x.size).astype(x.dtype)
    out[::5] = -0.0
    where = taken(x, keep_of(codec, x.size))
    expected = out.copy()
    expected[where] += x[where]
    codec.decode_add(encoded(codec, x), out)
    assert same(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_long_buffers(kind, dtype):
    """Where a sample decides what is looked at: more candidates than needed, or too few."""
    for count in (2**16 + 1, 200_000):
        x = kind(np.random.default_rng(count), count, dtype)
        for fraction in (1e-4, 0.01, 0.1, 0.6):
            codec = TopK(fraction)
            assert same(through(codec, x), dense(x, keep_of(codec, count)))


def test_of_equal_magnitudes_the_first_are_taken():
    x = np.array([-1, 1, -2, 1, 0.5, -1], np.float32)
    assert through(TopK(0.5), x).tolist() == [-1, 1, -2, 0, 0, 0]
    y = through(TopK(0.5), np.array([0.0, -0.0, -0.0, 3], np.float32))
    assert y.tolist() == [0, 0, 0, 3]
    assert (
        np.signbit(through(TopK(0.5), -np.zeros(4, np.float32))).tolist()
        == [True] * 2 + [False] * 2
    )


def test_how_many_are_taken():
    for count, fraction, keep in [
        (1, 1e-9, 1), (1000, 0.01, 10), (1049, 0.01, 10), (1051, 0.01, 11), (100, 0.29, 29),
        (100, 0.07, 7), (3, 0.5, 2), (5, 0.5, 2), (7, 1, 7),
    ]:  # fmt: skip
        x = np.arange(1, count + 1, dtype=np.float32)
        assert np.count_nonzero(through(TopK(fraction), x)) == keep


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_wire_sizes(fraction):  # check 14
    codec = TopK(fraction)
    for count in (0, 1, 7, 8, 9, 511, 512, 513, 10**6 + 3, 2**33):
        for itemsize, dtype in ((4, np.float32), (8, np.float64)):
            size = codec.nbytes(count, dtype)
            keep = keep_of(codec, count)
            low = min(8, int(np.log2(count // keep))) if count else 0
            row = keep + (count - 1) // 2**low if count else 0
            assert size == itemsize * keep + (low * keep + 7) // 8 + (row + 7) // 8
            # Neither 32 bits an index nor a bitmap is smaller, as far as a bitmap makes sense.
            if 0.001 <= fraction <= 0.25 and count > 10**5:
                assert size < itemsize * keep + min(4 * keep, count // 8)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite_is_visible_and_not_remembered(bad, dtype):  # check 22
    codec = TopK(0.01)
    for count in (1, 1000):
        x = unlike_each_other(np.random.default_rng(0), count, dtype)
        x[[count // 2, -1]] = bad
        payload = encoded(codec, x)
        out = np.ones_like(x)
        codec.decode_add(payload, out)
        assert np.isnan(decoded(codec, payload, x)).all()
        assert np.isnan(out).all()
        residual = np.full_like(x, 0.5)
        codec.encode_feedback(x, residual, payload)
        assert np.isnan(decoded(codec, payload, x)).all()
        assert (residual == 0.5).all()
    many = np.full(1000, bad, dtype)  # more than there is room for
    assert np.isnan(through(codec, many)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_beyond_the_range_is_not_remembered(dtype):
    x = np.full(100, np.finfo(dtype).max)
    x[1:] = 1
    residual = x.copy()
    payload = np.empty(TopK(0.1).nbytes(100, dtype), np.uint8)
    TopK(0.1).encode_feedback(x, residual, payload)
    assert np.isnan(decoded(TopK(0.1), payload, x)).all()
    assert same(residual, x)


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_no_payload_writes_outside(fraction):
    """Bytes from anywhere are decoded or refused; a refusal leaves the buffer alone."""
    codec, rng = TopK(fraction), np.random.default_rng(0)
    refused = 0
    for count in (1, 9, 513, 1000):
        x = rng.standard_normal(count).astype(np.float32)
        good = encoded(codec, x)
        for trial in range(100):
            payload = good.copy()
            if trial % 4:
                at = rng.integers(0, payload.size, 1 + trial % 3)
                payload[at] = rng.integers(0, 256, at.size)
            else:
                payload[:] = [0, 0xFF, 0x55, rng.integers(0, 256)][trial // 4 % 4]
            room = np.full(count + 64, 7, np.float32)
            out = room[32:-32]
            for decode in (codec.decode, codec.decode_add):
                before = out.copy()
                try:
                    decode(payload, out)
                except ValueError as error:
                    assert "increasing indices below" in str(error)
                    assert same(out, before)
                    refused += 1
                assert (room[:32] == 7).all()
                assert (room[-32:] == 7).all()
    assert refused


@pytest.mark.parametrize(
    "wrong", [[1, 0, 0b11], [1, 1, 0b11], [0, 1, 0b111], [0, 1, 0b1], [0, 232, 0b10001]]
)
def test_indices_are_as_many_as_values_increase_and_end(wrong):
    x = np.arange(1000, dtype=np.float32)[::-1].copy()
    payload = encoded(TopK(0.002), x)
    assert payload[8:].tolist() == [0, 1, 0b11]
    payload[8:] = wrong
    with pytest.raises(ValueError, match="holds no 2 increasing indices below 1000"):
        TopK(0.002).decode_add(payload, x)
    assert x[0] == 999


@pytest.mark.parametrize("late", [1e3, 0.0, np.nan])
def test_a_buffer_that_changes_meanwhile_is_not_memory_that_breaks(late, monkeypatch):
    codec, count, counted = TopK(0.01), 200_000, _topk._count
    x = unlike_each_other(np.random.default_rng(0), count, np.float32)

    def change(*args):
        found = counted(*args)
        x[1000:] = late
        return found

    monkeypatch.setattr(_topk, "_count", change)
    payload = np.full(codec.nbytes(count, x.dtype) + 64, 0xA5, np.uint8)
    codec.encode(x, payload)
    assert (payload[-64:] == 0xA5).all()
    out = np.empty_like(x)
    try:
        codec.decode(payload, out)
    except ValueError as error:
        assert late == 0
        assert "increasing" in str(error)


def test_biased_alone_and_not_with_feedback():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    codec, residual = TopK(0.05), np.zeros(1000, np.float32)
    payload = np.empty(codec.nbytes(1000, x.dtype), np.uint8)
    total = np.zeros(1000)
    for _ in range(400):
        codec.encode_feedback(x, residual, payload)
        total += decoded(codec, payload, x)
    assert np.linalg.norm(through(codec, x) - x) > 0.8 * np.linalg.norm(x)
    assert np.linalg.norm(total / 400 - x) < 0.05 * np.linalg.norm(x)


@pytest.mark.ranks(1, 2, 3, 4)
def test_telescopes_and_ranks_agree_on_ties(comm):  # checks 24, 26, 28
    """Few different numbers, so that workers and owners choose among equals at every step."""
    memory, n, d = rx.ErrorFeedback(rx.TopK(0.1)), comm.size, 1001
    exact, got = np.zeros(d), np.zeros(d)
    for t in range(50):
        draws = [np.random.default_rng([r, t]).integers(-2, 3, d).astype("f4") for r in range(n)]
        y = rx.allreduce(comm, draws[comm.rank].copy(), op=rx.MEAN, codec=memory)
        assert len(set(comm.mpi.allgather(y.tobytes()))) == 1
        exact += sum(draws) / n
        got += y
        chunk = -(-d // n)
        for lo in range(0, d, chunk):
            assert np.count_nonzero(y[lo : lo + chunk]) <= (round(0.1 * chunk) if n > 1 else d)
    lost = np.zeros(d)
    for side, share in (("worker", 1 / n), ("owner", 1)):
        for (lo, hi), e in memory.residual(side).items():
            lost[lo:hi] += e * share
    rx.allreduce(comm, lost)
    assert lost.any() == (n > 1)
    assert np.abs(got - (exact - lost)).max() <= 1e-5 * np.abs(exact).max()


@MANY
def test_a_bad_step_is_not_remembered(comm):  # check 22
    clean, hurt = rx.ErrorFeedback(rx.TopK(0.1)), rx.ErrorFeedback(rx.TopK(0.1))
    chunk = -(-640 // comm.size)
    for t in range(6):
        x = np.random.default_rng([comm.rank, t]).standard_normal(640).astype("f4")
        if t == 3:
            bad = x.copy()
            bad[::chunk] = np.nan  # one number of each chunk
            assert np.isnan(rx.allreduce(comm, bad, op=rx.MEAN, codec=hurt)).all()
        expected = rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=clean)
        assert np.array_equal(rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=hurt), expected)


@MANY
def test_a_nan_of_one_rank_spoils_its_chunk_on_all(comm):
    x = np.random.default_rng(comm.rank).standard_normal(640).astype("f4")
    if comm.rank == 1:
        x[3] = np.nan
    y = rx.allreduce(comm, x, op=rx.MEAN, codec=rx.TopK(0.1))
    chunk = -(-640 // comm.size)
    assert np.isnan(y[:chunk]).all()
    assert np.isfinite(y[chunk:]).all()
    assert len(set(comm.mpi.allgather(y.tobytes()))) == 1
