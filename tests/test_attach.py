"""`attach`: a torch loop that stays as it is, on 1 to 4 ranks."""

import copy
import time

import numpy as np
import pytest
from loops import (
    SMALL,
    Branches,
    assert_same_model,
    fit,
    loss_of,
    nn,
    numbers,
    perceptron,
    sgd_of,
    torch,
    traces,
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


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rule", ["sgd", "nesterov", "adamw"])
def test_law_n_ranks_are_one_process_with_the_whole_batch(comm, rule):
    def optimizer_of(model):
        if rule == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=1e-3)
        return sgd_of(model, nesterov=rule == "nesterov", weight_decay=1e-3)

    alone = perceptron()
    optimizer = optimizer_of(alone)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(alone).backward()
        optimizer.step()
    together = perceptron()
    fit(comm, together, optimizer_of(together), rx.SGD())
    assert (numbers(alone) - numbers(perceptron())).abs().max() > 3e-3, "nothing was learned"
    # Adam divides by the root of tiny second moments, which magnifies rounding.
    atol = 2e-4 if rule == "adamw" else 2e-6
    np.testing.assert_allclose(numbers(together), numbers(alone), rtol=0, atol=atol)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
@pytest.mark.parametrize("to_none", [True, False])
def test_law_one_rank_is_the_plain_loop_bit_for_bit(comm, algorithm, to_none):
    models = [perceptron(), perceptron()]
    for model, attached in zip(models, [False, True], strict=True):
        optimizer = sgd_of(model, weight_decay=1e-3)
        sync = rx.attach(model, optimizer, algorithm, comm=comm, **SMALL) if attached else None
        for _ in range(4):
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model).backward()
            optimizer.step()
        if sync is not None:
            assert sync.stats().payload_bytes == 0
            sync.detach()
    assert torch.equal(numbers(models[0]), numbers(models[1]))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
def test_law_all_ranks_hold_the_same_model_after_any_step(comm, algorithm):
    model = perceptron(seed=comm.rank)
    fit(comm, model, sgd_of(model), algorithm, 4, lambda _: assert_same_model(comm, model))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
def test_law_attach_is_bind_on_arrays(comm, algorithm):
    attached, by_hand = perceptron(), perceptron()
    lr = 0.125  # a power of two: lr * g is exact, however the update is computed
    optimizer = torch.optim.SGD(attached.parameters(), lr=lr)
    fit(comm, attached, optimizer, algorithm, bucket_bytes=2**30, first_bucket_bytes=2**30)

    params = list(by_hand.parameters())[::-1]
    bucket = rx.Bucket(params)
    opt = algorithm.bind(comm, bucket.flat, lr=lr, name="bucket 0")
    for _ in range(5):
        grads = torch.autograd.grad(loss_of(by_hand, comm.rank, comm.size), params)
        opt.step(rx.Bucket(grads).flat)
        with torch.no_grad():
            for p, view in zip(params, bucket.views, strict=True):
                p.copy_(view)
    assert torch.equal(numbers(attached), numbers(by_hand))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("algorithm", [rx.SGD(), rx.QSGD(codec=rx.Identity())], ids=str)
def test_law_bucket_sizes_do_not_matter(comm, algorithm):
    models = []
    for size in (1, 3000, 2**30):
        models.append(perceptron())
        limits = {"bucket_bytes": size, "first_bucket_bytes": size}
        stats = fit(comm, models[-1], sgd_of(models[-1]), algorithm, 3, **limits)
        assert stats.buckets == {1: 6, 3000: 2, 2**30: 1}[size]
    for model in models[1:]:
        np.testing.assert_allclose(numbers(model), numbers(models[0]), rtol=0, atol=1e-6)


@pytest.mark.ranks(2)
def test_everything_starts_as_on_rank_0(comm):
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    model[1].weight.requires_grad_(False)
    with torch.no_grad():
        model[1].running_mean += comm.rank
        model[1].num_batches_tracked += comm.rank
        model[1].weight += comm.rank
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + comm.rank)
    model(torch.randn(4, 1, 3, 3)).sum().backward()
    optimizer.step()
    theirs = copy.deepcopy((model, optimizer.state_dict()["state"])) if comm.rank == 0 else None
    want, state = comm.mpi.bcast(theirs)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL):
        pass
    for a, b in zip(model.state_dict().values(), want.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            assert torch.equal(value, state[index][key]), key
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.ranks(2)
def test_gradients_are_views_of_the_buckets(comm):
    model = perceptron()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        loss_of(model).backward()
        optimizer.step()
        memory = {part.flat.untyped_storage().data_ptr() for part in sync._engine.parts}
        assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == memory
        names = [slot.name for part in sync._engine.parts for slot in part.slots]
        assert names == [name for name, _ in model.named_parameters()][::-1]
        grads = [p.grad.clone() for p in model.parameters()]
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(p.grad, grad)
        assert p.grad.untyped_storage().data_ptr() not in memory


@pytest.mark.ranks(2)
def test_detach_leaves_model_and_optimizer_as_they_were(comm):
    model = perceptron()
    optimizer = sgd_of(model)

    before = traces(model, optimizer)
    for _ in range(2):
        sync = rx.attach(model, optimizer, rx.QSGD(), comm=comm, **SMALL)
        assert traces(model, optimizer)["parameters"] == [1] * 6
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        sync.detach()
        sync.detach()
        assert traces(model, optimizer) == before
    optimizer.zero_grad()
    with pytest.raises(ZeroDivisionError), rx.attach(model, optimizer, rx.SGD(), comm=comm):
        loss_of(model).backward()
        raise ZeroDivisionError
    assert traces(model, optimizer) == before
    assert all(p.grad is None for p in model.parameters()), "they were on their way"

    alone = copy.deepcopy(model)
    theirs = sgd_of(alone)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (alone, theirs)):
        o.zero_grad()
        loss_of(m, comm.rank, comm.size).backward()
        o.step()
    assert torch.equal(numbers(model), numbers(alone)), "a detached model is trained alone"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("algorithm", CODED.values(), ids=CODED)
