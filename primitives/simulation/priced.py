"""Codecs and sums whose work takes virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relaxmpi.primitives.codecs import Codec

__all__ = ["CODEC", "DEVICE", "Priced", "prices_of"]

# What is counted, by the place of the argument whose numbers it works on.
CODEC = {"encode": 0, "encode_feedback": 0, "decode": 1, "decode_add": 1}
DEVICE = {"reduce": 1, "copy": 0, "divide": 0}


def prices_of(work: Mapping[str, tuple[float, float]], thing: Any) -> dict[str, Any]:
    """Return the prices of what `thing` does, by method.

    Example:
        >>> from relaxmpi import OneBit
        >>> prices_of({f"{OneBit()}.encode": (1e-6, 1e-9), "reduce": (0.0, 1e-9)}, OneBit())
        {'encode': (1e-06, 1e-09)}
    """
    start = f"{thing.describe()}." if isinstance(thing, Codec) else ""
    methods = CODEC if start else DEVICE
    return {name: work[start + name] for name in methods if start + name in work}


class Priced:
    """A codec or a device that lets its rank's clock advance with its work.

    Args:
        thing: What does the work.
        prices: For a method's name, seconds a call and seconds a number.
        charge: Told the seconds a call and the seconds a number times how many there were.
    """

    def __init__(
        self,
        thing: Any,
        prices: Mapping[str, tuple[float, float]],
        charge: Callable[[float, float], None],
    ) -> None:
        self._thing, self._prices, self._charge = thing, prices, charge

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        price = self._prices.get(name)
        if price is None:
            return found
        place = (CODEC | DEVICE)[name]

        def work(*args: Any, **others: Any) -> Any:
            result = found(*args, **others)
            self._charge(price[0], price[1] * len(args[place]))
            return result

        return work
