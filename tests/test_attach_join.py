"""Uneven numbers of batches and of samples: `Sync.join`."""

import copy

import pytest
from loops import SMALL, Branches, assert_close, nn, push, sgd_of, torch, weight_of

import relaxmpi as rx

RULES = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.25, momentum=0.5, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.125, weight_decay=0.1),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.125, amsgrad=True),
}


def batches(rank, epoch):
    """Of 1 to 3 samples; some ranks have none at all, another one each epoch."""
    generator = torch.Generator().manual_seed(10 * epoch + rank)
    count = (0, 2, 5, 1)[(rank + epoch) % 4]
    return [torch.randn(1 + (rank + t) % 3, 4, generator=generator) for t in range(count)]


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def mean_loss(model, x):
    return model(x).square().mean()


def by_hand(model, optimizer, all_batches, weighted):
    """One process: in each step the mean over the ranks that still have a batch."""
    for t in range(max(map(len, all_batches))):
        optimizer.zero_grad()
        now = [b[t] for b in all_batches if t < len(b)]
        weights = [len(x) if weighted else 1 for x in now]
        for w, x in zip(weights, now, strict=True):
            (mean_loss(model, x) * w / sum(weights)).backward()
        optimizer.step()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("weighted", [True, False])
def test_law_uneven_batches_are_one_process_with_those_that_are_there(comm, rule, weighted):
    model, alone = make(), make()
    optimizer, theirs = rule(model), rule(alone)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        for epoch in range(4):  # who took the most steps changes
            with sync.join():
                for x in batches(comm.rank, epoch):
                    optimizer.zero_grad()
                    if weighted:
                        sync.weight = len(x)
                    mean_loss(model, x).backward()
                    optimizer.step()
            sync.check()
            by_hand(alone, theirs, [batches(r, epoch) for r in range(comm.size)], weighted)
            assert_close(model, alone, 2e-5)
        if comm.size > 1:
            most = [max(len(batches(r, e)) for r in range(comm.size)) for e in range(4)]
            assert sync.stats().steps == sum(most)
        mean_loss(model, torch.ones(1, 4)).backward()  # and all together again
        optimizer.step()
        sync.check()
        state = optimizer.state_dict()["state"]
        assert comm.mpi.allgather(str(state)) == [str(state)] * comm.size


def test_law_join_in_any_order_of_events():
    def program():
        with rx.Comm.world() as comm:
            model, alone = make(), make()
            optimizer, theirs = RULES["adam"](model), RULES["adam"](alone)
            with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
                for epoch in range(2):
                    with sync.join():
                        for x in batches(comm.rank, epoch):
                            optimizer.zero_grad()
                            sync.weight = len(x)
                            mean_loss(model, x).backward()
                            optimizer.step()
                    by_hand(alone, theirs, [batches(r, epoch) for r in range(comm.size)], True)
                sync.check()
            assert_close(model, alone, 2e-5)

    for seed in range(6):
        rx.SimulatedWorld(2 + seed % 3, seed=seed).run(program)


@pytest.mark.ranks(2)
def test_a_mean_over_samples_by_hand(comm):
    # Gradients 10 (3 samples), 0 (1 sample): 7.5, where the mean of the ranks' means is 5.
    model, optimizer = weight_of([0.0])
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        for t in range(3):
            with sync.join():
                sync.weight = (3, 1)[comm.rank]
                optimizer.zero_grad()
                push(model, [(10.0, 0.0)[comm.rank]])
                optimizer.step()
            assert model.w.item() == -7.5 * (t + 1)


@pytest.mark.ranks(2)
def test_momentum_by_hand(comm):
    # Rank 0 has gradients 2, 4 and 8, rank 1 only 6; momentum 0.5, step length 1:
    # means 4, 4, 8; v = 4, 6, 11; w = -4, -10, -21.
    model, optimizer = weight_of([0.0], momentum=0.5)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        with sync.join():
            for g in ([2.0, 4.0, 8.0], [6.0])[comm.rank]:
                optimizer.zero_grad()
                push(model, [g])
                optimizer.step()
        assert model.w.item() == -21
        assert optimizer.state[model.w]["momentum_buffer"].item() == 11


