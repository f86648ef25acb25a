"""Error feedback: what a codec lost in one call is added to the input of the next."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from relaxmpi.primitives.codecs import Codec
from relaxmpi.primitives.devices import Device
from relaxmpi.primitives.work import Flow

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """Two-sided error feedback around a codec, for the all-reduce of one buffer.

    With e_i the residual of rank i and E that of the owner of a chunk (Tang et al. 2019,
    DoubleSqueeze; 1-bit Adam): u = x + e; q = Q(u); e <- u - q; a = mean_i q_i + E;
    y = Q(a); E <- a - y. Over any number of steps sum y = sum mean x - mean e - E, so nothing
    is lost, only late. Residuals are kept in mean units, in the work format (float32; float64
    for float64), and do not exist on one rank.

    Args:
        codec: What encodes. Nearest rounding is used where the codec offers a choice.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> memory = rx.ErrorFeedback(rx.OneBit())
        >>> with rx.Comm.world() as comm:
        ...     rx.allreduce(comm, np.float32([1, 2]), op=rx.MEAN, codec=memory)
        array([1., 2.], dtype=float32)
    """

    def __init__(self, codec: Codec) -> None:
        if not isinstance(codec, Codec):
            raise TypeError(f"ErrorFeedback wraps a Codec, not {type(codec).__name__}")
        self.codec = codec
        self._residuals: dict[tuple[str, int, int], Any] = {}
        self._layout: tuple[str, ...] | None = None
        self._user: weakref.ref[Flow[Any]] | None = None

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec!r})"

    def describe(self) -> str:
        """What ranks must agree on before they exchange payloads."""
        return f"ErrorFeedback({self.codec.describe()})"

    def claim(self, flow: Flow[Any], *layout: str) -> None:
        """Bind to a buffer's layout at the first use, and to a call until it has ended.

        Raises:
            ValueError: The layout is another one, or the last call has not ended.
        """
        user = None if self._user is None else self._user()
        if user is not None and inspect.getgeneratorstate(user) != inspect.GEN_CLOSED:
            raise ValueError(
                "this ErrorFeedback is in use by a call that is not done: give each buffer one "
                "of its own"
            )
        if self._layout is None:
            self._layout = layout
        elif self._layout != layout:
            raise ValueError(
                f"this ErrorFeedback holds the residuals of a buffer of {_words(self._layout)}, "
                f"not of {_words(layout)}: make one for each buffer, or call reset()"
            )
        self._user = weakref.ref(flow)

    def site(self, side: str, lo: int, hi: int, device: Device, dtype: str) -> Any:
        """Return the residual of elements lo to hi as a "worker" (contributor) or "owner"."""
        found = self._residuals.get((side, lo, hi))
        if found is None:
            found = self._residuals[side, lo, hi] = device.zeros(hi - lo, dtype)
        return found

    def residual(self, side: str) -> dict[tuple[int, int], Any]:
        """Return the residuals of one side by their element ranges; empty before the first use."""
        return {(lo, hi): r for (s, lo, hi), r in sorted(self._residuals.items()) if s == side}

    def reset(self) -> None:
        """Forget the residuals and the layout."""
        self._residuals.clear()
        self._layout = self._user = None

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's residuals; every rank saves its own."""
        return {
            "layout": self._layout,
            "residuals": {key: value.copy() for key, value in self._residuals.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank."""
        self._layout, self._user = state["layout"], None
        self._residuals = {key: value.copy() for key, value in state["residuals"].items()}

    def load_resized(self, state: dict[str, Any]) -> None:
        """Residuals belong to a number of ranks: with another one they begin at zero again."""
        self.reset()


def _words(layout: tuple[str, ...]) -> str:
    return ", ".join(layout)
