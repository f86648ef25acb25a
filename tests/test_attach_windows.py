"""`attach` from one step to the next: what is summed, skipped, clipped, or has no gradient."""

import copy

import numpy as np
import pytest
from loops import (
    SMALL,
    Branches,
    assert_same_model,
    loss_of,
    nn,
    numbers,
    perceptron,
    sgd_of,
    torch,
)

import relaxmpi as rx

CODED = {
    "qsgd8": rx.QSGD(bits=8),
    "qsgd4": rx.QSGD(bits=4),
    "sign": rx.QSGD(codec=rx.OneBit(), feedback=True),
    "bytegrad": rx.ByteGrad(),
    "fp16": rx.QSGD(codec=rx.Cast("fp16")),
}
ALL = {"sgd": rx.SGD(), **CODED}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("last_is_synced", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_law_accumulated_gradients_are_one_step_with_their_sum(comm, last_is_synced, to_none):
    model, alone = perceptron(), perceptron()
    optimizer, theirs = sgd_of(model), sgd_of(alone)
    pieces = [slice(0, 60), slice(60, 120), slice(120, 240)]
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            theirs.zero_grad()
            with sync.no_sync():
                for rows in pieces[: 2 if last_is_synced else 3]:
                    loss_of(model, comm.rank, comm.size, rows).backward()
            if last_is_synced:
                loss_of(model, comm.rank, comm.size, pieces[2]).backward()
            optimizer.step()
            sum(loss_of(alone, rows=rows) for rows in pieces).backward()
            theirs.step()
        full = 2 * (comm.size - 1) / comm.size * 4 * numbers(model).numel()
        assert sync.stats().payload_bytes == pytest.approx(full, rel=1e-3), "once a step"
    np.testing.assert_allclose(numbers(model), numbers(alone), rtol=0, atol=3e-6)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
def test_a_parameter_unused_on_one_rank_counts_as_zero(comm, algorithm):
    model = Branches()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 4)
    with rx.attach(model, optimizer, algorithm, comm=comm, bucket_bytes=1, first_bucket_bytes=1):
        for _ in range(2):  # a hang would come one step late
            optimizer.zero_grad()
            model(x, left=comm.rank == 0).sum().backward()
            optimizer.step()
            assert_same_model(comm, model)
    moved = [before.left.weight - model.left.weight, before.right.weight - model.right.weight]
    share = 1 / comm.size
    assert torch.allclose(moved[0], torch.full((2, 4), 2 * share), atol=0.02)
    assert torch.allclose(moved[1], torch.full((2, 4), 2 * (1 - share)), atol=0.02)
    assert torch.equal(model.never.weight, before.never.weight)


@pytest.mark.ranks(2)
def test_a_rank_without_any_gradient_takes_part(comm):
    model, alone = perceptron(), perceptron()
    optimizer, theirs = sgd_of(model), sgd_of(alone)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL):
        if comm.rank == 0:
            loss_of(model).backward()
        optimizer.step()
    (loss_of(alone) / 2).backward()
    theirs.step()
    np.testing.assert_allclose(numbers(model), numbers(alone), rtol=0, atol=1e-6)


@pytest.mark.ranks(1)
def test_alone_a_parameter_without_gradient_stays_without(comm):
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    before = copy.deepcopy(model)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm):
        model(torch.ones(1, 4), left=True).sum().backward()
        optimizer.step()
    assert model.never.weight.grad is None
    assert torch.equal(model.never.weight, before.never.weight), "no weight decay either"


@pytest.mark.ranks(2)
def test_a_frozen_parameter_is_left_alone_and_thawing_it_is_refused(comm):
    model = perceptron()
    model[0].weight.requires_grad_(False)
    optimizer = sgd_of(model, weight_decay=0.5)
    before = model[0].weight.clone()
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        loss_of(model).backward()
        model[2].bias.requires_grad_(False)
        optimizer.step()
        frozen = model[2].bias.clone()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        assert torch.equal(model[0].weight, before)
        assert torch.equal(model[2].bias, frozen)
        model[0].weight.requires_grad_(True)
        with pytest.raises(rx.RelaxError, match=r"0\.weight was frozen"):
            optimizer.step()
        model[0].weight.requires_grad_(False)
        sync.detach()


@pytest.mark.ranks(2)
def test_clipping_after_wait_clips_the_mean(comm):
    # Gradients [3, 4] and [0, 0], largest norm 1: the mean has norm 2.5, clipped [0.6, 0.8].
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        before = model.weight.detach().clone()
        x = torch.tensor([[3.0, 4.0]]) if comm.rank == 0 else torch.zeros(1, 2)
        model(x).sum().backward()
        sync.wait()
        assert model.weight.grad.tolist() == [[1.5, 2.0]]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sync.wait()
        optimizer.step()
        moved = before - model.weight.detach()
    np.testing.assert_allclose(moved.numpy(), [[0.6, 0.8]], atol=1e-5)


