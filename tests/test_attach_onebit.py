"""1-bit Adam as an optimizer of torch, by itself and inside `attach`."""

import copy
import warnings

import numpy as np
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
    torch,
    traces,
)

import relaxmpi as rx

alone_or_attached = pytest.mark.parametrize("attached", [False, True], ids=["alone", "attached"])


def groups_of(model):
    return [
        {"params": list(model[0].parameters()), "lr": 5e-3, "weight_decay": 0.1},
        {"params": list(model[2:].parameters()), "betas": (0.8, 0.99)},
    ]


class Loop:
    """A training loop, one part of the batch a rank."""

    def __init__(self, comm, spec, *, attached, model=None, groups=None, **limits):
        self.comm, self.model = comm, model or perceptron()
        params = groups(self.model) if groups else self.model.parameters()
        self.optimizer = rx.OneBitAdamOptimizer(params, spec, comm=comm, lr=1e-2)
        self.sync = None
        if attached:
            limits = limits or SMALL
            self.sync = rx.attach(self.model, self.optimizer, spec, comm=comm, **limits)

    def step(self, poison=False):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self.comm.rank, self.comm.size)
        if poison:
            loss = loss + (self.model[0].bias * float("inf")).sum()
        loss.backward()
        self.optimizer.step()

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self

    @property
    def bounds(self):
        return self.optimizer._bounds

    def moments(self):
        return torch.cat([s["exp_avg"].ravel() for s in self.optimizer.state.values()])

    def save(self):
        parts = (self.model, self.optimizer, *([self.sync] if self.sync else []))
        return [copy.deepcopy(part.state_dict()) for part in parts]

    def load(self, saved):
        parts = (self.model, self.optimizer, *([self.sync] if self.sync else []))
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)
        return self


def alone_with(kind, steps, groups=groups_of, **settings):
    """The same with torch's optimizer and the whole batch, in one process."""
    model = perceptron()
    params = groups(model) if groups else model.parameters()
    optimizer = kind(params, lr=1e-2, **{"weight_decay": 0.0, **settings})
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return model


# ---------------------------------------------------------------- what it computes


@pytest.mark.ranks(1, 2, 3)
@alone_or_attached
@pytest.mark.parametrize("decoupled", [True, False])
def test_warm_up_is_adam_of_torch(comm, attached, decoupled):
    """Check 33, with parameter groups; on one rank for ever (check 28)."""
    spec = rx.OneBitAdam(2 if comm.size == 1 else 20, rule=rx.AdamW(decoupled=decoupled))
    loop = Loop(comm, spec, attached=attached, groups=groups_of).run(8)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    assert_close(loop.model, alone_with(kind, 8), 1e-6 if comm.size == 1 else 2e-5)
    assert_same_model(comm, loop.model)


@pytest.mark.ranks(2, 3, 4)
@alone_or_attached
def test_law_all_ranks_hold_the_same_after_every_step(comm, attached):
    """Check 36, and that it trains on signs."""
    loop = Loop(comm, rx.OneBitAdam(4), attached=attached, groups=groups_of)
    before = loss_of(loop.model).item()
    for _ in range(25):
        loop.step()
        assert_same_model(comm, loop.model)
        seen = rx.allgather(comm, loop.moments())
        assert (seen == seen[0]).all()
    assert all(bound.momenta is not None for bound in loop.bounds)
    assert loss_of(loop.model).item() < before / 3


@pytest.mark.ranks(2, 3)
def test_law_overlapped_is_not_overlapped(comm):
    spec = rx.OneBitAdam(3)
    first = Loop(comm, spec, attached=True, overlap=True, **SMALL).run(8)
    other = Loop(comm, spec, attached=True, overlap=False, **SMALL).run(8)
    assert torch.equal(numbers(first.model), numbers(other.model))


