"""SGP and OSGP: exact laws, over many seeds in the simulated world and on real ranks."""

from collections import deque

import numpy as np
import pytest
from gossips import Bowl, check_resume, descend, pulls, same_everywhere, simulate

import relaxmpi as rx

GRAPHS = [rx.OnePeerExponential(), rx.OnePeerExponential(peers=2), rx.Exponential(), rx.Ring()]
WHILE = rx.Order.COMBINE_WHILE_ADAPT
graphs = pytest.mark.parametrize("graph", GRAPHS, ids=str)


def by_hand(comm, graph, tau, steps, lr, grad, x):
    """OSGP as the documentation writes it; returns x / w of every step."""
    w, flight, seen = np.ones(1), deque(), []
    for t in range(steps):
        x -= lr * grad(x / w)
        flight.append(rx.push_sum.start(comm, x, w, topology=graph, step=t))
        if len(flight) > tau:
            dx, dw = flight.popleft().wait()
            x += dx
            w += dw
        seen.append(x / w)
    while flight:
        flight.popleft().wait()
    return np.array(seen)


@graphs
@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_law_osgp_is_the_loop_of_the_documentation_bit_for_bit(graph, tau, seed):
    def run():
        with rx.Comm.world() as comm:
            grad = Bowl(comm.rank).grad
            want = by_hand(comm, graph, tau, 30, 0.05, grad, np.ones(5))
            x = np.ones(5)
            opt = rx.OSGP(tau, graph, send_every=1).bind(comm, x, lr=0.05)
            got = descend(opt, x, grad, 30)
            opt.finish()
            return got.tobytes() == want.tobytes()

    assert all(simulate((3, 5, 8)[seed], run, seed, delayed=seed > 0))


@graphs
@pytest.mark.parametrize("seed", range(3))
def test_law_sgp_while_adapting_sends_before_the_gradient_and_folds_before_its_step(graph, seed):
    def run():
        with rx.Comm.world() as comm:
            grad, lr = Bowl(comm.rank).grad, 0.05
            y, w, seen = np.ones(5), np.ones(1), []
            y -= lr * grad(y)  # nothing has been sent yet
            for t in range(30):
                z = y / w
                seen.append(z)
                dx, dw = rx.push_sum(comm, y, w, topology=graph, step=t)
                y += dx
                w += dw
                y -= lr * grad(z)
            x = np.ones(5)
            opt = rx.SGP(graph, order=WHILE).bind(comm, x, lr=lr)
            got = descend(opt, x, grad, 30)
            assert len(opt.flight) == 1, "it travels while the next gradient is computed"
            mean = rx.allreduce(comm, opt.y + sum(m.wait()[0] for _, m in opt.flight), op=rx.MEAN)
            np.testing.assert_allclose(opt.mean(), mean, rtol=1e-12)
            opt.finish()
            np.testing.assert_allclose(x, opt.y / opt.w, rtol=1e-12)
            return got.tobytes() == np.array(seen).tobytes()

    assert all(simulate((3, 5, 8)[seed], run, seed, delayed=seed > 0))


@pytest.mark.ranks(2, 3, 4)
def test_law_sgp_while_adapting_on_a_symmetric_graph_is_d_psgd_in_that_order(comm):
    grad, x, z = Bowl(comm.rank).grad, np.ones(5), np.ones(5)
    one = rx.SGP(rx.Ring(), order=WHILE).bind(comm, x, lr=0.05)
    other = rx.Decentralized(rx.Ring(), WHILE).bind(comm, z, lr=0.05)
    got, want = descend(one, x, grad, 60), descend(other, z, grad, 60)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    one.finish()
    other.finish()


@graphs
@pytest.mark.ranks(1, 2, 3, 4)
def test_law_sgp_is_osgp_without_delay_on_real_ranks(comm, graph):
    grad, x = Bowl(comm.rank).grad, np.ones(5)
    want = by_hand(comm, graph, 0, 60, 0.05, grad, np.ones(5))
    got = descend(rx.SGP(graph).bind(comm, x, lr=0.05), x, grad, 60)
    assert got.tobytes() == want.tobytes()


