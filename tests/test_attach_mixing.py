"""`attach` around algorithms that mix parameters: the seam, with ten lines that all-reduce x."""

import copy
import dataclasses

import numpy as np
import pytest
from loops import (
    assert_same_model,
    copies,
    loss_of,
    nn,
    numbers,
    perceptron,
    push,
    sgd_of,
    torch,
    traces,
    train,
    weight_of,
)

import relaxmpi as rx


class BoundAverage(rx.Bound):
    def __init__(self, rule, comm, x, lr, name):
        self.comm, self.x, self.lr, self.name, self.rule = comm, x, lr, name, rule.local()

    def on_step(self, g):
        self.rule.apply(self.x, g, self.lr)

    def on_params(self):
        rx.allreduce(self.comm, self.x, op=rx.MEAN, name=self.name)


@dataclasses.dataclass(frozen=True)
class Average(rx.Algorithm):
    """Step, then replace x by its mean: for rules that are linear in g, AllReduce SGD."""

    rule: rx.Rule = dataclasses.field(default_factory=rx.SGD)

    def bind(self, comm, x, *, lr, name=""):
        return BoundAverage(self.rule, comm, x, lr, name)

    mixes = True


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("limits", [{}, {"bucket_bytes": 2000}], ids=str)
def test_averaging_after_each_step_is_allreduce_sgd(comm, limits):
    alone, together = perceptron(), perceptron(comm.rank)
    optimizer = sgd_of(alone)
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(alone).backward()
        optimizer.step()
    optimizer = sgd_of(together)
    with rx.attach(together, optimizer, Average(), comm=comm, **limits) as sync:
        train(comm, together, optimizer)
        assert_same_model(comm, together)
        assert sync.spread() == 0
        stats = sync.stats()
        assert stats.steps == 4
        if comm.size > 1:
            assert stats.buckets == (1 if not limits else 3)
            assert stats.payload_bytes > 0
    np.testing.assert_allclose(numbers(together), numbers(alone), rtol=0, atol=2e-6)


@pytest.mark.ranks(1)
def test_law_one_rank_is_the_plain_loop_and_costs_nothing(comm):
    models = [perceptron(), perceptron()]
    for model, attached in zip(models, [False, True], strict=True):
        optimizer = sgd_of(model, weight_decay=1e-3)
        sync = rx.attach(model, optimizer, Average(), comm=comm) if attached else None
        train(comm, model, optimizer)
        if sync is not None:
            assert sync.bound == []
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            with sync.averaged():
                assert torch.equal(numbers(models[0]), numbers(models[1]))
            assert sync.stats().messages < 2
            sync.detach()
    assert torch.equal(numbers(models[0]), numbers(models[1]))


class Alone(Average):
    """No exchange at all: the ranks go apart, as far as they can."""

    def bind(self, comm, x, *, lr, name=""):
        bound = super().bind(comm, x, lr=lr, name=name)
        bound.on_params = lambda: False
        return bound


def divided(comm, **limits):
    """A model that each rank has trained by itself for some steps."""
    model = perceptron()
    optimizer = sgd_of(model)
    sync = rx.attach(model, optimizer, Alone(), comm=comm, **limits)
    train(comm, model, optimizer)
    return model, optimizer, sync


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("limits", [{}, {"bucket_bytes": 2000}], ids=str)
def test_averaged_shows_the_mean_model_and_gives_the_own_one_back(comm, limits):
    model, optimizer, sync = divided(comm, **limits)
    mine = numbers(model)
    mean = rx.allreduce(comm, mine.clone(), op=rx.MEAN)
    with sync.averaged():
        np.testing.assert_allclose(numbers(model), mean, rtol=0, atol=1e-6)
        sync.check()
        with pytest.raises(rx.RelaxError, match="inside averaged"):
            optimizer.step()
    assert torch.equal(numbers(model), mine)
    with pytest.raises(rx.RelaxError, match=r"differs .* see sync\.spread\(\) for how far"):
        sync.check()
    apart = rx.allreduce(comm, float((mine - mean).square().sum()), op=rx.MEAN)
    np.testing.assert_allclose(sync.spread(), (apart / mean.square().sum()) ** 0.5, rtol=1e-4)
    train(comm, model, optimizer, 1)
    sync.detach()


@pytest.mark.ranks(2)
def test_averaged_sees_what_the_user_did_to_the_parameters(comm):
    model, _, sync = divided(comm)
    with torch.no_grad():
        model[0].weight.fill_(comm.rank)
    with sync.averaged():
        assert (model[0].weight == 0.5).all()
    assert (model[0].weight == comm.rank).all()
    sync.detach()


