"""Local SGD: its degenerate cases, post-local SGD, the bytes, arrays and attach."""

import numpy as np
import pytest

import relaxmpi as rx


def grads(rank, t):
    return np.random.default_rng((rank, t)).standard_normal(37).astype("f4")


def run(spec, n, steps, rule_grads=grads):
    def program():
        with rx.Comm.world() as comm:
            x = np.ones(37, "f4")
            opt = spec.bind(comm, x, lr=0.1)
            seen = []
            for t in range(steps):
                opt.step(rule_grads(comm.rank, t))
                seen.append(x.copy())
            return seen, comm.stats.payload_bytes

    return rx.SimulatedWorld(n).run(program)


MOMENTUM = rx.SGD(momentum=0.9, nesterov=True, weight_decay=0.01)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("rule", [rx.SGD(), MOMENTUM], ids=str)
def test_law_with_a_period_of_one_it_is_allreduce_sgd(n, rule):
    ours, want = run(rx.LocalSGD(every=1, rule=rule), n, 8), run(rule, n, 8)
    for (x, _), (y, _) in zip(ours, want, strict=True):
        np.testing.assert_allclose(x[-1], y[-1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_law_it_is_the_mean_of_local_steps(n):
    results = run(rx.LocalSGD(every=4), n, 8)
    x = [np.ones(37, "f4")] * n
    for t in range(8):
        x = [y - np.float32(0.1) * grads(r, t) for r, y in enumerate(x)]
        if t % 4 == 3:
            x = [sum(x) / n] * n
        for r in range(n):
            np.testing.assert_allclose(results[r][0][t], x[r], rtol=0, atol=1e-6)
        assert len({seen[t].tobytes() for seen, _ in results}) == (1 if t % 4 == 3 else n)


@pytest.mark.parametrize("n", [2, 3])
def test_law_before_start_it_is_allreduce_sgd(n):
    results = run(rx.LocalSGD(every=3, start=4, rule=MOMENTUM), n, 10)
    want = run(MOMENTUM, n, 4)
    np.testing.assert_allclose(results[0][0][3], want[0][0][3], rtol=0, atol=1e-6)
    equal = [len({seen[t].tobytes() for seen, _ in results}) == 1 for t in range(10)]
    assert equal == [True] * 4 + [False, False, True] * 2


def test_bytes_fall_with_the_period():
    assert run(rx.LocalSGD(every=5), 2, 10)[0][1] == run(rx.SGD(), 2, 10)[0][1] / 5


@pytest.mark.ranks(1, 2, 4)
def test_real_ranks_do_what_simulated_ones_do_bit_for_bit(comm):
    want = run(rx.LocalSGD(every=3, start=2), comm.size, 9)[comm.rank][0]
    x = np.ones(37, "f4")
    opt = rx.LocalSGD(every=3, start=2).bind(comm, x, lr=0.1)
    for t in range(9):
        opt.step(grads(comm.rank, t))
        assert x.tobytes() == want[t].tobytes()


@pytest.mark.ranks(1, 2, 3)
def test_attached_parameters_are_averaged_every_few_steps(comm):
    torch = pytest.importorskip("torch")
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    spec = rx.LocalSGD(every=3, start=2)
    spreads = []
    with rx.attach(model, optimizer, spec, comm=comm) as sync:
        for t in range(8):
            optimizer.zero_grad()
            torch.manual_seed(10 * t + comm.rank)
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
            spreads.append(sync.spread() > 0)
    local = [comm.size > 1] * 2
    assert spreads == [False, False, *local, False, *local, False]


def test_wrong_arguments():
    with pytest.raises(ValueError, match="every"):
        rx.LocalSGD(every=0)
    with pytest.raises(ValueError, match="start"):
        rx.LocalSGD(every=2, start=-1)
