"""Counters of what a communicator moved."""

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass
class Stats:
    """What this rank sent and how long it waited, since the Comm was made.

    Attributes:
        payload_bytes: Numbers or encoded numbers sent; for reductions left to MPI, the
            2 (n - 1) / n x size that a bandwidth-optimal algorithm sends.
        header_bytes: Agreements and notices sent.
        messages: Messages that carried payload.
        waited: Seconds spent in blocking calls and `wait`.
    """

    payload_bytes: int = 0
    header_bytes: int = 0
    messages: int = 0
    waited: float = 0.0