def test_law_any_delays_leave_the_same_bytes():
    def run():
        with rx.Comm.world() as comm:
            x = np.ones(5)
            opt = rx.OSGP(tau=2, send_every=1).bind(comm, x, lr=0.05)
            seen = descend(opt, x, Bowl(comm.rank).grad, 20)
            opt.finish()
            return seen

    runs = [simulate(6, run, seed, delayed=seed > 0) for seed in range(6)]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def test_law_sgp_on_the_complete_graph_is_allreduce_sgd():
    rule = rx.SGD(momentum=0.9, nesterov=True, weight_decay=1e-2)

    def run():
        with rx.Comm.world() as comm:
            grad = Bowl(comm.rank).grad
            x, y = np.ones(5), np.ones(5)
            one = rx.SGP(rx.Complete(), rule=rule).bind(comm, x, lr=0.02)
            other = rule.bind(comm, y, lr=0.02)
            return np.abs(descend(one, x, grad, 100) - descend(other, y, grad, 100)).max()

    assert max(simulate(4, run)) < 1e-13


@pytest.mark.parametrize(
    ("tau", "peers", "limit"),
    [(0, 1, 1.0), (1, 1, 2 / 3), (2, 1, 1 / 2), (4, 1, 1 / 3), (1, 2, 0.6)],
)
def test_weights_go_where_the_delay_says(tau, peers, limit):
    def run():
        with rx.Comm.world() as comm:
            x = np.zeros(1)
            opt = rx.OSGP(tau, rx.OnePeerExponential(peers), send_every=1).bind(comm, x, lr=0.0)
            weights = []
            for _ in range(60):
                opt.step(np.zeros(1))
                weights.append(opt.w[0])
            opt.finish()
            return [*weights, opt.w[0]]

    for weights in simulate(9, run):
        if (tau, peers) == (1, 1):
            want = 2 / 3 + (1 / 3) * (-0.5) ** np.arange(1, 61)
            np.testing.assert_allclose(weights[:-1], want, rtol=1e-14)
        np.testing.assert_allclose(weights[-2], limit, rtol=1e-3)
        np.testing.assert_allclose(weights[-1], 1.0, rtol=1e-14)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("tau", [1, 2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_law_mass_changes_by_the_gradients_alone(tau, early, seed):
    lr, n = 0.02, 8

    def run():
        with rx.Comm.world() as comm:
            x, grad = np.array([float(comm.rank)]), pulls(comm)
            opt = rx.OSGP(tau, send_every=1, early=early).bind(comm, x, lr=lr)
            means, grads, oldest = [opt.mean()[0]], [], 0
            for t in range(160):
                g = grad(x)
                if t < 20:
                    grads.append(rx.allreduce(comm, float(g[0]), op=rx.MEAN))
                comm.compute(1e-3)
                opt.step(g.copy())
                oldest = max([oldest, *(t - sent for sent, _ in opt.flight)])
                if t < 20:
                    means.append(opt.mean()[0])
            weight = rx.allreduce(comm, opt.w[0] + sum(d for *_, d in opt._land()))
            opt.finish()
            return means, grads, oldest, weight, x[0]

    for means, grads, oldest, weight, x in simulate(n, run, seed, delayed=True):
        np.testing.assert_allclose(np.diff(means), -lr * np.array(grads), atol=1e-14)
        assert oldest == tau - 1 or early
        assert oldest < tau
        assert abs(weight - n) < 1e-12
        assert abs(x - 3.5) < 0.6


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_a_neighbour_that_stops_blocks_after_tau_steps_and_no_earlier(tau):
    def run():
        comm, x = rx.Comm.world(timeout=5), np.zeros(1)
        opt = rx.OSGP(tau, rx.Ring(), send_every=1).bind(comm, x, lr=0.1)
        opt.step(np.zeros(1))  # the last one of rank 0
        if comm.rank == 0:
            comm.compute(100.0)
            return None
        with pytest.raises(rx.PeerTimeout, match=r"nothing from ranks? 0"):
            for _ in range(100):
                opt.step(np.zeros(1))
        for _, message in opt.flight:
            with pytest.raises(rx.BrokenComm):
                message.wait()
        return opt.t

    assert simulate(3, run)[1:] == [1 + tau] * 2


def test_the_mean_follows_gradient_descent_exactly():
    """Equal curvature: mean of gradients = gradient at the mean, though all ranks differ."""

    def run():
        with rx.Comm.world() as comm:
            x = np.array([10.0])
            opt = rx.SGP().bind(comm, x, lr=0.1)
            return [(opt.step(pulls(comm)(x)), opt.mean()[0], x[0])[1:] for _ in range(40)]

    want, y = [], 10.0
    for _ in range(40):
        y -= 0.1 * (y - 2.5)
        want.append(y)
    runs = np.array(simulate(6, run))
    np.testing.assert_allclose(runs[:, :, 0], np.broadcast_to(want, (6, 40)), rtol=1e-14)
    assert np.ptp(runs[:, -1, 1]) > 0.1


SPECS = [
    rx.SGP(),
    rx.SGP(order=WHILE),
    rx.SGP(rx.OnePeerExponential(2), order=WHILE),
    rx.OSGP(1),
    rx.OSGP(3, send_every=2),
    rx.OSGP(2, send_every=1, biased=True),
    rx.OSGP(1, rule=rx.SGD(momentum=0.9)),
    rx.SlowMo(rx.OSGP(1), every=3),
    rx.SGP(codec=rx.Quantizer(bits=8)),
    rx.OSGP(2, send_every=1, codec=rx.Quantizer(bits=4)),
]
specs = pytest.mark.parametrize("spec", SPECS, ids=str)


@specs
def test_law_saved_and_resumed_at_any_step_is_never_stopped(spec):
    def run():
        with rx.Comm.world() as comm:
            check_resume(comm, spec)

    simulate(5, run, delayed=True)


def test_looking_at_the_mean_changes_nothing():
    def run(look):
        with rx.Comm.world() as comm:
            x = np.ones(5)
            opt = rx.OSGP(2, send_every=1).bind(comm, x, lr=0.05)
            for _ in range(12):
                opt.step(Bowl(comm.rank).grad(x))
                if look:
                    mean = opt.mean()
            last = x.copy()
            opt.finish()
            return last, mean if look else None

    looked, blind = simulate(4, lambda: run(True)), simulate(4, lambda: run(False))
    assert same_everywhere([mean for _, mean in looked])
    for (x, _), (y, _) in zip(looked, blind, strict=True):
        assert x.tobytes() == y.tobytes()


def test_without_the_weight_models_are_too_small():
    def run():
        with rx.Comm.world() as comm:
            x = np.ones(1)
            opt = rx.OSGP(1, biased=True).bind(comm, x, lr=0.0)
            seen = descend(opt, x, np.zeros_like, 40)
            opt.finish()
            return seen[-1, 0]

    np.testing.assert_allclose(simulate(4, run), 2 / 3, rtol=1e-9)


@pytest.mark.ranks(1)
@specs
def test_law_one_rank_is_plain_descent(comm, spec):
    if isinstance(spec, rx.SlowMo):
        return
    x, y = np.ones(5), np.ones(5)
    got = descend(spec.bind(comm, x, lr=0.1), x, Bowl(0).grad, 9)
    want = descend(spec.rule.bind(comm, y, lr=0.1), y, Bowl(0).grad, 9)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("graph", [rx.OnePeerExponential(), rx.Ring()], ids=str)
def test_law_mass_is_exact_in_low_precision(tau, graph):
    def run():
        with rx.Comm.world() as comm:
            x, grad = np.full(40, 10.0), pulls(comm, size=40)
            opt = rx.OSGP(tau, graph, send_every=1, codec=rx.Quantizer(bits=4)).bind(
                comm, x, lr=0.05
            )
            means, pull = [opt.mean().mean()], []
            for _ in range(60):
                g = grad(x)
                pull.append(rx.allreduce(comm, float(g.mean()), op=rx.MEAN))
                opt.step(g)
                means.append(opt.mean().mean())
            opt.finish()
            return means, pull, x

    for means, pull, x in simulate(5, run, delayed=True):
        np.testing.assert_allclose(np.diff(means), -0.05 * np.array(pull), atol=1e-13)
        assert np.abs(x - means[-1]).max() < 1.0


def test_by_node_all_ranks_of_a_node_hold_one_model():
    def run():
        with rx.Comm.world() as comm, comm.by_node() as nodes:
            x, grad = np.full(3, 10.0), pulls(comm, size=3)
            opt = rx.SGP().bind(nodes, x, lr=0.1)
            for _ in range(60):
                opt.step(grad(x))
            for overlapped in (rx.OSGP(tau=1), rx.SGP(order=WHILE)):
                with pytest.raises(ValueError, match="Hierarchy"):
                    overlapped.bind(nodes, x, lr=0.1)
            return x.copy(), opt.mean()

    runs = rx.SimulatedWorld(6, ranks_per_node=2).run(run)
    for rank, (x, mean) in enumerate(runs):
        np.testing.assert_array_equal(x, runs[rank - rank % 2][0])
        np.testing.assert_allclose(mean, 2.5 + 7.5 * 0.9**60, rtol=1e-12)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="tau"):
        rx.OSGP(tau=-1)
    with pytest.raises(ValueError, match="needs tau=0"):
        rx.OSGP(tau=1, order=WHILE)
    with pytest.raises(TypeError, match="one of Order"):
        rx.SGP(order="first")
    with pytest.raises(ValueError, match="send_every"):
        rx.OSGP(send_every=0)
    with pytest.raises(TypeError, match="codec"):
        rx.OSGP(codec=rx.ErrorFeedback(rx.OneBit()))


@pytest.mark.parametrize("tau", [0, 1, 4, 16])
def test_no_more_is_given_away_than_comes_back(tau):
    def program():
        with rx.Comm.world() as comm:
            opt = rx.OSGP(tau).bind(comm, np.ones(3), lr=0.0)
            held = []
            for _ in range(3 * tau + 3):
                opt.step(np.zeros(3))
                held.append(opt.w[0])
            opt.finish()
            return min(held)

    assert min(rx.SimulatedWorld(4).run(program)) >= 0.5


SWAP = rx.from_matrix([[0, 1], [1, 0]])


@pytest.mark.parametrize("tau", [1, 3, None])
def test_a_topology_that_leaves_a_rank_with_nothing_is_refused(tau):
    """With w = 0 the model would be 0 / 0, and no later step would make it finite again."""

    def run():
        with rx.Comm.world() as comm:
            with pytest.raises(ValueError, match="gives all it has away"):
                rx.OSGP(tau, SWAP).bind(comm, np.ones(3), lr=0.1)
            with pytest.raises((ValueError, rx.MismatchError), match="gives all it has away"):
                rx.AsyncPushSum(comm, np.ones(3), SWAP)
            x = np.full(3, float(comm.rank))
            rx.SGP(SWAP).bind(comm, x, lr=0.1).step(np.zeros(3))
            return x[0]

    assert simulate(2, run) == [1, 0]


ALL = [
    rx.OSGP(),
    rx.Decentralized(),
    rx.Choco(),
    rx.LowPrecisionDecentralized(),
    rx.SlowMo(rx.SGP()),
    rx.LocalSGD(every=2),
    rx.DiLoCo(every=2),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("spec", ALL, ids=lambda spec: type(spec).__name__)
def test_parameters_that_no_step_could_change_are_refused_when_bound(comm, spec):
    torch = pytest.importorskip("torch")
    read_only = np.ones(3)
    read_only.flags.writeable = False
    for x, kind, words in [
        (np.ones(3, int), TypeError, "float"),
        (read_only, ValueError, "read-only"),
        (torch.nn.Parameter(torch.ones(3)), ValueError, "detach"),
    ]:
        with pytest.raises(kind, match=words):
            spec.bind(comm, x, lr=0.1)


def test_free_running_osgp_restores_what_was_saved_after_finish():
    def run():
        with rx.Comm.world() as comm:
            x = np.full(3, float(comm.rank))
            opt = rx.OSGP(tau=None).bind(comm, x, lr=0.1)
            opt.step(np.zeros(3))
            opt.finish()
            state, want = opt.state_dict(), x.copy()
            opt.step(np.ones(3))
            opt.load_state_dict(state)
            np.testing.assert_array_equal(x, want)
            opt.step(np.zeros(3))
            opt.finish()

    simulate(3, run)


def test_ranks_that_run_freely_do_not_diverge_beside_a_slow_one():
    """A step on the numerator moves x by lr / w, so w must not fall far."""

    def run(spec):
        with rx.Comm.world() as comm:
            x = np.full(1, float(comm.rank))
            opt, furthest = spec.bind(comm, x, lr=0.7), 0.0
            for _ in range(25 if comm.rank == 0 else 200):
                comm.compute(8e-3 if comm.rank == 0 else 1e-3)
                opt.step(x - comm.rank)
                furthest = max(furthest, abs(x[0]))
            opt.finish()
            return furthest

    def furthest(**options):
        spec = rx.OSGP(tau=None, rule=rx.SGD(momentum=0.9), **options)
        return max(simulate(3, lambda: run(spec)))

    assert furthest() < 30
    assert furthest(floor=0.1) > 1e3


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("inner", [rx.SGP(), rx.OSGP(1), rx.OSGP(2), rx.SGP(order=WHILE)], ids=str)
def test_a_slow_step_is_whole_whatever_was_on_its_way(inner, average):
    def run():
        with rx.Comm.world() as comm:
            x = np.zeros(3)
            spec = rx.SlowMo(inner, every=2, beta=0.5, average=average)
            opt = spec.bind(comm, x, lr=0.125)
            for _ in range(40):
                opt.step(np.ones(3))
            mean = opt.mean()
            opt.finish()
            return mean

    u = z = 0.0
    for _ in range(20):
        u = 0.5 * u + 2
        z -= 0.125 * u
    np.testing.assert_allclose(simulate(4, run), z)


@pytest.mark.parametrize("spec", [rx.OSGP(1), rx.OSGP(None), rx.SGP(order=WHILE)], ids=str)
def test_the_model_is_what_it_was_replaced_by(spec):
    def run():
        with rx.Comm.world() as comm:
            x = np.ones(3)
            opt = spec.bind(comm, x, lr=0.1)
            opt.step(np.zeros(3))
            assert opt.weight != 1
            opt.replace(np.full(3, 2.0))
            np.testing.assert_allclose(opt.y / opt.weight, 2.0)
            opt.finish()

    simulate(2, run)


def test_a_biased_model_is_replaced_as_it_is():
    uneven = rx.from_matrix([[0.5, 0.25], [0.5, 0.75]])

    def run():
        with rx.Comm.world() as comm:
            x = np.ones(3)
            opt = rx.OSGP(0, uneven, biased=True, order=WHILE).bind(comm, x, lr=0.1)
            for _ in range(3):
                opt.step(np.zeros(3))
            opt.finish()
            opt.replace(np.full(3, 2.0))
            return opt.y.tolist()

    assert simulate(2, run) == [[2.0] * 3] * 2
