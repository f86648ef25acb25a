"""What an asynchronous endpoint did."""

from dataclasses import dataclass

__all__ = ["AsyncStats"]


@dataclass
class AsyncStats:
    """What an endpoint did so far.

    Attributes:
        messages: Sent, those sent again included.
        bytes: Of them, with headers.
        folded: Messages that were added to x.
        discarded: Messages that brought nothing new: repeated or overtaken ones.
        skipped: Shares that were kept, because the peer had not taken the earlier ones.
        low_weight: Shares that were kept, because w would have become too small.
        largest_staleness: Of any edge after any `fold()`, in steps.
    """

    messages: int = 0
    bytes: int = 0
    folded: int = 0
    discarded: int = 0
    skipped: int = 0
    low_weight: int = 0
    largest_staleness: int = 0
