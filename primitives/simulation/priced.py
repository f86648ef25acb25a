"""Codecs and sums whose work takes virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from relaxmpi.primitives.codecs import Codec
from relaxmpi.primitives.simulation.network import Network

__all__ = ["priced"]

T = TypeVar("T")

# What is counted, by the place of the argument whose numbers it works on.
_ENCODE = {"encode": 0, "encode_feedback": 0, "encode_difference": 0}
_CODEC = {**_ENCODE, "decode": 1, "decode_add": 1, "decode_follow": 1}
_DEVICE = {"reduce": 1, "copy": 0, "divide": 0}


def priced(thing: T, network: Network, charge: Callable[[float], None]) -> T:
    """Return what does the same as a codec or a device, and charges what the network says.

    Args:
        thing: The codec or device.
        network: Its `work` says what costs how much.
        charge: Told the seconds after each call.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> network = rx.Network(work={f"{rx.OneBit()}.encode": (1e-6, 1e-9)})
        >>> codec = priced(rx.OneBit(), network, print)
        >>> codec.encode(np.zeros(5000, np.float32), np.empty(5000, np.uint8))
        6e-06
    """
    if not network.work:
        return thing
    start = f"{thing.describe()}." if isinstance(thing, Codec) else ""
    methods = _CODEC if start else _DEVICE
    prices = {name: network.work[start + name] for name in methods if start + name in network.work}
    return cast("T", _Priced(thing, prices, network.scale, charge)) if prices else thing


class _Priced:
    def __init__(
        self,
        thing: Any,
        prices: dict[str, tuple[float, float]],
        scale: float,
        charge: Callable[[float], None],
    ) -> None:
        self._thing, self._prices, self._scale, self._charge = thing, prices, scale, charge

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        price = self._prices.get(name)
        if price is None:
            return found
        place = (_CODEC | _DEVICE)[name]

        def work(*args: Any, **others: Any) -> Any:
            result = found(*args, **others)
            self._charge(price[0] + price[1] * len(args[place]) * self._scale)
            return result

        return work