@pytest.mark.ranks(2)
def test_detach_leaves_no_trace(comm):
    model = perceptron()
    optimizer = sgd_of(model)
    before = traces(model, optimizer)
    with rx.attach(model, optimizer, Average(), comm=comm) as sync:
        assert traces(model, optimizer) != before
        with pytest.raises(ValueError, match="attached already"):
            rx.attach(model, optimizer, Average(), comm=comm)
        train(comm, model, optimizer, 2)
        low = sync._engine.parts[0].flat.data_ptr()
        high = low + sync._engine.parts[0].flat.nbytes
    sync.detach()
    assert traces(model, optimizer) == before
    assert not any(low <= p.data_ptr() < high for p in model.parameters())
    memory = [p.untyped_storage() for p in model.parameters()]
    assert len({m.data_ptr() for m in memory}) == len(memory)
    assert all(m.nbytes() == p.nbytes for m, p in zip(memory, model.parameters(), strict=True))


def second(model, optimizer, sync):
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def closure(model, optimizer, sync):
    optimizer.step(lambda: 0.0)


def replaced(model, optimizer, sync):
    model.w = nn.Parameter(torch.zeros(2))
    optimizer.step()


def weighed(model, optimizer, sync):
    sync.weight = 2.0


def joined(model, optimizer, sync):
    with sync.join():
        pass


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("do", "words"),
    [
        (second, "not attached"),
        (closure, "closure"),
        (replaced, "was replaced"),
        (weighed, "exchange gradients"),
        (joined, "exchange gradients"),
    ],
)
def test_what_would_go_wrong_is_refused(comm, do, words):
    model, optimizer = weight_of([1.0, 2.0])
    sync = rx.attach(model, optimizer, Average(), comm=comm)
    push(model, [1.0, 1.0])
    with pytest.raises(rx.RelaxError, match=words):
        do(model, optimizer, sync)


@pytest.mark.ranks(2)
def test_an_own_rule_is_refused(comm):
    model, optimizer = weight_of([1.0])
    with pytest.raises(ValueError, match="has no effect here"):
        rx.attach(model, optimizer, Choice(rule=rx.SGD(momentum=0.5)), comm=comm)
    with pytest.raises(ValueError, match="around one of those"):
        rx.attach(model, optimizer, rx.SlowMo(rx.SGD()), comm=comm)


class Choice(Average):
    @property
    def own_rule(self):
        return self.rule.own_rule


@pytest.mark.ranks(2, 3)
def test_ranks_that_took_different_numbers_of_steps_are_told(comm):
    model, optimizer, sync = divided(comm)
    train(comm, model, optimizer, comm.rank)
    with pytest.raises(rx.MismatchError, match="after 4 steps"), sync.averaged():
        pass
    with pytest.raises(rx.MismatchError, match=r"check\(\) after 4 steps"):
        sync.check()
    with pytest.raises(rx.MismatchError, match=r"average_buffers\(\) after 4 steps"):
        sync.average_buffers()
    train(comm, model, optimizer, comm.size - comm.rank)
    sync.detach()


@pytest.mark.ranks(2)
def test_gradients_are_the_users_to_clip_and_add_up(comm):
    (model, optimizer), (twin, plain) = copies(perceptron(), sgd_of)
    sync = rx.attach(model, optimizer, Alone(), comm=comm)
    for m, o in ((model, optimizer), (twin, plain)):
        for _ in range(2):
            o.zero_grad()
            with sync.no_sync():
                loss_of(m, comm.rank, comm.size).backward()
            loss_of(m, comm.rank, comm.size).backward()
            sync.wait()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            o.step()
    assert torch.equal(numbers(model), numbers(twin))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    sync.detach()


@pytest.mark.ranks(2)
def test_learning_rates_may_differ(comm):
    model, optimizer = weight_of([0.0, 0.0], lr=1.0)
    with rx.attach(model, optimizer, Average(), comm=comm) as sync:
        optimizer.param_groups[0]["lr"] = 1.0 + comm.rank
        push(model, [1.0, 2.0])
        optimizer.step()
        assert sync.bound[0].lr == 1.0 + comm.rank
        assert model.w.tolist() == [-1.5, -3.0]


@pytest.mark.ranks(2)
def test_what_is_not_finite_stays_on_its_rank(comm):
    bad = float("nan") if comm.rank == 1 else 1.0
    model, optimizer = weight_of([1.0, 1.0], momentum=0.5)
    with rx.attach(model, optimizer, Average(), comm=comm, nonfinite=rx.NonFinite.SKIP) as sync:
        push(model, [1.0, bad])
        optimizer.step()
        assert model.w.tolist() == [0.5, 0.5]
        assert sync.stats().skipped == comm.rank
        optimizer.zero_grad()
        push(model, [1.0, 1.0])
        optimizer.step()

    model, optimizer = weight_of([1.0, 1.0])
    sync = rx.attach(model, optimizer, Average(), comm=comm, nonfinite=rx.NonFinite.RAISE)
    push(model, [1.0, bad])
    if comm.rank == 1:
        with pytest.raises(rx.NonFiniteError, match="gradient of w is not finite on rank 1"):
            optimizer.step()
        optimizer.zero_grad()
        push(model, [1e30, 1e38])
        optimizer.param_groups[0]["lr"] = 1e10
        with pytest.raises(rx.NonFiniteError, match="parameter w is not finite on rank 1"):
            optimizer.step()


