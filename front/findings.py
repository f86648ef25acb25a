"""What a check of `relaxmpi.doctor` reports."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "bad", "ok", "warn"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: ``bad`` if the library will not work, ``warn`` if it may disappoint.
        subject: What was looked at.
        text: What was found.
        advice: What to do about it; empty if nothing.
    """

    status: Literal["OK", "warn", "bad"]
    subject: str
    text: str
    advice: str = ""


def ok(subject: str, text: str, advice: str = "") -> Finding:
    """Return a finding that all is well."""
    return Finding("OK", subject, text, advice)


def warn(subject: str, text: str, advice: str) -> Finding:
    """Return a finding that something may disappoint."""
    return Finding("warn", subject, text, advice)


def bad(subject: str, text: str, advice: str) -> Finding:
    """Return a finding that something will not work."""
    return Finding("bad", subject, text, advice)