def test_law_resumed_is_never_stopped(comm, algorithm):
    def run(model, optimizer, steps, state=None):
        with rx.attach(model, optimizer, algorithm, comm=comm, **SMALL) as sync:
            if state is not None:
                sync.load_state_dict(state)
            for _ in range(steps):
                optimizer.zero_grad()
                loss_of(model, comm.rank, comm.size).backward()
                optimizer.step()
            return sync.state_dict()

    straight = perceptron()
    run(straight, sgd_of(straight), 6)
    model = perceptron()
    optimizer = sgd_of(model)
    state = run(model, optimizer, 3)
    resumed = perceptron(seed=5)
    theirs = sgd_of(resumed)
    resumed.load_state_dict(model.state_dict())
    theirs.load_state_dict(optimizer.state_dict())
    run(resumed, theirs, 3, state)
    assert torch.equal(numbers(straight), numbers(resumed))


@pytest.mark.ranks(2, 4)
def test_the_wire_carries_what_the_bits_say(comm):
    sent = {}
    for name, algorithm in ALL.items():
        model = perceptron(width=256)
        stats = fit(comm, model, sgd_of(model), algorithm, 2, bucket_bytes=2**22)
        assert stats.steps == 2
        sent[name] = stats.payload_bytes
    full = 2 * (comm.size - 1) / comm.size * 4 * numbers(model).numel()
    bits_of = {"sgd": 32, "fp16": 16, "qsgd8": 8, "qsgd4": 4, "bytegrad": 8, "sign": 1}
    for name, bits in bits_of.items():
        assert full * bits / 32 * 0.999 < sent[name] < full * (bits / 32 + 0.015), name


@pytest.mark.ranks(2)
def test_the_users_own_calls_may_come_in_between(comm):
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, bucket_bytes=1, first_bucket_bytes=1):
        for _ in range(3):
            # The ranks start different buckets before this call, and the rest after it.
            loss = model(torch.ones(1, 4), left=comm.rank == 0).sum()
            loss.backward()
            assert rx.allreduce(comm, comm.rank, name="metric") == 1
            optimizer.step()


@pytest.mark.ranks(4)
def test_between_nodes_only_the_codec_travels(comm, monkeypatch):
    monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", "2")
    with rx.Comm.wrap(comm.mpi) as inner, inner.by_node() as nodes:
        model, alone = perceptron(), perceptron()
        stats = fit(nodes, model, sgd_of(model), rx.QSGD(bits=8), 3)
        assert_same_model(comm, model)
        # Inside a node: half of the numbers to the neighbour and back; between nodes: half of
        # them, in halves, twice, in 8 bit and a scale.
        count = numbers(model).numel()
        assert stats.payload_bytes == pytest.approx(4 * count + count / 2 * 1.02, rel=0.02)
        fit(comm, alone, sgd_of(alone), rx.SGD(), 3)
        np.testing.assert_allclose(numbers(model), numbers(alone), rtol=0, atol=5e-3)


@pytest.mark.ranks(1)
def test_the_hooks_cost_little(comm):
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2000)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def seconds():
        best = 1.0
        for _ in range(7):
            optimizer.zero_grad(set_to_none=False)
            loss = torch.stack(list(model)).sum()
            begin = time.process_time()
            loss.backward()
            best = min(best, time.process_time() - begin)
            optimizer.step()
        return best

    seconds()
    plain = seconds()
    with rx.attach(model, optimizer, rx.SGD(), comm=comm):
        seconds()
        assert (seconds() - plain) / 2000 < 10e-6


@pytest.mark.ranks(2, 3)
def test_switching_algorithms_six_times(comm):
    """Bagua's check 37: nothing leaks, nothing hangs, the ranks stay alike."""
    model = perceptron(seed=comm.rank)
    optimizer = sgd_of(model)

    before = traces(model, optimizer)
    for algorithm in [*ALL.values(), rx.QSGD(codec=rx.TopK(0.5), feedback=True)]:
        if comm.rank:
            with torch.no_grad():
                model[0].bias += 1.0  # each attach starts from rank 0's
        fit(comm, model, optimizer, algorithm, 3, lambda sync: sync.check())
        assert traces(model, optimizer) == before
    assert loss_of(model).item() < loss_of(perceptron()).item()


@pytest.mark.ranks(2)
def test_restoring_while_gradients_are_on_their_way_is_refused(comm):
    model = perceptron()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        for refused in (False, True):
            optimizer.zero_grad()
            loss_of(model, comm.rank, comm.size).backward()
            if refused:
                with pytest.raises(rx.RelaxError, match="on their way"):
                    sync.load_state_dict(sync.state_dict())
            sync.wait()
            sync.load_state_dict(sync.state_dict())
            optimizer.step()
        sync.check()
