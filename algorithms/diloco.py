"""DiLoCo: an outer optimizer along what many local steps have moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relaxmpi.algorithms.arrays import copy_of
from relaxmpi.algorithms.base import Rule
from relaxmpi.algorithms.mixing import BoundMixing, MixingAlgorithm
from relaxmpi.algorithms.sgd import SGD
from relaxmpi.primitives import MEAN, Codec, Comm, ErrorFeedback, Identity, Work, allreduce

__all__ = ["BoundDiLoCo", "DiLoCo"]


@dataclass(frozen=True)
class DiLoCo(MixingAlgorithm):
    """DiLoCo (Douillard et al. 2023, arXiv 2311.08105): 1/H of the bytes of AllReduce SGD.

    With x_i what rank i trains, H the period, theta the outer parameters, the same on all ranks,
    eta the outer step length and mu its momentum:

        x_i <- the rule's step along grad f_i(x_i)        H times, on each rank by itself
        d <- mean_i Q(theta - x_i)                        the pseudo-gradient, all that is sent
        b <- mu b + d
        theta <- theta - eta (d + mu b)                   Nesterov's momentum as torch has it
        x_i <- theta

    The state of the rule stays on its rank. With mu = 0 and eta = 1 this is local SGD: theta
    becomes the mean of the parameters. For a constant d, theta moves by 1.33 d, 1.897 d, 2.407 d
    and so on to 7 d.

    With a `delay` of tau steps the exchange runs while the next tau steps are computed, as in
    Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512). What they have moved is mixed in:

        x_i <- (1 - alpha) theta + alpha x_i              tau steps later

    There alpha = 0.5 and tau = 1 to 5. With alpha = 0 these steps would be lost.

    All ranks begin with the same parameters. Without `alpha` they hold the same bytes after each
    outer step, and theta is the same on all of them in any case.

    Args:
        every: H.
        rule: The inner rule; DiLoCo's is AdamW.
        outer_lr: eta.
        outer_momentum: mu.
        codec: Encodes the pseudo-gradient, such as `Quantizer(bits=4)`; None sends all its bits.
        feedback: Remember what the codec lost, and add it to the next pseudo-gradient.
        delay: tau, less than H.
        alpha: How much of its own parameters a rank keeps.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> x = np.zeros(1)
        >>> with rx.Comm.world() as comm:
        ...     opt = rx.DiLoCo(every=4).bind(comm, x, lr=0.25)
        ...     for t in range(1, 13):
        ...         opt.step(np.ones(1))
        ...         if t % 4 == 0:
        ...             print(f"{-x[0]:.3f}")
        1.330
        3.227
        5.634
    """

    every: int
    rule: Rule = field(default_factory=SGD)
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    codec: Codec | None = None
    feedback: bool = False
    delay: int = 0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 <= self.delay < self.every:
            raise ValueError(
                f"every must be 1 or more and delay less than that, not {self.every}, {self.delay}"
            )
        if not (self.outer_lr > 0 and 0 <= self.outer_momentum < 1 and 0 <= self.alpha < 1):
            raise ValueError(
                "outer_lr must be above 0, outer_momentum and alpha in [0, 1), not "
                f"{self.outer_lr}, {self.outer_momentum}, {self.alpha}"
            )
        if not (self.codec is None or isinstance(self.codec, Codec)):
            raise TypeError(
                f"codec must be a Codec, not {self.codec!r}: each buffer makes its own memory, "
                "with feedback=True"
            )
        if self.feedback and self.codec is None:
            raise ValueError("feedback=True needs a codec, which loses something")

    def bind(self, comm: Comm, x: Any, *, lr: float, name: str = "") -> BoundDiLoCo:
        """See `Algorithm.bind`."""
        return BoundDiLoCo(self, comm, x, lr, name)

    @property
    def acts_alone(self) -> bool:
        """The outer optimizer moves the parameters of a single rank too."""
        return True


class BoundDiLoCo(BoundMixing):
    """The state of DiLoCo for one buffer.

    Attributes:
        theta: The outer parameters.
        b: The outer momentum.
        d: The pseudo-gradient that is on its way, or has arrived and is not used yet.
    """

    def __init__(self, spec: DiLoCo, comm: Comm, x: Any, lr: float, name: str) -> None:
        super().__init__(spec.rule, comm, x, lr, name)
        self.spec = spec
        codec = spec.codec or Identity()  # which adds in the order of the ranks
        self.codec = ErrorFeedback(codec) if spec.feedback else codec
        self.theta = copy_of(x)
        self.b: Any = 0.0
        self.d: Any = None
        self._work: Work[Any] | None = None

    def on_params(self) -> bool:
        """Send the pseudo-gradient, and use the one that has arrived, if it is time."""
        self.t += 1
        every, delay = self.spec.every, self.spec.delay
        if self.t % every == 0:
            self.d = self.theta - self.x
            self._work = allreduce.start(
                self.comm, self.d, op=MEAN, codec=self.codec, name=self.name, step=self.t // every
            )
        if self.d is None or self.t % every != delay:
            return False
        self._outer_step()
        return True

    def _outer_step(self) -> None:
        self.quiesce()
        eta, mu, alpha = self.spec.outer_lr, self.spec.outer_momentum, self.spec.alpha
        d, self.d = self.d, None
        self.b = mu * self.b + d
        self.theta -= eta * (d + mu * self.b)
        if alpha:
            self.x *= alpha
            self.x += (1 - alpha) * self.theta
        else:
            self.x[...] = self.theta

    def quiesce(self) -> None:
        """Wait for the pseudo-gradient."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def finish(self) -> None:
        """Take the outer step that is under way."""
        if self.d is not None:
            self._outer_step()

    def replace(self, x: Any) -> None:
        """Go on from another model: the outer parameters, too."""
        self.x[...] = x
        self.theta[...] = x

    def state_dict(self) -> dict[str, Any]:
        """Outer parameters and momentum, the pseudo-gradient that has arrived, what is owed."""
        self.quiesce()
        owed = self.codec.state_dict() if isinstance(self.codec, ErrorFeedback) else None
        ours = {"theta": copy_of(self.theta), "b": self.b, "d": self.d, "owed": owed}
        return {**super().state_dict(), **ours}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; the parameters are the caller's to restore."""
        self._load_outer(state)
        if isinstance(self.codec, ErrorFeedback):
            self.codec.load_state_dict(state["owed"])

    def load_resized(self, state: dict[str, Any]) -> None:
        """Restore all but what the codec owes; a rule goes on from the state of another rank's."""
        self._load_outer(state)
        if isinstance(self.codec, ErrorFeedback):
            self.codec.reset()

    def _load_outer(self, state: dict[str, Any]) -> None:
        self.quiesce()
        super().load_state_dict(state)
        self.theta[...] = state["theta"]
        self.b, self.d = state["b"], state["d"]
