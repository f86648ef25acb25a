"""AdamW as an algorithm and as a rule: the steps of torch.optim, on arrays and tensors."""

import numpy as np
import pytest

import relaxmpi as rx
from relaxmpi.primitives import kernels

SETTINGS = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled": False},
    {"betas": (0.8, 0.95), "eps": 1e-3},
    {"betas": (0.0, 0.9)},
]
settings = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def gradients(rank, steps, size, dtype="f4"):
    numbers = np.random.default_rng(rank)
    return [numbers.standard_normal(size).astype(dtype) for _ in range(steps)]


def by_hand(settings, x, grads, lr):
    """Kingma & Ba's algorithm 1, and Loshchilov & Hutter's algorithm 2, in double."""
    rule = rx.AdamW(**settings)
    (b1, b2), w = rule.betas, rule.weight_decay
    x, m, v = np.float64(x), 0.0, 0.0
    for t, g in enumerate(map(np.float64, grads), 1):
        if rule.decoupled:
            x = x - lr * w * x
        else:
            g = g + w * x
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        x = x - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + rule.eps)
    return x


def of_torch(settings, x, grads, lr):
    torch = pytest.importorskip("torch")
    others = dict(settings)
    kind = torch.optim.AdamW if others.pop("decoupled", True) else torch.optim.Adam
    p = torch.nn.Parameter(torch.from_numpy(x.copy()))
    theirs = kind([p], lr=lr, **{"weight_decay": 0.0, **others})
    for g in grads:
        p.grad = torch.from_numpy(g.copy())
        theirs.step()
    return p.detach().numpy()


@settings
@pytest.mark.parametrize(("dtype", "atol"), [("f4", 1e-6), ("f8", 1e-14)])
def test_the_rule_takes_the_steps_of_torch(settings, dtype, atol):
    """1,000 steps, which is check 21 of the reference's list."""
    grads = gradients(0, 1000, 33, dtype)
    x = gradients(1, 1, 33, dtype)[0]
    want = of_torch(settings, x, grads, 1e-3)
    local = rx.AdamW(**settings).local()
    for g in grads:
        local.apply(x, g.copy(), 1e-3)
    np.testing.assert_allclose(x, want, rtol=0, atol=atol)


@settings
@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 2049, 5000])
def test_the_rule_is_the_formula(settings, size):
    grads, x = gradients(0, 7, size), gradients(1, 1, size)[0]
    want = by_hand(settings, x, grads, 0.01)
    local = rx.AdamW(**settings).local()
    for g in grads:
        local.apply(x, g.copy(), 0.01)
    np.testing.assert_allclose(x, want, rtol=0, atol=2e-6)


@pytest.mark.ranks(1, 2, 3, 4)
@settings
def test_the_algorithm_is_adam_along_the_mean_gradient(comm, settings):
    all_grads = [gradients(r, 6, 501) for r in range(comm.size)]
    means = [np.mean(gs, axis=0) for gs in zip(*all_grads, strict=True)]
    x = np.ones(501, "f4")
    opt = rx.AdamW(**settings).bind(comm, x, lr=0.01)
    for g in all_grads[comm.rank]:
        opt.step(g)
    np.testing.assert_allclose(x, by_hand(settings, np.ones(501), means, 0.01), atol=5e-6)
    seen = rx.allgather(comm, x)
    assert (seen == seen[0]).all()


@pytest.mark.ranks(1, 2)
def test_law_resuming_is_never_having_stopped(comm):
    grads, spec = gradients(comm.rank, 8, 100), rx.AdamW(weight_decay=0.1)
    whole, part = np.ones(100, "f4"), np.ones(100, "f4")
    opt = spec.bind(comm, whole, lr=0.01)
    for g in grads:
        opt.step(g.copy())
    opt = spec.bind(comm, part, lr=0.01)
    for g in grads[:3]:
        opt.step(g.copy())
    state, kept = opt.state_dict(), part.copy()
    opt.step(grads[0].copy())  # must not reach what was saved
    again = spec.bind(comm, kept, lr=0.01)
    again.load_state_dict(state)
    for g in grads[3:]:
        again.step(g.copy())
    assert whole.tobytes() == kept.tobytes()


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_keeps_moments_in_single(kind):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, kind)
    x = torch.ones(100, dtype=dtype)
    local = rx.AdamW().local()
    for g in gradients(0, 5, 100):
        local.apply(x, torch.from_numpy(g).to(dtype) * 1e-4, 1e-2)
    assert local.m.dtype == local.v.dtype == np.float32
    assert (local.v > 0).all(), "1e-8 is nothing in half precision"
    assert 0.9 < x.float().min() < x.float().max() < 1.1
    assert not (x == 1).all()


@pytest.mark.ranks(1)
def test_as_the_rule_of_another_algorithm(comm):
    x, y = np.ones(10, "f4"), np.ones(10, "f4")
    a = rx.QSGD(rule=rx.AdamW()).bind(comm, x, lr=0.1)
    b = rx.AdamW().bind(comm, y, lr=0.1)
    for g in gradients(0, 3, 10):
        a.step(g.copy())
        b.step(g.copy())
    assert x.tobytes() == y.tobytes()


def test_wrong_settings_are_refused():
    for wrong in ({"betas": (0.9, 1.0)}, {"betas": (0.9,)}, {"eps": -1.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match=r"betas must|must not be negative"):
            rx.AdamW(**wrong)
    assert rx.AdamW(betas=[0.9, 0.99]) == rx.AdamW(betas=(0.9, 0.99))
    with pytest.raises(TypeError, match="Adam steps float16"):
        rx.AdamW().local().apply(np.ones(3, int), np.ones(3, int), 0.1)


@pytest.mark.ranks(2)
def test_attach_refuses_it_as_a_second_rule(comm):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="has no effect here: the local rule is the optimizer's"):
        rx.attach(model, torch.optim.AdamW(model.parameters()), rx.AdamW(), comm=comm)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_facts_about_gradients(bad, dtype):
    x = gradients(0, 1, 5001, dtype)[0]
    assert kernels.is_finite(x)
    np.testing.assert_allclose(kernels.square_sum(x), (np.float64(x) ** 2).sum(), rtol=1e-12)
    np.testing.assert_allclose(kernels.absolute_sum(x), np.abs(np.float64(x)).sum(), rtol=1e-12)
    assert kernels.is_finite(x[:0])
    assert kernels.square_sum(x[:0]) == 0
    x[4321] = bad
    assert not kernels.is_finite(x)
    assert np.isnan(kernels.square_sum(x))
    assert np.isnan(kernels.absolute_sum(x))
