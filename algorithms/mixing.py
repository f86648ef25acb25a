"""What algorithms that mix parameters have in common: a local rule, then an exchange."""

from __future__ import annotations

from enum import Enum
from typing import Any

from relaxmpi.algorithms.arrays import copy_of
from relaxmpi.algorithms.base import Algorithm, Bound, Rule, rule_of, with_rule
from relaxmpi.primitives import Comm
from relaxmpi.primitives.devices import device_of

__all__ = ["BoundMixing", "MixingAlgorithm", "Order"]


class Order(Enum):
    """When parameters are mixed.

    Attributes:
        ADAPT_THEN_COMBINE: x_i <- sum_j W_ij (x_j - lr g_j): neighbours get the step at once.
        COMBINE_WHILE_ADAPT: x_i <- sum_j W_ij x_j - lr g_i: parameters travel while the gradient
            is computed at the rank's own.
    """

    ADAPT_THEN_COMBINE = "adapt, then combine"
    COMBINE_WHILE_ADAPT = "combine while adapting"


class MixingAlgorithm(Algorithm):
    """An algorithm that steps locally and mixes parameters; its dataclass has a `rule`."""

    rule: Rule

    @property
    def own_rule(self) -> str:
        """The settings of the local rule that differ from plain descent."""
        return rule_of(self.rule).own_rule

    @property
    def mixes(self) -> bool:
        """See `Algorithm`."""
        return True


class BoundMixing(Bound):
    """The state of such an algorithm: x, the local rule's, and the number of steps taken."""

    def __init__(self, rule: Rule, comm: Comm, x: Any, lr: float, name: str) -> None:
        _check_parameters(x)
        self.comm, self.x, self.lr, self.name = comm, x, lr, name
        self.rule, self.with_rule = rule_of(rule).local(), with_rule(rule)
        self.t = 0

    @property
    def kind(self) -> str:
        """See `Bound`; the state of the rule is a part of it."""
        return super().kind + self.with_rule

    def on_step(self, g: Any) -> None:
        """Descend."""
        self.rule.apply(self.stepped, g, self.lr)

    def state_dict(self) -> dict[str, Any]:
        """Steps taken and their length, and the state of the rule."""
        return {"t": self.t, "lr": self.lr, "rule": self.rule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; the parameters are the caller's to restore, before this."""
        self.t, self.lr = state["t"], state["lr"]
        self.rule.load_state_dict(state["rule"])

    def load_resized(self, state: dict[str, Any]) -> None:
        """Go on from x, with the rule's state of another rank and nothing on its way."""
        x = copy_of(self.x)
        self.finish()
        BoundMixing.load_state_dict(self, state)
        self.replace(x)


def _check_parameters(x: Any) -> None:
    """Refuse at once what a later step cannot change in place."""
    dtype = device_of(x).flat(x, strided=True).dtype
    if not dtype.startswith(("float", "bfloat", "complex")):
        raise TypeError(f"parameters are floats or complex numbers, not {dtype}")
    if getattr(x, "requires_grad", False):
        raise ValueError(
            "torch changes no tensor that requires gradients in place: pass x.detach(), which "
            "shares its memory"
        )
