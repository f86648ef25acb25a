"""Ranks that disagree, and arguments that are refused: the same error everywhere, at once."""

import time

import numpy as np
import pytest

import relaxmpi as rx

MANY = pytest.mark.ranks(2, 3, 4)
one = np.ones


def odd(comm):
    return comm.rank == comm.size - 1


CASES = {
    "count": lambda c: rx.allreduce(c, one(8 if odd(c) else 4)),
    "shape": lambda c: rx.allreduce(c, one((2, 2) if odd(c) else 4)),
    "dtype": lambda c: rx.allreduce(c, one(4, "f4" if odd(c) else "f8")),
    "op": lambda c: rx.allreduce(c, one(4), op=rx.MEAN if odd(c) else rx.SUM),
    "name": lambda c: rx.allreduce(c, one(4), name="b" if odd(c) else "a"),
    "codec": lambda c: rx.allreduce(c, one(4), codec=rx.Identity() if odd(c) else None),
    "memory": lambda c: rx.allreduce(
        c, one(4), codec=rx.ErrorFeedback(rx.Identity()) if odd(c) else rx.Identity()
    ),
    "bits": lambda c: rx.allreduce(c, one(4), codec=rx.Quantizer(bits=4 if odd(c) else 8)),
    "bucket": lambda c: rx.allreduce(c, one(4), codec=rx.Quantizer(8, bucket=64 if odd(c) else 32)),
    "root": lambda c: rx.broadcast(c, one(4), root=1 if odd(c) else 0),
    "verb": lambda c: rx.barrier(c) if odd(c) else rx.allreduce(c, one(4)),
    "number": lambda c: rx.allreduce(c, 1.0 if odd(c) else one(1)),
    "int and float": lambda c: rx.allreduce(c, 1.0 if odd(c) else 1),
    "step": lambda c: rx.allreduce(c, one(4), codec=rx.Quantizer(8), step=2 if odd(c) else 3),
    "strided": lambda c: rx.allreduce(c, one((4, 4)).T[::2] if odd(c) else one((2, 4))),
    "fortran": lambda c: rx.allreduce(c, np.asfortranarray(one((2, 3))) if odd(c) else one((2, 3))),
    "no buffer": lambda c: rx.allreduce(c, [1.0] if odd(c) else one(1)),
    "object": lambda c: rx.allreduce(c, np.array([None]) if odd(c) else one(1)),
    "gathered": lambda c: rx.allgather(c, one(3 if odd(c) else 2)),
    "rows": lambda c: rx.alltoall(c, one((c.size + odd(c), 2))),
    "scattered": lambda c: rx.reduce_scatter(c, one(5 if odd(c) else 4)),
}


@MANY
@pytest.mark.parametrize("case", CASES)
def test_one_rank_differs(comm, case):
    begin = time.perf_counter()
    with pytest.raises(rx.MismatchError) as caught:
        CASES[case](comm)
    assert time.perf_counter() - begin < 5
    assert f"rank {comm.size - 1}: " in str(caught.value)
    assert len(set(comm.mpi.allgather(str(caught.value)))) == 1
    assert rx.allreduce(comm, 1) == comm.size  # the Comm stays usable


@MANY
def test_outputs_are_untouched(comm):
    x, out = one(4) * comm.rank, np.full(4, -1.0)
    with pytest.raises(rx.MismatchError):
        rx.allreduce(comm, x, out, op=rx.SUM if odd(comm) else rx.MEAN)
    with pytest.raises(rx.MismatchError):
        rx.allreduce(comm, x, op=rx.SUM if odd(comm) else rx.MEAN)
    assert (x == comm.rank).all()
    assert (out == -1).all()


@MANY
def test_two_named_tensors_in_opposite_order(comm):
    """Fact 1 of the public reports: MPI mixes the two sums without a word."""
    a, b = one(4), one(4) * 100
    first, second = (b, a) if odd(comm) else (a, b)
    names = ("b", "a") if odd(comm) else ("a", "b")
    for x, name in zip((first, second), names, strict=True):
        with pytest.raises(rx.MismatchError):
            rx.allreduce(comm, x, name=name)
    assert (a == 1).all()
    assert (b == 100).all()


@MANY
def test_works_queued_behind_a_mismatch_go_on(comm):
    works = [
        rx.allreduce.start(comm, one(4)),
        rx.allreduce.start(comm, one(5 if odd(comm) else 4)),
        rx.allreduce.start(comm, one(6)),
        rx.allreduce.start(comm, one(3 if odd(comm) else 7)),
        rx.allreduce.start(comm, one(8)),
    ]
    for k in (1, 3):
        with pytest.raises(rx.MismatchError):
            works[k].wait()
    for k in (0, 2, 4):
        assert (works[k].wait() == comm.size).all()


