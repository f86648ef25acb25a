"""Words of memory that several ranks see, a row a rank: each writes its own and reads the others'.

Nothing is locked: numbers first, then the count that says they are there. That stores of one core
become visible in their order is a promise of x86-64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LINE", "NUDGE", "rows"]

LINE = 8  # words of a cache line: the rows of two ranks share none

# Looks in vain after which MPI's own messages, of other Comms or of the user, get their chance.
NUDGE = 32


def rows(words: memoryview, size: int) -> Any:
    """Return the same memory for compiled code, an array of a row a rank."""
    return np.frombuffer(words, np.int64).reshape(size, -1)
