"""`attach` around algorithms that mix parameters: the seam, with ten lines that all-reduce x."""

import dataclasses

import numpy as np
import pytest
from loops import (
    assert_same_model,
    loss_of,
    numbers,
    perceptron,
    sgd_of,
)

import relaxmpi as rx


class BoundAverage(rx.Bound):
    def __init__(self, rule, comm, x, lr, name):
        self.comm, self.x, self.lr, self.name, self.rule = comm, x, lr, name, rule.local()

    def on_step(self, g):
        self.rule.apply(self.x, g, self.lr)

    def on_params(self):
        rx.allreduce(self.comm, self.x, op=rx.MEAN, name=self.name)


@dataclasses.dataclass(frozen=True)
class Average(rx.Algorithm):
    """Step, then replace x by its mean: for rules that are linear in g, AllReduce SGD."""

    rule: rx.Rule = dataclasses.field(default_factory=rx.SGD)

    def bind(self, comm, x, *, lr, name=""):
        return BoundAverage(self.rule, comm, x, lr, name)

    mixes = True


def train(comm, model, optimizer, steps=4, each=lambda t: None):
    for t in range(steps):
        optimizer.zero_grad()
        loss_of(model, comm.rank, comm.size).backward()
        optimizer.step()
        each(t)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("limits", [{}, {"bucket_bytes": 2000}], ids=str)
def test_averaging_after_each_step_is_allreduce_sgd(comm, limits):
    alone, together = perceptron(), perceptron(comm.rank)
    optimizer = sgd_of(alone)
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(alone).backward()
        optimizer.step()
    optimizer = sgd_of(together)
    with rx.attach(together, optimizer, Average(), comm=comm, **limits) as sync:
        train(comm, together, optimizer)
        assert_same_model(comm, together)
        assert sync.spread() == 0
        stats = sync.stats()
        assert stats.steps == 4
        if comm.size > 1:
            assert stats.buckets == (1 if not limits else 3)
            assert stats.payload_bytes > 0
    np.testing.assert_allclose(numbers(together), numbers(alone), rtol=0, atol=2e-6)
