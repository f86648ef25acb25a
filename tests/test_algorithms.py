"""SGD and QSGD on plain arrays: the laws of the update rule, on 1 to 4 ranks."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

import relaxmpi as rx

CODED = {
    "qsgd8": rx.QSGD(bits=8),
    "qsgd4": rx.QSGD(bits=4),
    "qsgd2, feedback": rx.QSGD(bits=2, feedback=True),
    "sign": rx.QSGD(codec=rx.OneBit(), feedback=True),
    "bytegrad": rx.ByteGrad(),
    "fp16": rx.QSGD(codec=rx.Cast("fp16")),
}
RULES = [
    rx.SGD(),
    rx.SGD(weight_decay=0.1),
    rx.SGD(momentum=0.9),
    rx.SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
]
coded = pytest.mark.parametrize("spec", CODED.values(), ids=CODED)
rules = pytest.mark.parametrize("rule", RULES, ids=str)


class LeastSquares:
    """f(x) = mean (a x - b)**2 / 2 over rows, of which each rank holds equally many."""

    def __init__(self, rank, size, features=37, rows=24, dtype="f4"):
        numbers = np.random.default_rng(7)
        self.a = numbers.standard_normal((rows, features)).astype(dtype)
        self.b = self.a @ numbers.standard_normal(features).astype(dtype)
        self.a, self.b = self.a[rank::size], self.b[rank::size]

    def grad(self, x):
        return self.a.T @ (self.a @ x - self.b) / len(self.b)


def by_hand(rule, x, grads, lr):
    """torch's SGD as its documentation writes it, one step after the other."""
    velocity = None
    for grad in grads:
        g = grad(x) if callable(grad) else grad
        if rule.weight_decay:
            g = g + rule.weight_decay * x
        if rule.momentum:
            velocity = 0 * g + g if velocity is None else rule.momentum * velocity + g
            g = g + rule.momentum * velocity if rule.nesterov else velocity
        x = x - lr * g
    return x


def gradients(rank, steps, size, dtype="f4"):
    numbers = np.random.default_rng(rank)
    return [numbers.standard_normal(size).astype(dtype) for _ in range(steps)]


def assert_same_bytes(comm, x):
    seen = rx.allgather(comm, np.asarray(x).view(np.uint8))
    for r in range(1, comm.size):
        assert np.array_equal(seen[r], seen[0]), f"rank {r} differs from rank 0"


@pytest.mark.ranks(1, 2, 3, 4)
@rules
def test_law_n_ranks_are_one_process_with_the_whole_batch(comm, rule):
    alone, shared = LeastSquares(0, 1), LeastSquares(comm.rank, comm.size)
    want = by_hand(rule, np.zeros(37, "f4"), [alone.grad] * 20, lr=0.05)
    x = np.zeros(37, "f4")
    opt = rule.bind(comm, x, lr=0.05)
    for _ in range(20):
        opt.step(shared.grad(x))
    assert np.abs(want).max() > 0.5, "nothing was learned"
    np.testing.assert_allclose(x, want, rtol=0, atol=2e-5)


@pytest.mark.ranks(1)
@rules
@pytest.mark.parametrize("spec", [None, *CODED.values()], ids=["sgd", *CODED])
def test_law_one_rank_is_the_formula_bit_for_bit(comm, rule, spec):
    spec = rule if spec is None else dataclasses.replace(spec, rule=rule)
    grads = gradients(0, 6, 1001)
    x = np.ones(1001, "f4")
    opt = spec.bind(comm, x, lr=0.1)
    for g in grads:
        opt.step(g.copy())
    assert x.tobytes() == by_hand(rule, np.ones(1001, "f4"), grads, 0.1).tobytes()
    assert comm.stats.payload_bytes == 0


