"""`attach` with several optimizers, losses, buffers and starts."""

import copy

import pytest
from loops import (
    SINGLE,
    SMALL,
    Branches,
    assert_close,
    assert_same_model,
    loss_of,
    nn,
    numbers,
    perceptron,
    push,
    sgd_of,
    torch,
    weight_of,
)

import relaxmpi as rx


@pytest.mark.ranks(1, 2, 3)
def test_two_optimizers_on_one_model(comm):
    """Each has its parameters and its attach; they may step at different times."""

    def rules(model):
        return sgd_of(model[0]), torch.optim.Adam(model[2:].parameters(), lr=0.01)

    model, alone = perceptron(), perceptron()
    ours, theirs = rules(model), rules(alone)
    with (
        rx.attach(model, ours[0], rx.SGD(), comm=comm, **SMALL) as first,
        rx.attach(model, ours[1], rx.SGD(), comm=comm, **SMALL) as second,
    ):
        for t in range(6):
            for m, optimizers, ranks in ((model, ours, [comm.rank]), (alone, theirs, None)):
                for o in optimizers:
                    o.zero_grad()
                if ranks is None:
                    loss_of(m).backward()
                else:
                    loss_of(m, comm.rank, comm.size).backward()
                optimizers[0].step()
                if t % 2:
                    optimizers[1].step()
        first.check()
        second.check()
        assert (first.stats().steps, second.stats().steps) == (6, 3)
    assert_close(model, alone, 2e-4)


@pytest.mark.ranks(1, 2, 3)
def test_generator_and_critic(comm):
    """The loss of one goes through the other, whose gradients are then thrown away."""
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.ModuleDict({"g": nn.Linear(3, 2), "d": nn.Linear(2, 1)})
        pairs.append((model, [sgd_of(model[k], lr=0.02) for k in "gd"]))

    def steps(model, optimizers, ranks):
        g, d = optimizers
        for t in range(4):
            noise = [torch.full((1, 3), 1.0 + r + t) for r in ranks]
            d.zero_grad()
            sum((1 - model["d"](model["g"](z).detach())).square().sum() for z in noise).div(
                len(ranks)
            ).backward()
            d.step()
            g.zero_grad()
            sum(model["d"](model["g"](z)).square().sum() for z in noise).div(len(ranks)).backward()
            g.step()

    (model, ours), (alone, theirs) = pairs
    syncs = [rx.attach(model, o, rx.SGD(), comm=comm, **SINGLE) for o in ours]
    steps(model, ours, [comm.rank])
    steps(alone, theirs, range(comm.size))
    for sync in syncs:
        sync.check()
        sync.detach()
    assert_close(model, alone)


@pytest.mark.ranks(2)
def test_two_losses_that_share_parameters(comm):
    """One after the other they are refused at once; added, or in no_sync(), they are right."""
    model, optimizer = weight_of([1.0, 2.0])
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        for _ in range(2):
            push(model, [1.0, 1.0])
            with pytest.raises(rx.RelaxError, match="another gradient"):
                push(model, [1.0, 1.0])
            optimizer.zero_grad()
            with sync.no_sync():
                push(model, [1.0, comm.rank])
            push(model, [2.0, comm.rank])
            sync.wait()
            assert model.w.grad.tolist() == [3.0, 1.0]
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_gradients_of_gradients(comm):
    model, optimizer = weight_of([2.0])
    with rx.attach(model, optimizer, rx.SGD(), comm=comm):
        (grad,) = torch.autograd.grad(model.w.pow(3).sum(), [model.w], create_graph=True)
        grad.square().sum().backward()  # d (3 w^2)^2 / dw = 36 w^3
        optimizer.step()
        assert model.w.item() == 2 - 36 * 8
        optimizer.zero_grad()
        with (
            pytest.warns(UserWarning, match="create_graph"),
            pytest.raises(rx.RelaxError, match="create_graph=True"),
        ):
            model.w.square().sum().backward(create_graph=True)
        optimizer.zero_grad()


@pytest.mark.ranks(1, 2)
def test_sparse_adam_is_refused(comm):
    model = nn.Embedding(3, 2, sparse=True)
    with pytest.raises(ValueError, match="SparseAdam needs sparse gradients"):
        rx.attach(model, torch.optim.SparseAdam(model.parameters()), rx.SGD(), comm=comm)


@pytest.mark.ranks(1, 2, 3)
def test_batch_norm_keeps_its_own_statistics_until_they_are_averaged(comm):
    torch.manual_seed(0)
    model = nn.BatchNorm1d(2)
    model.register_buffer("seen", torch.tensor([False, False]))
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        model.seen[0] = comm.rank == 1
        for _ in range(1 + comm.rank):
            model(torch.full((4, 2), 1.0 + comm.rank))
        own = 1.0 + comm.rank
        want = own * (1 - 0.9 ** (1 + comm.rank))
        torch.testing.assert_close(model.running_mean, torch.full((2,), want))
        sync.average_buffers()
        means = [(1.0 + r) * (1 - 0.9 ** (1 + r)) for r in range(comm.size)]
        torch.testing.assert_close(
            model.running_mean, torch.full((2,), sum(means) / comm.size), rtol=1e-6, atol=0
        )
        assert model.num_batches_tracked.item() == comm.size, "the largest of any rank"
        assert model.seen.tolist() == [comm.size > 1, False]
        assert_same_model(comm, model)


