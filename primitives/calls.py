"""What a rank is about to do, as the ranks compare it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from hashlib import blake2b

__all__ = ["Call"]


@lru_cache(maxsize=4096)
def _digest(what: tuple[Hashable, ...]) -> int:
    text = repr(what).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


class Call:
    """What one rank is about to do, and what is wrong with it, if anything is.

    Args:
        what: Equal on ranks that make the same call; its parts are shown to the user.
        refusal: The error of this rank's arguments.
    """

    __slots__ = ("_digest", "refusal", "what")

    def __init__(self, what: tuple[Hashable, ...], refusal: Exception | None = None) -> None:
        self.what, self.refusal = what, refusal
        self._digest: int | None = None

    @property
    def digest(self) -> int:
        """A number of 64 bits: other ones differ in it."""
        if self._digest is None:
            refusal = self.refusal
            self._digest = _digest(
                self.what if refusal is None else (type(refusal).__name__, *self.what)
            )
        return self._digest

    def marked(self, mark: str) -> Call:
        """Return the same call with a mark, if there is one."""
        return Call((*self.what, mark), self.refusal) if mark else self

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
