"""D-PSGD in both orders, and slow momentum: exact laws on quadratics."""

import numpy as np
import pytest
from gossips import Bowl, check_resume, descend, pulls, simulate

import relaxmpi as rx

ATC, CTA = rx.Order.ADAPT_THEN_COMBINE, rx.Order.COMBINE_WHILE_ADAPT
orders = pytest.mark.parametrize("order", [ATC, CTA], ids=["ATC", "CTA"])


def all_at_once(graph, n, order, interval, steps, lr, grads, x):
    """The rule in matrix form: row i of x is the model of rank i; returns x of every step."""
    seen = []
    for t in range(steps):
        g = np.array([grad(row) for grad, row in zip(grads, x, strict=True)])
        W = graph.matrix(n, t // interval)
        if order is ATC:
            x = x - lr * g
            x = W @ x if t % interval == interval - 1 else x
        else:
            x = (W @ x if t % interval == 0 else x) - lr * g
        seen.append(x)
    return np.array(seen)


@orders
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize(
    ("graph", "n"),
    [(rx.Ring(), 2), (rx.Ring(), 5), (rx.ShiftOne(), 6), (rx.Exponential(), 8), (rx.Complete(), 3)],
    ids=str,
)
def test_law_ranks_do_what_the_matrix_says(order, interval, graph, n):
    def run():
        with rx.Comm.world() as comm:
            x = np.full(5, float(comm.rank))
            spec = rx.Decentralized(graph, order, interval)
            opt = spec.bind(comm, x, lr=0.05)
            seen = descend(opt, x, Bowl(comm.rank).grad, 10)
            opt.finish()
            return seen

    start = np.arange(float(n))[:, None] * np.ones(5)
    want = all_at_once(graph, n, order, interval, 10, 0.05, [Bowl(r).grad for r in range(n)], start)
    got = np.array(simulate(n, run, delayed=True)).swapaxes(0, 1)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


@orders
@pytest.mark.ranks(1, 2, 3, 4)
def test_law_real_ranks_do_what_the_matrix_says(comm, order):
    n, x = comm.size, np.ones(5)
    opt = rx.Decentralized(rx.Ring(), order).bind(comm, x, lr=0.05)
    got = descend(opt, x, Bowl(comm.rank).grad, 8)
    opt.finish()
    grads = [Bowl(r).grad for r in range(n)]
    want = all_at_once(rx.Ring(), n, order, 1, 8, 0.05, grads, np.ones((n, 5)))
    np.testing.assert_allclose(got, want[:, comm.rank], rtol=1e-12, atol=1e-14)


@orders
def test_fixed_points_and_the_mean(order):
    n, lr, steps = 5, 0.3, 120

    def run():
        with rx.Comm.world() as comm:
            x = np.array([7.0])
            opt = rx.Decentralized(rx.Ring(), order).bind(comm, x, lr=lr)
            means = [(opt.step(pulls(comm)(x)), opt.mean()[0])[1] for _ in range(steps)]
            opt.finish()
            return x[0], means

    W, eye, b = rx.Ring().matrix(n), np.eye(n), np.arange(float(n))
    if order is CTA:
        want = lr * np.linalg.inv(eye - W + lr * eye) @ b
    else:
        want = lr * np.linalg.inv(eye - (1 - lr) * W) @ W @ b
    results = simulate(n, run)
    np.testing.assert_allclose([x for x, _ in results], want, rtol=1e-12)
    mean = 2 + 5 * (1 - lr) ** np.arange(1, steps + 1)
    for _, means in results:
        np.testing.assert_allclose(means, mean, rtol=1e-13)


def test_on_the_complete_graph_all_ranks_hold_the_same_bytes():
    def run():
        with rx.Comm.world() as comm:
            x = np.ones(5)
            opt = rx.Decentralized(rx.Complete()).bind(comm, x, lr=0.05)
            return descend(opt, x, Bowl(comm.rank).grad, 10)

    runs = simulate(3, run, delayed=True)
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def test_parameters_travel_while_the_gradient_is_computed():
    network = rx.Network(latency=8e-3, bandwidth=1e9)
    took = {}
    for order in (ATC, CTA):

        def run(order=order):
            with rx.Comm.world() as comm:
                x = np.ones(5)
                opt = rx.Decentralized(rx.Ring(), order).bind(comm, x, lr=0.1)
                for t in range(11):
                    if t == 1:  # in the first step the ranks agree on the topology
                        begin = comm.now()
                    comm.compute(10e-3)
                    opt.step(x.copy())
                took = comm.now() - begin
                opt.finish()
                return took

        took[order] = max(rx.SimulatedWorld(4, network=network).run(run))
    assert took[CTA] < 0.125
    assert took[ATC] > 0.175


SPECS = [
    rx.Decentralized(order=ATC, interval=2),
    rx.Decentralized(order=CTA, rule=rx.SGD(momentum=0.9)),
    rx.Decentralized(rx.OnePeerExponential(), order=CTA, interval=2),
    rx.SlowMo(rx.Decentralized(order=CTA), every=3),
    rx.SlowMo(rx.Decentralized(), every=4, average=False),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_law_saved_and_resumed_at_any_step_is_never_stopped(spec):
    def run():
        with rx.Comm.world() as comm:
            check_resume(comm, spec)

    simulate(4, run, delayed=True)


# ------------------------------------------------------------------------------ slow momentum


def base(comm, spec, steps, x, every=1):
    """A run that is averaged exactly every so many steps, by hand."""
    opt = spec.bind(comm, x, lr=0.05)
    grad = Bowl(comm.rank).grad
    for t in range(1, steps + 1):
        opt.step(grad(x))
        if t % every == 0:
            opt.finish()
            opt.replace(opt.mean())
    return x


@pytest.mark.parametrize(
    "spec", [rx.OSGP(2), rx.SGP(), rx.Decentralized(), rx.Decentralized(order=CTA)]
)
def test_without_momentum_slowmo_is_the_algorithm_and_an_exact_average(spec):
    def run():
        with rx.Comm.world() as comm:
            want = base(comm, spec, 12, np.ones(5), every=4)
            x = np.ones(5)
            opt = rx.SlowMo(spec, every=4, beta=0.0).bind(comm, x, lr=0.05)
            descend(opt, x, Bowl(comm.rank).grad, 12)
            np.testing.assert_allclose(x, want, rtol=1e-13)
            return x

    runs = simulate(5, run)
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def test_slowmo_of_one_step_around_sgd_is_sgd():
    def run():
        with rx.Comm.world() as comm:
            rule, grad = rx.SGD(momentum=0.9), Bowl(comm.rank).grad
            x, y = np.ones(5), np.ones(5)
            slow = rx.SlowMo(rule, every=1, beta=0.0).bind(comm, x, lr=0.05)
            np.testing.assert_allclose(
                descend(slow, x, grad, 20),
                descend(rule.bind(comm, y, lr=0.05), y, grad, 20),
                rtol=1e-12,
            )

    simulate(3, run)


@pytest.mark.parametrize("average", [True, False])
def test_the_slow_step_is_its_formula(average):
    def run():
        with rx.Comm.world() as comm:
            spec = rx.SlowMo(rx.SGP(rx.Ring()), every=2, beta=0.6, alpha=0.9, average=average)
            x = np.full(1, 4.0)
            opt = spec.bind(comm, x, lr=0.1)
            y, z, u = np.full(1, 4.0), 4.0, 0.0
            inner = rx.SGP(rx.Ring()).bind(comm, y, lr=0.1)
            for t in range(1, 9):
                inner.lr = opt.lr = 0.0 if t < 3 else 0.1 / t
                opt.step(pulls(comm)(x))
                inner.step(pulls(comm)(y))
                if t % 2 == 0:
                    reached = inner.mean() if average else y
                    u = 0.6 * u + (z - reached) / inner.lr if inner.lr else u
                    z = z - 0.9 * inner.lr * u
                    inner.replace(z)
            np.testing.assert_allclose(x, y, rtol=1e-12)
            assert not rx.SlowMo(rx.OSGP(tau=None), average=False).lockstep
            return opt.mean()

    runs = simulate(4, run)
    np.testing.assert_array_equal(runs, np.broadcast_to(runs[0], np.shape(runs)))


def test_wrong_settings_are_refused():
    with pytest.raises(TypeError, match="Order"):
        rx.Decentralized(order="atc")
    with pytest.raises(ValueError, match="interval"):
        rx.Decentralized(interval=0)
    for wrong in ({"every": 0}, {"beta": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rx.SlowMo(rx.SGP(), **wrong)
    with pytest.raises(TypeError, match="algorithm"):
        rx.SlowMo("SGP")
