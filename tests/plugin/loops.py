"""Small models, and the loops that the tests of `attach` compare."""

import copy
import sys
from functools import lru_cache

import numpy as np
import pytest

import relaxmpi as rx

torch = pytest.importorskip("torch")
nn = torch.nn
torch.set_num_threads(1)  # ranks share the cores

SMALL = {"bucket_bytes": 2000, "first_bucket_bytes": 500}  # several buckets for small models
SINGLE = {"bucket_bytes": 1, "first_bucket_bytes": 1}  # one a parameter


def perceptron(seed=0, width=32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
    )


class Branches(nn.Module):
    """Uses one of two layers, as the caller says; a third one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right, self.never = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, left):
        return (self.left if left else self.right)(x)


@lru_cache
def samples():
    """240 images of 8 x 8 pixels, of ten kinds."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(240) % 10
    kinds = torch.rand(10, 64, generator=generator)
    return kinds[labels] + 0.2 * torch.randn(240, 64, generator=generator), labels


def loss_of(model, rank=0, size=1, rows=slice(None)):
    images, labels = samples()
    mine = slice(rank, None, size)
    return nn.functional.cross_entropy(model(images[rows][mine]), labels[rows][mine])


def train(comm, model, optimizer, steps=4, each=lambda t: None):
    for t in range(steps):
        optimizer.zero_grad()
        loss_of(model, comm.rank, comm.size).backward()
        optimizer.step()
        each(t)


def numbers(model):
    flat = [torch.view_as_real(p) if p.is_complex() else p for p in model.parameters()]
    return torch.cat([p.detach().double().ravel() for p in flat])


def assert_close(model, want, atol=2e-6):
    np.testing.assert_allclose(numbers(model), numbers(want), rtol=0, atol=atol)


def assert_same_model(comm, model):
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        seen = rx.allgather(comm, t.detach().reshape(-1).contiguous(), name=name)
        for r in range(1, comm.size):
            assert torch.equal(seen[r], seen[0]), f"{name} on rank {r}"


def sgd_of(model, **settings):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})


def fit(comm, model, optimizer, algorithm, steps=5, each=lambda sync: None, **limits):
    with rx.attach(model, optimizer, algorithm, comm=comm, **limits or SMALL) as sync:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model, comm.rank, comm.size).backward()
            optimizer.step()
            each(sync)
        return sync.stats()


def weight_of(values, **settings):
    """A model of one float32 vector and its optimizer: plain descent with step length 1."""
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor(values, dtype=torch.float32))
    return model, torch.optim.SGD(model.parameters(), **{"lr": 1.0, **settings})


def push(model, gradient):
    """A backward pass that leaves a given gradient."""
    (model.w * torch.tensor(gradient, dtype=torch.float32)).sum().backward()


def copies(model, optimizer_of):
    """The model and a copy, each with its optimizer."""
    twin = copy.deepcopy(model)
    return (model, optimizer_of(model)), (twin, optimizer_of(twin))


def traces(model, optimizer):
    """The hooks and attributes that attach may have left behind."""
    hooked = sys.modules["torch.optim.optimizer"]  # torch.optim deletes the name
    counts = [len(getattr(optimizer, n)) for n in vars(optimizer) if n.endswith("_hooks")]
    return {
        "parameters": [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
        "backward": [len(p._backward_hooks or ()) for p in model.parameters()],
        "modules": [sorted(vars(m)) for m in model.modules()],
        "attributes": [sorted(vars(x)) for x in (optimizer, *model.parameters())],
        "types": {k: type(v) for k, v in vars(optimizer).items()},
        "optimizer": [*counts, len(hooked._global_optimizer_pre_hooks)],
    }