@pytest.mark.ranks(2)
@alone_or_attached
def test_one_exchange_a_bucket_of_one_group(comm, attached):
    """Six tensors of two groups are two messages there and two back, and few bytes."""
    large = {"bucket_bytes": 1 << 20, "first_bucket_bytes": 1 << 20}
    loop = Loop(comm, rx.OneBitAdam(2), attached=attached, groups=groups_of, **large).run(3)
    exchange = loop.sync._engine if attached else loop.optimizer._alone
    assert [len(bound.segments) for bound in loop.bounds] in ([4, 2], [2, 4])
    groups = [{id(p) for p in g["params"]} for g in loop.optimizer.param_groups]
    for bound in loop.bounds:
        assert any({id(s.x) for s in bound.segments} <= group for group in groups)
    streams = exchange._streams
    before = [copy.copy(stream.stats) for stream in streams]
    loop.step()
    messages = sum(s.stats.messages - b.messages for s, b in zip(streams, before, strict=True))
    assert messages == 2 * 2 * (comm.size - 1)


@pytest.mark.ranks(2)
@alone_or_attached
def test_schedulers(comm, attached):
    loop = Loop(comm, rx.OneBitAdam(20), attached=attached)
    model, theirs = perceptron(), None
    theirs = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.3) for o in (loop.optimizer, theirs)]
    for _ in range(6):
        loop.step()
        theirs.zero_grad()
        loss_of(model).backward()
        theirs.step()
        for s in schedulers:
            s.step()
    assert_close(loop.model, model, 2e-5)


@pytest.mark.ranks(2, 3)
@alone_or_attached
def test_clipping_is_by_the_norm_of_all_parameters(comm, attached):
    """As clip_grad_norm_ in the warm-up; afterwards steps are finite and equal on all ranks."""
    loop = Loop(comm, rx.OneBitAdam(4, max_norm=0.1), attached=attached, groups=groups_of)
    model = perceptron()
    theirs = torch.optim.AdamW(groups_of(model), lr=1e-2, weight_decay=0.0)
    for _ in range(4):
        loop.step()
        theirs.zero_grad()
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        theirs.step()
    assert_close(loop.model, model, 1e-4)
    raw = torch.autograd.grad(
        loss_of(loop.model, comm.rank, comm.size), list(loop.model.parameters())
    )
    assert nn.utils.get_total_norm(raw) > 0.11, "there is something to clip"
    loop.step()
    mine = sum(float(bound.flat.double().square().sum()) for bound in loop.bounds)
    np.testing.assert_allclose(rx.allreduce(comm, mine, op=rx.MEAN) ** 0.5, 0.1, rtol=1e-3)
    assert_same_model(comm, loop.model)


@pytest.mark.ranks(2)
@alone_or_attached
def test_accumulated_gradients_are_one_step(comm, attached):
    """Check 38 of the list of BAGUA: the momentum moves once a step."""

    def accumulate(loop, halves):
        for _ in range(5):
            loop.optimizer.zero_grad()
            if loop.sync and halves:
                with loop.sync.no_sync():
                    (loss_of(loop.model, comm.rank, comm.size) * 0.5).backward()
                (loss_of(loop.model, comm.rank, comm.size) * 0.5).backward()
            elif halves:
                for _ in range(2):
                    (loss_of(loop.model, comm.rank, comm.size) * 0.5).backward()
            else:
                loss_of(loop.model, comm.rank, comm.size).backward()
            loop.optimizer.step()
        return loop

    spec = rx.OneBitAdam(2)
    once, twice = (accumulate(Loop(comm, spec, attached=attached), h) for h in (False, True))
    assert_close(once.model, twice.model, 1e-6)


@pytest.mark.ranks(1, 2)
@alone_or_attached
def test_a_closure_is_refused_where_gradients_have_left(comm, attached):
    loop = Loop(comm, rx.OneBitAdam(2), attached=attached)

    def closure():
        loop.optimizer.zero_grad()
        loss = loss_of(loop.model, comm.rank, comm.size)
        loss.backward()
        return loss

    if attached:
        with pytest.raises(rx.RelaxError, match="computes gradients after"):
            loop.optimizer.step(closure)
    else:
        losses = [loop.optimizer.step(closure).item() for _ in range(5)]
        assert losses[-1] < losses[0]
        assert_same_model(comm, loop.model)


