"""Laws of the centralised verbs, on real ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relaxmpi as rx

RANKS = pytest.mark.ranks(1, 2, 3, 4)
DTYPES = ["f8", "f4", "f2", "c8", "i4", "i8", "u1"]


def sizes(n):
    return sorted({0, 1, 7, 8, 9, n - 1, n, n + 1, 513, 1000, 1001})


def contribution(rank, d, dtype):
    """Small integers, so that sums are exact in every format."""
    values = np.random.default_rng([7, rank, d]).integers(0, 8, d)
    return (values * (1 + 1j) if dtype == "c8" else values).astype(dtype)


def same_everywhere(comm, x):
    """Law 1, by the bytes themselves."""
    mine = np.frombuffer(np.ascontiguousarray(x).tobytes(), "u1")
    everyones = comm.mpi.allgather(mine.tobytes())
    return len(set(everyones)) == 1


@RANKS
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_every_size(comm, dtype):
    for d in sizes(comm.size):
        x = contribution(comm.rank, d, dtype)
        total = sum(contribution(r, d, dtype).astype("c16") for r in range(comm.size))
        kept, out = x.copy(), np.empty_like(x)
        assert rx.allreduce(comm, x, out) is out
        assert np.array_equal(x, kept)
        assert rx.allreduce(comm, x) is x
        assert np.array_equal(x, total.astype(dtype) if dtype == "c8" else total.real.astype(dtype))
        assert np.array_equal(x, out)
        assert same_everywhere(comm, x)


@RANKS
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "c8"])
def test_mean_is_the_sum_over_n(comm, dtype):
    for d in sizes(comm.size):
        x = contribution(comm.rank, d, dtype)
        total = rx.allreduce(comm, x.copy())
        mean = rx.allreduce(comm, x, op=rx.MEAN)
        tolerance = 2e-3 if dtype == "f2" else 1e-6
        assert np.allclose(mean, total / comm.size, rtol=tolerance)
        if comm.size in (1, 2, 4):
            assert np.array_equal(mean, total / comm.size)
        assert same_everywhere(comm, mean)


@RANKS
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i4", "?"])
@pytest.mark.parametrize("op", [rx.MAX, rx.MIN])
def test_extremes(comm, dtype, op):
    fold = np.maximum if op is rx.MAX else np.minimum
    for d in sizes(comm.size):
        expected = contribution(0, d, dtype)
        for r in range(1, comm.size):
            expected = fold(expected, contribution(r, d, dtype))
        assert np.array_equal(
            rx.allreduce(comm, contribution(comm.rank, d, dtype), op=op), expected
        )


@RANKS
@pytest.mark.parametrize("nodes", [False, True])
def test_real_numbers_end_bit_identical(comm, nodes, monkeypatch):
    if nodes:
        monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", "1")
    with rx.Comm.world() as stream:
        for seed in range(20):
            x = np.random.default_rng([seed, comm.rank]).standard_normal(1001).astype("f4")
            exact = rx.allreduce(comm, x.astype("f8"))
            rx.allreduce(stream, x)
            assert same_everywhere(comm, x)
            assert np.allclose(x, exact, atol=1e-5)


@RANKS
def test_fixed_order_is_the_order_of_ranks(comm):
    """With the identity codec sums are folded in rank order: 6, bit for bit."""
    x = np.random.default_rng(comm.rank).standard_normal(1000).astype("f4")
    expected = np.random.default_rng(0).standard_normal(1000).astype("f4")
    for r in range(1, comm.size):
        expected = expected + np.random.default_rng(r).standard_normal(1000).astype("f4")
    blocking = rx.allreduce(comm, x.copy(), op=rx.MEAN, codec=rx.Identity())
    started = rx.allreduce.start(comm, x.copy(), op=rx.MEAN, codec=rx.Identity()).wait()
    with comm.background():
        behind = rx.allreduce.start(comm, x.copy(), op=rx.MEAN, codec=rx.Identity()).wait()
    assert np.array_equal(blocking, expected / np.float32(comm.size))
    assert np.array_equal(blocking, started)
    assert np.array_equal(blocking, behind)


@RANKS
def test_numbers(comm):
    n, r = comm.size, comm.rank
    assert rx.allreduce(comm, r + 1) == n * (n + 1) // 2
    assert type(rx.allreduce(comm, 1)) is int
    assert rx.allreduce(comm, 0.5 * r) == 0.5 * n * (n - 1) / 2
    assert rx.allreduce(comm, r, op=rx.MEAN) == (n - 1) / 2
    assert rx.allreduce(comm, r == n - 1, op=rx.MAX) == 1
    assert rx.allreduce(comm, np.float32(2)).dtype == np.float32
    assert rx.allreduce.start(comm, 1).wait() == n


@RANKS
def test_zero_dimensional_and_shaped_buffers(comm):
    x = np.array(2.0)
    assert rx.allreduce(comm, x) is x
    assert x == 2 * comm.size
    y = np.ones((2, 3, 4), "f4")
    assert rx.allreduce(comm, y).shape == (2, 3, 4)
    assert (y == comm.size).all()


@RANKS
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter_and_allgather_are_halves_of_allreduce(comm, dtype):
    n, r = comm.size, comm.rank
    for d in sizes(n):
        x = contribution(r, d, dtype)
        chunk = rx.reduce_scatter(comm, x)
        c = -(-d // n)
        assert chunk.shape == (len(range(min(r * c, d), min((r + 1) * c, d))),)
        whole = rx.allgather(comm, chunk, np.empty(d, dtype))
        assert np.array_equal(whole, rx.allreduce(comm, x.copy()))
        given = np.empty_like(chunk)
        assert rx.reduce_scatter(comm, x, given) is given
        assert np.array_equal(given, chunk)


@RANKS
def test_allgather_stacks(comm):
    stacked = rx.allgather(comm, np.full((2, 3), comm.rank, "f4"))
    assert stacked.shape == (comm.size, 2, 3)
    assert np.array_equal(stacked[:, 0, 0], np.arange(comm.size))


@RANKS
def test_broadcast_from_every_root(comm):
    for root in range(comm.size):
        for d in sizes(comm.size):
            x = contribution(comm.rank, d, "f4")
            assert rx.broadcast(comm, x, root=root) is x
            assert np.array_equal(x, contribution(root, d, "f4"))


@RANKS
def test_alltoall_is_a_transpose(comm):
    n, r = comm.size, comm.rank
    for d in (0, 1, 5):
        x = np.array([[100 * r + k] * d for k in range(n)]).reshape(n, d)
        expected = np.array([[100 * k + r] * d for k in range(n)]).reshape(n, d)
        assert np.array_equal(rx.alltoall(comm, x, np.empty_like(x)), expected)
        assert rx.alltoall(comm, x) is x
        assert np.array_equal(x, expected)


@RANKS
def test_inputs_with_out_may_be_strided(comm):
    x = np.arange(24.0).reshape(4, 6)[::2, ::3]
    out = rx.allreduce(comm, x, np.empty(x.shape))
    assert np.array_equal(out, x * comm.size)
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert np.array_equal(rx.allreduce(comm, fortran, np.empty((2, 3))), fortran * comm.size)


@RANKS
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_out_may_be_the_input_and_nothing_between(comm, dtype):
    n, d = comm.size, 1001
    x = contribution(comm.rank, d, dtype)
    expected = rx.allreduce(comm, x.copy())
    y = x.copy()
    assert rx.allreduce(comm, y, y) is y
    assert np.array_equal(y, expected)
    c = -(-d // n)
    own = slice(min(comm.rank * c, d), min((comm.rank + 1) * c, d))
    y = x.copy()
    rx.reduce_scatter(comm, y, y[own])
    assert np.array_equal(y[own], expected[own])
    rx.allgather(comm, y[own], y)
    assert np.array_equal(y, expected)
    rows = np.full((n, 3), comm.rank, dtype)
    rx.alltoall(comm, rows, rows)
    assert np.array_equal(rows[:, 0], np.arange(n))
    longer = np.zeros(d + 1, dtype)
    with pytest.raises(ValueError, match="share memory"):
        rx.allreduce(comm, longer[1:], longer[:-1])


@RANKS
def test_hypothesis_draws(comm):
    """Random sizes, formats, operations and seeds: the sum of small integers is exact."""

    @settings(max_examples=30)
    @given(
        d=st.integers(0, 2000),
        dtype=st.sampled_from(DTYPES),
        op=st.sampled_from([rx.SUM, rx.MAX, rx.MIN]),
        seed=st.integers(0, 2**32),
    )
    def law(d, dtype, op, seed):
        op = rx.SUM if dtype == "c8" else op
        draws = [
            np.random.default_rng([seed, r]).integers(0, 8, d).astype(dtype)
            for r in range(comm.size)
        ]
        fold = {rx.SUM: np.add, rx.MAX: np.maximum, rx.MIN: np.minimum}[op]
        expected = draws[0]
        for other in draws[1:]:
            expected = fold(expected, other)
        assert np.array_equal(rx.allreduce(comm, draws[comm.rank], op=op), expected)

    law()


@RANKS
def test_long_buffers_go_in_pieces(comm, monkeypatch):
    """The limit that stands for MPI's 2^31 is set so low that everything is cut."""
    monkeypatch.setenv("RELAXMPI_MAX_MESSAGE", "100")
    x = np.random.default_rng(comm.rank).integers(0, 9, 1001).astype("f4")
    expected = rx.allreduce(comm, x.copy())
    for per_node in ("0", "1"):
        monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", per_node)
        with rx.Comm.world() as short:
            assert np.array_equal(rx.allreduce(short, x.copy()), expected)
            assert np.array_equal(rx.allreduce(short, x.astype("f2")), expected)
            assert np.array_equal(
                rx.allreduce(short, x.copy(), codec=rx.Identity(), op=rx.MEAN),
                expected / np.float32(comm.size),
            )
            root = rx.broadcast(short, np.full(1001, comm.rank), root=comm.size - 1)
            assert (root == comm.size - 1).all()


