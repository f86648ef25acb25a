"""AllReduce SGD: every rank descends along the mean of all gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from relaxmpi.algorithms.base import Algorithm, Bound, Local, Rule, rule_of, with_rule
from relaxmpi.primitives import MEAN, Codec, Comm, ErrorFeedback, Work, allreduce

__all__ = ["SGD", "BoundSGD"]


@dataclass(frozen=True)
class SGD(Algorithm, Rule):
    """Synchronous SGD; with a batch of equal size on every rank, SGD on the union of the batches.

    With f_i the loss on rank i, mu the momentum and w the weight decay:

        g <- mean_i grad f_i(x)        the one thing that is communicated
        g <- g + w x
        v <- mu v + g                  v = g in the first step
        x <- x - lr v                  with Nesterov's momentum x - lr (g + mu v)

    The local rule is that of `torch.optim.SGD` (Sutskever et al. 2013, without dampening).

    Args:
        momentum: mu.
        nesterov: Look ahead along the momentum.
        weight_decay: w.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> x = np.ones(3)
        >>> with rx.Comm.world() as comm:
        ...     opt = rx.SGD(momentum=0.5).bind(comm, x, lr=0.25)
        ...     for _ in range(2):
        ...         opt.step(2 * x)
        >>> x
        array([0., 0., 0.])
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ValueError("Nesterov's momentum needs momentum > 0")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, not {self.weight_decay}")

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundSGD:
        """See `Algorithm.bind`."""
        return BoundSGD(self, comm, x, lr, name)

    def local(self) -> Descent:
        """See `Rule.local`."""
        return Descent(self)

    @property
    def own_rule(self) -> str:
        """The settings that differ from plain descent."""
        ours = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{name}={value}" for name, value in ours.items() if value)


class Descent(Local):
    """Descent with momentum and weight decay."""

    def __init__(self, rule: SGD) -> None:
        self.rule = rule
        self.v: Any = 0.0

    def apply(self, x: Any, g: Any, lr: float) -> None:
        """See `Local`."""
        mu, w = self.rule.momentum, self.rule.weight_decay
        if w:
            g = g + w * x
        if mu:
            self.v = mu * self.v + g
            g = g + mu * self.v if self.rule.nesterov else self.v
        x -= lr * g

    def state_dict(self) -> dict[str, Any]:
        """The momentum, which is never changed in place: no copy."""
        return {"v": self.v}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Local`."""
        self.v = state["v"]


class BoundSGD(Bound):
    """The state of SGD for one buffer, or of another rule; with a codec, that of QSGD."""

    def __init__(
        self,
        rule: Rule,
        comm: Comm,
        x: Any,
        lr: float,
        name: str,
        codec: Codec | ErrorFeedback | None = None,
    ) -> None:
        self.comm, self.x, self.lr, self.name = comm, x, lr, name
        self.rule, self._with_rule = rule_of(rule).local(), with_rule(rule)
        self.codec = codec
        self.t = 0

    @property
    def kind(self) -> str:
        """See `Bound`; the state of the rule is a part of it."""
        return super().kind + self._with_rule

    def on_grads(self, g: Any) -> Work[Any]:
        """Start to replace `g` by its mean over the ranks."""
        # A codec's random numbers follow the step of this state, so that it resumes exactly.
        step = None if self.codec is None else self.t
        self.t += 1
        return allreduce.start(self.comm, g, op=MEAN, codec=self.codec, name=self.name, step=step)

    def on_step(self, g: Any) -> None:
        """Descend."""
        self.rule.apply(self.x, g, self.lr)

    def state_dict(self) -> dict[str, Any]:
        """Steps taken and their length, the state of the rule, what the codec still owes."""
        owed = self.codec.state_dict() if isinstance(self.codec, ErrorFeedback) else None
        return {"t": self.t, "lr": self.lr, "rule": self.rule.state_dict(), "owed": owed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; the parameters are the caller's to restore."""
        self._load_common(state)
        if isinstance(self.codec, ErrorFeedback):
            self.codec.load_state_dict(state["owed"])

    def load_resized(self, state: dict[str, Any]) -> None:
        """Restore all but what the codec owes."""
        self._load_common(state)
        if isinstance(self.codec, ErrorFeedback):
            self.codec.reset()

    def _load_common(self, state: dict[str, Any]) -> None:
        self.t, self.lr = state["t"], state["lr"]
        self.rule.load_state_dict(state["rule"])
