"""Where the parameters lie that `attach` mixes, and who may move them."""

import time
import weakref

import pytest
from loops import (
    loss_of,
    nn,
    perceptron,
    sgd_of,
    torch,
    train,
)

import relaxmpi as rx


@pytest.mark.ranks(2)
def test_parameters_lie_in_the_buffer_that_is_sent(comm):
    model = perceptron()
    model[0].weight.data = model[0].weight.data.T.contiguous().T  # of another memory layout
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.OSGP(), comm=comm) as sync:
        train(comm, model, optimizer, 2)
        part = sync._engine.parts[0]
        low = part.flat.data_ptr()
        inside = [low <= p.data_ptr() < low + part.flat.nbytes for p in model.parameters()]
        assert inside == [False] + [True] * 5
        assert not model[0].weight.is_contiguous()
        with torch.no_grad():
            own = [p.clone() for p in model.parameters()]
            with sync.averaged():
                assert not all(map(torch.equal, own, model.parameters()))
        assert all(map(torch.equal, own, model.parameters()))


def shared(model):
    model[0].weight.share_memory_()


def doubled(model):
    model.double().float()


def assigned(model):
    model[0].weight.data = model[0].weight.detach().clone()


WHILE = rx.Order.COMBINE_WHILE_ADAPT
TRAVELLING = [rx.Decentralized(order=WHILE), rx.SGP(order=WHILE), rx.OSGP(), rx.SGP()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("move", [shared, doubled, assigned])
@pytest.mark.parametrize("spec", TRAVELLING, ids=str)
def test_parameters_that_somebody_moves_stay_there_and_lose_nothing(comm, spec, move):
    models = [perceptron(), perceptron()]
    for model, moved in zip(models, (False, True), strict=True):
        optimizer = sgd_of(model)
        with rx.attach(model, optimizer, spec, comm=comm):
            train(comm, model, optimizer, 2)
            if moved:
                move(model)
                where = model[0].weight.data_ptr()
            train(comm, model, optimizer, 3)
        if moved:
            assert model[0].weight.data_ptr() == where
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q)  # matrix products depend on where matrices begin


@pytest.mark.ranks(2)
def test_parameters_assigned_between_steps_are_missed_if_they_would_be_lost(comm):
    model = perceptron()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.OSGP(), comm=comm) as sync:
        train(comm, model, optimizer, 1)
        model[0].weight.data = model[0].weight.detach() + 1
        with pytest.raises(rx.RelaxError, match=r"0\.weight was changed between two steps"):
            optimizer.step()
        with torch.no_grad():
            model[0].weight -= 1
        sync._engine.parts[0].show_model()


@pytest.mark.ranks(2)
def test_parameters_that_share_memory_go_on_sharing_it(comm):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    model[1].weight.data = model[0].weight.data
    model[2].weight.share_memory_()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.OSGP(), comm=comm):
        train(comm, model, optimizer, 2)
        assert model[1].weight.data_ptr() == model[0].weight.data_ptr()
        assert model[2].weight.is_shared()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("spec", TRAVELLING[:2], ids=str)
def test_two_optimizers_of_one_model_are_attached_one_after_the_other(comm, spec):
    model = perceptron()
    first, second = sgd_of(model[0]), sgd_of(model[2:])
    with rx.attach(model, first, spec, comm=comm), rx.attach(model, second, spec, comm=comm):
        for _ in range(2):
            loss_of(model, comm.rank, comm.size).backward()
            first.step()
            second.step()


@pytest.mark.ranks(2)
def test_a_peer_that_asks_during_backward_does_not_move_the_parameters(comm):
    model = perceptron()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.ADPSGD(), comm=comm) as sync:
        moved = 0
        for _ in range(5):
            train(comm, model, optimizer, 1)
            shown = [p.detach().clone() for p in model.parameters()]
            part = sync._engine.parts[0]
            before = part.flat.clone()
            for _ in range(100):
                part.bound.poll()
                time.sleep(1e-4)
            moved += not torch.equal(before, part.flat)
            assert all(map(torch.equal, shown, model.parameters()))
        assert rx.allreduce(comm, moved, op=rx.MAX) > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("spec", [rx.SGP(), rx.ADPSGD()], ids=str)
def test_backward_does_not_mistake_the_mean_for_the_model_of_forward(comm, spec):
    model = perceptron()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, spec, comm=comm) as sync:
        train(comm, model, optimizer, 2)
        loss = loss_of(model, comm.rank, comm.size)
        with sync.averaged(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.ranks(2)
def test_the_mean_model_is_let_go(comm):
    model = perceptron()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.Decentralized(), comm=comm) as sync:
        train(comm, model, optimizer, 2)
        with sync.averaged():
            mean = weakref.ref(sync._engine.parts[0]._shown[0].own)
        assert mean() is None
