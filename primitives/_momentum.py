"""Kernels of Adam with a frozen variance, whose momentum travels: as numbers, or as signs.

What travels are the momenta of *live* coordinates only, one after the other. A table of runs
says where they are: run r holds the live coordinates at[r] to at[r + 1] - 1, which lie in the
buffer from source[r] on; at has one entry more than source. They travel in units of 2**k, with k
the exponent of sqrt(v) clamped to a range (low, high): that is exact, and makes them alike in size.
With (0, 0) they are what they are.

A step with signs is two passes over memory, before the exchange and after it. The first one writes
nothing but the payload, so that a step can still be left out; the second one makes u again.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxmpi.primitives._adam import BLOCK, Rates, move
from relaxmpi.primitives._bits import split_payload
from relaxmpi.primitives._jit import as_float, inlined, jit
from relaxmpi.primitives._reduce import LANES, Lanes
from relaxmpi.primitives._sign import pack_signs, scale_of, values_of, without

Floats = NDArray[Any]
Codes = NDArray[np.uint8]
Places = NDArray[np.int64]


@inlined
def _run_of(at: Places, k: int) -> int:
    """The run that holds live coordinate k."""
    low, high = 0, at.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if at[middle] <= k:
            low = middle
        else:
            high = middle
    return low


@inlined
def _take(
    g: Floats, m: Floats, v: Floats, mix: Any, low: int, high: int, e: Floats, u: Floats
) -> None:
    """Fill u with (m + mix (g - m)) / 2**k + e, in one loop: memory answers all streams at once.

    Half the bits of a float have half its exponent, which gives k; see `units_of`.
    """
    if v.itemsize == 4:
        narrow = v.view(np.int32)
        least, most = np.int32((127 + low) << 23), np.int32((127 + high) << 23)
        half, mask, two = np.int32(127 << 22), np.int32(255 << 23), np.int32(254 << 23)
        for j in range(u.size):
            p = np.int32(np.int32(np.int32(narrow[j] >> np.int32(1)) + half) & mask)
            p = np.int32(two - min(max(p, least), most))
            u[j] = (m[j] + mix * (g[j] - m[j])) * as_float(p) + e[j]
    else:
        wide = v.view(np.int64)
        for j in range(u.size):
            k = min(max(((wide[j] >> 52) - 1023) >> 1, low), high)
            u[j] = (m[j] + mix * (g[j] - m[j])) * as_float(np.int64((1023 - k) << 52)) + e[j]


@inlined
def _give(q: Floats, v: Floats, low: int, high: int, m: Floats) -> None:
    """Fill m with 2**k q."""
    if v.itemsize == 4:
        narrow = v.view(np.int32)
        least, most = np.int32((127 + low) << 23), np.int32((127 + high) << 23)
        half, mask = np.int32(127 << 22), np.int32(255 << 23)
        for j in range(m.size):
            p = np.int32(np.int32(np.int32(narrow[j] >> np.int32(1)) + half) & mask)
            m[j] = q[j] * as_float(np.int32(min(max(p, least), most)))
    else:
        wide = v.view(np.int64)
        for j in range(m.size):
            k = min(max(((wide[j] >> 52) - 1023) >> 1, low), high)
            m[j] = q[j] * as_float(np.int64((1023 + k) << 52))


@jit
def _gather_momentum(
    g: Floats,
    m: Floats,
    v: Floats,
    at: Places,
    source: Places,
    mix: Any,
    low: int,
    high: int,
    nothing: Floats,
    u: Floats,
) -> None:
    """Momenta of live coordinates to the front of g; nothing is read after it was overwritten."""
    for r in range(source.size):
        k, i, end = at[r], source[r], at[r + 1]
        while k < end:
            take = min(end - k, u.size)
            mb, gb, vb, ub = m[i : i + take], g[i : i + take], v[i : i + take], u[:take]
            _take(gb, mb, vb, mix, low, high, nothing[:take], ub)
            front = g[k : k + take]
            for j in range(take):
                front[j] = u[j]
            k += take
            i += take


@jit
def _move_frozen(
    x: Floats,
    origin: int,
    q: Floats,
    m: Floats,
    v: Floats,
    at: Places,
    source: Places,
    low: int,
    high: int,
    begin: int,
    end: int,
    length: Any,
    root: Any,
    eps: Any,
    decay: Any,
) -> None:
    k, r = begin, _run_of(at, begin)
    while k < end:
        i = source[r] + k - at[r]
        take = min(min(end, at[r + 1]) - k, BLOCK)
        mb = m[i : i + take]
        _give(q[k : k + take], v[i : i + take], low, high, mb)
        move(x[i - origin : i - origin + take], mb, v[i : i + take], length, root, eps, decay)
        k += take
        if k == at[r + 1]:
            r += 1


@inlined
def _sum_up(
    g: Floats,
    m: Floats,
    v: Floats,
    e: Floats,
    at: Places,
    source: Places,
    k: int,
    mix: Any,
    low: int,
    high: int,
    u: Floats,
) -> None:
    """Momentum and residual of the live coordinates from k on, as many as u holds; e is theirs."""
    r, done = _run_of(at, k), 0
    while done < u.size:
        i = source[r] + k + done - at[r]
        take = min(u.size - done, at[r + 1] - k - done)
        mb, gb = m[i : i + take], g[i : i + take]
        eb, ub = e[done : done + take], u[done : done + take]
        _take(gb, mb, v[i : i + take], mix, low, high, eb, ub)
        done += take
        r += 1


@jit
def _sign_momentum(
    g: Floats,
    m: Floats,
    v: Floats,
    e: Floats,
    at: Places,
    source: Places,
    begin: int,
    mix: Any,
    low: int,
    high: int,
    scales: Floats,
    packed: Codes,
    bucket: int,
    l2: bool,
    lanes: Lanes,
    sums: Floats,
) -> None:
    for b in range(scales.size):
        lo = b * bucket
        hi = min(lo + bucket, e.size)
        u = sums[: hi - lo]
        _sum_up(g, m, v, e[lo:hi], at, source, begin + lo, mix, low, high, u)
        scale_of(u, l2, scales[b : b + 1], lanes)
        pack_signs(u, packed[lo // 8 : (hi + 7) // 8])


@jit
def _move_signed(
    x: Floats,
    origin: int,
    g: Floats,
    m: Floats,
    v: Floats,
    e: Floats,
    at: Places,
    source: Places,
    chunk: int,
    begin: int,
    end: int,
    own: Floats,
    scales: Floats,
    packed: Codes,
    bucket: int,
    low: int,
    high: int,
    mix: Any,
    length: Any,
    root: Any,
    eps: Any,
    decay: Any,
    sums: Floats,
    values: Floats,
) -> None:
    """Live coordinates begin to end of the chunk that starts at `chunk` and that e belongs to."""
    for b in range((begin - chunk) // bucket, (end - chunk + bucket - 1) // bucket):
        lo = b * bucket
        hi = min(lo + bucket, e.size)
        q = values[: hi - lo]
        values_of(packed[lo // 8 : (hi + 7) // 8], scales[b], q)
        k = max(begin, chunk + lo)
        stop = min(end, chunk + hi)
        u, eb = sums[: stop - k], e[k - chunk : stop - chunk]
        _sum_up(g, m, v, eb, at, source, k, mix, low, high, u)
        without(u, own[b], eb)
        r = _run_of(at, k)
        while k < stop:
            i = source[r] + k - at[r]
            take = min(stop, at[r + 1]) - k
            qb, mb = q[k - chunk - lo : k - chunk - lo + take], m[i : i + take]
            _give(qb, v[i : i + take], low, high, mb)
            move(x[i - origin : i - origin + take], mb, v[i : i + take], length, root, eps, decay)
            k += take
            r += 1


def gather_momentum(
    g: Floats,
    m: Floats,
    v: Floats,
    at: Places,
    source: Places,
    *,
    mix: Any,
    units: tuple[int, int],
) -> None:
    """Leave m + mix (g - m) of the live coordinates, in their units, in the front of g."""
    nothing, u = np.zeros((2, min(BLOCK, g.size)), g.dtype)
    _gather_momentum(g, m, v, at, source, mix, *units, nothing, u)


def move_frozen(
    x: Floats,
    origin: int,
    q: Floats,
    m: Floats,
    v: Floats,
    at: Places,
    source: Places,
    *,
    live: tuple[int, int],
    units: tuple[int, int],
    step: Rates,
) -> None:
    """Let the momentum of some live coordinates be q, and step; x begins at `origin` of m and v."""
    rest = (step.length, step.root, step.eps, step.decay)
    _move_frozen(x, origin, q, m, v, at, source, *units, *live, *rest)


def sign_momentum(
    g: Floats,
    m: Floats,
    v: Floats,
    e: Floats,
    at: Places,
    source: Places,
    payload: Codes,
    *,
    begin: int,
    mix: Any,
    units: tuple[int, int],
    bucket: int,
    l2: bool,
) -> Floats:
    """Encode u = (m + mix (g - m)) / unit + e for live coordinates begin to begin + e.size.

    As `sign` does, whose scales are returned. Nothing but the payload is written: `move_signed`
    makes u again.
    """
    head, packed = split_payload(payload, e.size, e.dtype, 1, bucket)
    scales = np.empty(-(-e.size // bucket), e.dtype)
    sums = np.empty(min(bucket, e.size), e.dtype)
    rest: Any = (scales, packed, bucket, l2, np.empty(LANES), sums)
    _sign_momentum(g, m, v, e, at, source, begin, mix, *units, *rest)
    head[:] = scales.view(np.uint8)
    return scales


def move_signed(
    x: Floats,
    origin: int,
    g: Floats,
    m: Floats,
    v: Floats,
    e: Floats,
    at: Places,
    source: Places,
    *,
    chunk: int,
    live: tuple[int, int],
    own: Floats,
    payload: Codes,
    bucket: int,
    units: tuple[int, int],
    step: Rates,
) -> None:
    """Decode, keep what was lost, and step; all in one pass over some live coordinates.

    e <- u - own sign(u); m <- unit q, decoded; x <- x - length m / (sqrt(v) / root + eps).
    """
    head, packed = split_payload(payload, e.size, e.dtype, 1, bucket)
    scales = np.empty(-(-e.size // bucket), e.dtype)
    scales.view(np.uint8)[:] = head
    sums, values = np.empty((2, min(bucket, e.size)), e.dtype)
    rest = (step.mix, step.length, step.root, step.eps, step.decay, sums, values)
    places = (at, source, chunk, *live, own, scales, packed, bucket, *units)
    _move_signed(x, origin, g, m, v, e, *places, *rest)
