"""SlowMo: momentum between the models that another algorithm reaches every so many steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relaxmpi.algorithms.arrays import copy_of
from relaxmpi.algorithms.base import Algorithm, Bound
from relaxmpi.primitives import Comm, Work

__all__ = ["SlowMo"]


@dataclass(frozen=True)
class SlowMo(Algorithm):
    """Slow momentum (Wang, Tantia, Ballas, Rabbat 2020, arXiv 1910.00643) around an algorithm.

    Every `every` steps, with z the model that the ranks had after the last time and x the one
    that they have reached since:

        x <- mean_i x_i                           exactly, with all messages folded in
        u <- beta u + (z - x) / lr
        z <- z - alpha lr u;  x <- z

    It closes most of the gap between gossip and AllReduce SGD. With beta = 0 and alpha = 1 all
    that is left is the exact average; around local SGD it is BMUF (Chen, Huo 2016).

    Args:
        algorithm: What runs in between, such as `OSGP()`.
        every: Steps in between; 48 in the paper, for SGP.
        beta: Slow momentum, 0.4 to 0.8 in the paper.
        alpha: Slow learning rate.
        average: False leaves the exact average out: each rank then has a z of its own, which
            costs no message and hardly any accuracy.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> spec = rx.SlowMo(rx.OSGP(tau=1), every=10, beta=0.5)
        >>> def run():
        ...     with rx.Comm.world() as comm:
        ...         x = np.zeros(2)
        ...         opt = spec.bind(comm, x, lr=0.1)
        ...         for _ in range(200):
        ...             opt.step(x - comm.rank)
        ...         return x
        >>> rx.SimulatedWorld(4).run(run)[0].round(2)
        array([1.5, 1.5])
    """

    algorithm: Algorithm
    every: int = 48
    beta: float = 0.5
    alpha: float = 1.0
    average: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            raise TypeError(
                f"SlowMo goes around an algorithm such as OSGP(), not {self.algorithm!r}"
            )
        if self.every < 1:
            raise ValueError(f"every must be at least 1, not {self.every}")
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must be in [0, 1), not {self.beta}")

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundSlowMo:
        """See `Algorithm.bind`."""
        return BoundSlowMo(self, self.algorithm.bind(comm, x, lr=lr, name=name))

    @property
    def own_rule(self) -> str:
        """See `Algorithm`."""
        return self.algorithm.own_rule

    @property
    def mixes(self) -> bool:
        """See `Algorithm`."""
        return self.algorithm.mixes

    @property
    def lockstep(self) -> bool:
        """See `Algorithm`."""
        return self.average or self.algorithm.lockstep

    @property
    def acts_alone(self) -> bool:
        """See `Algorithm`."""
        return True


class BoundSlowMo(Bound):
    """The state of SlowMo for one buffer, around that of the inner algorithm."""

    def __init__(self, spec: SlowMo, inner: Bound) -> None:
        self.spec, self.inner = spec, inner
        self.comm, self.x = inner.comm, inner.x
        self.z = copy_of(inner.x)
        self.u: Any = 0.0
        self.t = 0

    @property
    def lr(self) -> float:  # an attribute of its own would go stale
        """The step length of the inner algorithm."""
        return self.inner.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.inner.lr = value

    @property
    def kind(self) -> str:
        """See `Bound`."""
        return f"SlowMo around {self.inner.kind}"

    @property
    def stepped(self) -> Any:
        """See `Bound`."""
        return self.inner.stepped

    def model(self) -> tuple[Any, float]:
        """See `Bound`."""
        return self.inner.model()

    def on_grads(self, g: Any) -> Work[Any] | None:
        """See `Bound`."""
        return self.inner.on_grads(g)

    def before_step(self) -> bool | None:
        """See `Bound`."""
        return self.inner.before_step()

    def on_step(self, g: Any) -> None:
        """See `Bound`."""
        self.inner.on_step(g)

    def on_params(self) -> bool | None:
        """Let the inner algorithm end its step; now and then, take a slow one."""
        moved = self.inner.on_params()
        self.t += 1
        if self.t % self.spec.every:
            return moved
        beta, alpha = self.spec.beta, self.spec.alpha
        x = self._reached()
        if self.lr:  # a warm-up may begin with a step length of zero, which has moved nothing
            self.u = beta * self.u + (self.z - x) / self.lr
        self.z -= alpha * self.lr * self.u
        self.inner.replace(self.z)
        return True

    def _reached(self) -> Any:
        """Return where the inner algorithm has come to, with nothing on its way.

        What was sent before the slow step would undo a part of it. Where nobody waits for anybody
        that has to be borne.
        """
        if self.spec.average or self.spec.algorithm.lockstep:
            self.inner.finish()
        if self.spec.average:
            return self.inner.mean()
        y, w = self.inner.model()
        return y / w

    def poll(self) -> None:
        """See `Bound`."""
        self.inner.poll()

    @property
    def restless(self) -> bool:
        """See `Bound`."""
        return self.inner.restless

    def mean(self) -> Any:
        """See `Bound`."""
        return self.inner.mean()

    def finish(self) -> None:
        """See `Bound`."""
        self.inner.finish()

    def replace(self, x: Any) -> None:
        """See `Bound`."""
        self.inner.replace(x)

    def state_dict(self) -> dict[str, Any]:
        """Momentum, the last slow model, and the inner algorithm's state."""
        return {"t": self.t, "u": self.u, "z": copy_of(self.z), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        self.t, self.u = state["t"], state["u"]
        self.z[...] = state["z"]
        self.inner.load_state_dict(state["inner"])

    def load_resized(self, state: dict[str, Any]) -> None:
        """Keep the slow model and its momentum where they are common, and go on from x."""
        common = self.spec.average
        self.t, self.u = state["t"], state["u"] if common else 0.0
        self.z[...] = state["z"] if common else self.x
        self.inner.load_resized(state["inner"])

    def quiesce(self) -> None:
        """See `Bound`."""
        self.inner.quiesce()
