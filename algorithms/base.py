"""What an algorithm is: an immutable description, and the state of one buffer bound to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from relaxmpi.primitives.comm import Comm
from relaxmpi.primitives.work import Work

__all__ = ["Algorithm", "Bound", "Local", "Rule"]


class Local(ABC):
    """A local rule at work on one buffer: what to do with a gradient once it is there."""

    @abstractmethod
    def apply(self, x: Any, g: Any, lr: float) -> None:
        """Move x in place; `g` may be overwritten."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save to resume exactly; later steps do not change it."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Rule(ABC):
    """A description of a local rule, such as `SGD(momentum=0.9)`."""

    @abstractmethod
    def local(self) -> Local:
        """Return its state for one buffer."""

    @property
    @abstractmethod
    def own_rule(self) -> str:
        """The settings that differ from plain descent, in words."""


class Bound:
    """An algorithm at work on one buffer.

    Four moments make up a step. `step` runs them in order, and `attach` places them around
    somebody else's training loop. Whatever an algorithm keeps beside the parameters, x is always
    what the next gradient is to be computed at.

    Attributes:
        lr: The step length, to be changed at will between steps.
    """

    lr: float

    def on_grads(self, g: Any) -> Work[Any] | None:
        """What happens as soon as the gradient is there; `g` belongs to the Work until it ends."""
        return None

    def before_step(self) -> None:
        """What happens to x before the local rule, such as mixing it with those of neighbours."""

    def on_step(self, g: Any) -> None:
        """The local rule: move x by the gradient that `on_grads` left in `g`."""

    def on_params(self) -> None:
        """What happens after the local rule: afterwards x is where the next gradient is taken."""

    def step(self, g: Any) -> None:
        """Take one step with this rank's gradient, in whose place the exchanged one is left."""
        work = self.on_grads(g)
        if work is not None:
            work.wait()
        self.before_step()
        self.on_step(g)
        self.on_params()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what this rank must save, besides the parameters, to resume exactly."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank."""


class Algorithm(ABC):
    """What to send, and when: a frozen dataclass, shared freely; `bind` makes the state.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> x = np.zeros(2)
        >>> with rx.Comm.world() as comm:
        ...     rx.SGD().bind(comm, x, lr=0.5).step(np.array([2.0, 4.0]))
        >>> x
        array([-1., -2.])
    """

    @abstractmethod
    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> Bound:
        """Return the state of this algorithm for one buffer.

        Args:
            comm: Whom to communicate with.
            x: The parameters, changed in place; numpy array or torch tensor. None leaves them and
                the local rule to somebody else (`attach`: an optimizer), who never calls `on_step`.
            lr: Step length.
            name: Which buffer this is: the ranks agree on it, and random numbers depend on it.
        """

    @property
    def own_rule(self) -> str:
        """The settings of the local rule that differ from plain descent, in words."""
        return ""

    def refuses(self, optimizer: Any) -> str:
        """Say why it cannot be attached to this optimizer, and what to do; empty if it can."""
        return ""
