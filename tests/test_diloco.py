"""DiLoCo: the outer rule, its degenerate cases, overlap, low precision, arrays and attach."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

import relaxmpi as rx

torch = pytest.importorskip("torch")


def target(rank):
    return np.random.default_rng(rank).standard_normal(61).astype("f4")


def grads(rank, t):
    return np.random.default_rng((rank, t)).standard_normal(61).astype("f4")


def run(spec, n, steps, lr=0.1, grad=None, seed=0, each=lambda opt: None):
    """Return x of every rank after the last step, and what `each` returned after every step."""

    def program():
        with rx.Comm.world() as comm:
            x = np.ones(61, "f4")
            opt = spec.bind(comm, x, lr=lr, name="x")
            seen = []
            for t in range(steps):
                g = grads(comm.rank, t) if grad is None else grad(comm.rank, t, x)
                opt.step(g)
                seen.append(each(opt))
            opt.finish()
            return x, seen

    return rx.SimulatedWorld(n, seed=seed).run(program)


def test_law_a_constant_pseudo_gradient_moves_by_nesterovs_numbers():
    moved = run(
        rx.DiLoCo(every=5),
        3,
        15,
        lr=0.2,
        grad=lambda *_: np.ones(61, "f4"),
        each=lambda opt: opt.x.astype("f8").copy(),
    )[1][1]
    at = [np.ones(61), *moved[4::5]]
    steps = [(a - b) for a, b in pairwise(at)]  # the pseudo-gradient is one
    np.testing.assert_allclose([s[0] for s in steps], [1.33, 1.897, 2.4073], atol=2e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_law_without_momentum_it_is_parameter_averaging(n):
    ours = run(rx.DiLoCo(every=4, outer_lr=1.0, outer_momentum=0.0), n, 12)
    want = run(rx.LocalSGD(every=4), n, 12)
    for (x, _), (y, _) in zip(ours, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_law_with_one_inner_step_it_is_data_parallel_sgd(n):
    """The outer optimizer is then torch's Nesterov along lr times the mean gradient."""
    (x, _), *_ = run(rx.DiLoCo(every=1), n, 6, lr=0.1)
    p = torch.nn.Parameter(torch.ones(61))
    theirs = torch.optim.SGD([p], lr=0.07, momentum=0.9, nesterov=True)
    for t in range(6):
        p.grad = torch.from_numpy(np.mean([grads(r, t) for r in range(n)], axis=0))
        theirs.step()
    np.testing.assert_allclose(x, p.detach().numpy(), rtol=0, atol=2e-6)
    plain = rx.DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0)
    for (x, _), (y, _) in zip(run(plain, n, 6), run(rx.SGD(), n, 6), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        rx.DiLoCo(every=3),
        rx.DiLoCo(every=3, codec=rx.Quantizer(bits=8)),
        rx.DiLoCo(every=3, codec=rx.Quantizer(bits=4), feedback=True),
        rx.DiLoCo(every=3, rule=rx.SGD(momentum=0.9)),
    ],
    ids=["plain", "8 bit", "4 bit with feedback", "inner momentum"],
)
@pytest.mark.parametrize("n", [2, 4])
def test_law_all_ranks_hold_the_same_bytes_after_each_outer_step(spec, n):
    seen = [s for _, s in run(spec, n, 9, each=lambda opt: (opt.x.tobytes(), opt.theta.tobytes()))]
    for t in range(9):
        assert len({s[t][1] for s in seen}) == 1, "the outer parameters are common"
        assert len({s[t][0] for s in seen}) == (1 if t % 3 == 2 else n), t


@pytest.mark.parametrize("delay", [1, 2, 4])
def test_law_overlapped_it_is_the_formula_with_a_delay(delay):
    """The same, by hand: sent after 5 steps, used `delay` later, mixed with what came between."""
    n, alpha = 3, 0.5
    ours = run(rx.DiLoCo(every=5, delay=delay, alpha=alpha), n, 18)
    x = [np.ones(61, "f4") for _ in range(n)]
    theta, b, d = np.ones(61, "f4"), 0.0, None
    for t in range(1, 19):
        for r in range(n):
            x[r] = x[r] - np.float32(0.1) * grads(r, t - 1)
        if t % 5 == 0:
            d = sum(theta - y for y in x) / n
        if d is not None and t % 5 == delay:
            b = 0.9 * b + d
            theta, d = theta - 0.7 * (d + 0.9 * b), None
            x = [(1 - alpha) * theta + alpha * y for y in x]
    if d is not None:  # `finish`
        b = 0.9 * b + d
        theta = theta - 0.7 * (d + 0.9 * b)
        x = [(1 - alpha) * theta + alpha * y for y in x]
    for (got, _), want in zip(ours, x, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)


