"""The library's settings: every `RELAXMPI_*` environment variable is read here and nowhere else."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["Settings"]

_PREFIX = "RELAXMPI_"
_SET_BY_TOOLS = ("RELAXMPI_LAB", "RELAXMPI_TEST_")


@dataclass(frozen=True)
class Settings:
    """What may be set from outside; field `timeout` is the variable `RELAXMPI_TIMEOUT`.

    Attributes:
        timeout: Seconds the operation at the head of a Comm may wait for its peers.
        warn_after: Seconds after which a waiting rank says so, and asks who else waits.
        max_message: Bytes of the largest single MPI message; longer buffers go in pieces.
        segment: Bytes of the pieces sent between nodes; the smallest of any rank holds. 0: half
            of MPI's rendezvous threshold, which is 1 MiB where `Comm.world()` started Open MPI
            and could raise it, and taken for 64 KiB elsewhere.
        ranks_per_node: Pretend that nodes hold this many consecutive ranks (0: ask the hosts).
        shared_memory: Whether ranks of one host may talk through memory that they share (0 or 1);
            without it, or where a rank cannot, all of them send messages.
        single_copy: Whether they may also read each other's memory, for long all-reduces (0 or 1),
            where the kernel lets them; without it such calls take two copies.

    Example:
        >>> Settings.read({"RELAXMPI_TIMEOUT": "5"}).timeout
        5.0
    """

    timeout: float = 60.0
    warn_after: float = 10.0
    max_message: int = 2**30
    segment: int = 0
    ranks_per_node: int = 0
    shared_memory: int = 1
    single_copy: int = 1

    def __post_init__(self) -> None:
        for name in ("timeout", "warn_after", "max_message"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{_PREFIX}{name.upper()} must be above zero")
        for name in ("shared_memory", "single_copy"):
            if getattr(self, name) not in (0, 1):
                raise ValueError(f"{_PREFIX}{name.upper()} must be 0 or 1")
        for name, meaning in (("ranks_per_node", "asks the hosts"), ("segment", "asks MPI")):
            if getattr(self, name) < 0:
                raise ValueError(f"{_PREFIX}{name.upper()} must not be negative (0 {meaning})")

    @classmethod
    def read(
        cls, environ: Mapping[str, str] = os.environ, timeout: float | None = None
    ) -> "Settings":
        """Read the environment; unknown names and unreadable values are a ValueError.

        A `timeout` that is given comes before the environment's.
        """
        kinds: dict[str, Any] = {_PREFIX + f.name.upper(): f for f in fields(cls)}
        given = {}
        for name, text in environ.items():
            if not name.startswith(_PREFIX) or name.startswith(_SET_BY_TOOLS):
                continue
            if name not in kinds:
                raise ValueError(f"unknown setting {name}; there are {', '.join(sorted(kinds))}")
            field = kinds[name]
            try:
                given[field.name] = type(field.default)(text)
            except ValueError:
                kind = type(field.default).__name__
                raise ValueError(f"{name} must be a number ({kind}), not {text!r}") from None
        settings = cls(**given)
        return settings if timeout is None else replace(settings, timeout=timeout)
