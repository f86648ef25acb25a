"""An all-reduce of ranks that read each other's memory, in one function: see `Pulls`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._atomic import address, load, store
from relaxmpi.primitives._jit import inlined, jit, numba
from relaxmpi.primitives._together import (
    BLOCK,
    DIFFER,
    DONE,
    LATE,
    add,
    all_equal,
    copy,
    divide,
    renew,
    wait,
)

__all__ = ["REFUSED", "pull"]

Words = NDArray[np.int64]

REFUSED = 4

# How far it has come: nothing said; where the numbers lie has been said; this rank's chunk has been
# added up; it has those of all others; or it has tried in vain to read, and waits for good.
_NEW, _OFFERED, _ADDED, _COLLECTED, _LOST = 0, 1, 2, 3, 4

_MOST = 2**30  # the kernel reads a little less than 2^31 bytes in one call

_readv = numba.types.ExternalFunction(
    "process_vm_readv",
    numba.types.int64(
        numba.types.int32,
        numba.types.int64,
        numba.types.uint64,
        numba.types.int64,
        numba.types.uint64,
        numba.types.uint64,
    ),
)


@inlined
def _read(process: int, theirs: int, mine: int, nbytes: int, parts: Words) -> bool:
    """See `Reader.read`."""
    at = address(parts)
    while nbytes > 0:
        now = min(nbytes, _MOST)
        parts[0], parts[1], parts[2], parts[3] = mine, now, theirs, now
        if _readv(process, at, 1, at + 16, 1, 0) != now:
            return False
        mine, theirs, nbytes = mine + now, theirs + now, nbytes - now
    return True


@inlined
def _lets(process: int, x: Any, parts: Words) -> bool:
    """See `Reader.lets`."""
    at, begin = address(parts), address(x)
    parts[0], parts[1], parts[2], parts[3] = at + 56, 2, begin, 1
    parts[4], parts[5] = begin + x.size * x.itemsize - 1, 1
    return bool(_readv(process, at, 1, at + 16, 2, 0) == 2)


@inlined
def _stand(words: Words, offers: Words) -> bool:
    """Whether nobody has withdrawn what he said."""
    for r in range(words.shape[0]):
        for k in range(offers.shape[1]):
            if load(words, r * words.shape[1] + 1 + k) != offers[r, k]:
                return False
    return True


@inlined
def _add(mine: Any, rooms: Any, lo: int, rank: int, total: Any) -> None:
    """Add what all have given, in the order of ranks, to what the first other has."""
    hi = lo + mine.size
    if rank < 2:
        add(total, mine)
    for r in range(1 + (rank == 0), rooms.shape[0]):
        if r != rank:
            add(total, rooms[r, lo:hi])
        elif r > 1:
            add(total, mine)


@inlined
def _sums_at(out: Any, sums: Any, begin: int) -> int:
    """Where the sums would begin, if this rank had those of all chunks."""
    return int(address(sums) - begin * sums.itemsize if sums.size else address(out))


@inlined
def _sum(
    x: Any,
    out: Any,
    rooms: Any,
    sums: Any,
    rank: int,
    spans: Words,
    mean: bool,
    processes: Any,
    parts: Words,
    offers: Words,
) -> bool:
    """Read this rank's chunk of all others and add it up, part by part."""
    n, size, most = rooms.shape[0], x.itemsize, rooms.shape[1]
    begin, end, first = spans[rank, 0], spans[rank, 1], int(rank == 0)
    for lo in range(begin, end, most):
        hi = min(lo + most, end)
        totals = sums[lo - begin : hi - begin] if sums.size else rooms[rank, : hi - lo]
        for k in range(1, n):
            r = (rank + k) % n
            theirs = offers[r, 0] + lo * size
            room = address(totals) if r == first else address(rooms[r])
            if not _read(processes[r], theirs, room, (hi - lo) * size, parts):
                return False
        for at in range(lo, hi, BLOCK):
            until = min(at + BLOCK, hi)
            total = totals[at - lo : until - lo]
            _add(x[at:until], rooms, at - lo, rank, total)
            if mean:
                divide(total, n)
            copy(total, out[at:until])
    return True


