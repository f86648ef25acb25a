"""Laws of compressed all-reduces, with and without error feedback."""

import hashlib

import numpy as np
import pytest

import relaxmpi as rx

RANKS = pytest.mark.ranks(1, 2, 3, 4)
MANY = pytest.mark.ranks(2, 3, 4)
CODECS = [
    rx.Identity(),
    rx.Cast("fp16"),
    rx.Cast("bf16"),
    rx.MinMaxUInt8(),
    rx.Quantizer(bits=8),
    rx.Quantizer(bits=4, bucket=64),
    rx.Quantizer(bits=2, norm="l2"),
    rx.OneBit(),
    rx.OneBit(scale="l2", bucket=64),
    rx.TopK(0.05),
]
codecs = pytest.mark.parametrize("codec", CODECS, ids=str)


def draw(rank, t, d, dtype="f8"):
    return np.random.default_rng([rank, t, d]).standard_normal(d).astype(dtype)


def sizes(n):
    return sorted({0, 1, 7, 8, 9, n - 1, n, n + 1, 513, 1000, 1001})


def oracle(n, d, codec, op, draws):
    """The slow obvious way, on one rank: two quantisations, in rank order."""
    c = -(-d // n)
    out = np.empty(d, draws[0].dtype)
    for owner in range(n):
        lo, hi = min(owner * c, d), min((owner + 1) * c, d)
        if lo == hi:
            continue
        total = np.zeros(hi - lo, out.dtype)
        for r in range(n):
            total = total + roundtrip(codec, draws[r][lo:hi], rx.Key("", 5, r, 0), lo)
        mean = roundtrip(codec, total / n, rx.Key("", 5, owner, 1), lo)
        out[lo:hi] = mean * n if op is rx.SUM else mean
    return out


def roundtrip(codec, x, key, offset):
    payload = np.empty(codec.nbytes(len(x), x.dtype), "u1")
    codec.encode(np.ascontiguousarray(x), payload, key=key, offset=offset)
    out = np.empty_like(x)
    codec.decode(payload, out)
    return out


@MANY
@codecs
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_equals_the_oracle(comm, codec, dtype):
    n = comm.size
    for d in sizes(n):
        draws = [draw(r, 0, d, dtype) for r in range(n)]
        for op in (rx.MEAN, rx.SUM):
            got = rx.allreduce(comm, draws[comm.rank].copy(), op=op, codec=codec, step=5)
            want = oracle(n, d, codec, op, draws)
            ulps = 4 * np.finfo(dtype).eps
            assert np.allclose(got, want, rtol=ulps, atol=ulps)
            digest = hashlib.sha256(got.tobytes()).hexdigest()
            assert len(set(comm.mpi.allgather(digest))) == 1


@MANY
@codecs
def test_payload_on_the_wire_is_what_nbytes_says(comm, codec):
    n = comm.size
    for d in sizes(n):
        before, packets = comm.stats.payload_bytes, comm.stats.messages
        rx.allreduce(comm, draw(comm.rank, 0, d, "f4"), op=rx.MEAN, codec=codec)
        c = -(-d // n)
        chunk = [min((r + 1) * c, d) - min(r * c, d) for r in range(n)]
        size = [codec.nbytes(m, "f4") for m in chunk]
        expected = sum(size) - size[comm.rank] + (n - 1) * size[comm.rank]
        assert comm.stats.payload_bytes - before == expected
        filled = [m > 0 for m in chunk]
        sent = sum(filled) - filled[comm.rank] + (n - 1) * filled[comm.rank]
        assert comm.stats.messages - packets == sent


@MANY
@codecs
@pytest.mark.parametrize("op", [rx.MEAN, rx.SUM])
def test_feedback_telescopes(comm, codec, op):
    """sum y = sum mean x - mean e - E, over 20 steps, to rounding."""
    memory, n = rx.ErrorFeedback(codec), comm.size
    for d in (1, n + 1, 1001):
        memory.reset()
        exact, got = np.zeros(d), np.zeros(d)
        for t in range(20):
            exact += sum(draw(r, t, d) for r in range(n)) / n
            y = rx.allreduce(comm, draw(comm.rank, t, d), op=op, codec=memory)
            got += y / n if op is rx.SUM else y
        lost = np.zeros(d)
        for (lo, hi), e in memory.residual("worker").items():
            lost[lo:hi] += e / n
        for (lo, hi), e in memory.residual("owner").items():
            lost[lo:hi] += e
        rx.allreduce(comm, lost)
        assert np.abs(got - (exact - lost)).max() <= 1e-10
        if codec == rx.Identity():
            assert not lost.any()


@MANY
def test_feedback_reaches_the_mean_of_constant_input(comm):
    """bagua check 12: constant x, the running mean of the results converges to the mean."""
    for codec in (
        rx.OneBit(), rx.OneBit(scale="l2"), rx.MinMaxUInt8(), rx.Quantizer(bits=2), rx.TopK(0.1)
    ):  # fmt: skip
        memory, d = rx.ErrorFeedback(codec), 700
        x = draw(comm.rank, 0, d, "f4")
        mean = rx.allreduce(comm, x.copy(), op=rx.MEAN)
        last = 400 if codec == rx.OneBit() else 200  # by far the slowest
        got, wrong = np.zeros(d), {}
        for t in range(1, last + 1):
            got += rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=memory)
            wrong[t] = np.sqrt(((got / t - mean) ** 2).mean())
        assert wrong[last] < 0.8 * wrong[last // 2]  # the residuals grow slower than t
        assert wrong[last] < 0.05 * np.sqrt((mean**2).mean())


@MANY
def test_sign_reference(comm):
    """bagua check 13: sign times the L2 norm over sqrt(d), with both residuals."""
    n, d, rank = comm.size, 8 * comm.size, comm.rank
    memory = rx.ErrorFeedback(rx.OneBit(scale="l2"))
    c = d // n
    worker = {r: np.zeros(d) for r in range(n)}
    owner = np.zeros(d)
    for t in range(4):
        draws = {r: draw(r, t, d) for r in range(n)}
        want = np.empty(d)
        q = {r: np.empty(d) for r in range(n)}
        for r in range(n):
            u = draws[r] + worker[r]
            for j in range(n):
                s = slice(j * c, (j + 1) * c)
                q[r][s] = np.where(u[s] >= 0, 1, -1) * np.linalg.norm(u[s]) / np.sqrt(c)
            worker[r] = u - q[r]
        a = sum(q.values()) / n + owner
        for j in range(n):
            s = slice(j * c, (j + 1) * c)
            want[s] = np.where(a[s] >= 0, 1, -1) * np.linalg.norm(a[s]) / np.sqrt(c)
        owner = a - want
        got = rx.allreduce(comm, draws[rank].copy(), op=rx.MEAN, codec=memory)
        assert np.allclose(got, want, rtol=1e-12)


@MANY
def test_padding_never_enters(comm):
    """3 ones on many ranks: a padded scale would be below one."""
    for d in (1, 3, comm.size + 1):
        memory = rx.ErrorFeedback(rx.OneBit(scale="l2"))
        for _ in range(5):
            got = rx.allreduce(comm, np.ones(d, "f4"), op=rx.MEAN, codec=memory)
            assert np.allclose(got, 1, rtol=1e-6)


@MANY
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_the_dtype_is_kept(comm, dtype):
    x = draw(comm.rank, 0, 513, dtype)
    mean = rx.allreduce(comm, x.astype("f8"), op=rx.MEAN)
    for codec in (rx.Quantizer(bits=8), rx.OneBit(), rx.Cast("bf16")):
        y = rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=codec)
        assert y.dtype == x.dtype
    y = rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=rx.Quantizer(bits=8))
    assert np.abs(y - mean).max() < 0.1


