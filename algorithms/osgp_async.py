"""OSGP without a bound on delays: ranks that wait for nobody."""

from __future__ import annotations

from typing import Any

from relaxmpi.algorithms.arrays import copy_of
from relaxmpi.algorithms.base import Rule
from relaxmpi.algorithms.numerator import BoundPush
from relaxmpi.primitives import AsyncPushSum, Comm, DifferenceCompression, Topology

__all__ = ["BoundAsyncOSGP"]


class BoundAsyncOSGP(BoundPush):
    """The state of OSGP with tau=None: messages are folded in whenever they come.

    Making it, `mean`, `finish`, `state_dict` and `load_state_dict` are collective: they drain what
    is on its way into y. A step after `finish` starts afresh, from x.

    Attributes:
        mix: The endpoint, which has the weight; None after `finish`.
    """

    def __init__(
        self,
        rule: Rule,
        topology: Topology,
        send_every: int,
        biased: bool,
        codec: DifferenceCompression | None,
        floor: float,
        comm: Comm,
        x: Any,
        lr: float,
        name: str,
    ) -> None:
        super().__init__(rule, comm, x, lr, name)
        self.topology, self.send_every = topology, send_every
        self.codec, self.floor = codec, floor
        self.y = x if biased else copy_of(x)
        self.mix: AsyncPushSum | None = self._open()

    def _open(self) -> AsyncPushSum:
        return AsyncPushSum(
            self.comm,
            self.y,
            self.topology,
            codec=self.codec,
            floor=self.floor,
            name=self.name,
        )

    @property
    def weight(self) -> float:
        """W; 1 after `finish`."""
        return 1.0 if self.mix is None else self.mix.w

    def on_params(self) -> None:
        """Push, and fold in what is there."""
        if self.mix is None:
            self.mix = self._open()
        if self.t % self.send_every == 0:
            self.mix.send()
        self.mix.fold()
        self.t += 1

    def _drained(self) -> dict[str, Any] | None:
        state = None if self.mix is None else self.mix.state_dict()
        self.settle()
        return state

    def mean(self) -> Any:
        """Return sum_i y / sum_i w."""
        self._drained()
        return self.mean_of(copy_of(self.y), self.weight)

    def finish(self) -> None:
        """Wait until all ranks have come, and fold in all messages."""
        if self.mix is None:
            return
        self.mix.close()
        self.settle()
        self.mix = None
        self.y[...] = self.x

    def quiesce(self) -> None:
        """See `Bound`."""
        self._drained()

    def state_dict(self) -> dict[str, Any]:
        """Drain, and return numerator and weight."""
        mix = self._drained()
        return {**super().state_dict(), "y": copy_of(self.y), "mix": mix}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Drain, and restore."""
        super().load_state_dict(state)
        if state["mix"] is None:  # saved after `finish`
            self.finish()
        else:
            if self.mix is None:
                self.mix = self._open()
            self.mix.load_state_dict(state["mix"])
        self.y[...] = state["y"]
        self.settle()