@pytest.mark.ranks(2)
def test_a_second_backward_without_no_sync_is_refused(comm):
    model = perceptron()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        loss_of(model).backward()
        with pytest.raises(rx.RelaxError, match="no_sync"):
            loss_of(model).backward()
        sync.wait()
        with pytest.raises(rx.RelaxError, match="no_sync"), sync.no_sync():
            loss_of(model).backward()
        optimizer.step()


@pytest.mark.ranks(1, 2)
def test_two_losses_that_share_nothing_are_fine(comm):
    model = Branches()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, bucket_bytes=1, first_bucket_bytes=1):
        model(torch.ones(1, 4), left=True).sum().backward()
        model(torch.ones(1, 4), left=False).sum().backward()
        optimizer.step()
    for name in ("left", "right"):
        moved = getattr(before, name).weight - getattr(model, name).weight
        assert torch.allclose(moved, torch.ones(2, 4))


@pytest.mark.ranks(1, 2, 3)
def test_a_step_may_be_skipped(comm):
    model, alone = perceptron(), perceptron()
    optimizer, theirs = sgd_of(model), sgd_of(alone)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL):
        for t in range(4):
            optimizer.zero_grad()
            (loss_of(model, comm.rank, comm.size) * (1 + t)).backward()
            theirs.zero_grad()
            (loss_of(alone) * (1 + t)).backward()
            if t in (0, 3):
                optimizer.step()
                theirs.step()
    np.testing.assert_allclose(numbers(model), numbers(alone), rtol=0, atol=3e-6)


@pytest.mark.ranks(2, 3)
def test_awkward_parameters(comm):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.short = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
            self.turned = nn.Parameter(torch.randn(3, 2).t())
            self.tied = self.scalar

        def forward(self, k):
            return (
                self.scalar * k
                + self.empty.sum()
                + (self.wide * k).sum()
                + (self.short * k).sum()
                + (self.turned * k).sum()
            )

    model = Odd()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        model(float(comm.rank)).backward()
        optimizer.step()
        assert sync.stats().buckets == 3, "one a dtype"
    step = (comm.size - 1) / 2
    for name, p in model.named_parameters():
        assert torch.allclose(getattr(before, name) - p, torch.full_like(p, step)), name


def two_layers(rank):
    """A model whose second layer is unused on every rank but the first."""
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)

    def backward(value):
        y = model[0](torch.full((1, 1), float(value)))
        (model[1](y) if rank == 0 else y).sum().backward()

    return model, backward


@pytest.mark.ranks(2, 3)
def test_a_skipped_step_and_a_bucket_that_is_not_full_on_one_rank(comm):
    """Ranks whose buckets did not start notice the new window as well as those whose did."""
    model, backward = two_layers(comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm):
        for t in range(4):
            optimizer.zero_grad()
            before = model[1].weight.item()
            backward(10.0**t)
            if t:
                optimizer.step()
                # The mean over ranks of x, times the second layer's weight where it is used.
                mean = 10.0**t * (before + comm.size - 1) / comm.size
                assert model[0].weight.grad.item() == pytest.approx(mean)
                weights = [p.item() for p in model.parameters()]
                assert comm.mpi.allgather(weights) == [weights] * comm.size


@pytest.mark.ranks(2, 3)
def test_detach_between_backward_and_step(comm):
    model, backward = two_layers(comm.rank)
    sync = rx.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), rx.SGD(), comm=comm)
    backward(comm.rank + 1)
    sync.detach()
    grads = [p.grad.item() for p in model.parameters()]
    assert comm.mpi.allgather(grads) == [grads] * comm.size


@pytest.mark.ranks(2, 3)
def test_a_parameter_used_on_one_rank_and_only_inside_no_sync(comm):
    model = Branches()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm) as sync:
        for _ in range(2):
            optimizer.zero_grad()
            with sync.no_sync():
                model(torch.ones(1, 4), left=comm.rank == 0).sum().backward()
            model(torch.ones(1, 4), left=False).sum().backward()
            optimizer.step()
        sync.check()
    share = 1 / comm.size
    left = before.left.weight - model.left.weight
    right = before.right.weight - model.right.weight
    torch.testing.assert_close(left, torch.full((2, 4), 2 * share))
    torch.testing.assert_close(right, torch.full((2, 4), 2 * (2 - share)))
