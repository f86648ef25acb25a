"""`attach` with the algorithms that mix parameters is `bind` on arrays, and resumes exactly."""

import copy
import dataclasses

import pytest
from loops import (
    loss_of,
    nn,
    numbers,
    perceptron,
    sgd_of,
    torch,
    train,
)

import relaxmpi as rx

MOMENTUM = rx.SGD(momentum=0.9)
SPECS = {
    "sgp": rx.SGP(),
    "sgp, cta": rx.SGP(order=rx.Order.COMBINE_WHILE_ADAPT),
    "osgp": rx.OSGP(tau=1),
    "osgp, rarely": rx.OSGP(tau=3, send_every=2),
    "osgp, biased": rx.OSGP(tau=1, biased=True),
    "atc": rx.Decentralized(rx.Ring(), interval=2),
    "cta": rx.Decentralized(rx.Ring(), rx.Order.COMBINE_WHILE_ADAPT),
    "osgp, 8 bits": rx.OSGP(tau=1, codec=rx.MinMaxUInt8()),
    "choco": rx.Choco(rx.Quantizer(bits=4)),
    "choco, later": rx.Choco(rx.Quantizer(bits=4), order=rx.Order.COMBINE_WHILE_ADAPT),
    "ring, 8 bits": rx.LowPrecisionDecentralized(),
    "slowmo": rx.SlowMo(rx.OSGP(tau=1), every=3),
    "slowmo, cta": rx.SlowMo(
        rx.Decentralized(order=rx.Order.COMBINE_WHILE_ADAPT), every=2, average=False
    ),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def with_momentum(spec):
    """The algorithm with the rule that `attach` leaves to the optimizer."""
    if isinstance(spec, rx.SlowMo):
        return dataclasses.replace(spec, algorithm=with_momentum(spec.algorithm))
    return dataclasses.replace(spec, rule=MOMENTUM)


@pytest.mark.ranks(2, 3)
@specs
def test_law_attach_is_bind_on_arrays(comm, spec):
    attached, by_hand = perceptron(), perceptron()
    lr = 0.125  # a power of two: lr * g is exact, however the update is computed
    optimizer = sgd_of(attached, lr=lr)
    params = list(by_hand.parameters())
    bucket = rx.Bucket(params)
    with rx.attach(attached, optimizer, spec, comm=comm) as sync:
        opt = with_momentum(spec).bind(comm, bucket.flat, lr=lr, name="bucket 0")
        for t in range(6):
            train(comm, attached, optimizer, 1)
            grads = torch.autograd.grad(loss_of(by_hand, comm.rank, comm.size), params)
            opt.step(rx.Bucket(grads).flat)
            with torch.no_grad():
                for p, view in zip(params, bucket.views, strict=True):
                    p.copy_(view)
            assert torch.equal(numbers(attached), numbers(by_hand)), f"step {t}"
        with sync.averaged():
            mean = torch.cat([p.detach().ravel() for p in attached.parameters()])
            assert torch.equal(mean, opt.mean())
        opt.finish()
    assert torch.equal(numbers(attached).float(), bucket.flat)


@pytest.mark.ranks(2)
@specs
def test_law_saved_and_resumed_is_never_stopped(comm, spec):
    whole, resumed = perceptron(), perceptron(7)
    optimizer = sgd_of(whole)
    with rx.attach(whole, optimizer, spec, comm=comm) as sync:
        train(comm, whole, optimizer, 4)
        saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), sync.state_dict()))
        train(comm, whole, optimizer, 3)
        end = numbers(whole)
    again = sgd_of(resumed)
    with rx.attach(resumed, again, spec, comm=comm) as sync:
        train(comm, resumed, again, 1)
        resumed.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        sync.load_state_dict(saved[2])
        train(comm, resumed, again, 3)
        assert torch.equal(numbers(resumed), end)
    assert torch.equal(numbers(resumed), numbers(whole))


@pytest.mark.ranks(2)
def test_a_state_of_other_buckets_is_refused(comm):
    model, other = perceptron(), perceptron()
    with rx.attach(model, sgd_of(model), rx.SGP(), comm=comm, bucket_bytes=1) as sync:
        state = sync.state_dict()
    sync = rx.attach(other, sgd_of(other), rx.SGP(), comm=comm)
    with pytest.raises(ValueError, match="other"):
        sync.load_state_dict(state)
    sync.detach()