@MANY
def test_a_mismatch_inside_a_primitive(comm):
    @rx.primitive
    def twice(comm, x, y):
        def flow():
            yield from rx.allreduce.flow(comm, x)
            yield from rx.allreduce.flow(comm, y)

        return flow()

    work = twice.start(comm, one(3), one(2 if odd(comm) else 3))
    after = rx.allreduce.start(comm, one(2))
    with pytest.raises(rx.MismatchError):
        work.wait()
    assert (after.wait() == comm.size).all()


@MANY
def test_different_primitives_are_noticed(comm):
    def build(comm):
        yield from rx.barrier.flow(comm)

    def other(comm):
        yield from rx.barrier.flow(comm)

    with pytest.raises(rx.MismatchError, match="other"):
        rx.primitive(other if odd(comm) else build)(comm)


REFUSED = {
    "list": (TypeError, lambda c: rx.allreduce(c, [1.0])),
    "strided": (ValueError, lambda c: rx.allreduce(c, one((4, 4))[:, ::2])),
    "fortran": (ValueError, lambda c: rx.allreduce(c, np.asfortranarray(one((2, 3))))),
    "read-only": (ValueError, lambda c: rx.allreduce(c, np.frombuffer(bytes(8)))),
    "byte order": (TypeError, lambda c: rx.allreduce(c, one(3, ">f8"))),
    "integer mean": (TypeError, lambda c: rx.allreduce(c, one(3, "i4"), op=rx.MEAN)),
    "complex max": (TypeError, lambda c: rx.allreduce(c, one(3, "c8"), op=rx.MAX)),
    "bool sum": (TypeError, lambda c: rx.allreduce(c, one(3, "?"))),
    "max codec": (TypeError, lambda c: rx.allreduce(c, one(3), op=rx.MAX, codec=rx.Identity())),
    "complex codec": (TypeError, lambda c: rx.allreduce(c, one(3, "c8"), codec=rx.OneBit())),
    "int codec": (TypeError, lambda c: rx.allreduce(c, one(3, "i4"), codec=rx.OneBit())),
    "codec class": (TypeError, lambda c: rx.allreduce(c, one(3), codec=rx.OneBit)),
    "op string": (TypeError, lambda c: rx.allreduce(c, one(3), op="sum")),
    "name": (TypeError, lambda c: rx.allreduce(c, one(3), name=7)),
    "out shape": (ValueError, lambda c: rx.allreduce(c, one(3), one(4))),
    "out dtype": (TypeError, lambda c: rx.allreduce(c, one(3), one(3, "f4"))),
    "out of a number": (TypeError, lambda c: rx.allreduce(c, 1.0, one(1))),
    "root": (ValueError, lambda c: rx.broadcast(c, one(3), root=c.size)),
    "rows": (ValueError, lambda c: rx.alltoall(c, one(c.size + 1))),
    "chunk": (ValueError, lambda c: rx.allgather(c, one(9), one(3))),
    "huge int": (ValueError, lambda c: rx.allreduce(c, 2**80)),
    "unknown argument": (TypeError, lambda c: rx.allreduce(c, one(3), average=True)),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_all_ranks(comm, case):
    kind, call = REFUSED[case]
    with pytest.raises(kind) as caught:
        call(comm)
    assert len(str(caught.value)) > 10
    assert rx.allreduce(comm, 1) == comm.size


@pytest.mark.ranks(2)
def test_a_memory_serves_one_buffer(comm):
    memory = rx.ErrorFeedback(rx.Identity())
    rx.allreduce(comm, one(4), codec=memory)
    with pytest.raises(ValueError, match="4 x float64"):
        rx.allreduce(comm, one(5), codec=memory)
    with pytest.raises(ValueError, match="reset"):
        rx.reduce_scatter(comm, one(4), codec=memory)
    # On rank 0 the first is under way, for rank 1 has not begun it; rank 1 may have ended it.
    if comm.rank:
        comm.mpi.Barrier()
    first = rx.allreduce.start(comm, one(4), codec=memory)
    second = rx.allreduce.start(comm, one(4), codec=memory)
    if not comm.rank:
        comm.mpi.Barrier()
    with pytest.raises((ValueError, rx.MismatchError), match="not done"):
        second.wait()
    first.wait()
    memory.reset()
    rx.allreduce(comm, one(5), codec=memory)


@pytest.mark.ranks(1, 2)
def test_a_refused_call_that_is_started_fails_when_it_is_waited_for(comm):
    work = rx.allreduce.start(comm, [1.0])
    with pytest.raises(TypeError, match="not a buffer"):
        work.wait()
    with comm.trace():
        traced = rx.allreduce.start(comm, [1.0])
        with pytest.raises(TypeError, match="not a buffer"):
            traced.wait()
        assert rx.allreduce(comm, 1) == comm.size
