"""Durations and link rates as people write them: ``5ms``, ``100Mbit``."""

import math
import re

__all__ = ["parse_duration", "parse_rate"]

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*([a-zµ/]*)\s*", re.IGNORECASE)


def _split(text: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit; write for example {example}")
    return float(match[1]), match[2].lower()


def parse_duration(text: str) -> float:
    """Return the seconds that ``text`` stands for.

    Args:
        text: A number with one of the units ns, us, ms, s.

    Raises:
        ValueError: If the unit is missing or unknown.

    Example:
        >>> parse_duration("0.1ms")
        0.0001
    """
    number, unit = _split(text, "5ms")
    if number == 0 and not unit:
        return 0.0
    if unit not in _SECONDS:
        raise ValueError(f"{text!r} needs one of the units ns, us, ms, s; write for example 5ms")
    return number * _SECONDS[unit]


def parse_rate(text: str) -> float:
    """Return the bits per second that ``text`` stands for.

    Args:
        text: A number with one of the units bit, kbit, Mbit, Gbit; ``/s`` and ``ps`` may follow.

    Raises:
        ValueError: If the unit is missing or unknown, or the rate is zero.

    Example:
        >>> parse_rate("2.5Gbit")
        2500000000.0
    """
    number, unit = _split(text, "100Mbit")
    rate = _BITS.get(unit.removesuffix("/s").removesuffix("ps"))
    if rate is None:
        raise ValueError(
            f"{text!r} needs one of the units bit, kbit, Mbit, Gbit; write for example 100Mbit"
        )
    if number == 0 or not math.isfinite(number * rate):
        raise ValueError(f"{text!r} is no usable rate; write for example 100Mbit")
    return number * rate