@RANKS
def test_many_works_in_flight_keep_their_order(comm):
    with comm.dup() as other:
        works = [rx.allreduce.start(comm, np.full(1000 * k + 1, 1.0 * k)) for k in range(12)]
        assert rx.allreduce(other, 1) == comm.size
        for k, work in reversed(list(enumerate(works))):
            assert (work.wait() == k * comm.size).all()
            assert work.test()
            assert (work.wait() == k * comm.size).all()


@RANKS
def test_test_makes_progress_and_never_blocks(comm):
    """Public report mpich#6836: a test that blocks."""
    work = rx.allreduce.start(comm, np.ones(2_000_000, "f4"))
    longest = 0.0
    while True:
        begin = comm.now()
        if work.test():
            break
        longest = max(longest, comm.now() - begin)
    assert longest < 1.0
    assert (work.wait() == comm.size).all()


@RANKS
def test_a_split_has_its_own_ranks(comm):
    part = comm.split(comm.rank % 2, -comm.rank)
    members = [r for r in range(comm.size) if r % 2 == comm.rank % 2]
    assert part.size == len(members)
    assert rx.allreduce(part, comm.rank) == sum(members)
    assert part.rank == sorted(members, reverse=True).index(comm.rank)
    part.close()
    alone = comm.split(None if comm.rank else 1)
    assert (alone is None) == (comm.rank > 0)
    if alone is not None:
        assert rx.allreduce(alone, 5) == 5
        alone.close()