@inlined
def _collect(
    out: Any, rank: int, spans: Words, processes: Any, parts: Words, offers: Words
) -> bool:
    """Read the sums of all others."""
    n, size = spans.shape[0], out.itemsize
    for k in range(1, n):
        r = (rank + k) % n
        at, nbytes = spans[r, 0] * size, (spans[r, 1] - spans[r, 0]) * size
        if not _read(processes[r], offers[r, 1] + at, address(out) + at, nbytes, parts):
            return False
    return True


@jit
def pull(
    x: Any,
    out: Any,
    rooms: Any,
    sums: Any,
    rank: int,
    spans: Words,
    mean: bool,
    processes: Any,
    parts: Words,
    offers: Words,
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
    """Begin the all-reduce, or go on with it, and end it unless the peers are late.

    Args:
        x: This rank's numbers.
        out: Where the results belong; may be `x`.
        rooms: For a part of the chunk of each rank, n x m.
        sums: For this rank's chunk, where the others read its sums; none where they read `out`.
        rank: This rank.
        spans: For each rank, the bounds of its chunk.
        mean: Whether to divide by n.
        processes: Of each rank; none where this rank cannot read one of them.
        parts: Eight words, for the kernel.
        offers: Two words a rank: where its numbers lie, and where its sums will.
        votes: As in `turn`, and so are the next three.
        entry: Where in a row the vote stands.
        number: The number of the vote; 0 where there is none.
        code: What this rank votes.
        turns: The words of the `Slots`, a row a rank.
        now: Number of the first of three turns.
        looks: As in `turn`.
        polite: As in `turn`.
        stage: As in `turn`.

    Returns:
        LATE, DONE, DIFFER, or REFUSED where a rank has numbers that cannot be read.
    """
    renew(stage, now)
    if stage[0] > LATE:
        return int(stage[0])
    each = turns.shape[1]
    if stage[1] == _NEW:
        able = processes.size > 0
        hidden = not able or not _lets(processes[rank], x, parts)
        if address(out) != address(x):
            hidden = hidden or not _lets(processes[rank], out, parts)
        turns[rank, 1] = (0 if able else -1) if hidden else address(x)
        turns[rank, 2] = (0 if able else -1) if hidden else _sums_at(out, sums, spans[rank, 0])
        if number > 0:
            votes[rank, entry + 1] = code
            store(votes, rank * votes.shape[1] + entry, number)
        store(turns, rank * each, now)
        stage[0], stage[1] = LATE, _OFFERED
    if stage[1] == _OFFERED:
        if number > 0:
            looks = wait(votes, entry, number, looks, polite)
            if looks < 0:
                return LATE
            if not all_equal(votes, entry, code):
                stage[0] = DIFFER
                return DIFFER
        looks = wait(turns, 0, now, looks, polite)
        if looks < 0:
            return LATE
        for r in range(turns.shape[0]):
            for k in range(2):
                offers[r, k] = load(turns, r * each + 1 + k)
        for r in range(turns.shape[0]):
            if offers[r, 0] <= 0:
                stage[0] = REFUSED
                return REFUSED
        read = _sum(x, out, rooms, sums, rank, spans, mean, processes, parts, offers)
        if not read or not _stand(turns, offers):
            stage[1] = _LOST
            return LATE
        store(turns, rank * each, now + 1)
        stage[1] = _ADDED
    if stage[1] == _ADDED:
        looks = wait(turns, 0, now + 1, looks, polite)
        if looks < 0:
            return LATE
        read = _collect(out, rank, spans, processes, parts, offers)
        if not read or not _stand(turns, offers):
            stage[1] = _LOST
            return LATE
        store(turns, rank * each, now + 2)
        stage[1] = _COLLECTED
    if stage[1] == _LOST or wait(turns, 0, now + 2, looks, polite) < 0:
        return LATE
    stage[0] = DONE
    return DONE
