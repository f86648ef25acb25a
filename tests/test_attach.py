"""`attach`: a torch loop that stays as it is, on 1 to 4 ranks."""

import copy
import time

import numpy as np
import pytest

import relaxmpi as rx

torch = pytest.importorskip("torch")
nn = torch.nn
datasets = pytest.importorskip("sklearn.datasets")

CODED = {
    "qsgd8": rx.QSGD(bits=8),
    "qsgd4": rx.QSGD(bits=4),
    "sign": rx.QSGD(codec=rx.OneBit(), feedback=True),
    "bytegrad": rx.ByteGrad(),
    "fp16": rx.QSGD(codec=rx.Cast("fp16")),
}
ALL = {"sgd": rx.SGD(), **CODED}
SMALL = {"bucket_bytes": 2000, "first_bucket_bytes": 500}  # several buckets for small models


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def perceptron(seed=0, width=32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
    )


@pytest.fixture(scope="session")
def digits():
    """240 handwritten digits of 8 x 8 pixels."""
    images, labels = datasets.load_digits(return_X_y=True)
    return torch.from_numpy(images[:240] / 16).float(), torch.from_numpy(labels[:240]).long()


def loss_of(model, data, rank=0, size=1, rows=slice(None)):
    images, labels = data
    mine = slice(rank, None, size)
    return nn.functional.cross_entropy(model(images[rows][mine]), labels[rows][mine])


def numbers(model):
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def assert_same_model(comm, model):
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        seen = rx.allgather(comm, t.detach().reshape(-1).contiguous(), name=name)
        for r in range(1, comm.size):
            assert torch.equal(seen[r], seen[0]), f"{name} on rank {r}"


def sgd_of(model, **settings):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})


def fit(comm, model, optimizer, algorithm, data, steps=5, each=lambda sync: None, **limits):
    with rx.attach(model, optimizer, algorithm, comm=comm, **limits or SMALL) as sync:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model, data, comm.rank, comm.size).backward()
            optimizer.step()
            each(sync)
        return sync.stats()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rule", ["sgd", "nesterov", "adamw"])
def test_law_n_ranks_are_one_process_with_the_whole_batch(comm, digits, rule):
    def optimizer_of(model):
        if rule == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=1e-3)
        return sgd_of(model, nesterov=rule == "nesterov", weight_decay=1e-3)

    alone = perceptron()
    optimizer = optimizer_of(alone)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(alone, digits).backward()
        optimizer.step()
    together = perceptron()
    fit(comm, together, optimizer_of(together), rx.SGD(), digits)
    assert (numbers(alone) - numbers(perceptron())).abs().max() > 3e-3, "nothing was learned"
    # Adam divides by the root of tiny second moments, which magnifies rounding.
    atol = 2e-4 if rule == "adamw" else 2e-6
    np.testing.assert_allclose(numbers(together), numbers(alone), rtol=0, atol=atol)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
@pytest.mark.parametrize("to_none", [True, False])
def test_law_one_rank_is_the_plain_loop_bit_for_bit(comm, digits, algorithm, to_none):
    models = [perceptron(), perceptron()]
    for model, attached in zip(models, [False, True], strict=True):
        optimizer = sgd_of(model, weight_decay=1e-3)
        sync = rx.attach(model, optimizer, algorithm, comm=comm, **SMALL) if attached else None
        for _ in range(4):
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, digits).backward()
            optimizer.step()
        if sync is not None:
            assert sync.stats().payload_bytes == 0
            sync.detach()
    assert torch.equal(numbers(models[0]), numbers(models[1]))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
def test_law_all_ranks_hold_the_same_model_after_any_step(comm, digits, algorithm):
    model = perceptron(seed=comm.rank)
    fit(comm, model, sgd_of(model), algorithm, digits, 4, lambda _: assert_same_model(comm, model))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
def test_law_attach_is_bind_on_arrays(comm, digits, algorithm):
    attached, by_hand = perceptron(), perceptron()
    lr = 0.125  # a power of two: lr * g is exact, however the update is computed
    optimizer = torch.optim.SGD(attached.parameters(), lr=lr)
    fit(comm, attached, optimizer, algorithm, digits, bucket_bytes=2**30, first_bucket_bytes=2**30)

    params = list(by_hand.parameters())[::-1]
    bucket = rx.Bucket(params)
    opt = algorithm.bind(comm, bucket.flat, lr=lr, name="bucket 0")
    for _ in range(5):
        grads = torch.autograd.grad(loss_of(by_hand, digits, comm.rank, comm.size), params)
        opt.step(rx.Bucket(grads).flat)
        with torch.no_grad():
            for p, view in zip(params, bucket.views, strict=True):
                p.copy_(view)
    assert torch.equal(numbers(attached), numbers(by_hand))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("algorithm", [rx.SGD(), rx.QSGD(codec=rx.Identity())], ids=str)
