"""`attach` on models of all kinds: n ranks are one process with the batches of all of them."""

from dataclasses import dataclass
from typing import Any

import pytest
from loops import SINGLE, Branches, assert_close, assert_same_model, copies, nn, sgd_of, torch
from torch.utils.checkpoint import checkpoint

import relaxmpi as rx


@dataclass
class Case:
    """A model, the loss of a rank in a step (None: no backward there), and the rule."""

    build: Any
    loss: Any
    rule: Any = lambda model: sgd_of(model, weight_decay=0.1)
    to_none: bool = True
    each: Any = lambda model, optimizer, t: None
    steps: int = 4
    atol: float = 2e-6


def rows(t, r, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * t + r))


class Net(nn.Module):
    """Layers by name, and what to do with them."""

    def __init__(self, forward, **layers):
        super().__init__()
        torch.manual_seed(1)
        self.do = forward
        for name, make in layers.items():
            setattr(self, name, make())

    def forward(self, x):
        return self.do(self, x)


def linear_loss(model, t, r):
    return model(rows(t, r, 3, 4)).square().mean()


def branches_loss(model, t, r):
    # Step 2: the right one is used nowhere; step 3: rank 1 has no batch at all.
    if t == 3 and r == 1:
        return None
    return model(rows(t, r, 3, 4), left=t == 2 or (t + r) % 2 == 0).square().mean()


def two_layers(forward):
    return lambda: Net(forward, a=lambda: nn.Linear(4, 4), b=lambda: nn.Linear(4, 4))


def tied():
    net = Net(
        lambda self, x: self.out(self.table(x)).square().mean(),
        table=lambda: nn.Embedding(6, 4),
        out=lambda: nn.Linear(4, 6, bias=False),
    )
    net.out.weight = net.table.weight
    return net


def parameter(*shape, dtype=torch.float32):
    return lambda: nn.Parameter(torch.randn(shape, dtype=dtype))


def odd():
    """Shapes (), (0,), (0, 3), a dtype of which there is only an empty one, and a turned one."""
    return Net(
        lambda self, x: (
            x.mean() * (self.scalar + self.turned.sum() + self.one.sum())
            + self.nothing.sum()
            + self.none.sum()
            + self.thin.sum().float()
        ),
        scalar=parameter(),
        nothing=parameter(0),
        none=parameter(0, 3),
        thin=parameter(0, dtype=torch.float64),
        one=parameter(1),
        turned=lambda: nn.Parameter(torch.randn(3, 2).t()),
    )


def mixed():
    return Net(
        lambda self, x: x.mean() * (self.wide.sum() + self.short.sum() + self.brain.sum()),
        wide=parameter(5, dtype=torch.float64),
        short=parameter(3, dtype=torch.float16),
        brain=parameter(7, dtype=torch.bfloat16),
    )


def conv():
    return Net(
        lambda self, x: self.norm(self.b(torch.relu(self.a(x)))),
        a=lambda: nn.Conv2d(3, 4, 3),
        b=lambda: nn.Conv2d(4, 2, 1),
        norm=lambda: nn.GroupNorm(1, 2),
    ).to(memory_format=torch.channels_last)


def conv_loss(model, t, r):
    x = rows(t, r, 2, 3, 6, 6).to(memory_format=torch.channels_last)
    return model(x).square().mean()


def complex_loss(model, t, r):
    return model(torch.complex(rows(t, r, 3, 4), rows(t, r + 50, 3, 4))).abs().square().mean()


def embed_loss(model, t, r):
    # Repeated rows; rank 0 has none in step 1, nobody has any in step 2.
    if t == 2 or (t == 1 and r == 0):
        return None
    return model(torch.tensor([r, r, t])).square().mean()


def checkpointed(reentrant):
    def forward(self, x):
        x = x.requires_grad_()
        for layer in (self.a, self.b):
            x = checkpoint(lambda x, f=layer: torch.tanh(f(x)), x, use_reentrant=reentrant)
        return x

    return two_layers(forward)


def autocast_loss(model, t, r):
    with torch.autocast("cpu", torch.bfloat16):
        return model(rows(t, r, 3, 4)).float().square().mean()


def twice_loss(model, t, r):
    first, second = model(rows(t, r, 3, 4)), model(rows(t, r + 50, 3, 4))
    return first.square().mean() + second.abs().mean()


def freeze(model, optimizer, t):
    model.a.requires_grad_(t not in (1, 2))  # thawed again in step 3


