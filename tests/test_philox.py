"""The random numbers: a known answer, the fast path against the oracle, and what they depend on."""

from itertools import pairwise

import numpy as np
import pytest

from relaxmpi.primitives import kernels
from relaxmpi.primitives.codecs import Key
from relaxmpi.primitives.philox import Stream, philox4x32, random_words, uniforms

OFFSETS = [0, 1, 2, 3, 5, 1023, 2**31 - 3, 2**33 - 5, 2**33 + 1, 2**34 + 7, 2**40 + 3]


def fast(stream: Stream, offset: int, count: int) -> np.ndarray:
    out = np.empty(count, np.uint32)
    kernels.random_words(out, stream, offset)
    return out


def test_known_answers():
    assert [f"{w:08x}" for w in philox4x32(np.zeros(4, np.uint32), (0, 0))] == [
        "6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8",
    ]  # fmt: skip
    ones = np.full(4, 0xFFFFFFFF, np.uint32)
    assert [f"{w:08x}" for w in philox4x32(ones, (0xFFFFFFFF, 0xFFFFFFFF))] == [
        "408f276d", "41c83b0e", "a20bc7c6", "6d5451fd",
    ]  # fmt: skip
    pi = np.array([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], np.uint32)
    assert [f"{w:08x}" for w in philox4x32(pi, (0xA4093822, 0x299F31D0))] == [
        "d16cfe09", "94fdcceb", "5001e420", "24126ea1",
    ]  # fmt: skip
    assert fast(Stream(0, 0, 0, 0), 0, 4).tolist() == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 1023, 1024, 1025, 2100])
def test_kernel_equals_oracle(offset, count):
    stream = Stream(0xFFFFFFFF, 0x89ABCDEF, 0xFFFFFFFE, 0x01FFFFFF)
    assert (fast(stream, offset, count) == random_words(stream, offset, count)).all()


def test_element_e_has_word_e_mod_4_of_counter_e_div_4():
    stream = Stream(seed=11, name=22, step=33, lane=44)
    for element in (0, 6, 2**33 + 3, 2**34 + 1):
        group = element // 4
        counter = np.array([group % 2**32, group >> 32, 33, 44], np.uint32)
        word = philox4x32(counter, (11, 22))[element % 4]
        assert random_words(stream, element, 1)[0] == word


def test_pieces_equal_the_whole():
    stream = Stream(1, 2, 3, 4)
    start = 2**33 - 50  # crosses the carry into the high word of the counter
    whole = fast(stream, start, 3000)
    cuts = [0, 1, 2, 5, 700, 1733, 3000]
    pieces = [fast(stream, start + a, b - a) for a, b in pairwise(cuts)]
    assert (np.concatenate(pieces) == whole).all()


def test_uniforms_are_below_one():
    assert uniforms(np.array([0xFFFFFFFF], np.uint32))[0] == np.float32(1 - 2**-24) < 1
    assert uniforms(np.array([0, 255, 256], np.uint32)).tolist() == [0, 0, 2**-24]
    draws = uniforms(random_words(Stream(5, 6, 7, 8), 0, 100_000)).astype(np.float64)
    assert abs(draws.mean() - 0.5) < 5 / np.sqrt(12 * 100_000)
    assert abs(draws.var() - 1 / 12) < 5 / np.sqrt(180 * 100_000)


def test_key_names_the_stream():
    key = Key(name="layer1.weight", step=2**32 + 7, rank=5, site=1)
    assert key.stream(9) == Stream(seed=9, name=0x24D4A891, step=7, lane=5 | 1 << 24)
    streams = {
        k.stream(seed)
        for seed in (0, 1)
        for k in (Key(), Key("a"), Key(step=1), Key(rank=1), Key(site=1))
    }
    assert len(streams) == 10
    assert len({fast(s, 0, 4).tobytes() for s in streams}) == 10
    with pytest.raises(ValueError, match="rank must be below"):
        Key(rank=2**24).stream(0)