@pytest.mark.ranks(2)
def test_kinds_of_parameters(comm):
    torch.manual_seed(comm.rank)
    model = nn.ParameterList(
        [
            torch.randn(3),
            torch.randn(2, 2, dtype=torch.float64),
            torch.randn(2, dtype=torch.complex64),
            torch.randn(4, 3).t(),
            torch.randn(4, dtype=torch.bfloat16),
            torch.randn(()),
        ]
    )
    model[0].requires_grad_(False)
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, Average(), comm=comm) as sync:
        for _ in range(3):
            optimizer.zero_grad()
            sum((p.abs().double().square().sum() * (1 + comm.rank)) for p in model[1:]).backward()
            optimizer.step()
            assert_same_model(comm, model)
        assert sync.stats().buckets == 4
        assert sync.spread() < 1e-6
        with sync.averaged():
            pass


@pytest.mark.ranks(2, 3)
def test_law_saved_and_resumed_is_never_stopped(comm):
    whole, stopped, resumed = perceptron(), perceptron(), perceptron(7)
    optimizer = sgd_of(whole)
    with rx.attach(whole, optimizer, Average(), comm=comm):
        train(comm, whole, optimizer, 5)
    first = sgd_of(stopped)
    with rx.attach(stopped, first, Average(), comm=comm) as sync:
        train(comm, stopped, first, 2)
        saved = copy.deepcopy((stopped.state_dict(), first.state_dict(), sync.state_dict()))
    optimizer = sgd_of(resumed)
    with rx.attach(resumed, optimizer, Average(), comm=comm) as sync:
        resumed.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        sync.load_state_dict(saved[2])
        train(comm, resumed, optimizer, 3)
    assert torch.equal(numbers(resumed), numbers(whole))


@pytest.mark.ranks(2)
def test_buffers_stay_local_until_averaged(comm):
    model = nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, Average(), comm=comm) as sync:
        train(comm, model, optimizer, 2)
        mine = model[1].running_mean.clone()
        assert not torch.equal(*rx.allgather(comm, mine))
        sync.average_buffers()
        assert torch.equal(*rx.allgather(comm, model[1].running_mean))


MIXERS = {
    "OSGP": rx.OSGP(),
    "SGP while": rx.SGP(order=rx.Order.COMBINE_WHILE_ADAPT),
    "codec": rx.OSGP(codec=rx.Quantizer(bits=8)),
    "free": rx.OSGP(tau=None),
    "D-PSGD": rx.Decentralized(),
    "while": rx.Decentralized(order=rx.Order.COMBINE_WHILE_ADAPT),
    "CHOCO": rx.Choco(),
    "BAGUA": rx.LowPrecisionDecentralized(),
    "AD-PSGD": rx.ADPSGD(),
    "SlowMo": rx.SlowMo(rx.OSGP(), every=2),
    "local": rx.LocalSGD(every=2),
    "DiLoCo": rx.DiLoCo(every=2),
}


def test_the_state_of_another_algorithm_is_refused_before_anything_changes():
    def run():
        with rx.Comm.world() as comm:
            states = {}
            for name, spec in MIXERS.items():
                with rx.attach(model := perceptron(), sgd_of(model), spec, comm=comm) as sync:
                    states[name] = sync.state_dict()
            for name, spec in MIXERS.items():
                with rx.attach(model := perceptron(), sgd_of(model), spec, comm=comm) as sync:
                    for other, state in states.items():
                        if other == name:
                            sync.load_state_dict(state)
                            continue
                        with pytest.raises(ValueError, match="this state is of"):
                            sync.load_state_dict(state)

    rx.SimulatedWorld(2).run(run)


@pytest.mark.ranks(2)
def test_the_mean_is_not_saved_with_the_state_of_one_rank(comm):
    model = perceptron(comm.rank)
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.Decentralized(), comm=comm) as sync:
        train(comm, model, optimizer, 2)
        state = sync.state_dict()
        with sync.averaged():
            for wrong in (
                sync.state_dict,
                sync.quiesce,
                sync.detach,
                lambda: sync.load_state_dict(state),
            ):
                with pytest.raises(rx.RelaxError, match=r"inside averaged\(\)"):
                    wrong()


@pytest.mark.ranks(2)
def test_a_mean_that_is_not_finite_is_said_once(comm, caplog):
    model, _, sync = divided(comm)
    with torch.no_grad():
        model[0].bias[1] = float("inf") if comm.rank else 1.0
    for _ in range(2):
        with sync.averaged():
            pass
        assert not np.isfinite(sync.spread())
    said = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(said) == (comm.rank == 0)
    assert all("in step 4: training has diverged" in text for text in said)
    sync.detach()