@MANY
def test_half_precision_norms_do_not_overflow(comm):
    x = np.full(1000, 3000, "f2")
    for codec in (rx.OneBit(scale="l2"), rx.Quantizer(bits=8, norm="l2"), rx.MinMaxUInt8()):
        y = rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=codec, step=0)
        assert np.isfinite(y).all()
        assert abs(y.astype("f4").mean() / 3000 - 1) < 0.25


@MANY
def test_a_nan_spoils_its_bucket_on_all_ranks_and_no_other(comm):
    for bad in (np.nan, np.inf):
        x = draw(comm.rank, 0, 4096, "f4")
        if comm.rank == 1:
            x[70] = bad
        y = rx.allreduce(comm, x, op=rx.MEAN, codec=rx.Quantizer(bits=4, bucket=64))
        hit = ~np.isfinite(y)
        assert hit[70]
        assert hit.sum() == 64
        assert len(set(comm.mpi.allgather(y.tobytes()))) == 1


@MANY
def test_a_bad_step_is_not_remembered(comm):
    """compression check 22: the next clean step equals a run without the bad one."""
    clean, hurt = rx.ErrorFeedback(rx.OneBit(bucket=64)), rx.ErrorFeedback(rx.OneBit(bucket=64))
    for t in range(6):
        if t == 3:
            bad = np.full(640, np.nan, "f4")
            assert np.isnan(rx.allreduce(comm, bad, op=rx.MEAN, codec=hurt)).all()
        x = draw(0, t, 640, "f4")
        if t == 3:
            for side in ("worker", "owner"):
                for where, e in clean.residual(side).items():
                    assert np.array_equal(e, hurt.residual(side)[where])
        expected = rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=clean)
        assert np.array_equal(rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=hurt), expected)


@MANY
def test_rounding_is_independent_of_the_rank(comm):
    """compression check 30: stochastic errors of ranks do not correlate, so they average out."""
    d = 100_000
    x = draw(0, 0, d, "f4")
    codec = rx.Quantizer(bits=4, stochastic=True)
    mine = roundtrip(codec, x, rx.Key("g", 0, comm.rank, 0), 0) - x
    errors = rx.allgather(comm, mine)
    for i in range(comm.size):
        for j in range(i):
            assert abs(np.corrcoef(errors[i], errors[j])[0, 1]) < 5 / np.sqrt(d)
    single = np.sqrt((mine**2).mean())
    averaged = np.sqrt((errors.mean(axis=0) ** 2).mean())
    assert averaged == pytest.approx(single / np.sqrt(comm.size), rel=0.1)


