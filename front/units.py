"""Durations and link rates as people write them: ``5ms``, ``100Mbit``."""

import argparse
import math
import re
from collections.abc import Callable

__all__ = [
    "parse_bytes",
    "parse_duration",
    "parse_rate",
    "show_bytes",
    "show_duration",
    "show_rate",
    "with_unit",
]

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
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


def parse_bytes(text: str) -> float:
    """Return the bytes that ``text`` stands for.

    Args:
        text: A number with one of the units B, kB, MB, GB, KiB, MiB, GiB.

    Raises:
        ValueError: If the unit is missing or unknown.

    Example:
        >>> parse_bytes("1.5MB"), parse_bytes("64KiB")
        (1500000.0, 65536.0)
    """
    number, unit = _split(text, "16MB")
    if unit not in _BYTES or "b" in text or not math.isfinite(number):  # b: a bit
        raise ValueError(
            f"{text!r} needs one of the units B, kB, MB, GB, KiB, MiB, GiB; write for example 16MB"
        )
    return number * _BYTES[unit]


def with_unit(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Return one of the functions above as a `type` of argparse, which shows the user its error."""

    def convert(text: str) -> float:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _show(value: float, units: tuple[str, ...]) -> str:
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1e3, units[1:]
    return f"{value:.3g} {units[0]}" if value < 999.5 else f"{value:.0f} {units[0]}"


def show_duration(seconds: float) -> str:
    """Return seconds in three digits and a fitting unit.

    Example:
        >>> show_duration(0.0012345), show_duration(0.0), show_duration(90.0)
        ('1.23 ms', '0 s', '90 s')
    """
    nanoseconds = round(seconds * 1e9, 3)
    return _show(nanoseconds, ("ns", "us", "ms", "s")) if nanoseconds else "0 s"


def show_bytes(count: float) -> str:
    """Return a number of bytes in three digits and a fitting unit.

    Example:
        >>> show_bytes(2560), show_bytes(12)
        ('2.56 kB', '12 B')
    """
    return _show(count, ("B", "kB", "MB", "GB", "TB"))


def show_rate(bits: float) -> str:
    """Return bits per second in three digits and a fitting unit.

    Example:
        >>> show_rate(1e10)
        '10 Gbit/s'
    """
    return _show(bits, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"))
