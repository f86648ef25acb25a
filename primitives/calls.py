"""What a rank is about to do, as the ranks compare it."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Call"]


class Call:
    """What one rank is about to do, and what is wrong with it, if anything is.

    Args:
        what: Equal on ranks that make the same call; its parts are shown to the user.
        refusal: The error of this rank's arguments.
    """

    __slots__ = ("refusal", "what")

    def __init__(self, what: tuple[Hashable, ...], refusal: Exception | None = None) -> None:
        self.what, self.refusal = what, refusal

    def agreed_refusal(self) -> Exception:
        """Return the refusal, marked as one that all ranks raise."""
        assert self.refusal is not None  # callers have looked
        self.refusal.agreed = True  # type: ignore[attr-defined]
        return self.refusal

    def __str__(self) -> str:
        text = _words(self.what)
        return text if self.refusal is None else f"{text}, refused: {self.refusal}"


def _words(what: tuple[Hashable, ...]) -> str:
    return " ".join(str(part) for part in what if part not in (None, ""))
