"""What an algorithm is: an immutable description, and the state of one buffer bound to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from relaxmpi.algorithms.arrays import divide
from relaxmpi.primitives import MEAN, Comm, Work, allreduce
from relaxmpi.primitives.devices import device_of

__all__ = ["Algorithm", "Bound", "Local", "Rule", "made", "rule_of", "with_rule"]


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


def made(thing: object) -> str:
    """Return how to make a value of a class that was given in its place; empty if none was."""
    return f": did you mean {thing.__name__}()?" if isinstance(thing, type) else ""


def rule_of(rule: object) -> Rule:
    """Return a local rule; TypeError where it is none."""
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be a local rule such as SGD(momentum=0.9), not {rule!r}{made(rule)}"
        )
    return rule


def with_rule(rule: Rule) -> str:
    """Return what the kind of a state says of the rule's: nothing of that of SGD."""
    name = type(rule).__name__
    return "" if name == "SGD" else f" with {name}"


class Bound:
    """An algorithm at work on one buffer.

    Four moments make up a step. `step` runs them in order, and `attach` places them around
    somebody else's training loop. Whatever an algorithm keeps beside the parameters, x is always
    what the next gradient is to be computed at.

    Attributes:
        comm: Whom it communicates with.
        x: The parameters.
        lr: The step length, to be changed at will between steps.
    """

    comm: Comm
    x: Any
    lr: float

    def on_grads(self, g: Any) -> Work[Any] | None:
        """What happens as soon as the gradient is there; `g` belongs to the Work until it ends."""
        return None

    def before_step(self) -> bool | None:
        """What happens before the local rule, such as mixing x with those of neighbours.

        Returns:
            Whether x was changed.
        """

    def on_step(self, g: Any) -> None:
        """The local rule: move x by the gradient that `on_grads` left in `g`."""

    def on_params(self) -> bool | None:
        """What happens after the local rule: afterwards `model` says where a gradient is taken.

        Returns:
            False where it is what the local rule has left, so that nobody need copy it.
        """

    @property
    def stepped(self) -> Any:
        """What the local rule moves: x, unless the gradient is taken at another place."""
        return self.x

    @property
    def kind(self) -> str:
        """What it is, in words: only a state of the same kind can be restored."""
        return type(self).__name__.removeprefix("Bound")

    def poll(self) -> None:
        """What may happen at any moment while a gradient is computed, to keep messages moving."""
        self.comm.progress()

    @property
    def restless(self) -> bool:
        """Whether `poll` may change x, so that a gradient must be taken at a copy."""
        return False

    def model(self) -> tuple[Any, float]:
        """Return where the next gradient is taken: an array, and what to divide it by.

        After `step` x is that; `attach` divides into x where parameters are not the array itself.
        """
        return self.x, 1.0

    def step(self, g: Any) -> None:
        """Take one step with this rank's gradient, in whose place the exchanged one is left."""
        work = self.on_grads(g)
        if work is not None:
            work.wait()
        self.before_step()
        self.on_step(g)
        self.on_params()
        self.settle()

    def settle(self) -> None:
        """Make x the model, where `model` says that it is another one."""
        y, w = self.model()
        if y is not self.x:
            divide(y, w, self.x)

    def mean(self) -> Any:
        """Return the mean model of all ranks, which is the same everywhere; collective."""
        out = device_of(self.x).like(self.x, tuple(self.x.shape))
        return allreduce(self.comm, self.x, out, op=MEAN, name="mean model")

    def finish(self) -> None:
        """Fold in what is still on its way, so that no model misses a part; collective."""

    def replace(self, x: Any) -> None:
        """Go on from another model, without losing what is on its way."""
        self.x[...] = x

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what this rank must save, besides the parameters, to resume exactly."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank."""

    def load_resized(self, state: dict[str, Any]) -> None:
        """Restore what has a meaning for any number of ranks; the rest begins anew from x.

        Args:
            state: What `state_dict` returned on a rank among another number of ranks.
        """

    def load(self, state: dict[str, Any], *, resized: bool) -> None:
        """Call one of the two above."""
        (self.load_resized if resized else self.load_state_dict)(state)

    def quiesce(self) -> None:
        """Wait for what is on its way, so that nothing is lost where the program ends; collective.

        Later steps do what they would have done.
        """


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
            x: The parameters, changed in place; numpy array or torch tensor. `attach`, where an
                optimizer is the local rule and nobody calls `on_step`, passes None if `mixes` is
                false, and otherwise a buffer, of which parameters are views where they can be.
            lr: Step length.
            name: Which buffer this is: the ranks agree on it, and random numbers depend on it.
        """

    @property
    def own_rule(self) -> str:
        """The settings of the local rule that differ from plain descent, in words."""
        return ""

    @property
    def mixes(self) -> bool:
        """Whether parameters are exchanged, after each local step, instead of gradients."""
        return False

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must take the same number of steps."""
        return True

    @property
    def acts_alone(self) -> bool:
        """Whether it moves parameters beside the local rule, even those of a single rank."""
        return False

    def refuses(self, optimizer: Any) -> str:
        """Say why it cannot be attached to this optimizer, and what to do; empty if it can."""
        return ""
