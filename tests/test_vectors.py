"""Vectors in registers do lane by lane what numpy does number by number."""

from collections.abc import Callable

import numpy as np
import pytest

from relaxmpi.primitives._jit import jit
from relaxmpi.primitives._vectors import (
    cast,
    counting,
    highest,
    load,
    negative,
    rint,
    signs,
    splat,
    store,
    zip_words,
)

SPECIAL = [0.0, -0.0, 0.5, -0.5, 1.5, -2.5, 1e-30, -1e-30, 3.25, -7.75, 100.5, -100.5]
NOT_FINITE = [*SPECIAL[:9], np.nan, np.inf, -np.inf]


@jit
def floats(x, y, out):
    for i in range(0, x.size, 4):
        a, b = load(x, i, 4), load(y, i, 4)
        store(out[0], i, a + b)
        store(out[1], i, a - b)
        store(out[2], i, a * b)
        store(out[3], i, min(a, b))
        store(out[4], i, max(a, b))
        store(out[5], i, abs(a))
        store(out[6], i, rint(a))
        store(out[7], i, a * x.dtype.type(3))
        store(out[8], i, x.dtype.type(3) - a)


@jit
def integers(x, y, out):
    number = x.dtype.type
    for i in range(0, x.size, 8):
        a, b = load(x, i, 8), load(y, i, 8)
        store(out[0], i, a + b)
        store(out[1], i, a - b)
        store(out[2], i, a * b)
        store(out[3], i, a & b)
        store(out[4], i, a | b)
        store(out[5], i, a ^ b)
        store(out[6], i, a << number(3))
        store(out[7], i, a >> number(3))
        store(out[8], i, min(a, b))
        store(out[9], i, max(a, b))


@jit
def conversions(x, narrow, wide, single, signed, back):
    for i in range(0, x.size, 4):
        v = load(x, i, 4)
        whole = cast(v, np.int32)
        store(signed, i, whole)
        store(narrow, i, cast(whole, np.uint8))
        store(wide, i, cast(whole, np.int64))
        store(single, i, cast(v, np.float32))
        store(back, i, cast(whole, np.float64))


@jit
def compared(x, not_negative, below):
    for i in range(0, x.size, 4):
        store(not_negative, i, signs(load(x, i, 4)))
        store(below, i, negative(load(x, i, 4)))


@jit
def others(spread, counted, words, x):
    store(spread, 0, splat(np.int32(7), 16))
    store(counted, 0, counting(np.uint64, 8))
    first = counting(np.uint64, 4)
    zip_words(words, 0, first, first + np.uint64(10))
    return highest(load(x, 1, 8))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_floats_like_numpy(kind: type) -> None:
    x = np.array(SPECIAL, kind)
    y = x[::-1].copy()
    out = np.zeros((9, x.size), kind)
    floats(x, y, out)
    smaller, larger = np.where(x < y, x, y), np.where(x > y, x, y)
    wanted = [x + y, x - y, x * y, smaller, larger, abs(x), np.rint(x), x * kind(3), kind(3) - x]
    assert out.tobytes() == np.stack(wanted).tobytes()


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64, np.uint64, np.uint8])
def test_integers_like_numpy(kind: type) -> None:
    numbers = np.random.default_rng(0)
    bounds = np.iinfo(kind)
    x, y = numbers.integers(bounds.min, bounds.max, (2, 64), kind, endpoint=True)
    out = np.zeros((10, x.size), kind)
    integers(x, y, out)
    three = kind(3)
    wanted = [x + y, x - y, x * y, x & y, x | y, x ^ y, x << three, x >> three]
    wanted += [np.minimum(x, y), np.maximum(x, y)]
    assert (out == np.stack(wanted)).all()


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_casts_like_numpy(kind: type) -> None:
    x = np.array(SPECIAL, kind)
    outs = [np.zeros(x.size, k) for k in (np.uint8, np.int64, np.float32, np.int32, np.float64)]
    conversions(x, *outs)
    whole = x.astype(np.int32)
    wanted: list[Callable[[], np.ndarray]] = [
        lambda: whole.astype(np.uint8),
        lambda: whole.astype(np.int64),
        lambda: x.astype(np.float32),
        lambda: whole,
        lambda: whole.astype(np.float64),
    ]
    for out, want in zip(outs, wanted, strict=True):
        assert (out == want()).all()


@pytest.mark.parametrize(("kind", "mask"), [(np.float32, np.int32), (np.float64, np.int64)])
def test_comparisons_with_zero(kind: type, mask: type) -> None:
    x = np.array(NOT_FINITE, kind)
    not_negative, below = np.zeros(x.size, np.uint8), np.zeros(x.size, mask)
    compared(x, not_negative, below)
    assert not_negative.tolist() == [255 if v >= 0 else 0 for v in x]
    assert below.tolist() == [-1 if v < 0 else 0 for v in x]


def test_vectors_made_of_numbers() -> None:
    spread, counted, words = np.zeros(17, np.int32), np.zeros(9, np.uint64), np.zeros(9, np.uint64)
    x = np.array([99, -5, 3, 8, -9, 0, 7, 2, 1, 99], np.int32)
    assert others(spread, counted, words, x) == 8
    assert spread.tolist() == [7] * 16 + [0]
    assert counted.tolist() == [*range(8), 0]
    assert words.tolist() == [0, 10, 1, 11, 2, 12, 3, 13, 0]
