"""Calls of push_sum whose kind is known are not checked again, and refuse what they refused."""

import numpy as np
import pytest

import relaxmpi as rx

SOME = pytest.mark.ranks(2, 3)
RING = rx.Ring()


def known(comm, count, topology=RING):
    """Numbers of a kind that has been called."""
    x, w = np.full(count, 1.0 + comm.rank), np.ones(1)
    dx, dw = rx.push_sum(comm, x, w, topology=topology)
    x += dx
    w += dw
    usual = comm.edges.usual[(count,), x.dtype, ""]
    assert usual.topology is topology
    return x, w


@SOME
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "c8"])
def test_the_second_call_is_like_the_first(comm, dtype):
    """In shapes of one, two and no axes, and with topologies by turns."""
    for shape in ((7,), (3, 5), (0,), ()):
        for topology in (RING, rx.Exponential(), RING, rx.Ring()):
            x = np.full(shape, 1.0 + comm.rank, dtype)
            y, v, w = x.copy(), np.ones(1), np.ones(1)
            for _ in range(3):
                dx, dw = rx.push_sum(comm, x, w, topology=topology)
                dy, dv = rx.push_sum(comm, y, v, topology=topology, name="checked", step=0)
                assert dx.shape == shape
                assert dx.dtype == x.dtype
                assert (dx.tobytes(), dw) == (dy.tobytes(), dv)
                assert x.tobytes() == y.tobytes()
                x += dx
                y += dy
                w += dw
                v += dv
            assert w[0] == pytest.approx(1)


@SOME
def test_what_numpy_may_raise_in_user_code_is_none_of_ours(comm):
    """A share of the smallest number, and of an infinity, under np.seterr."""
    for dtype in ("f4", "f8", "c8"):
        x, w = np.array([1, np.inf, np.finfo(dtype).smallest_subnormal], dtype), np.ones(1)
        with np.errstate(all="raise"):
            for _ in range(2):
                rx.push_sum(comm, x, w, topology=RING)
        assert not np.isfinite(x[1])


@SOME
def test_what_is_no_weight_or_no_buffer_is_refused_again(comm):
    comm = comm.dup()  # whose neighbours hear of it
    x, w = known(comm, 6)
    frozen = x.copy()
    frozen.flags.writeable = False
    wide = np.zeros(12)[::2]
    for error, a, b, name in (
        (ValueError, frozen, w, ""),
        (ValueError, wide, w, ""),
        (TypeError, x, np.ones(1, "f4"), ""),
        (TypeError, x, np.ones(2), ""),
        (TypeError, x, 1.0, ""),
        (TypeError, x, w, 3),
        (TypeError, x.astype("i8"), w, ""),
    ):
        before = x.copy()
        with pytest.raises(error):
            rx.push_sum(comm, a, b, topology=RING, name=name)
        assert (x == before).all()
    for topology in (None, "ring"):
        with pytest.raises(TypeError, match="Topology"):
            rx.push_sum(comm, x, w, topology=topology)


@pytest.mark.ranks(2)
def test_ranks_that_differ_in_known_calls(comm):
    """Both kinds are known on both ranks."""
    comm = comm.dup()
    known(comm, 6)
    known(comm, 8)
    x = np.ones(6 + 2 * comm.rank)
    with pytest.raises(rx.MismatchError, match="rank 1"):
        rx.push_sum(comm, x, np.ones(1), topology=RING)


@SOME
def test_inside_a_primitive_too(comm):
    @rx.primitive
    def pushed(comm, x, w):
        return rx.push_sum.flow(comm, x, w, topology=RING)

    known(comm, 6)
    x, w = np.full(6, 1.0 + comm.rank), np.ones(1)
    y, v = x.copy(), np.ones(1)
    dx, dw = pushed(comm, x, w)
    dy, dv = rx.push_sum(comm, y, v, topology=RING)
    assert (dx.tobytes(), dw, x.tobytes(), w[0]) == (dy.tobytes(), dv, y.tobytes(), v[0])


def test_kinds_are_forgotten_before_they_are_too_many():
    def program():
        with rx.Comm.world() as comm:
            for count in range(300):
                rx.push_sum(comm, np.ones(count), np.ones(1), topology=RING)
            return len(comm.edges.usual)

    assert max(rx.SimulatedWorld(2).run(program)) <= 256