@pytest.mark.ranks(1, 2)
@alone_or_attached
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float64"])
def test_other_formats(comm, attached, kind):
    dtype = getattr(torch, kind)
    torch.manual_seed(0)
    model = nn.Linear(5, 3).to(dtype)
    spec = rx.OneBitAdam(2)
    optimizer = rx.OneBitAdamOptimizer(model.parameters(), spec, comm=comm, lr=1e-2)
    if attached:
        rx.attach(model, optimizer, spec, comm=comm)
    before = numbers(model)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 5, dtype=dtype) * (1 + comm.rank)).sum().backward()
        optimizer.step()
    moved = (before - numbers(model)).numpy()
    np.testing.assert_allclose(moved, 0.06, atol=0.02)
    kept = optimizer.state[model.weight]["exp_avg"].dtype
    assert kept == (torch.float64 if kind == "float64" else torch.float32)
    assert_same_model(comm, model)


@pytest.mark.ranks(1, 2)
def test_memory_in_another_order(comm):
    torch.manual_seed(0)
    pair = [nn.Conv2d(3, 4, 3) for _ in range(2)]
    pair[1].load_state_dict(pair[0].state_dict())
    pair[1].to(memory_format=torch.channels_last)
    assert not pair[1].weight.is_contiguous()
    for model in pair:
        optimizer = rx.OneBitAdamOptimizer(model.parameters(), rx.OneBitAdam(2), comm=comm)
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.ones(1, 3, 6, 6)) * torch.arange(4.0).view(1, 4, 1, 1)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(pair[0].weight, pair[1].weight, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- who takes part


@pytest.mark.ranks(1, 2, 3)
@alone_or_attached
def test_unused_parameters_are_left_alone_in_warm_up(comm, attached):
    """As torch does; and those that were never used stay in warm-up when others are frozen."""
    spec, model, twin = rx.OneBitAdam(4), Branches(), Branches()
    optimizer = rx.OneBitAdamOptimizer(model.parameters(), spec, comm=comm, lr=0.1)
    theirs = torch.optim.Adam(twin.parameters(), lr=0.1)
    sync = rx.attach(model, optimizer, spec, comm=comm) if attached else None

    def step(left):
        for m, o in ((model, optimizer), (twin, theirs)):
            o.zero_grad()
            m(torch.eye(4), left).square().sum().backward()
            o.step()

    for left in (True, True, False, True):
        step(left)
    assert_close(model, twin, 1e-5)
    assert optimizer.state[model.right.weight]["step"] == 1
    assert model.never.weight not in optimizer.state
    late = model.never
    for _ in range(3):  # its first gradients come after the freeze
        for m, o in ((model, optimizer), (twin, theirs)):
            o.zero_grad()
            (m(torch.eye(4), True).sum() + m.never(torch.eye(4)).square().sum()).backward()
            o.step()
    torch.testing.assert_close(late.weight, twin.never.weight, rtol=0, atol=1e-5)
    if comm.size > 1:
        assert optimizer.state[model.left.weight]["frozen"] == 1
        assert optimizer.state[late.weight]["frozen"] == 2
    assert_same_model(comm, model)
    if sync:
        sync.detach()


@pytest.mark.ranks(2)
def test_added_and_unfrozen_parameters_get_a_warm_up_of_their_own(comm):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    model[1].requires_grad_(False)
    spec = rx.OneBitAdam(3)
    params = [*model[0].parameters(), *model[1].parameters()]
    optimizer = rx.OneBitAdamOptimizer(params, spec, comm=comm, lr=0.01)

    def step():
        optimizer.zero_grad()
        x = torch.eye(4) * (1 + comm.rank)
        sum(layer(x).square().sum() for layer in model).backward()
        optimizer.step()
        assert_same_model(comm, model)

    def phases():
        return [float(optimizer.state[m.weight].get("frozen", -1)) for m in model]

    for _ in range(5):
        step()
    assert phases() == [1, -1, -1]
    model[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
    for _ in range(2):
        step()
        assert phases() == [1, 0, 0]
    twin = copy.deepcopy(model[1].weight.detach())
    step()
    assert phases() == [1, 1, 1], "their third step was their last one in full precision"
    assert not torch.equal(twin, model[1].weight)
    assert optimizer.state[model[0].weight]["step"] == 8


@pytest.mark.ranks(1, 2)
def test_law_no_hook_stays_behind(comm):
    """Check 37 of the list of BAGUA: one algorithm after the other on one model."""
    model, spec = perceptron(), rx.OneBitAdam(2)
    ours = rx.OneBitAdamOptimizer(model.parameters(), spec, comm=comm)
    theirs = torch.optim.SGD(model.parameters(), lr=0.01)
    pairs = [(theirs, rx.ByteGrad()), (ours, spec), (theirs, rx.SGD()), (ours, spec)]
    before = traces(model, theirs)
    for optimizer, algorithm in pairs:
        with rx.attach(model, optimizer, algorithm, comm=comm, **SMALL) as sync:
            for _ in range(4):
                optimizer.zero_grad()
                loss_of(model, comm.rank, comm.size).backward()
                optimizer.step()
            sync.check()
        assert traces(model, theirs) == before
    assert ours.state[model[0].weight]["step"] == 8
    for _ in range(2):  # by itself, with the variance that was frozen
        ours.zero_grad()
        loss_of(model, comm.rank, comm.size).backward()
        ours.step()
    assert ours.state[model[0].weight]["frozen"] == (comm.size > 1)
    assert_same_model(comm, model)


# ---------------------------------------------------------------- numbers that are not finite


@pytest.mark.ranks(1, 2, 3)
@alone_or_attached
@pytest.mark.parametrize("when", [1, 5], ids=["warm-up", "signs"])
def test_one_overflow_leaves_the_step_out_on_all(comm, attached, when):
    """Check 37: no hang, and later steps are as if it had not been."""
    loops = [Loop(comm, rx.OneBitAdam(3), attached=attached) for _ in range(2)]
    loops[0].run(8)
    for t in range(9):
        loops[1].step(poison=t == when and comm.rank == comm.size - 1)
    assert torch.equal(*(numbers(loop.model) for loop in loops))
    assert [loop.optimizer.skipped for loop in loops] == [0, 1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("codec", [rx.OneBit(), rx.Quantizer(4)])
@pytest.mark.parametrize("guard", [rx.NonFinite.SKIP, rx.NonFinite.RAISE])
def test_guards_of_attach(comm, guard, codec):
    spec = rx.OneBitAdam(3, codec=codec)
    loops = [Loop(comm, spec, attached=True, nonfinite=guard, **SMALL) for _ in range(2)]
    loops[0].run(8)
    for t in range(9):
        if t == 5 and guard is rx.NonFinite.RAISE:
            with pytest.raises(rx.NonFiniteError, match="on rank 1 in step 5"):
                loops[1].step(poison=comm.rank == 1)
        else:
            loops[1].step(poison=t == 5 and comm.rank == 1)
    assert torch.equal(*(numbers(loop.model) for loop in loops))
    skips = guard is rx.NonFinite.SKIP
    assert loops[1].sync.stats().skipped == skips


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("unscale", [True, False])
def test_a_grad_scaler_with_the_optimizer_by_itself(comm, unscale):
    loops = [Loop(comm, rx.OneBitAdam(3), attached=False) for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    loops[0].run(7)
    loop = loops[1]
    for t in range(8):
        loop.optimizer.zero_grad()
        loss = loss_of(loop.model, comm.rank, comm.size)
        bad = t == 5 and comm.rank == comm.size - 1
        scaler.scale(loss + (loop.model[0].bias * (float("inf") if bad else 0)).sum()).backward()
        if unscale:
            scaler.unscale_(loop.optimizer)
        scaler.step(loop.optimizer)
        scaler.update()
    assert_close(loop.model, loops[0].model, 1e-5)
    assert loop.optimizer.skipped == 1
    assert scaler.get_scale() == (2.0**9 if comm.rank == comm.size - 1 else 2.0**10)


# ---------------------------------------------------------------- state


@pytest.mark.ranks(1, 2, 3)
@alone_or_attached
@pytest.mark.parametrize("stop", [3, 5, 8])
def test_law_resuming_is_never_having_stopped(comm, attached, stop):
    """Check 39: saved before, at and after a freeze at 5, bit for bit."""
    make = {"spec": rx.OneBitAdam(5), "attached": attached, "groups": groups_of}
    want = Loop(comm, **make).run(12)
    first = Loop(comm, **make).run(stop)
    saved = first.save()
    first.step()  # must not reach what was saved
    again = Loop(comm, **make).load(saved).run(12 - stop)
    assert torch.equal(numbers(again.model), numbers(want.model))
    assert torch.equal(again.moments(), want.moments())
    back = first.load(saved).run(12 - stop)
    assert torch.equal(numbers(back.model), numbers(want.model)), "also in place"


@pytest.mark.ranks(2)
def test_the_order_of_loading(comm):
    """What codecs owe belongs to coordinates that the optimizer's state tells."""
    spec = rx.OneBitAdam(2)
    saved = Loop(comm, spec, attached=True).run(4).save()
    other = Loop(comm, spec, attached=True)
    with pytest.raises(ValueError, match="load the state of the optimizer first"):
        other.sync.load_state_dict(saved[2])
    other.load(saved).run(2)


@pytest.mark.ranks(1, 2)
def test_a_state_of_adam_is_taken_over(comm):
    model = perceptron()
    theirs = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        theirs.zero_grad()
        loss_of(model).backward()
        theirs.step()
    loop = Loop(comm, rx.OneBitAdam(6), attached=False, model=copy.deepcopy(model))
    loop.optimizer.load_state_dict(
        {**loop.optimizer.state_dict(), "state": theirs.state_dict()["state"]}
    )
    loop.run(3)
    for _ in range(3):
        theirs.zero_grad()
        loss_of(model).backward()
        theirs.step()
    assert_close(loop.model, model, 1e-5)
    assert loop.optimizer.state[loop.model[0].weight]["frozen"] == (comm.size > 1)


# ---------------------------------------------------------------- wrong use


@pytest.mark.ranks(1, 2)
def test_wrong_pairs_are_refused(comm):
    model, spec = perceptron(), rx.OneBitAdam(2)
    ours = rx.OneBitAdamOptimizer(model.parameters(), spec, comm=comm)
    theirs = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"cannot feed a Adam: make rx.OneBitAdamOptimizer"):
        rx.attach(model, theirs, spec, comm=comm)
    with pytest.raises(ValueError, match=r"is for OneBitAdam\(freeze=2"):
        rx.attach(model, ours, rx.SGD(), comm=comm)
    with pytest.raises(ValueError, match="cannot feed"):
        rx.attach(model, ours, rx.OneBitAdam(3), comm=comm)
    with pytest.raises(TypeError, match="must be OneBitAdam"):
        rx.OneBitAdamOptimizer(model.parameters(), rx.SGD(), comm=comm)
    with pytest.raises(ValueError, match="betas must be"):
        rx.OneBitAdamOptimizer(model.parameters(), spec, comm=comm, betas=(0.9, 1.0))
    with pytest.raises(TypeError, match="Adam steps float16"):
        bad = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        rx.OneBitAdamOptimizer([bad], spec, comm=comm)


@pytest.mark.ranks(2)
def test_what_would_have_no_effect_is_refused(comm):
    loop = Loop(comm, rx.OneBitAdam(2), attached=True).run(3)
    with pytest.raises(rx.RelaxError, match="takes no weights"), loop.sync.join():
        pass
    with pytest.raises(rx.RelaxError, match="takes no weights"):
        loop.sync.weight = 2.0
    loop.run(1)
    loop.optimizer.zero_grad()
    loss_of(loop.model, comm.rank, comm.size).backward()
    loop.sync.wait()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    with pytest.raises(rx.RelaxError, match=r"use OneBitAdam\(max_norm"):
        loop.optimizer.step()


@pytest.mark.ranks(2)
def test_a_grad_scaler_inside_attach_is_refused(comm):
    loop = Loop(comm, rx.OneBitAdam(2), attached=True, **SINGLE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss_of(loop.model, comm.rank, comm.size)).backward()
    loop.sync.wait()
    with pytest.raises(rx.RelaxError, match="use the optimizer by itself"):
        scaler.step(loop.optimizer)


@pytest.mark.ranks(4)
def test_by_node(comm):
    with comm.by_node() as nodes, warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = Loop(nodes, rx.OneBitAdam(2), attached=True).run(5)
        assert_same_model(comm, loop.model)
        loop.sync.detach()