@pytest.mark.ranks(1, 2)
@rules
def test_torch_tensors_take_the_steps_of_torch_optim(comm, rule):
    torch = pytest.importorskip("torch")
    mine = [torch.from_numpy(g) for g in gradients(comm.rank, 8, 100)]
    means = [
        torch.from_numpy(np.mean(gs, axis=0))
        for gs in zip(*(gradients(r, 8, 100) for r in range(comm.size)), strict=True)
    ]
    p = torch.nn.Parameter(torch.ones(100))
    theirs = torch.optim.SGD([p], lr=0.1, **dataclasses.asdict(rule))
    x = torch.ones(100)
    ours = rule.bind(comm, x, lr=0.1)
    for g, mean in zip(mine, means, strict=True):
        ours.step(g)
        p.grad = mean
        theirs.step()
    np.testing.assert_allclose(x.numpy(), p.detach().numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("size", [0, 1, 3, 9, 1001])
@coded
def test_law_all_ranks_hold_the_same_bytes_after_any_step(comm, spec, size):
    spec = dataclasses.replace(spec, rule=rx.SGD(momentum=0.9))
    x = np.ones(size, "f4")
    opt = spec.bind(comm, x, lr=0.1)
    for g in gradients(comm.rank, 3, size):
        opt.step(g)
        assert_same_bytes(comm, x)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("spec", [rx.SGD(), rx.QSGD(codec=rx.Identity())], ids=["sgd", "identity"])
def test_law_fused_is_per_tensor(comm, spec):
    shapes = [(3, 4), (), (0,), (17,), (2, 3, 5)]
    mine = [gradients(10 * comm.rank + k, 4, shape) for k, shape in enumerate(shapes)]
    single = [np.ones(shape, "f4") for shape in shapes]
    opts = [spec.bind(comm, x, lr=0.1, name=str(k)) for k, x in enumerate(single)]
    fused = rx.Bucket([np.ones(shape, "f4") for shape in shapes], align=16)
    opt = spec.bind(comm, fused.flat, lr=0.1, name="all")
    for t in range(4):
        opt.step(rx.Bucket([grads[t] for grads in mine], align=16).flat)
        for bound, grads in zip(opts, mine, strict=True):
            bound.step(grads[t].copy())
    for view, x in zip(fused.views, single, strict=True):
        np.testing.assert_allclose(view, x, rtol=0, atol=1e-6)


@pytest.mark.ranks(2, 3)
@coded
def test_law_resumed_is_never_stopped(comm, spec):
    spec = dataclasses.replace(spec, rule=rx.SGD(momentum=0.9))
    grads = gradients(comm.rank, 8, 1001)

    x = np.ones(1001, "f4")
    opt = spec.bind(comm, x, lr=0.1, name="x")
    for t, g in enumerate(grads):
        if t == 4:
            saved, state = x.copy(), opt.state_dict()
        opt.step(g.copy())

    y = np.ones(1001, "f4")
    resumed = spec.bind(comm, y, lr=0.1, name="x")
    resumed.step(np.full(1001, 3, "f4"))  # whatever it did before is forgotten
    y[:] = saved
    resumed.load_state_dict(state)
    for g in grads[4:]:
        resumed.step(g.copy())
    assert x.tobytes() == y.tobytes()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("codec", [rx.OneBit(), rx.Quantizer(bits=2)], ids=str)
def test_law_feedback_loses_nothing(comm, codec):
    # sum_t y_t = sum_t mean_i g_it - mean_i e_i - E, so x is behind by exactly the residuals.
    steps, size = 12, 1001
    x = np.zeros(size)
    opt = rx.QSGD(codec=codec, feedback=True).bind(comm, x, lr=1.0)
    for g in gradients(comm.rank, steps, size, "f8"):
        opt.step(g)
    owed = np.zeros((2, size))
    for row, side in zip(owed, ("worker", "owner"), strict=True):
        for (lo, hi), residual in opt.codec.residual(side).items():
            row[lo:hi] = residual
    owed[0] /= comm.size
    rx.allreduce(comm, owed)
    sent = sum(sum(gradients(r, steps, size, "f8")) for r in range(comm.size)) / comm.size
    np.testing.assert_allclose(-x, sent - owed.sum(0), atol=1e-9)
    if comm.size > 1:
        assert np.abs(owed).max() > 0.1


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("bits", [4, 8])
def test_random_rounding_is_unbiased_and_within_its_bound(comm, bits):
    g = gradients(comm.rank, 1, 513)[0]
    mean = np.mean([gradients(r, 1, 513)[0] for r in range(comm.size)], axis=0)
    total, rounds = np.zeros(513), 400
    opt = rx.QSGD(bits=bits).bind(comm, np.zeros(513, "f4"), lr=0.0)
    grid = 2 * 5 / (2 ** (bits - 1) - 1)  # twice, at most one level of max |g| < 5 each
    for _ in range(rounds):
        sent = g.copy()
        opt.on_grads(sent).wait()
        assert np.abs(sent - mean).max() < grid
        total += sent
    assert np.abs(total / rounds - mean).max() < 5 * grid / 4 / rounds**0.5


@pytest.mark.ranks(2, 4)
def test_the_wire_carries_what_the_bits_say(comm):
    count, sent = 2**16, {}
    for name, spec in {"sgd": rx.SGD(), **CODED}.items():
        opt = spec.bind(comm, np.zeros(count, "f4"), lr=0.1)
        before = comm.stats.payload_bytes
        opt.step(gradients(comm.rank, 1, count)[0])
        sent[name] = comm.stats.payload_bytes - before
    full = 2 * (comm.size - 1) * count * 4 // comm.size
    assert sent["sgd"] == full
    assert sent["fp16"] == full // 2
    # 4 bytes for each 512 numbers; MinMaxUInt8 64 bytes a chunk; OneBit 4 for each 2048 or fewer.
    assert sent["qsgd8"] == full // 4 + full // 512
    assert sent["qsgd4"] == full // 8 + full // 512
    assert full // 4 < sent["bytegrad"] <= full // 4 + 2 * comm.size * 64
    assert full // 32 < sent["sign"] <= full // 32 + full // 512


@pytest.mark.ranks(2)
def test_random_numbers_follow_the_name_and_the_step(comm):
    def first_steps(name):
        x = np.zeros(1001, "f4")
        opt = rx.QSGD(bits=2).bind(comm, x, lr=1.0, name=name)
        g = gradients(comm.rank, 1, 1001)[0]
        opt.step(g.copy())
        one = x.copy()
        opt.step(g.copy())
        return one, x - one

    a, b = first_steps("a"), first_steps("b")
    assert np.array_equal(a, first_steps("a")), "the same name, step and numbers"
    assert not np.array_equal(a[0], b[0])
    assert not np.array_equal(a[0], a[1])


@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree_all_learn_it_and_go_on(comm):
    x = np.ones(5, "f4")
    opt = rx.SGD().bind(comm, x, lr=0.1, name=f"buffer {comm.rank == 1}")
    with pytest.raises(rx.MismatchError, match="buffer True"):
        opt.step(np.ones(5, "f4"))
    resumed = rx.QSGD(bits=4).bind(comm, x, lr=0.1)
    resumed.t = 3 if comm.rank == 1 else 0  # a checkpoint that only one rank has loaded
    with pytest.raises(rx.MismatchError, match="step 3"):
        resumed.step(np.ones(5, "f4"))
    assert (x == 1).all()
    rx.SGD().bind(comm, x, lr=0.5).step(np.ones(5, "f4"))
    assert (x == 0.5).all()


@pytest.mark.ranks(1, 2)
def test_the_three_moments_make_up_a_step(comm):
    x = np.ones(3, "f4")
    opt = rx.SGD().bind(comm, x, lr=0.5)
    g = np.full(3, float(comm.rank), "f4")
    work = opt.on_grads(g)
    assert (x == 1).all()
    assert work.wait() is g
    assert (g == (comm.size - 1) / 2).all()
    opt.lr = 1.0
    opt.on_step(g)
    assert opt.on_params() is None
    assert (x == 1 - g).all()


@pytest.mark.ranks(1, 4)
def test_low_precision_learns_real_digits_like_full_precision(comm):
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = (images / 16).astype("f4"), np.eye(10, dtype="f4")[labels]
    mine, told = images[:1500:1][comm.rank :: comm.size], labels[:1500][comm.rank :: comm.size]

    def accuracy(spec):
        x = np.zeros((64, 10), "f4")
        opt = spec.bind(comm, x, lr=0.5)
        for _ in range(200):
            p = np.exp(mine @ x)
            p /= p.sum(1, keepdims=True)
            opt.step(mine.T @ (p - told) / len(mine))
        assert_same_bytes(comm, x)
        return np.mean((images[1500:] @ x).argmax(1) == labels[1500:].argmax(1))

    full = accuracy(rx.SGD())
    assert full > 0.85
    for name, spec in CODED.items():
        assert accuracy(spec) > full - 0.02, name


def test_specs_are_values():
    assert rx.QSGD(bits=4) == rx.QSGD(bits=4) != rx.QSGD(bits=8)
    assert len({rx.SGD(), rx.SGD(), rx.SGD(momentum=0.5), rx.ByteGrad()}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        rx.SGD().momentum = 0.5
    assert rx.ByteGrad(feedback=True).codec == rx.MinMaxUInt8()
    assert rx.QSGD(rule=rx.SGD(momentum=0.5)).own_rule == "momentum=0.5"
    assert rx.QSGD().own_rule == ""


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: rx.QSGD(bits=0), ValueError, "1 to 8"),
        (lambda: rx.QSGD(bits=9), ValueError, "1 to 8"),
        (lambda: rx.QSGD(codec=rx.ErrorFeedback(rx.OneBit())), TypeError, "feedback=True"),
        (lambda: rx.SGD(momentum=1.0), ValueError, "momentum"),
        (lambda: rx.SGD(nesterov=True), ValueError, "momentum > 0"),
        (lambda: rx.SGD(weight_decay=-1), ValueError, "weight_decay"),
    ],
)
def test_wrong_settings_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_bits_choose_the_codec():
    class Alone:
        size, rank = 1, 0

    codecs = [rx.QSGD(bits=b).bind(Alone(), None, lr=0.0).codec for b in (1, 2, 8)]
    assert codecs == [rx.OneBit(), rx.Quantizer(bits=2), rx.Quantizer(bits=8)]


def test_arrays_need_no_torch():
    code = (
        "import sys, numpy as np, relaxmpi as rx\n"
        "with rx.Comm.world() as comm:\n"
        "    rx.QSGD(bits=4).bind(comm, np.zeros(2), lr=1.0).step(np.ones(2))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