@RANKS
def test_counters(comm):
    n = comm.size
    before = comm.stats.payload_bytes
    rx.allreduce(comm, np.ones(1000 * n, "f4"), op=rx.MEAN, codec=rx.Identity())
    assert comm.stats.payload_bytes - before == 2 * (n - 1) * 4000
    assert (comm.stats.header_bytes > 0) == (n > 1)
    assert comm.stats.waited >= 0


@pytest.mark.ranks(2)
def test_communicators_are_given_back(comm):
    """MPICH has 2,046 of them, Open MPI 65,532: fact 8 of the public reports."""
    for _ in range(800):
        comm.dup().close()


@RANKS
def test_the_identity_on_one_rank_costs_nothing(comm):
    alone = rx.Comm.wrap(__import__("mpi4py.MPI", fromlist=["MPI"]).COMM_SELF)
    x = np.random.default_rng(0).standard_normal(100).astype("f4")
    memory = rx.ErrorFeedback(rx.Identity())
    for codec in (None, rx.Identity(), memory):
        y = rx.allreduce(alone, x.copy(), op=rx.MEAN, codec=codec)
        assert np.array_equal(x, y)
    assert memory.residual("worker") == {}
    assert alone.stats.payload_bytes == alone.stats.header_bytes == 0
    alone.close()