def test_law_without_delay_and_alpha_streaming_is_diloco_bit_for_bit():
    a = run(rx.DiLoCo(every=4), 3, 10)
    b = run(rx.DiLoCo(every=4, delay=0, alpha=0.0), 3, 10)
    assert [x.tobytes() for x, _ in a] == [x.tobytes() for x, _ in b]


def test_the_exchange_runs_while_the_inner_steps_compute():
    def seconds(delay):
        def program():
            with rx.Comm.world() as comm:
                x = np.ones(100_000, "f4")
                opt = rx.DiLoCo(every=5, delay=delay).bind(comm, x, lr=0.1)
                for _ in range(11 + delay):
                    with comm.background():
                        comm.compute(0.01)
                    opt.step(np.ones_like(x))
                return comm.stats.waited

        network = rx.Network(latency=1e-4, bandwidth=400_000 / 0.016)
        return max(rx.SimulatedWorld(2, network=network).run(program))

    assert seconds(0) > 0.03
    assert seconds(2) < seconds(0) / 5


def test_bytes_fall_with_the_period_and_the_bits():
    def sent(spec):
        def program():
            with rx.Comm.world() as comm:
                x = np.ones(51_200, "f4")
                opt = spec.bind(comm, x, lr=0.1)
                for _ in range(50):
                    opt.step(np.ones_like(x))
                return comm.stats.payload_bytes

        return rx.SimulatedWorld(2).run(program)[0]

    every_step = sent(rx.SGD())
    assert sent(rx.DiLoCo(every=50)) == every_step / 50
    assert sent(rx.DiLoCo(every=50, codec=rx.Quantizer(bits=8))) < every_step / 195
    assert sent(rx.DiLoCo(every=50, codec=rx.Quantizer(bits=4), feedback=True)) < every_step / 380


@pytest.mark.ranks(1, 2, 3)
def test_law_torch_tensors_and_real_ranks_take_the_same_steps(comm):
    spec = rx.DiLoCo(every=3, delay=1, alpha=0.5, codec=rx.Quantizer(bits=8))
    want = run(spec, comm.size, 7)[comm.rank][0]
    x = np.ones(61, "f4")
    opt = spec.bind(comm, x, lr=0.1, name="x")
    y = torch.ones(61)
    other = spec.bind(comm, y, lr=0.1, name="x")
    for t in range(7):
        opt.step(grads(comm.rank, t))
        other.step(torch.from_numpy(grads(comm.rank, t)))
    opt.finish()
    other.finish()
    assert x.tobytes() == want.tobytes()
    np.testing.assert_allclose(y.numpy(), x, rtol=0, atol=2e-6)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("limits", [{}, {"bucket_bytes": 500}], ids=["one bucket", "buckets"])
def test_attached_it_is_what_it_is_on_arrays(comm, limits):
    spec = rx.DiLoCo(every=3)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.Tanh(), torch.nn.Linear(10, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    opt = dataclasses.replace(spec, rule=rx.SGD(momentum=0.9)).bind(comm, x, lr=0.1)
    with rx.attach(model, optimizer, spec, comm=comm, **limits) as sync:
        for t in range(7):
            optimizer.zero_grad()
            torch.manual_seed(100 * t + comm.rank)
            model(torch.randn(8, 20)).square().mean().backward()
            opt.step(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
            optimizer.step()
            now = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            np.testing.assert_allclose(now.numpy(), x.numpy(), rtol=0, atol=1e-6)
        assert (sync.spread() > 0) == (comm.size > 1)


def test_wrong_arguments():
    for wrong in (
        {"every": 0},
        {"every": 3, "delay": 3},
        {"every": 3, "outer_lr": 0.0},
        {"every": 3, "outer_momentum": 1.0},
        {"every": 3, "alpha": 1.0},
        {"every": 3, "feedback": True},
    ):
        with pytest.raises(ValueError):
            rx.DiLoCo(**wrong)
    with pytest.raises(TypeError, match="memory"):
        rx.DiLoCo(every=3, codec=rx.ErrorFeedback(rx.OneBit()))
