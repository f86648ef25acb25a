"""1-bit Adam on arrays: its phases, what travels, and what must not be touched."""

import dataclasses
import hashlib
import tracemalloc

import numpy as np
import pytest

import relaxmpi as rx
from relaxmpi.algorithms.freezing import lag_of

LR = 0.01


class AnyOneBit(rx.OneBit):
    """The same codec, which the fused exchange does not know: the oracle."""

    def describe(self):
        return "OneBit by allreduce"


def gradients(rank, steps, size, dtype="f4", seed=0):
    numbers = np.random.default_rng((seed, rank))
    return [numbers.standard_normal(size).astype(dtype) for _ in range(steps)]


def digest(a):
    return int.from_bytes(hashlib.sha256(np.ascontiguousarray(a)).digest()[:7], "little")


def assert_same(comm, *arrays):
    for a in arrays:
        mine = np.array([digest(a)])
        assert (rx.allgather(comm, mine) == mine).all()


def train(comm, spec, steps, size=101, dtype="f4", each=lambda t, opt, x: None, grads=None):
    x = np.ones(size, dtype)
    opt = spec.bind(comm, x, lr=LR, name="x")
    for t, g in enumerate(grads or gradients(comm.rank, steps, size, dtype), 1):
        opt.step(g.copy())
        each(t, opt, x)
    return x, opt


def everywhere(n, fn, *args, **kwargs):
    return rx.SimulatedWorld(n).run(lambda: fn(rx.Comm.world(), *args, **kwargs))


# ---------------------------------------------------------------- the phases


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rule", [rx.AdamW(), rx.AdamW(weight_decay=0.1, decoupled=False)], ids=str)
def test_warm_up_is_adam(comm, rule):
    """Check 33; tests of AdamW compare that with torch."""
    x, _ = train(comm, rx.OneBitAdam(freeze=100, rule=rule), 8)
    want, _ = train(comm, rule, 8)
    assert x.tobytes() == want.tobytes()


@pytest.mark.ranks(1)
def test_law_one_rank_is_adam_bit_for_bit(comm):
    """Check 28: nothing is compressed, so nothing is frozen."""
    x, opt = train(comm, rx.OneBitAdam(freeze=2), 8)
    want, _ = train(comm, rx.AdamW(), 8)
    assert x.tobytes() == want.tobytes()
    assert opt.momenta is None


@pytest.mark.ranks(2, 3, 4)
def test_the_boundary_is_taken_in_full_precision_once(comm):
    """Checks 34 and 39: after step 3 of freeze=3 v stays, and only then signs travel."""
    seen, sent = [], []

    def look(t, opt, x):
        seen.append(digest(opt.v))
        sent.append(comm.stats.payload_bytes)

    train(comm, rx.OneBitAdam(freeze=3), 7, size=4096, each=look)
    three, _ = train(comm, rx.AdamW(), 3, size=4096)
    assert len(set(seen[:3])) == 3
    assert len(set(seen[2:])) == 1
    cost = np.diff([0, *sent])
    assert (cost[:3] == cost[0]).all()
    assert (cost[3:] == cost[3]).all()
    assert cost[0] > 25 * cost[3]
    after, _ = train(comm, rx.OneBitAdam(freeze=3), 3, size=4096)
    assert after.tobytes() == three.tobytes()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("rule", [rx.AdamW(weight_decay=0.1), rx.AdamW(betas=(0.5, 0.9))], ids=str)
def test_identity_codec_is_adam_with_frozen_variance(comm, rule):
    """Check 34, with bias correction and decoupled weight decay in both phases."""
    freeze, steps = 3, 12
    x, _ = train(comm, rx.OneBitAdam(freeze, codec=rx.Identity(), rule=rule), steps)
    means = np.mean([gradients(r, steps, 101) for r in range(comm.size)], axis=0, dtype="f8")
    want, m, v = np.ones(101), 0.0, 0.0
    b1, b2 = rule.betas
    for t, g in enumerate(means, 1):
        m = b1 * m + (1 - b1) * g
        if t <= freeze:
            v = b2 * v + (1 - b2) * g * g
        root = np.sqrt(v / (1 - b2 ** min(t, freeze)))
        want = want - LR * rule.weight_decay * want - LR * m / (1 - b1**t) / (root + rule.eps)
    np.testing.assert_allclose(x, want, rtol=0, atol=1e-5)


