"""What algorithms that mix parameters have in common: a local rule, then an exchange."""

from __future__ import annotations

from typing import Any

from relaxmpi.algorithms.base import Algorithm, Bound, Rule
from relaxmpi.primitives import MAX, Comm, allreduce, broadcast
from relaxmpi.primitives.devices import device_of

__all__ = ["BoundMixing", "MixingAlgorithm", "check_equal_start", "copy_of"]


class MixingAlgorithm(Algorithm):
    """An algorithm that steps locally and mixes parameters; its dataclass has a `rule`."""

    rule: Rule

    @property
    def own_rule(self) -> str:
        """The settings of the local rule that differ from plain descent."""
        return self.rule.own_rule

    @property
    def mixes(self) -> bool:
        """See `Algorithm`."""
        return True


class BoundMixing(Bound):
    """The state of such an algorithm: x, the local rule's, and the number of steps taken."""

    def __init__(self, rule: Rule, comm: Comm, x: Any, lr: float, name: str) -> None:
        self.comm, self.x, self.lr, self.name = comm, x, lr, name
        self.rule = rule.local()
        self.t = 0

    def on_step(self, g: Any) -> None:
        """Descend."""
        self.rule.apply(self.stepped, g, self.lr)

    def state_dict(self) -> dict[str, Any]:
        """Steps taken and the state of the rule."""
        return {"t": self.t, "rule": self.rule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; the parameters are the caller's to restore, before this."""
        self.t = state["t"]
        self.rule.load_state_dict(state["rule"])


def copy_of(x: Any) -> Any:
    """Return a copy, of the same kind."""
    out = device_of(x).like(x, tuple(x.shape))
    out[...] = x
    return out


def check_equal_start(comm: Comm, x: Any, name: str) -> None:
    """Refuse buffers that differ between ranks; collective.

    Raises:
        ValueError: On every rank.
    """
    if comm.size == 1:
        return
    theirs = broadcast(comm, copy_of(x), name=f"start of {name}")
    if allreduce(comm, int(not bool((theirs == x).all())), op=MAX, name=f"equal start of {name}"):
        raise ValueError(
            f"x{f' of {name}' * bool(name)} must be equal on all ranks at the start, as each keeps "
            "replicas of its neighbours': rx.broadcast(comm, x) first"
        )