def test_law_bucket_sizes_do_not_matter(comm, digits, algorithm):
    models = []
    for size in (1, 3000, 2**30):
        models.append(perceptron())
        limits = {"bucket_bytes": size, "first_bucket_bytes": size}
        stats = fit(comm, models[-1], sgd_of(models[-1]), algorithm, digits, 3, **limits)
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
    assert optimizer.param_groups[0]["lr"] == 0.1 + comm.rank, "settings stay the rank's own"


@pytest.mark.ranks(2)
def test_gradients_are_views_of_the_buckets(comm, digits):
    model = perceptron()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        loss_of(model, digits).backward()
        optimizer.step()
        memory = {part.flat.untyped_storage().data_ptr() for part in sync._parts}
        assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == memory
        names = [slot.name for part in sync._parts for slot in part.slots]
        assert names == [name for name, _ in model.named_parameters()][::-1]
        grads = [p.grad.clone() for p in model.parameters()]
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(p.grad, grad)
        assert p.grad.untyped_storage().data_ptr() not in memory


@pytest.mark.ranks(2)
def test_detach_leaves_model_and_optimizer_as_they_were(comm, digits):
    model = perceptron()
    optimizer = sgd_of(model)

    def seen():
        hooks = [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]
        hooks += [len(p._backward_hooks or {}) for p in model.parameters()]
        hooks += [len(getattr(optimizer, n)) for n in vars(optimizer) if n.endswith("_hooks")]
        ours = {k: type(v) for k, v in vars(optimizer).items()}, sorted(vars(model))
        return sum(hooks), ours, [sorted(vars(p)) for p in model.parameters()]

    before = seen()
    keys = sorted(vars(model[0]))
    for _ in range(2):
        sync = rx.attach(model, optimizer, rx.QSGD(), comm=comm, **SMALL)
        assert seen()[0] == before[0] + 1 + 6
        optimizer.zero_grad()
        loss_of(model, digits).backward()
        optimizer.step()
        sync.detach()
        sync.detach()
        assert seen() == before
        assert sorted(vars(model[0])) == keys
    with pytest.raises(ZeroDivisionError), rx.attach(model, optimizer, rx.SGD(), comm=comm):
        raise ZeroDivisionError
    assert seen() == before

    alone = copy.deepcopy(model)
    theirs = sgd_of(alone)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (alone, theirs)):
        o.zero_grad()
        loss_of(m, digits, comm.rank, comm.size).backward()
        o.step()
    assert torch.equal(numbers(model), numbers(alone)), "a detached model is trained alone"


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("last_is_synced", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_law_accumulated_gradients_are_one_step_with_their_sum(
    comm, digits, last_is_synced, to_none
):
    model, alone = perceptron(), perceptron()
    optimizer, theirs = sgd_of(model), sgd_of(alone)
    pieces = [slice(0, 60), slice(60, 120), slice(120, 240)]
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            theirs.zero_grad()
            with sync.no_sync():
                for rows in pieces[: 2 if last_is_synced else 3]:
                    loss_of(model, digits, comm.rank, comm.size, rows).backward()
            if last_is_synced:
                loss_of(model, digits, comm.rank, comm.size, pieces[2]).backward()
            optimizer.step()
            sum(loss_of(alone, digits, rows=rows) for rows in pieces).backward()
            theirs.step()
        full = 2 * (comm.size - 1) / comm.size * 4 * numbers(model).numel()
        assert sync.stats().payload_bytes == pytest.approx(full, rel=1e-3), "once a step"
    np.testing.assert_allclose(numbers(model), numbers(alone), rtol=0, atol=3e-6)


class Branches(nn.Module):
    """Uses one of two layers, as the caller says; a third one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right, self.never = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, left):
        return (self.left if left else self.right)(x)


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
def test_a_rank_without_any_gradient_takes_part(comm, digits):
    model, alone = perceptron(), perceptron()
    optimizer, theirs = sgd_of(model), sgd_of(alone)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL):
        if comm.rank == 0:
            loss_of(model, digits).backward()
        optimizer.step()
    (loss_of(alone, digits) / 2).backward()
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
def test_a_frozen_parameter_is_left_alone_and_thawing_it_is_refused(comm, digits):
    model = perceptron()
    model[0].weight.requires_grad_(False)
    optimizer = sgd_of(model, weight_decay=0.5)
    before = model[0].weight.clone()
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        loss_of(model, digits).backward()
        model[2].bias.requires_grad_(False)
        optimizer.step()
        frozen = model[2].bias.clone()
        optimizer.zero_grad()
        loss_of(model, digits).backward()
        optimizer.step()
        assert torch.equal(model[0].weight, before)
        assert torch.equal(model[2].bias, frozen)
        model[0].weight.requires_grad_(True)
        with pytest.raises(rx.RelaxError, match=r"0\.weight was frozen"):
            optimizer.step()
        model[0].weight.requires_grad_(False)
        sync.detach()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("which", ["shape", "name", "optimizer", "state", "algorithm", "buckets"])
def test_ranks_with_different_models_all_learn_it(comm, which):
    odd = comm.rank == 1
    model = perceptron(width=33 if odd and which == "shape" else 32)
    if which == "name" and odd:
        model = nn.Sequential(*list(model))
        model.add_module("0b", model[0])
        del model[0]
    optimizer = sgd_of(model)
    if which == "optimizer" and odd:
        optimizer = torch.optim.AdamW(model.parameters())
    if which == "state" and odd:
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
    algorithm = rx.QSGD(bits=4 if odd and which == "algorithm" else 8)
    size = 2000 if odd and which == "buckets" else 1000
    with pytest.raises(rx.MismatchError, match="disagree"):
        rx.attach(model, optimizer, algorithm, comm=comm, bucket_bytes=size)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert rx.allreduce(comm, 1) == 2, "the Comm stays usable"


@pytest.mark.ranks(1, 2)
def test_a_model_without_trainable_parameters_is_refused_everywhere(comm):
    model = nn.Linear(2, 2)
    optimizer = sgd_of(model)
    if comm.rank == comm.size - 1:
        for p in model.parameters():
            p.requires_grad_(False)
    error = rx.MismatchError if comm.size > 1 else ValueError
    with pytest.raises(error, match="no trainable parameter"):
        rx.attach(model, optimizer, rx.SGD(), comm=comm)
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        rx.attach(model, optimizer, rx.SGD(), comm=comm)


@pytest.mark.ranks(1, 2)
def test_wrong_arguments_are_refused(comm):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="2 parameters that are not the model's"):
        rx.attach(model, sgd_of(nn.ModuleList([model, other])), rx.SGD(), comm=comm)
    with pytest.raises(ValueError, match=r"momentum=0\.9 has no effect here"):
        rx.attach(model, sgd_of(model), rx.SGD(momentum=0.9), comm=comm)
    with pytest.raises(TypeError, match="algorithm must be one such as"):
        rx.attach(model, sgd_of(model), "sgd", comm=comm)
    with pytest.raises(ValueError, match="at least one byte"):
        rx.attach(model, sgd_of(model), rx.SGD(), comm=comm, bucket_bytes=0)
    with pytest.raises(TypeError, match=r"nonfinite must be NonFinite\.PASS"):
        rx.attach(model, sgd_of(model), rx.SGD(), comm=comm, nonfinite="skip")


@pytest.mark.ranks(2)
def test_attaching_twice_is_refused(comm):
    model = nn.Linear(2, 2)
    with (
        rx.attach(model, sgd_of(model), rx.SGD(), comm=comm),
        pytest.raises(ValueError, match="attached already"),
    ):
        rx.attach(model, sgd_of(model), rx.SGD(), comm=comm)


@pytest.mark.ranks(1, 2)
def test_a_replaced_parameter_is_named(comm, digits):
    model = perceptron()
    optimizer = sgd_of(model)
    sync = rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL)
    model[2].weight = nn.Parameter(torch.zeros(32, 32))
    loss_of(model, digits).backward()
    with pytest.raises(rx.RelaxError, match=r"2\.weight was replaced"):
        optimizer.step()
    sync.detach()


@pytest.mark.ranks(2)
def test_new_parameters_in_the_optimizer_are_noticed(comm, digits):
    model = perceptron()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        loss_of(model, digits).backward()
        with pytest.raises(rx.RelaxError, match="got or lost parameters"):
            optimizer.step()


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
def test_a_second_backward_without_no_sync_is_refused(comm, digits):
    model = perceptron()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL) as sync:
        loss_of(model, digits).backward()
        with pytest.raises(rx.RelaxError, match="no_sync"):
            loss_of(model, digits).backward()
        sync.wait()
        with pytest.raises(rx.RelaxError, match="no_sync"), sync.no_sync():
            loss_of(model, digits).backward()
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
def test_a_step_may_be_skipped(comm, digits):
    model, alone = perceptron(), perceptron()
    optimizer, theirs = sgd_of(model), sgd_of(alone)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL):
        for t in range(4):
            optimizer.zero_grad()
            (loss_of(model, digits, comm.rank, comm.size) * (1 + t)).backward()
            theirs.zero_grad()
            (loss_of(alone, digits) * (1 + t)).backward()
            if t in (0, 3):
                optimizer.step()
                theirs.step()
    np.testing.assert_allclose(numbers(model), numbers(alone), rtol=0, atol=3e-6)


@pytest.mark.ranks(1)
def test_an_optimizer_that_calls_backward_itself_is_refused(comm, digits):
    model = perceptron()
    optimizer = torch.optim.LBFGS(model.parameters())
    with (
        rx.attach(model, optimizer, rx.SGD(), comm=comm),
        pytest.raises(rx.RelaxError, match="closure"),
    ):
        optimizer.step(lambda: loss_of(model, digits))


@pytest.mark.ranks(1, 2, 3)
def test_sparse_gradients_also_where_a_rank_has_none(comm):
    torch.manual_seed(0)
    model = nn.Embedding(6, 2, sparse=True)
    alone = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone))
    with rx.attach(model, optimizer, rx.SGD(), comm=comm):
        for t in range(3):
            for o in (optimizer, theirs):
                o.zero_grad()
            rows = [torch.tensor([r + t, r + t, 5]) for r in range(comm.size)]
            if comm.rank == 0 or t != 1:
                model(rows[comm.rank]).sum().backward()
            for row in rows[: 1 if t == 1 else None]:
                (alone(row).sum() / comm.size).backward()
            optimizer.step()
            theirs.step()
    np.testing.assert_allclose(numbers(model), numbers(alone), rtol=0, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("algorithm", CODED.values(), ids=CODED)
def test_law_resumed_is_never_stopped(comm, digits, algorithm):
    def run(model, optimizer, steps, state=None):
        with rx.attach(model, optimizer, algorithm, comm=comm, **SMALL) as sync:
            if state is not None:
                sync.load_state_dict(state)
            for _ in range(steps):
                optimizer.zero_grad()
                loss_of(model, digits, comm.rank, comm.size).backward()
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
def test_the_wire_carries_what_the_bits_say(comm, digits):
    sent = {}
    for name, algorithm in ALL.items():
        model = perceptron(width=256)
        stats = fit(comm, model, sgd_of(model), algorithm, digits, 2, bucket_bytes=2**22)
        assert stats.steps == 2
        sent[name] = stats.payload_bytes
    full = 2 * (comm.size - 1) / comm.size * 4 * numbers(model).numel()
    bits_of = {"sgd": 32, "fp16": 16, "qsgd8": 8, "qsgd4": 4, "bytegrad": 8, "sign": 1}
    for name, bits in bits_of.items():
        assert full * bits / 32 * 0.999 < sent[name] < full * (bits / 32 + 0.015), name


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


@pytest.mark.ranks(2)
def test_the_users_own_calls_may_come_in_between(comm, digits):
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
def test_between_nodes_only_the_codec_travels(comm, digits, monkeypatch):
    monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", "2")
    with rx.Comm.wrap(comm.mpi) as inner, inner.by_node() as nodes:
        model, alone = perceptron(), perceptron()
        stats = fit(nodes, model, sgd_of(model), rx.QSGD(bits=8), digits, 3)
        assert_same_model(comm, model)
        # Inside a node: half of the numbers to the neighbour and back; between nodes: half of
        # them, in halves, twice, in 8 bit and a scale.
        count = numbers(model).numel()
        assert stats.payload_bytes == pytest.approx(4 * count + count / 2 * 1.02, rel=0.02)
        fit(comm, alone, sgd_of(alone), rx.SGD(), digits, 3)
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
            begin = time.perf_counter()
            loss.backward()
            best = min(best, time.perf_counter() - begin)
            optimizer.step()
        return best

    seconds()
    plain = seconds()
    with rx.attach(model, optimizer, rx.SGD(), comm=comm):
        seconds()
        assert (seconds() - plain) / 2000 < 10e-6


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


@pytest.mark.ranks(1, 2)
def test_another_optimizer_on_attached_parameters_is_refused(comm):
    model = torch.nn.Linear(2, 1)
    sync = rx.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), rx.SGD(), comm=comm)
    other = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(rx.RelaxError, match="Adam that is not attached"):
        other.step()
    torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1).step()
    sync.detach()
    other.step()


@pytest.mark.ranks(1, 2)
def test_buffers_that_cannot_be_sent_are_named(comm):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, buffer in [("wide", torch.ones(1).expand(3)), ("thin", torch.eye(2).to_sparse())]:
        model.register_buffer(name, buffer)
        with pytest.raises(ValueError, match=name):
            rx.attach(model, optimizer, rx.SGD(), comm=comm)
        del model._buffers[name]
    with pytest.raises(TypeError, match="a Module and an Optimizer"):
        rx.attach(optimizer, model, rx.SGD(), comm=comm)