def groups(model):
    some = [{"params": model.a.parameters(), "lr": 0.01}, {"params": [model.b.weight]}]
    optimizer = torch.optim.Adam(some, lr=0.1, weight_decay=0.1, amsgrad=True)
    optimizer.add_param_group({"params": [model.b.bias], "betas": (0.5, 0.9)})
    return optimizer


def decay(model, optimizer, t):
    if t == 0:
        optimizer.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    else:
        optimizer.schedule.step()


straight = two_layers(lambda self, x: self.b(torch.tanh(self.a(x))))

CASES = {
    "conditional": Case(Branches, branches_loss),
    "conditional-zeros": Case(Branches, branches_loss, to_none=False),
    "conditional-adamw": Case(
        Branches, branches_loss, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), atol=1e-4
    ),
    "frozen": Case(straight, linear_loss, each=freeze),
    "frozen-zeros": Case(straight, linear_loss, each=freeze, to_none=False),
    "tied": Case(tied, lambda model, t, r: model(torch.tensor([r, t, r]))),
    "odd": Case(odd, lambda m, t, r: m(rows(t, r, 3))),
    "mixed": Case(mixed, lambda m, t, r: m(rows(t, r, 3).sign()), atol=2e-2),
    "complex": Case(
        lambda: nn.Linear(4, 2, dtype=torch.complex64),
        complex_loss,
    ),
    "sparse": Case(
        lambda: nn.Embedding(6, 2, sparse=True),
        embed_loss,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
    ),
    "channels_last": Case(conv, conv_loss),
    "lstm": Case(lambda: Net(lambda self, x: self.a(x)[0], a=lambda: nn.LSTM(4, 3)), linear_loss),
    "checkpoint": Case(checkpointed(False), linear_loss),
    "checkpoint-reentrant": Case(checkpointed(True), linear_loss),
    "two-forwards": Case(straight, twice_loss),
    "groups": Case(straight, linear_loss, groups, atol=2e-4),
    "scheduler": Case(straight, linear_loss, each=decay),
    "autocast": Case(straight, autocast_loss, atol=5e-3),
    "zeros-kept": Case(straight, linear_loss, to_none=False),
}


def run(comm, case, algorithm=None):
    """Return the model that all ranks trained, and the one of one process."""
    torch.manual_seed(0)
    (model, optimizer), (alone, theirs) = copies(case.build(), case.rule)
    with rx.attach(model, optimizer, algorithm or rx.SGD(), comm=comm, **SINGLE) as sync:
        for t in range(case.steps):
            for m, o in ((model, optimizer), (alone, theirs)):
                o.zero_grad(set_to_none=case.to_none)
                case.each(m, o, t)
            loss = case.loss(model, t, comm.rank)
            if loss is not None:
                loss.backward()
            losses = [case.loss(alone, t, r) for r in range(comm.size)]
            for loss in losses:
                if loss is not None:
                    (loss / comm.size).backward()
            optimizer.step()
            theirs.step()
        sync.check()
    assert all(type(p.grad) in (torch.Tensor, type(None)) for p in model.parameters())
    has = [[p.grad is None for p in m.parameters()] for m in (model, alone)]
    assert has[0] == has[1]
    return model, alone


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", CASES)
def test_law_n_ranks_are_one_process(comm, name):
    model, alone = run(comm, CASES[name])
    assert_close(model, alone, CASES[name].atol)


@pytest.mark.ranks(4)
def test_law_n_ranks_on_nodes_are_one_process(comm, monkeypatch):
    monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", "2")
    with rx.Comm.wrap(comm.mpi) as inner, inner.by_node() as nodes:
        for case in CASES.values():
            model, alone = run(nodes, case)
            assert_close(model, alone, case.atol)


@pytest.mark.parametrize("n", [2, 3, pytest.param(5, marks=pytest.mark.long)])
def test_law_n_ranks_are_one_process_in_any_order_of_events(n):
    def program(case):
        with rx.Comm.world() as comm:
            model, alone = run(comm, case)
            assert_close(model, alone, case.atol)

    for seed, case in enumerate(CASES.values()):
        rx.SimulatedWorld(n, seed=100 * n + seed).run(program, case)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("algorithm", [rx.QSGD(bits=8), rx.QSGD(bits=1, feedback=True)], ids=str)
def test_with_a_codec_all_ranks_stay_alike(comm, algorithm):
    for case in CASES.values():
        model, _ = run(comm, case, algorithm)
        assert_same_model(comm, model)
