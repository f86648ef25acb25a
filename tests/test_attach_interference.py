"""`attach` notices what would make ranks differ: gradients touched on their way, drifting ranks."""

import pytest
from loops import nn, push, sgd_of, torch, weight_of

import relaxmpi as rx


def all_the_same(comm, error):
    """Whether all ranks got an error of the same words."""
    texts = comm.mpi.allgather(str(error.value))
    return texts == [texts[0]] * comm.size


USES = {
    "clip": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip_value": lambda m, o: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "data": lambda m, o: m.w.grad.data.clamp_(-1, 1),
    "numpy": lambda m, o: m.w.grad.numpy(),
    "norm": lambda m, o: m.w.grad.norm(),
    "in place": lambda m, o: m.w.grad.mul_(2),
    "new": lambda m, o: setattr(m.w, "grad", m.w.grad * 2),
    "zero": lambda m, o: o.zero_grad(set_to_none=False),
    "unscale": lambda m, o: torch.amp.GradScaler("cpu").unscale_(o),
    "another": lambda m, o: m.w.grad.add_(1),
}


@pytest.mark.ranks(2)
def test_gradients_on_their_way_cannot_be_used(comm):
    model, optimizer = weight_of([1.0, 2.0])
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        for t, (name, use) in enumerate(USES.items()):
            optimizer.zero_grad()
            push(model, [1.0, comm.rank])
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
            scaler.scale(torch.ones(1))
            with pytest.raises(rx.RelaxError, match=r"call sync\.wait\(\)"):
                scaler.unscale_(optimizer) if name == "unscale" else use(model, optimizer)
            sync.wait()
            assert model.w.grad.tolist() == [1.0, 0.5], name
            optimizer.step()
            assert sync.stats().steps == t + 1


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("when", ["first", "later"])
def test_interference_on_one_rank_is_told_to_all(comm, when):
    def replace(model, sync):
        model.w.grad = torch.zeros(2)

    def forget(model, sync):
        model.w.grad = None

    def behind_its_back(model, sync):
        if when == "later":  # the view that a step before has left
            kept.mul_(2)
        else:
            model.w.grad = torch.ones(2)

    def weigh(model, sync):
        if when == "later":
            sync.weight = 2.0
        else:
            forget(model, sync)

    said = {replace: "replaced", forget: "set to None", behind_its_back: "", weigh: ""}
    for do, words in said.items():
        model, optimizer = weight_of([1.0, 2.0])
        sync = rx.attach(model, optimizer, rx.SGD(), comm=comm)
        if when == "later":
            push(model, [1.0, 1.0])
            optimizer.step()
            kept = model.w.grad
            optimizer.zero_grad()
        if do is weigh:
            sync.weight = 1.0
        push(model, [1.0, 1.0])
        if comm.rank == 1:
            do(model, sync)
        for _ in range(2):
            with pytest.raises(rx.RelaxError, match=rf"on rank 1, in step .*{words}") as error:
                optimizer.step()
        assert all_the_same(comm, error)
        sync.detach()


@pytest.mark.ranks(2)
def test_a_model_that_is_moved_between_steps(comm):
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 2)
    optimizer = sgd_of(model)
    x = torch.ones(1, 3, 2, 2)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm):
        for t in range(3):
            optimizer.zero_grad()
            model(x * (1 + comm.rank)).sum().backward()
            if t < 2:
                optimizer.step()
            if t == 1:
                model.to(memory_format=torch.channels_last)
        with pytest.raises(rx.RelaxError, match=r"weight was moved"):
            optimizer.step()


@pytest.mark.ranks(2, 3)
def test_a_step_left_out_on_one_rank_is_noticed(comm):
    for waits in (False, True):
        model, optimizer = weight_of([1.0, 2.0])
        sync = rx.attach(model, optimizer, rx.SGD(), comm=comm)
        with pytest.raises(rx.RelaxError, match="have taken 1 to 2 steps") as error:
            for t in range(4):
                optimizer.zero_grad()
                push(model, [1.0, 1.0])
                if waits:
                    sync.wait()
                if t != 1 or comm.rank != 1:
                    optimizer.step()
        assert all_the_same(comm, error)
        sync.detach()


@pytest.mark.ranks(2, 3)
def test_learning_rates_that_drift_apart_are_noticed(comm):
    """As by ReduceLROnPlateau on each rank's own loss."""
    model, optimizer = weight_of([1.0, 2.0])
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    sync = rx.attach(model, optimizer, rx.SGD(), comm=comm)
    with pytest.raises(rx.RelaxError, match=r"settings .* differ between ranks in step 2") as error:
        for t in range(4):
            push(model, [1.0, 1.0])
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(1.0 + t if comm.rank else 1.0 - t / 10)
    assert all_the_same(comm, error)
    sync.detach()
