"""SGP and OSGP at work on one buffer."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxmpi.algorithms.arrays import copy_of, divide
from relaxmpi.algorithms.mixing import Order
from relaxmpi.algorithms.numerator import BoundPush
from relaxmpi.primitives import (
    Codec,
    Comm,
    DifferenceCompression,
    Identity,
    Work,
    push_sum,
)

if TYPE_CHECKING:
    from relaxmpi.algorithms.osgp import OSGP

__all__ = ["BoundCombineFirst", "BoundOSGP"]


class _Arrived:
    """A message that has arrived and waits for its step."""

    def __init__(self, dx: Any, dw: float) -> None:
        self._message = dx, dw

    def test(self) -> bool:
        return True

    def wait(self) -> tuple[Any, float]:
        return self._message


class BoundOSGP(BoundPush):
    """The state of OSGP for one buffer.

    Attributes:
        w: The push-sum weight, an array of one.
        flight: Steps in which messages were sent that are not folded in yet, and the messages.
    """

    def __init__(self, spec: OSGP, comm: Comm, x: Any, lr: float, name: str) -> None:
        super().__init__(spec.rule, comm, x, lr, name)
        self.spec = spec
        self.y = self._numerator(x)
        self.w = np.ones(1)
        self.flight: deque[tuple[int, Work[Any] | _Arrived]] = deque()
        self.codec = None if spec.codec is None else self._replicas(spec.codec)

    def _numerator(self, x: Any) -> Any:
        return x if self.spec.biased else copy_of(x)

    def _replicas(self, codec: Codec) -> DifferenceCompression:
        """Let both ends of each edge begin with x itself, so that only differences are coded."""
        memory, graph = DifferenceCompression(Identity(), self.spec.gamma), self.spec.topology
        for step in range(graph.period(self.comm.size) or 0):
            push_sum(
                self.comm,
                copy_of(self.y),
                np.ones(1),
                topology=graph,
                step=step,
                codec=memory,
                name=self.name,
            )
        memory.codec = codec
        return memory

    @property
    def weight(self) -> float:
        """W."""
        return float(self.w[0])

    def on_params(self) -> None:
        """Push, and fold in what is due."""
        if self.t % self.spec.period == 0:
            self.flight.append((self.t, self._push()))
        while self.flight and self._due(*self.flight[0]):
            self._fold()
        self.t += 1

    def _push(self) -> Work[Any]:
        spec = self.spec
        return push_sum.start(
            self.comm,
            self.y,
            self.w,
            topology=spec.topology,
            step=self.t // spec.period,
            codec=self.codec,
            name=self.name,
        )

    def _due(self, sent: int, message: Work[Any] | _Arrived) -> bool:
        assert self.spec.tau is not None  # there would be no flight
        return self.t - sent >= self.spec.tau or (self.spec.early and message.test())

    def _fold(self) -> None:
        dx, dw = self.flight.popleft()[1].wait()
        self.y += dx
        self.w += dw

    def _land(self) -> list[tuple[int, Any, float]]:
        """Wait for all messages, and let them wait for their steps."""
        landed = [(sent, *message.wait()) for sent, message in self.flight]
        self.flight = deque((sent, _Arrived(dx, dw)) for sent, dx, dw in landed)
        return landed

    def mean(self) -> Any:
        """Return sum_i y / sum_i w, with what is on its way; the run goes on as if never asked."""
        total, weight = copy_of(self.y), self.weight
        for _, dx, dw in self._land():
            total += dx
            weight += float(dw)
        return self.mean_of(total, weight)

    def finish(self) -> None:
        """Fold in all messages at once."""
        while self.flight:
            self._fold()
        self.settle()

    def state_dict(self) -> dict[str, Any]:
        """Numerator, weight, messages on their way, and what the codec remembers."""
        flight = [(sent, copy_of(dx), float(dw)) for sent, dx, dw in self._land()]
        codec = None if self.codec is None else self.codec.state_dict()
        ours = {"y": copy_of(self.y), "w": self.w.copy(), "flight": flight, "codec": codec}
        return {**super().state_dict(), **ours}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; what was on its way before is dropped."""
        super().load_state_dict(state)
        self._land()
        self.y[...] = state["y"]
        self.w[...] = state["w"]
        self.settle()
        self.flight = deque((t, _Arrived(copy_of(dx), dw)) for t, dx, dw in state["flight"])
        if self.codec is not None:
            self.codec.load_state_dict(state["codec"])


class BoundCombineFirst(BoundOSGP):
    """The same for SGP in order COMBINE_WHILE_ADAPT: x is y / w from before shares were sent."""

    def _numerator(self, x: Any) -> Any:
        return copy_of(x)

    @property
    def kind(self) -> str:
        """See `Bound`."""
        return f"{super().kind} in order {Order.COMBINE_WHILE_ADAPT.name}"

    def before_step(self) -> None:
        """Fold in what was sent when the step before ended."""
        while self.flight:
            self._fold()

    def on_params(self) -> None:
        """Show y / w, and send shares on their way."""
        self._reveal()
        super().on_params()

    def finish(self) -> None:
        """Fold in all messages at once."""
        super().finish()
        self._reveal()

    def _reveal(self) -> None:
        divide(self.y, self.divisor, self.x)

    @property
    def divisor(self) -> float:
        """See `BoundPush`: here y is never x."""
        return 1.0 if self.spec.biased else self.weight

    def _due(self, sent: int, message: Work[Any] | _Arrived) -> bool:
        return False  # until the next gradient is there

    def model(self) -> tuple[Any, float]:
        """Y / w as it was: y has given shares away."""
        return self.x, 1.0
