"""CHOCO-SGD and BAGUA's low-precision ring: exact laws on quadratics."""

import numpy as np
import pytest
from gossips import Bowl, check_resume, descend, pulls, simulate

import relaxmpi as rx

SPECS = {
    "choco 4": rx.Choco(rx.Quantizer(bits=4)),
    "choco sign": rx.Choco(rx.OneBit(bucket=32), gamma=0.3),
    "choco top": rx.Choco(rx.TopK(0.4), gamma=0.3, topology=rx.Exponential()),
    "choco later": rx.Choco(rx.Quantizer(bits=4), order=rx.Order.COMBINE_WHILE_ADAPT),
    "ring 8": rx.LowPrecisionDecentralized(),
    "ring 6": rx.LowPrecisionDecentralized(rx.Quantizer(bits=6)),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(
    ("spec", "order"),
    [
        (rx.Choco(rx.Identity(), gamma=1.0), rx.Order.ADAPT_THEN_COMBINE),
        (
            rx.Choco(rx.Identity(), gamma=1.0, order=rx.Order.COMBINE_WHILE_ADAPT),
            rx.Order.COMBINE_WHILE_ADAPT,
        ),
        (rx.LowPrecisionDecentralized(rx.Identity()), rx.Order.COMBINE_WHILE_ADAPT),
    ],
    ids=["choco", "choco later", "ring"],
)
def test_law_without_compression_it_is_d_psgd(spec, order, n):
    def run():
        with rx.Comm.world() as comm:
            grad, x, y = Bowl(comm.rank).grad, np.ones(5), np.ones(5)
            opt = spec.bind(comm, x, lr=0.05)
            got = descend(opt, x, grad, 30)
            opt.finish()
            other = rx.Decentralized(order=order).bind(comm, y, lr=0.05)
            want = descend(other, y, grad, 30)
            other.finish()
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)

    simulate(n, run)


@pytest.mark.parametrize("name", ["choco 4", "choco sign", "choco top", "choco later"])
def test_choco_keeps_the_mean_of_gradient_descent(name):
    """Equal curvature: whatever is lost on the wire, the mean model does exact steps."""

    def run():
        with rx.Comm.world() as comm:
            x = np.full(16, 10.0)
            opt = SPECS[name].bind(comm, x, lr=0.1)
            grad = pulls(comm, size=16)
            return [(opt.step(grad(x)), opt.mean().mean())[1] for _ in range(40)]

    want = 2 + 8 * 0.9 ** np.arange(1, 41)
    for means in simulate(5, run, delayed=True):
        np.testing.assert_allclose(means, want, rtol=1e-12)


@specs
def test_ranks_agree_in_the_end(spec):
    def run():
        with rx.Comm.world() as comm:
            x = np.full(16, 2.0)
            opt = spec.bind(comm, x, lr=0.1)
            grad = pulls(comm, size=16)
            for t in range(300):
                opt.lr = 0.1 / (1 + t / 10)
                opt.step(grad(x))
            opt.finish()
            return x

    runs = np.array(simulate(4, run))
    assert np.abs(runs - 1.5).max() < 0.15


@specs
def test_law_saved_and_resumed_at_any_step_is_never_stopped(spec):
    def run():
        with rx.Comm.world() as comm:
            check_resume(comm, spec)

    simulate(4, run, delayed=True)


@pytest.mark.ranks(1)
@specs
def test_law_one_rank_is_plain_descent(comm, spec):
    x, y = np.ones(5), np.ones(5)
    got = descend(spec.bind(comm, x, lr=0.1), x, Bowl(0).grad, 9)
    want = descend(rx.SGD().bind(comm, y, lr=0.1), y, Bowl(0).grad, 9)
    assert got.tobytes() == want.tobytes()


@specs
def test_equal_models_stay_as_they_are(spec):
    def run():
        with rx.Comm.world() as comm:
            x = np.linspace(-1.0, 1.0, 40)
            opt = spec.bind(comm, x, lr=0.1)
            for _ in range(3):
                opt.step(np.zeros(40))
            opt.finish()
            np.testing.assert_array_equal(x, np.linspace(-1.0, 1.0, 40))

    simulate(3, run)


@pytest.mark.parametrize(
    ("name", "hidden"), [("ring 8", True), ("choco later", True), ("choco 4", False)]
)
def test_messages_travel_while_the_gradient_is_computed(name, hidden):
    def run():
        with rx.Comm.world() as comm:
            x = np.ones(40)
            opt = SPECS[name].bind(comm, x, lr=0.1)
            begin = comm.now()
            for _ in range(10):
                comm.compute(10e-3)
                opt.step(x.copy())
            took = comm.now() - begin
            opt.finish()
            return took

    took = max(rx.SimulatedWorld(4, network=rx.Network(latency=8e-3, bandwidth=1e9)).run(run))
    assert took < 0.12 if hidden else took > 0.17


def test_wrong_settings_are_refused():
    for kind in (rx.Choco, rx.LowPrecisionDecentralized):
        with pytest.raises(TypeError, match="must be a Codec"):
            kind(codec=rx.ErrorFeedback(rx.OneBit()))
