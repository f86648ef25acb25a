"""One turn of ranks that share memory, in one function: see `Board`, `Slots` and `Plain`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._atomic import give_way, load, store
from relaxmpi.primitives._jit import inlined, jit

__all__ = [
    "AT_ONCE",
    "BLOCK",
    "DIFFER",
    "DONE",
    "GATHER",
    "GATHER_PUT",
    "LATE",
    "SCATTER",
    "add",
    "all_equal",
    "copy",
    "divide",
    "renew",
    "turn",
    "wait",
]

Words = NDArray[np.int64]

# What is moved in a turn: everything to everybody and added there; a chunk to each rank, which adds
# them and puts the sum where the next turn wants it; or the sum of each rank to all, which has
# been put there or has not.
AT_ONCE, SCATTER, GATHER, GATHER_PUT = 0, 1, 2, 3

# How far a turn has come: new, waiting for the peers, done, or stopped by another vote.
_NEW, LATE, DONE, DIFFER = 0, 1, 2, 3

BLOCK = 4096  # numbers that stay in the nearest cache while those of all ranks are added


@inlined
def renew(stage: Words, now: int) -> None:
    """Forget how far another turn had come."""
    if stage[2] != now:
        stage[0], stage[1], stage[2] = _NEW, 0, now


@inlined
def wait(words: Words, at: int, least: int, looks: int, polite: bool) -> int:
    """Look until the words `at` of all ranks are at least so large; return the looks left."""
    n, each = words.shape
    r = 0
    while r < n:
        if load(words, r * each + at) >= least:
            r += 1
            continue
        looks -= 1
        if looks < 0:
            break
        if polite:
            give_way()
    return looks


@inlined
def all_equal(votes: Words, entry: int, code: int) -> bool:
    """Whether all ranks have voted alike."""
    for r in range(votes.shape[0]):
        if votes[r, entry + 1] != code:
            return False
    return True


@inlined
def copy(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = x[i]


@inlined
def add(total: Any, part: Any) -> None:
    for i in range(total.size):
        total[i] += part[i]


@inlined
def divide(total: Any, n: int) -> None:
    by = total.dtype.type(n)
    for i in range(total.size):
        total[i] /= by


@inlined
def _add(given: Any, out: Any, mean: bool) -> None:
    """Add all of what the ranks have given, in their order; for a mean, divide."""
    n = given.shape[0]
    for lo in range(0, out.size, BLOCK):
        hi = min(out.size, lo + BLOCK)
        total, a, b = out[lo:hi], given[0, lo:hi], given[1, lo:hi]
        for i in range(total.size):
            total[i] = a[i] + b[i]
        for r in range(2, n):
            a = given[r, lo:hi]
            add(total, a)
        if mean:
            divide(total, n)


@inlined
def _add_chunk(x: Any, given: Any, at: int, rank: int, onward: Any, out: Any, mean: bool) -> None:
    """Add chunk `x` of this rank to those that the others have given it, into `out` and `onward`.

    In the order of ranks, and `out` may be `x`: the sum grows in `onward`.
    """
    n = given.shape[0]
    for lo in range(0, x.size, BLOCK):
        hi = min(x.size, lo + BLOCK)
        total, mine, target = onward[lo:hi], x[lo:hi], out[lo:hi]
        for r in range(n):
            part = mine if r == rank else given[r, at + lo : at + hi]
            if r == 0:
                copy(part, total)
            else:
                add(total, part)
        if mean:
            divide(total, n)
        copy(total, target)


@inlined
def _put(kind: int, x: Any, mine: Any, rank: int, spans: Words, each: int) -> None:
    if kind == AT_ONCE:
        copy(x, mine)
    elif kind == SCATTER:
        for r in range(spans.shape[0]):
            if r != rank:
                copy(x[spans[r, 0] : spans[r, 1]], mine[r * each : r * each + each])
    elif kind == GATHER_PUT:
        copy(x[spans[rank, 0] : spans[rank, 1]], mine)


@inlined
def _take(
    kind: int,
    x: Any,
    out: Any,
    given: Any,
    onward: Any,
    rank: int,
    spans: Words,
    each: int,
    mean: bool,
) -> None:
    lo, hi = spans[rank, 0], spans[rank, 1]
    if kind == AT_ONCE:
        _add(given, out, mean)
    elif kind == SCATTER:
        _add_chunk(x[lo:hi], given, rank * each, rank, onward[rank], out[lo:hi], mean)
    else:
        for r in range(spans.shape[0]):
            if r != rank:
                target = out[spans[r, 0] : spans[r, 1]]
                copy(given[r, : target.size], target)


@jit
def turn(
    x: Any,
    out: Any,
    given: Any,
    onward: Any,
    kind: int,
    rank: int,
    spans: Words,
    each: int,
    mean: bool,
    votes: Words,
    entry: int,
    number: int,
    code: int,
    turns: Words,
    now: int,
    looks: int,
    polite: bool,
    stage: Words,
) -> int:
    """Begin a turn, or go on with one, and end it unless the peers are late.

    Args:
        x: This rank's numbers.
        out: Where the results belong; may be `x`.
        given: The slots of all ranks, n x m.
        onward: Those of the next turn.
        kind: AT_ONCE, SCATTER, GATHER or GATHER_PUT.
        rank: This rank.
        spans: For each rank, the bounds of its chunk in `x` and `out`; of everything, AT_ONCE.
        each: Where a slot has a chunk for each rank, the room of one.
        mean: Whether to divide by n.
        votes: The words of the `Board`, a row a rank.
        entry: Where in a row the vote stands.
        number: The number of the vote; 0 where there is none.
        code: What this rank votes.
        turns: The words of the `Slots`, a row a rank.
        now: Number of the turn.
        looks: How often to look for the peers.
        polite: Whether others may need this core meanwhile.
        stage: Three words: what is returned, how far it has come, and the number of the turn that
            this is of. A signal's handler may keep the caller from reading that.

    Returns:
        LATE, DONE or DIFFER.
    """
    renew(stage, now)
    if stage[0] > LATE:
        return int(stage[0])
    if stage[0] == _NEW:
        _put(kind, x, given[rank], rank, spans, each)
        if number > 0:
            votes[rank, entry + 1] = code
            store(votes, rank * votes.shape[1] + entry, number)
        store(turns, rank * turns.shape[1], now)
        stage[0] = LATE
    if number > 0:
        looks = wait(votes, entry, number, looks, polite)
        if looks < 0:
            return LATE
        if not all_equal(votes, entry, code):
            stage[0] = DIFFER
            return DIFFER
    if wait(turns, 0, now, looks, polite) < 0:
        return LATE
    _take(kind, x, out, given, onward, rank, spans, each, mean)
    stage[0] = DONE
    return DONE