@pytest.mark.ranks(2)
def test_weight_decay_in_the_gradient_goes_on_after_the_freeze(comm):
    """It is a part of what is encoded; a codec without loss shows it."""
    rule = rx.AdamW(weight_decay=0.5, decoupled=False)
    x, _ = train(comm, rx.OneBitAdam(2, codec=rx.Identity(), rule=rule), 10)
    means = np.mean([gradients(r, 10, 101) for r in range(2)], axis=0, dtype="f8")
    want, m, v = np.ones(101), 0.0, 0.0
    for t, g in enumerate(means, 1):
        g = g + 0.5 * want
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g if t <= 2 else v
        root = np.sqrt(v / (1 - 0.999 ** min(t, 2)))
        want = want - LR * m / (1 - 0.9**t) / (root + 1e-8)
    np.testing.assert_allclose(x, want, rtol=0, atol=1e-5)


@pytest.mark.ranks(2)
def test_the_switch_of_phases_by_numbers(comm):
    """Check 22, corrected: constant gradients, three steps of warm-up, none of them skipped."""
    m, v, x = [], [], []

    def look(t, opt, p):
        m.append(opt.m[0])
        v.append(opt.v[0])
        x.append(p[0])

    spec = rx.OneBitAdam(freeze=3)
    x0 = np.ones(1, "f8")
    opt = spec.bind(comm, x0, lr=1e-3)
    for t in range(5):
        opt.step(np.ones(1))
        look(t, opt, x0)
    np.testing.assert_allclose(m, [0.1, 0.19, 0.271, 0.3439, 0.40951], rtol=1e-12)
    np.testing.assert_allclose(v, [0.001, 0.001999, *[0.002997001] * 3], rtol=1e-12)
    np.testing.assert_allclose(x, [0.999, 0.998, 0.997, 0.996, 0.995], rtol=1e-8)


@pytest.mark.parametrize("freeze", [0, -1])
def test_no_warm_up_is_refused(freeze):
    with pytest.raises(ValueError, match="at least one step"):
        rx.OneBitAdam(freeze=freeze)


def test_wrong_arguments_are_refused():
    for wrong in (2.5, True, "soon"):
        with pytest.raises(TypeError, match="a number of steps or a VarianceRatio"):
            rx.OneBitAdam(freeze=wrong)
    with pytest.raises(TypeError, match="each buffer makes its own memory"):
        rx.OneBitAdam(1, codec=rx.ErrorFeedback(rx.OneBit()))
    with pytest.raises(TypeError, match="made for the rule AdamW"):
        rx.OneBitAdam(1, rule=rx.SGD())
    with pytest.raises(ValueError, match="max_norm must be positive"):
        rx.OneBitAdam(1, max_norm=0)
    for wrong in ({"ratio": 1.0}, {"ratio": 0.0}, {"after": -1}):
        with pytest.raises(ValueError, match=r"ratio must|after must"):
            rx.VarianceRatio(**wrong)


@pytest.mark.ranks(1)
def test_wrong_buffers_are_refused(comm):
    with pytest.raises(TypeError, match="it needs the parameters"):
        rx.OneBitAdam(1).bind(comm, None, lr=0.1)
    with pytest.raises(ValueError, match="3 parameters got 4 gradients"):
        rx.OneBitAdam(1).bind(comm, np.ones(3), lr=0.1).step(np.ones(4))


# ---------------------------------------------------------------- when to freeze


@pytest.mark.parametrize(("b2", "steps"), [(0.9, 10), (0.99, 100), (0.999, 1000), (0.0, 1)])
def test_norms_are_compared_over_the_memory_of_the_variance(b2, steps):
    assert lag_of(b2) == steps


@pytest.mark.ranks(2, 3)
def test_the_published_rule_finds_the_step(comm):
    """Norms of the variance are compared 1 / (1 - b2) steps apart, on all ranks alike."""
    rule, spec = rx.AdamW(betas=(0.9, 0.9)), rx.VarianceRatio(0.96, after=15)
    falls = [g * (1 + 100 * 0.5**t) for t, g in enumerate(gradients(comm.rank, 200, 999))]
    norms, frozen = [], []

    def look(t, opt, x):
        if not frozen:
            norms.append(np.abs(np.float64(opt.v)).sum() / (1 - 0.9**t))
        if opt.momenta is not None:
            frozen.append(t)

    train(comm, rx.OneBitAdam(spec, rule=rule), 200, size=999, each=look, grads=falls)
    stable = [
        t
        for t in range(15, 201)
        if t > 10 and t <= len(norms) and norms[t - 1] / norms[t - 11] >= 0.96
    ]
    assert frozen[0] == stable[0] == len(norms)
    assert 15 < frozen[0] < 200
    assert (rx.allgather(comm, np.array(frozen[:1])) == frozen[0]).all()