@pytest.mark.ranks(2, 3)
def test_unused_parameters_inside_join(comm):
    model = Branches()
    before = copy.deepcopy(model)
    optimizer = sgd_of(model, lr=1.0, momentum=0.0, weight_decay=0.5)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        with sync.join():
            for _ in range(1 + comm.rank):
                optimizer.zero_grad()
                model(torch.ones(1, 4), left=True).sum().backward()
                optimizer.step()
        sync.check()
    x = before.left.weight
    for _ in range(comm.size):
        x = x - (1 + 0.5 * x)
    assert torch.allclose(model.left.weight, x)
    assert torch.equal(model.never.weight, before.never.weight), "no decay of what is unused"
    assert not optimizer.state.get(model.never.weight)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("guard", [rx.NonFinite.RAISE, rx.NonFinite.SKIP])
def test_not_finite_inside_join(comm, guard):
    # The last rank has four batches, the third of which is not finite; rank 0 has one.
    model, optimizer = weight_of([0.0])
    count = 1 if comm.rank == 0 else 4
    sync = rx.attach(model, optimizer, rx.SGD(), comm=comm, nonfinite=guard)

    def loop():
        with sync.join():
            for t in range(count):
                optimizer.zero_grad()
                push(model, [float("nan") if (t, comm.rank) == (2, comm.size - 1) else 1.0])
                optimizer.step()

    if guard is rx.NonFinite.SKIP:
        loop()
        assert model.w.item() == -3
        assert sync.stats().skipped == 1
        sync.check()
    else:
        with pytest.raises(rx.NonFiniteError, match=f"of w is not finite on rank {comm.size - 1}"):
            loop()
    sync.detach()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("passed", [True, False])
def test_clipping_and_a_scheduler_for_each_batch_inside_join(comm, passed):
    model, optimizer = weight_of([0.0, 0.0])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 2.0**-t)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        with sync.join(*[schedule] * passed):
            for _ in range(2 - (comm.rank == 0)):
                optimizer.zero_grad()
                push(model, [3.0, 4.0])
                sync.wait()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
        # Steps of length 1 and 1/2 along (0.6, 0.8); then 1/4.
        torch.testing.assert_close(model.w.detach(), torch.tensor([-0.9, -1.2]))
        assert optimizer.param_groups[0]["lr"] == 0.25
        push(model, [1.0, 1.0])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        push(model, [1.0, 1.0])
        if passed:
            assert schedule.last_epoch == 3
            optimizer.step()
            sync.check()
        else:  # rank 0's scheduler has counted one step less
            with pytest.raises(rx.RelaxError, match=r"settings .* differ"):
                optimizer.step()


@pytest.mark.ranks(2, 3)
def test_half_precision_and_large_weights(comm):
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync, sync.join():
        for t in range(3):
            optimizer.zero_grad()
            sync.weight = 32 * (1 + comm.rank)
            (model.w * (8.0 if t == 0 else 3000.0)).sum().backward()
            sync.wait()
            want = 8.0 if t == 0 else 3000.0
            assert model.w.grad.tolist() == pytest.approx([want] * 2, rel=2e-3)
            optimizer.step()


@pytest.mark.ranks(1, 2)
def test_join_refuses(comm):
    model, optimizer = weight_of([0.0])
    sync = rx.attach(model, optimizer, rx.SGD(), comm=comm)
    with pytest.raises(rx.RelaxError, match="inside join"), sync.join(), sync.join():
        pass
    for call in (sync.check, sync.average_buffers):
        with pytest.raises(rx.RelaxError, match="inside join"), sync.join():
            call()
    for weight in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            sync.weight = weight
    if comm.size > 1:
        with pytest.raises(rx.RelaxError, match="between backward and step"), sync.join():
            push(model, [1.0])
    sync.detach()
