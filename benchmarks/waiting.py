"""A model whose gradient takes a given time and no core.

Emulated hosts share the cores of one machine, hosts of a cluster do not: where the gradient is
waited for instead of computed, what is left on the cores is what communication costs.
"""

import time
from typing import Any

import torch
from torch import nn


class Waiting(nn.Module):
    """The parameters of another model, and gradients that are always the same.

    A third of the seconds passes in forward and two thirds in backward, layer by layer, in
    proportion to their multiplications, so that gradients appear in the order and at the times
    at which a processor of its own would give them.
    """

    def __init__(self, model: nn.Module, example: torch.Tensor, seconds: float) -> None:
        super().__init__()
        self.model = model
        self.layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        costs = multiplications(model, self.layers, example)
        self.seconds = [seconds * cost / sum(costs) for cost in costs]
        self.gradients = [
            [1e-3 * torch.randn_like(p) for p in layer.parameters()] for layer in self.layers
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Wait a third of the time; all logits are zero."""
        out = torch.zeros(len(x), 10, requires_grad=True)
        for layer, seconds, gradients in zip(
            self.layers, self.seconds, self.gradients, strict=True
        ):
            out = Wait.apply(out, seconds, gradients, *layer.parameters())  # type: ignore[no-untyped-call]
        return out


class Wait(torch.autograd.Function):
    """A layer that waits, and has gradients for its parameters."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, seconds: float, gradients: list[torch.Tensor], *_: nn.Parameter
    ) -> torch.Tensor:
        """Wait a third of the layer's seconds."""
        ctx.seconds, ctx.gradients = seconds, gradients
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Wait two thirds."""
        time.sleep(ctx.seconds * 2 / 3)
        return grad, None, None, *ctx.gradients


def multiplications(model: nn.Module, layers: list[nn.Module], example: torch.Tensor) -> list[int]:
    """Return how many multiplications each layer makes for an example."""
    counts: dict[nn.Module, int] = {}

    def count(layer: nn.Module, _: Any, out: torch.Tensor) -> None:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        counts[layer] = weight.numel() * out.numel() // len(weight)

    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        model(example)
    for hook in hooks:
        hook.remove()
    return [counts[layer] for layer in layers]