@pytest.mark.ranks(2)
def test_a_buffer_that_the_model_reassigns_is_averaged_too(comm):
    """pytorch#63916."""
    model = nn.Linear(1, 1)
    model.register_buffer("seen", torch.zeros(1))
    with rx.attach(model, sgd_of(model), rx.SGD(), comm=comm) as sync:
        model.seen = torch.full((1,), 2.0 * comm.rank)
        sync.average_buffers()
        assert model.seen.item() == 1.0


START = {
    "momentum": lambda p, r: torch.optim.SGD(p, lr=0.1 + r, momentum=0.5, nesterov=not r),
    "adam": lambda p, r: torch.optim.Adam(p, lr=0.1 + r, betas=(0.5 + 0.1 * r, 0.9), eps=1e-8 + r),
    "rprop": lambda p, r: torch.optim.Rprop(p, lr=0.1, etas=(0.5, 1.2 + r)),
    "tensor": lambda p, r: torch.optim.Adam(p, lr=torch.tensor(0.1 + r)),
    "groups": lambda p, r: torch.optim.SGD([{"params": [x], "lr": 0.1 + r} for x in p], momentum=r),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("make", START.values(), ids=START)
def test_settings_and_state_start_as_on_rank_0(comm, make):
    """Bagua's check 32."""
    model = perceptron(seed=comm.rank)
    optimizer = make(list(model.parameters()), comm.rank)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, comm.rank, comm.size).backward()
        optimizer.step()
    if make is START["groups"]:  # momentum 0 on rank 0 has no state
        optimizer.state.clear()
    torch.optim.lr_scheduler.StepLR(optimizer, 1 + comm.rank)
    mine = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    want, rule = comm.mpi.bcast(mine)
    kinds = [[type(v) for v in g.values()] for g in optimizer.param_groups]
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL):
        for name, value in model.state_dict().items():
            assert torch.equal(value, want[name])
        got = optimizer.state_dict()
        assert str(got["state"]) == str(rule["state"])
        assert got["param_groups"] == rule["param_groups"]
        if comm.rank == 0:
            assert [[type(v) for v in g.values()] for g in optimizer.param_groups] == kinds
        optimizer.zero_grad()
        loss_of(model, comm.rank, comm.size).backward()
        optimizer.step()
        assert_same_model(comm, model)


@pytest.mark.ranks(1, 2)
def test_random_numbers_stay_each_ranks_own(comm):
    torch.manual_seed(comm.rank)
    want = torch.rand(3)
    torch.manual_seed(comm.rank)
    model, optimizer = weight_of([1.0])
    with rx.attach(model, optimizer, rx.QSGD(bits=4), comm=comm):
        push(model, [1.0])
        optimizer.step()
        assert torch.equal(torch.rand(3), want)


@pytest.mark.ranks(2)
def test_clipping_costs_no_message(comm):
    """horovod#1099: gradients were exchanged twice when clipping by the book."""
    counts = []
    for clip in (False, True):
        model = perceptron()
        optimizer = sgd_of(model)
        with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(model, comm.rank, comm.size).backward()
                if clip:
                    sync.wait()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            counts.append(sync.stats()[1:4])
    assert counts[0] == counts[1]


@pytest.mark.ranks(2)
def test_more_batches_on_one_rank_without_join(comm):
    """pytorch#33148: an error names the rank that is missing, in time."""
    with rx.Comm.wrap(comm.mpi, timeout=2) as inner:
        model, optimizer = weight_of([1.0])
        sync = rx.attach(model, optimizer, rx.SGD(), comm=inner)
        push(model, [1.0])
        optimizer.step()
        if comm.rank == 1:
            optimizer.zero_grad()
            push(model, [1.0])
            with pytest.raises(rx.PeerTimeout, match="rank 0"):
                optimizer.step()
        sync.__exit__(rx.PeerTimeout, None, None)
        comm.mpi.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_models(comm, backend):
    model, alone = perceptron(), perceptron()
    compiled = torch.compile(model, backend=backend)
    optimizer, theirs = sgd_of(compiled), sgd_of(alone)
    with rx.attach(compiled, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        for _ in range(3):
            optimizer.zero_grad()
            theirs.zero_grad()
            loss_of(compiled, comm.rank, comm.size).backward()
            loss_of(alone).backward()
            optimizer.step()
            theirs.step()
        sync.check()
    assert_close(model, alone)


@pytest.mark.ranks(2)
def test_compiling_after_attach(comm):
    model = Branches()
    optimizer = sgd_of(model)
    before = numbers(model)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        step = torch.compile(model, backend="aot_eager")
        for left in (True, False, True):
            optimizer.zero_grad()
            step(torch.ones(1, 4), left=left).sum().backward()
            optimizer.step()
        sync.check()
    assert not torch.equal(numbers(model), before)