@pytest.mark.ranks(2)
def test_a_change_that_the_numerator_would_not_see_is_refused(comm):
    model = perceptron()
    optimizer = sgd_of(model)
    rx.attach(model, optimizer, rx.OSGP(tau=1), comm=comm)
    train(comm, model, optimizer, 2)
    with torch.no_grad():
        model[2].weight.clamp_(-0.1, 0.1)
    with pytest.raises(rx.RelaxError, match=r"parameter 2\.weight was changed between two steps"):
        train(comm, model, optimizer, 1)


@pytest.mark.ranks(3)
def test_law_osgp_keeps_its_mass_through_attach(comm):
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with rx.attach(model, optimizer, rx.OSGP(tau=2, send_every=1), comm=comm) as sync:
        before = None
        for _ in range(5):
            train(comm, model, optimizer, 1)
            grads = torch.cat([p.grad.double().ravel() for p in model.parameters()])
            step = 0.25 * rx.allreduce(comm, grads, op=rx.MEAN)
            with sync.averaged():
                mean = numbers(model)
            if before is not None:
                torch.testing.assert_close(mean, before - step, rtol=0, atol=3e-7)
            before = mean
        assert 0 < sync.spread() < 0.1


@pytest.mark.ranks(2)
def test_messages_move_during_backward(comm):
    model = perceptron(width=256)
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.OSGP(tau=1), comm=comm) as sync:
        train(comm, model, optimizer, 3)
        stats = sync.stats()
        count = sum(p.numel() for p in model.parameters())
        assert stats.payload_bytes == 4 * count + 8 or stats.payload_bytes == 4 * count
        assert stats.buckets == 1


def three_steps(comm, spec):
    model = nn.Linear(2, 1)
    optimizer = sgd_of(model)
    sync = rx.attach(model, optimizer, spec, comm=comm)

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    steps(3)
    return steps, sync


early = pytest.mark.parametrize(
    "spec", [rx.SGP(rx.Ring()), rx.OSGP(tau=2, send_every=1)], ids=["sgp", "osgp"]
)


@early
def test_a_rank_that_leaves_early_is_an_error(spec):
    def run():
        comm = rx.Comm.world(timeout=5)
        steps, _ = three_steps(comm, spec)
        if comm.rank == 0:
            return 0.0
        begin = comm.now()
        with pytest.raises((rx.PeerLeft, rx.PeerTimeout)):
            steps(20)
        return comm.now() - begin

    assert max(rx.SimulatedWorld(3).run(run)) < 6


@early
def test_a_rank_that_detaches_early_is_an_error_that_tells_so(spec):
    def run():
        with rx.Comm.world() as comm:
            steps, sync = three_steps(comm, spec)
            if comm.rank:
                steps(20)
            sync.detach()

    with pytest.raises(rx.Deadlock, match=r"rank 0 waits in barrier detach\(\) after 3 steps"):
        rx.SimulatedWorld(3).run(run)


@pytest.mark.parametrize("spec", [rx.OSGP(tau=None, topology=rx.Ring()), rx.ADPSGD()], ids=str)
def test_ranks_that_wait_for_nobody_may_take_different_numbers_of_steps(spec):
    def run():
        with rx.Comm.world() as comm:
            model = nn.Module()
            model.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
            with rx.attach(model, optimizer, spec, comm=comm) as sync:
                steps = 600 // (1 + 2 * (comm.rank == 3))
                begin = comm.now()
                for _ in range(steps):
                    optimizer.zero_grad()
                    comm.compute(1e-3 * (1 + 2 * (comm.rank == 3)))  # three times slower
                    (0.5 * (model.w - comm.rank).square()).sum().backward()
                    optimizer.step()
                took = comm.now() - begin
                with sync.averaged():
                    mean = model.w.item()
                spread = sync.spread()
                state = sync.state_dict()
                sync.load_state_dict(state)
            return took / steps, mean, spread, model.w.item()

    runs = rx.SimulatedWorld(4).run(run)
    for rank, (pace, mean, spread, own) in enumerate(runs):
        assert pace < 1.2e-3 * (1 + 2 * (rank == 3)), "somebody waited for the slow rank"
        assert mean == runs[0][1]
        # Fast ranks pull more often: between the mean of all and that of pulls.
        assert 1.2 < mean < 1.6
        assert spread < 0.5
        assert abs(own - mean) < 0.5