@MANY
def test_steps_differ_names_differ_and_repeats_agree(comm):
    x = draw(comm.rank, 0, 1000, "f4")
    codec = rx.Quantizer(bits=2, stochastic=True)

    def run(stream, name, step=None):
        return rx.allreduce(stream, x.copy(), op=rx.MEAN, codec=codec, name=name, step=step)

    with comm.dup() as first, comm.dup() as second:
        a, b = run(first, "w"), run(first, "w")
        assert not np.array_equal(a, b)
        assert not np.array_equal(a, run(first, "v"))
        assert np.array_equal(a, run(second, "w"))
        assert np.array_equal(b, run(second, "w"))
        assert np.array_equal(b, run(second, "other", 0)) is False
        assert np.array_equal(run(first, "w", 1), b)
        assert first.steps["w"] == 2


@MANY
def test_state_is_restored_bit_for_bit(comm):
    whole, half = rx.ErrorFeedback(rx.OneBit()), rx.ErrorFeedback(rx.OneBit())
    results = []
    for t in range(10):
        if t == 5:
            half.load_state_dict(whole.state_dict())
        x = draw(comm.rank, t, 1001, "f4")
        results.append(rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=whole))
        if t >= 5:
            again = rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=half)
            assert np.array_equal(again, results[-1])


@RANKS
@codecs
def test_one_rank_and_empty_buffers(comm, codec):
    memory = rx.ErrorFeedback(codec)
    empty = np.empty((0, 3), "f4")
    assert rx.allreduce(comm, empty, op=rx.MEAN, codec=memory) is empty
    assert memory.residual("worker") == {}


@MANY
@pytest.mark.parametrize("codec", [rx.Quantizer(bits=8), rx.OneBit()], ids=str)
def test_blocking_started_background_and_other_nodes_agree(comm, codec, monkeypatch):
    """Law 6: the order of additions is fixed, so every way gives the same bytes."""
    x = draw(comm.rank, 0, 5000, "f4")
    results = [rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=codec, step=1)]
    results.append(rx.allreduce.start(comm, x.copy(), op=rx.MEAN, codec=codec, step=1).wait())
    with comm.background():
        work = rx.allreduce.start(comm, x.copy(), op=rx.MEAN, codec=codec, step=1)
        while not work.test():
            comm.compute(1e-4)
        results.append(work.wait())
    monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", "1")
    monkeypatch.setenv("RELAXMPI_SEGMENT", "64")
    with rx.Comm.world() as spread:
        results.append(rx.allreduce(spread, x.copy(), op=rx.MEAN, codec=codec, step=1))
    assert all(np.array_equal(results[0], r) for r in results[1:])


@MANY
@codecs
def test_reduce_scatter_and_allgather_quantise_once(comm, codec):
    n, d = comm.size, 1001
    draws = [draw(r, 0, d, "f4") for r in range(n)]
    c = -(-d // n)
    lo, hi = min(comm.rank * c, d), min((comm.rank + 1) * c, d)
    got = rx.reduce_scatter(comm, draws[comm.rank], op=rx.MEAN, codec=codec, step=5)
    want = sum(roundtrip(codec, draws[r][lo:hi], rx.Key("", 5, r, 0), lo) for r in range(n)) / n
    assert np.allclose(got, want, rtol=1e-6, atol=1e-6)
    rows = rx.allgather(comm, draws[comm.rank], codec=codec, step=5)
    for r in range(n):
        assert np.array_equal(rows[r], roundtrip(codec, draws[r], rx.Key("", 5, r, 0), 0))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("nodes", ["0", "1"])
def test_long_buffers_go_in_pieces(comm, nodes, monkeypatch):
    """The cuts depend on the count alone: each piece is what it would be by itself."""
    monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", nodes)
    d = 2**20 + 7
    cut = -(-d // 2)
    with rx.Comm.world() as stream:
        x = draw(comm.rank, 0, d, "f4")
        for codec in (rx.OneBit(), rx.MinMaxUInt8(), rx.TopK(0.01)):
            memory = rx.ErrorFeedback(codec)
            for _ in range(2):
                whole = rx.allreduce(stream, x.copy(), op=rx.MEAN, codec=memory)
            parts = []
            for piece in (x[:cut], x[cut:]):
                memory = rx.ErrorFeedback(codec)
                for _ in range(2):
                    part = rx.allreduce(comm, piece.copy(), op=rx.MEAN, codec=memory)
                parts.append(part)
            assert np.array_equal(whole, np.concatenate(parts))
        a = rx.allreduce(stream, x.copy(), op=rx.MEAN, codec=rx.Quantizer(bits=4), step=1)
        b = rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=rx.Quantizer(bits=4), step=1)
        assert np.array_equal(a, b)
        plain = rx.allreduce(stream, x.astype("f8"))
        assert np.allclose(plain, rx.allreduce(comm, x.astype("f8")))


def test_wraps_codecs_only():
    with pytest.raises(TypeError, match="wraps a Codec"):
        rx.ErrorFeedback(rx.OneBit)