@pytest.mark.ranks(2)
def test_a_young_variance_is_not_taken_for_a_stable_one(comm):
    """Its norm grows by itself, which the raw ratio would take for more than 0.96."""
    grows = [g * 1.1**t for t, g in enumerate(gradients(comm.rank, 60, 99))]
    spec = rx.OneBitAdam(rx.VarianceRatio(), rule=rx.AdamW(betas=(0.9, 0.9)))
    _, opt = train(comm, spec, 60, size=99, grads=grows)
    assert opt.momenta is None
    _, opt = train(comm, spec, 60, size=99)
    assert opt.momenta is not None


# ---------------------------------------------------------------- what travels


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("size", [1, 3, 9, 1001, 20_001])
def test_law_momenta_are_equal_on_all_ranks_after_every_step(comm, size):
    """Checks 24 and 36; before the exchange they differ."""

    def look(t, opt, x):
        assert_same(comm, opt.m, opt.v, x)

    x, opt = train(comm, rx.OneBitAdam(freeze=2), 6, size=size, each=look)
    mine = gradients(comm.rank, 7, size)[6]
    own = np.array([digest(opt.m + np.float32(0.1) * (mine - opt.m))])
    assert len(np.unique(rx.allgather(comm, own))) == comm.size
    assert np.isfinite(x).all()


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("scale", ["l1", "l2"])
@pytest.mark.parametrize(("size", "dtype"), [(1, "f4"), (5, "f8"), (70_003, "f4"), (9001, "f8")])
def test_law_the_fused_way_is_the_long_way(n, scale, size, dtype):
    """Bit for bit, with coordinates that do not travel and with weight decay."""

    def run(comm, codec, normalise):
        idle = np.random.default_rng(7).random(size) < 0.3
        idle[size // 5 : size // 3] = True
        idle[0] = False
        grads = gradients(comm.rank, 7, size, dtype)
        for g in grads:
            g[idle] = 0
        how = {"codec": codec(scale), "normalise": normalise, "rule": rx.AdamW(weight_decay=0.1)}
        spec = rx.OneBitAdam(2, **how)
        x, opt = train(comm, spec, 7, size, dtype, grads=grads)
        return x.tobytes(), opt.m.tobytes(), opt.v.tobytes(), comm.stats.payload_bytes

    for normalise in (True, False):
        fused, long = (everywhere(n, run, codec, normalise) for codec in (rx.OneBit, AnyOneBit))
        assert fused == long
        assert len({r[:3] for r in fused}) == 1


@pytest.mark.parametrize("n", [2, 4])
def test_law_several_pieces_are_the_long_way(n):
    """More than 2**20 numbers travel in pieces."""
    size = 2**20 + 4099

    def run(comm, codec):
        x, opt = train(comm, rx.OneBitAdam(1, codec=codec()), 3, size)
        return digest(x), digest(opt.m)

    assert everywhere(n, run, rx.OneBit) == everywhere(n, run, AnyOneBit)


def test_many_simulated_ranks_are_one_event_with_the_same_bytes():
    def run(comm):
        return [digest(a) for a in (train(comm, rx.OneBitAdam(2), 4, size=300)[0],)]

    few = rx.SimulatedWorld(70).run(lambda: run(rx.Comm.world()))
    assert len({tuple(r) for r in few}) == 1


@pytest.mark.ranks(2, 3, 4)
def test_residuals_telescope(comm):
    """Check 26: what was sent late, and what is still owed, is what the gradients said."""
    size, steps = 501, 30
    rule = rx.AdamW(betas=(0.0, 0.9))  # momenta are gradients
    spec = rx.OneBitAdam(1, normalise=False, rule=rule)
    grads = gradients(comm.rank, steps, size, "f8")
    sums = np.zeros(size)

    def look(t, opt, x):
        if t > 1:
            sums[:] += opt.m

    _, opt = train(comm, spec, steps, size, "f8", look, grads)
    owed = opt.state_dict()["owed"]["residuals"]
    worker = owed["worker", 0, size]
    owner = np.zeros(size)
    for (side, lo, hi), e in owed.items():
        if side == "owner":
            owner[lo:hi] = e
    want = rx.allreduce(comm, np.sum(grads[1:], axis=0) - worker, op=rx.MEAN)
    want -= rx.allreduce(comm, owner, op=rx.SUM)
    np.testing.assert_allclose(sums, want, rtol=0, atol=1e-12)


@pytest.mark.ranks(2, 4)
def test_bytes_on_the_wire(comm):
    """At most 1/31 of the all-reduce of float32 numbers; counted and calculated."""
    size, sent = 250_000, []
    train(comm, rx.OneBitAdam(1), 3, size, each=lambda *_: sent.append(comm.stats.payload_bytes))
    full, signs = sent[0], sent[2] - sent[1]
    chunk = -(-size // comm.size)
    bounds = [min(chunk, size - r * chunk) for r in range(comm.size)]
    payload = [-(-c // 8) + 4 * -(-c // 2048) for c in bounds]
    others = sum(payload) - payload[comm.rank]
    assert signs == others + (comm.size - 1) * payload[comm.rank]
    assert signs <= full / 31


@pytest.mark.ranks(4)
def test_by_node_compresses_between_nodes_only(comm):
    """Two ranks of a node first add their momenta up."""

    def run(world):
        with world.by_node() as nodes:
            x, opt = train(nodes, rx.OneBitAdam(2), 6, size=1001)
            assert_same(world, x, opt.m)
            return np.concatenate([x, opt.m])

    run(comm)
    seen = rx.SimulatedWorld(4, ranks_per_node=2).run(lambda: run(rx.Comm.world()))
    pairs = [np.mean([gradients(r, 6, 1001) for r in (a, a + 1)], axis=0) for a in (0, 2)]

    def alone(world):
        x, opt = train(world, rx.OneBitAdam(2), 6, size=1001, grads=list(pairs[world.rank]))
        return np.concatenate([x, opt.m])

    # Chunks, and so scales, differ: the two are alike, not equal.
    flat = everywhere(2, alone)[0]
    assert 0.5 < np.corrcoef(seen[0][1001:], flat[1001:])[0, 1] <= 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_units_are_exact_and_near_the_root_of_the_variance(comm, dtype):
    """Without a lossy codec they change nothing; with one, steps stay those of Adam in size."""
    sizes = np.logspace(-6, 3, 101).astype(dtype)
    grads = [g * sizes for g in gradients(comm.rank, 10, 101, dtype)]
    for codec in (rx.Identity(), rx.OneBit()):
        spec = rx.OneBitAdam(5, codec=codec)
        ours, plain = (
            train(comm, dataclasses.replace(spec, normalise=n), 10, 101, dtype, grads=grads)[0]
            for n in (True, False)
        )
        if codec == rx.Identity():
            assert ours.tobytes() == plain.tobytes()
        else:
            assert np.abs(ours - 1).max() < 0.2 < 5 < np.abs(plain - 1).max()


# ---------------------------------------------------------------- what must not be touched


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("codec", [rx.OneBit(), rx.OneBit("l2"), AnyOneBit(), rx.Quantizer(4)])
def test_coordinates_without_variance_stay_as_they_are(comm, codec):
    """Check 35: bit for bit through 200 steps, nothing owed, and no part in the scales."""
    rows = np.zeros((8, 16), bool)
    rows[[2, 5, 6]] = True
    idle = rows.ravel()
    x = np.random.default_rng(3).standard_normal(128).astype("f4")
    before, dense = x.copy(), x[~idle].copy()
    opt = rx.OneBitAdam(2, codec=codec).bind(comm, x, lr=1e-3)
    twin = rx.OneBitAdam(2, codec=codec).bind(comm, dense, lr=1e-3)
    numbers = np.random.default_rng(comm.rank)
    for _ in range(200 if codec == rx.OneBit() else 20):
        g = numbers.standard_normal(128).astype("f4")
        g[idle] = 0
        twin.step(g[~idle].copy())
        opt.step(g)
    assert x[idle].tobytes() == before[idle].tobytes()
    assert not opt.m[idle].any()
    assert opt.momenta.live.size == (~idle).sum(), "there is nothing they could owe"
    assert x[~idle].tobytes() == dense.tobytes(), "as if they did not exist"


@pytest.mark.ranks(2)
def test_without_variance_weights_still_decay(comm):
    x = np.ones(4, "f8")
    opt = rx.OneBitAdam(1, rule=rx.AdamW(weight_decay=0.5)).bind(comm, x, lr=0.1)
    for _ in range(5):
        opt.step(np.array([0, 1.0, 1.0, 0]))
    np.testing.assert_allclose(x[[0, 3]], 0.95**5, rtol=1e-12)


@pytest.mark.ranks(2)
def test_a_buffer_without_any_gradient_stays_in_warm_up(comm):
    """Until it has had gradients for as many steps as the freeze wants."""
    x = np.ones(9, "f4")
    opt = rx.OneBitAdam(3).bind(comm, x, lr=LR)
    for g in [np.zeros(9, "f4")] * 5 + gradients(comm.rank, 2, 9):
        opt.step(g)
    assert opt.momenta is None
    opt.step(gradients(comm.rank, 1, 9)[0])
    assert opt.momenta is not None


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("codec", [rx.OneBit(), AnyOneBit(), rx.Quantizer(4), rx.Identity()])
@pytest.mark.parametrize(
    ("bad", "when"),
    [(np.nan, 1), (np.nan, 5), (np.inf, 5), (-np.inf, 1)],
    ids=["nan-warm-up", "nan-signs", "inf-signs", "-inf-warm-up"],
)
def test_a_gradient_that_is_not_finite_leaves_the_step_out_on_all(comm, codec, bad, when):
    """Checks 22 and 37: as if it had not been, for parameters, moments and residuals."""
    grads = gradients(comm.rank, 10, 4099)
    spec = rx.OneBitAdam(3, codec=codec, max_norm=50.0)
    want, twin = train(comm, spec, 10, 4099, grads=grads)
    broken = [g.copy() for g in grads]
    broken.insert(when, np.ones(4099, "f4"))
    if comm.rank == comm.size - 1:
        broken[when][4000] = bad
    x, opt = train(comm, spec, 11, 4099, grads=broken)
    assert x.tobytes() == want.tobytes()
    mine, other = opt.state_dict(), twin.state_dict()
    assert mine["age"] == other["age"] == 10
    assert mine["m"].tobytes() == other["m"].tobytes()
    assert mine["v"].tobytes() == other["v"].tobytes()
    for key, residual in other["owed"]["residuals"].items():
        assert mine["owed"]["residuals"][key].tobytes() == residual.tobytes()


@pytest.mark.ranks(1, 2, 3)
def test_clipping_is_by_the_norm_of_all_ranks(comm):
    """In the warm-up that of the mean; afterwards the root of the mean square."""
    size, limit = 64, 0.5
    spec = rx.OneBitAdam(2, codec=rx.Identity(), max_norm=limit)
    x, _ = train(comm, spec, 5, size)
    every = [gradients(r, 5, size) for r in range(comm.size)]
    want, m, v = np.ones(size), 0.0, 0.0
    for t in range(1, 6):
        gs = [np.float64(every[r][t - 1]) for r in range(comm.size)]
        warm = t <= 2 or comm.size == 1
        mean = np.mean(gs, axis=0)
        norm = np.linalg.norm(mean) if warm else np.sqrt(np.mean([g @ g for g in gs]))
        g = mean * min(1.0, limit / norm)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g if warm else v
        root = np.sqrt(v / (1 - 0.999 ** (t if warm else 2)))
        want = want - LR * m / (1 - 0.9**t) / (root + 1e-8)
    np.testing.assert_allclose(x, want, rtol=0, atol=2e-5)


# ---------------------------------------------------------------- state


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("stop", [3, 5, 8])
@pytest.mark.parametrize("codec", [rx.OneBit(), AnyOneBit(), rx.Quantizer(4)])
def test_law_resuming_is_never_having_stopped(comm, stop, codec):
    """Checks 38 and 39 of the lists: saved before, at and after a freeze at 5."""
    spec, grads = rx.OneBitAdam(5, codec=codec), gradients(comm.rank, 18, 3001)
    want, twin = train(comm, spec, 18, 3001, grads=grads)
    x, opt = train(comm, spec, stop, 3001, grads=grads[:stop])
    state, kept = opt.state_dict(), x.copy()
    opt.step(np.ones(3001, "f4"))  # must not reach what was saved
    again = spec.bind(comm, kept, lr=LR, name="x")
    again.load_state_dict(state)
    for g in grads[stop:]:
        again.step(g.copy())
    assert kept.tobytes() == want.tobytes()
    assert again.m.tobytes() == twin.m.tobytes()


def test_law_resuming_a_rule_that_is_still_looking():
    spec = rx.OneBitAdam(rx.VarianceRatio(0.5), rule=rx.AdamW(betas=(0.9, 0.9)))

    def run(comm, stop):
        grads = gradients(comm.rank, 30, 55)
        x, opt = train(comm, spec, stop, 55, grads=grads[:stop])
        again = spec.bind(comm, x, lr=LR, name="x")
        again.load_state_dict(opt.state_dict())
        for g in grads[stop:]:
            again.step(g)
        assert again.momenta is not None
        return digest(x)

    assert len({seen for stop in (4, 12, 25) for seen in everywhere(2, run, stop)}) == 1


def test_another_number_of_ranks_begins_without_residuals():
    """Check 38: with one warning; on one rank the variance lives again."""
    spec, states = rx.OneBitAdam(2), []

    def save(comm):
        x, opt = train(comm, spec, 6, 500)
        return x, opt.state_dict()

    states = everywhere(4, save)

    def resume(comm):
        x, state = states[comm.rank]
        x = x.copy()
        opt = spec.bind(comm, x, lr=LR, name="x")
        if comm.size > 1:
            with pytest.warns(RuntimeWarning, match=r"rank . of 4 ranks .* begins at zero"):
                opt.load_state_dict(state)
        else:
            opt.load_state_dict(state)
        for g in gradients(comm.rank, 5, 500, seed=1):
            opt.step(g)
        assert (opt.momenta is None) == (comm.size == 1)
        return digest(x), opt.v.tobytes() == state["v"].tobytes()

    assert {v for _, v in everywhere(2, resume)} == {True}
    assert len({x for x, _ in everywhere(2, resume)}) == 1
    assert not everywhere(1, resume)[0][1]


def test_two_runs_are_equal_bit_for_bit():
    """Check 40 of the list of BAGUA."""

    def run(comm):
        return digest(train(comm, rx.OneBitAdam(2, codec=rx.Quantizer(4)), 6, 777)[0])

    assert everywhere(3, run) == everywhere(3, run)


# ---------------------------------------------------------------- other buffers, and its price


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors(comm, kind):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, kind)
    x = torch.ones(300, dtype=dtype)
    opt = rx.OneBitAdam(2).bind(comm, x, lr=LR)
    for g in gradients(comm.rank, 6, 300):
        opt.step(torch.from_numpy(g).to(dtype))
    want, _ = train(comm, rx.OneBitAdam(2), 6, 300)
    np.testing.assert_allclose(x.double().numpy(), want, atol=0.1 if kind == "bfloat16" else 0.01)
    assert opt.m.dtype == (np.float64 if kind == "float64" else np.float32)


@pytest.mark.parametrize("n", [1, 4])
def test_memory_is_that_of_its_parts(n):
    """p, g, m, v and two residuals, of which the second is sharded, and 10 percent."""
    size = 400_000

    def run(comm):
        x, g = np.ones(size, "f4"), np.ones(size, "f4")
        opt = rx.OneBitAdam(2).bind(comm, x, lr=LR)
        for t in range(4):
            g[:] = 1 + t
            opt.step(g)

    everywhere(n, run)
    tracemalloc.start()
    everywhere(n, run)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    parts = 4 if n == 1 else 5 + 1 / n
    assert peak / n / (4 * size) < 1.1 * parts


def test_ranks_with_other_settings_are_told():
    def run(comm):
        spec = rx.OneBitAdam(2 + comm.rank)
        with pytest.raises(rx.MismatchError, match="signed mean"):
            train(comm, spec, 4)

    everywhere(2, run)


def test_specs_are_values():
    spec = rx.OneBitAdam(100)
    assert spec == dataclasses.replace(spec)
    assert "freeze=100" in repr(spec)
    assert spec.own_rule == ""
