"""What goes wrong in the middle of a call: no rank may go on with somebody else's numbers."""

import gc
import re
import signal
import time

import numpy as np
import pytest

import relaxmpi as rx

MANY = pytest.mark.ranks(2, 3)


@pytest.mark.parametrize("where", ["composite", "codec"])
def test_an_error_in_the_middle_on_one_rank_breaks_the_comm_everywhere(launch, where):
    done = launch(
        """
import sys
import numpy as np
import relaxmpi as rx
from relaxmpi.primitives import codecs

comm = rx.Comm.world(timeout=5)

@rx.primitive
def twice(comm, x):
    def flow():
        yield from rx.allreduce.flow(comm, x)
        if comm.rank == 1 and x[0] < 10 and sys.argv[1] == "composite":
            raise KeyError("in the middle")
        yield from rx.allreduce.flow(comm, x)
    return flow()

class Bad(rx.Codec):
    def nbytes(self, count, dtype): return 4 * count
    def encode(self, x, payload, *, key=rx.Key(), offset=0):
        if comm.rank == 1 and x[0] < 10:
            raise KeyError("in the middle")
        payload[:] = x.view("u1")
    def decode(self, payload, out): out[:] = payload.view("f4")
    def describe(self): return "bad"

def call(value):
    x = np.full(5, value, "f4")
    if sys.argv[1] == "codec":
        return rx.allreduce.start(comm, x, codec=Bad())
    return twice.start(comm, x)

works = []
for value in (1.0, 100.0):
    try:
        works.append(call(value))
    except rx.BrokenComm as error:  # the first has failed while it was started
        print("RAISED", comm.rank, type(error).__name__, flush=True)
for work in works:
    try:
        work.wait()
        print("WRONG", comm.rank, flush=True)
    except Exception as error:
        print("RAISED", comm.rank, type(error).__name__, flush=True)
""",
        2,
        where,
    )
    said = re.findall(r"RAISED (\d) (\w+)", done.stdout)
    assert "WRONG" not in done.stdout
    assert ("1", "KeyError") in said
    assert ("1", "BrokenComm") in said
    assert {name for rank, name in said if rank == "0"} <= {"PeerTimeout", "BrokenComm"}
    assert done.seconds < 25


@pytest.mark.ranks(2)
def test_an_error_on_all_ranks_breaks_the_comm_without_a_hang(comm):
    class Bad(rx.Codec):
        def nbytes(self, count, dtype):
            return 8 * count

        def encode(self, x, payload, *, key=None, offset=0):
            raise KeyError("everywhere")

        def decode(self, payload, out):
            raise AssertionError

        def describe(self):
            return "bad"

    with comm.dup() as stream:
        with pytest.raises(KeyError):
            rx.allreduce(stream, np.ones(4), codec=Bad())
        with pytest.raises(rx.BrokenComm, match="everywhere"):
            rx.allreduce(stream, np.ones(4))
    assert rx.allreduce(comm, 1) == comm.size


@MANY
def test_a_long_pause_before_waiting_blames_nobody(comm):
    with rx.Comm.wrap(comm.mpi, timeout=0.5) as hasty:
        works = [rx.allreduce.start(hasty, np.ones(2_000_000)) for _ in range(3)]
        time.sleep(1.5)
        for work in works:
            assert (work.wait() == comm.size).all()


@pytest.mark.ranks(3, 4)
def test_parts_of_a_hierarchy_called_directly(comm, monkeypatch):
    """Calls on `cross` are not counted against ranks outside it."""
    monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", "2")
    with rx.Comm.world(timeout=10) as flat, flat.by_node() as nodes:
        assert rx.allreduce(nodes.local, 1) == nodes.local.size
        if nodes.cross is not None:
            for _ in range(3):
                assert rx.allreduce(nodes.cross, 1) == nodes.cross.size
        rx.barrier(nodes)


@pytest.mark.parametrize("what", ["dup()", "by_node()", "split(0)"])
def test_making_a_comm_waits_no_longer_than_a_call(launch, what):
    done = launch(
        f"""
import sys
import relaxmpi as rx
comm = rx.Comm.world(timeout=3)
rx.barrier(comm)
if comm.rank == 1:
    sys.exit(0)
try:
    comm.{what}
except rx.PeerLeft as error:
    print("LEFT", error, flush=True)
""",
        2,
    )
    assert "LEFT" in done.stdout
    assert done.seconds < 20


@MANY
def test_what_a_signal_handler_raises_reaches_the_waiter_and_the_call_goes_on(comm):
    class Ring(Exception):
        pass

    def ring(*_):
        raise Ring

    with comm.dup() as stream:
        before = signal.signal(signal.SIGALRM, ring)
        try:
            if comm.rank == 0:
                work = rx.allreduce.start(stream, np.ones(1000))
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                with pytest.raises(Ring):
                    work.wait()
                comm.mpi.barrier()
            else:
                comm.mpi.barrier()
                work = rx.allreduce.start(stream, np.ones(1000))
            assert (work.wait() == comm.size).all()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@MANY
def test_a_memory_is_free_again_after_a_call_that_never_ran(comm):
    memory = rx.ErrorFeedback(rx.Identity())
    rx.allreduce.flow(comm, np.ones(4), codec=memory)
    gc.collect()
    rx.allreduce(comm, np.ones(4), codec=memory)
    with pytest.raises(rx.MismatchError) as kept:
        rx.allreduce(comm, np.ones(4), codec=memory, name=str(comm.rank))
    rx.allreduce(comm, np.ones(4), codec=memory)
    assert kept.value.agreed


@pytest.mark.ranks(2, 4)
def test_a_memory_belongs_to_one_layout(comm):
    memory = rx.ErrorFeedback(rx.OneBit())
    rx.allreduce(comm, np.ones(100), codec=memory)
    with comm.by_node() as nodes, pytest.raises(ValueError, match="nodes"):
        rx.allreduce(nodes, np.ones(100), codec=memory)


@MANY
def test_subclasses_of_arrays(comm, tmp_path):
    class Odd(np.ndarray):
        def reshape(self, *_args, **_kwargs):
            raise AssertionError("a subclass's own methods are not called")

    mine = np.ones((2, 3)).view(Odd) if comm.rank else np.ones((2, 3))
    assert rx.allreduce(comm, mine) is mine
    assert (np.asarray(mine) == comm.size).all()
    with pytest.raises(TypeError, match="filled"):
        rx.allreduce(comm, np.ma.masked_array([1.0, 2.0], [True, False]))
    mapped = np.memmap(tmp_path / f"m{comm.rank}", "f8", "w+", shape=(5,))
    mapped[:] = 1
    assert (rx.allreduce(comm, mapped) == comm.size).all()


@MANY
def test_background_may_be_closed_twice(comm):
    first = comm.background()
    first.close()
    with comm.background():
        first.close()
        work = rx.allreduce.start(comm, np.ones(100_000))
        deadline = comm.now() + 10
        while not work._done and comm.now() < deadline:
            time.sleep(0.01)
        assert work._done


@MANY
def test_a_failed_call_that_nobody_waits_for_is_logged(comm, caplog):
    rx.allreduce.start(comm, np.ones(comm.rank + 1))
    rx.barrier(comm)
    gc.collect()
    assert "nobody waited" in caplog.text
    assert "disagree" in caplog.text


@MANY
def test_places_of_a_program_are_told_apart_by_a_mark(comm):
    comm.mark = f"epoch {comm.rank}"
    with pytest.raises(rx.MismatchError, match="epoch 1"):
        rx.allreduce(comm, np.ones(3))
    comm.mark = ""
    assert rx.allreduce(comm, 1) == comm.size


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: rx.allreduce(np.ones(3), c), "must be a Comm"),
        (lambda c: rx.allreduce(c, np.ones(3), codec="fp16"), "codec must be a Codec"),
        (lambda c: rx.allreduce(c, np.ones(3), codec=rx.OneBit), "codec must be a Codec"),
        (lambda c: rx.reduce_scatter(c, np.ones(3), codec="x"), "codec must be a Codec"),
        (lambda c: rx.allreduce(c, np.ones(3), step=1.5), "step must be an int"),
    ],
)
def test_errors_say_what_to_do(comm, call, words):
    with pytest.raises(TypeError, match=words):
        call(comm)
    assert rx.allreduce(comm, 1) == comm.size


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("codec", [None, rx.Quantizer(bits=4)], ids=str)
def test_rehearsed_calls_give_the_same_bytes(comm, codec):
    x = np.random.default_rng(comm.rank).standard_normal(100_001).astype("f4")
    agreed = rx.allreduce(comm, x, np.empty_like(x), codec=codec, step=1)
    with comm.dup() as stream:
        stream.rehearsed = True
        works = [rx.allreduce.start(stream, x.copy(), codec=codec, step=1) for _ in range(3)]
        for work in works:
            np.testing.assert_array_equal(work.wait(), agreed)


@MANY
def test_rehearsed_calls_that_differ_raise_on_all_ranks_and_break_the_comm(comm):
    stream = comm.dup()
    stream.rehearsed = True
    rx.allreduce(stream, np.ones(3), name="first")
    with pytest.raises(rx.MismatchError, match=r"name 'of 1'.*numbers are mixed"):
        rx.allreduce(stream, np.ones(3), name=f"of {min(comm.rank, 1)}")
    with pytest.raises(rx.BrokenComm):
        rx.allreduce(stream, np.ones(3))
    assert rx.allreduce(comm, 1) == comm.size


@MANY
def test_a_rehearsed_call_refused_on_one_rank_is_told_to_the_others(comm):
    stream = comm.dup()
    stream.rehearsed = True
    begin = comm.now()
    expected = TypeError if comm.rank == 0 else rx.PeerTimeout
    with pytest.raises(expected, match="dtype" if comm.rank == 0 else "rank 0 gave up"):
        rx.allreduce(stream, np.ones(300_000, "S1" if comm.rank == 0 else "f4"))
    assert comm.now() - begin < 10
    assert rx.allreduce(comm, 1) == comm.size


@MANY
def test_streams_together_move_each_other(comm):
    with comm.dup() as first, first.dup(together=True) as second:
        a = rx.allreduce.start(first, np.ones(200_000), codec=rx.Quantizer(bits=8))
        b = rx.allreduce.start(second, np.ones(200_000), codec=rx.Quantizer(bits=8))
        b.wait()
        deadline = comm.now() + 10
        while not a._done and comm.now() < deadline:
            second.progress()
        assert a._done
        rx.barrier(comm)
        assert (a.wait() == b.wait()).all()


@MANY
def test_a_stream_inside_the_flow_of_one_beside_it_is_refused(comm):
    @rx.primitive
    def nested(stream, other, call):
        def flow():
            yield from rx.barrier.flow(stream)
            call(other)

        return flow()

    for call in (rx.barrier, rx.barrier.start, lambda c: next(rx.barrier.flow(c))):
        first = comm.dup()
        second = first.dup(together=True)
        with pytest.raises(rx.RelaxError, match="inside a primitive"):
            nested(first, second, call)
        assert rx.allreduce(comm, 1) == comm.size


@pytest.mark.ranks(1, 2)
def test_closed_streams_leave_the_others_alone(comm):
    with comm.dup() as first:
        second = first.dup(together=True)
        first.dup(together=True).close()
        work = rx.allreduce.start(second, np.ones(5))
        first.progress()
        assert (work.wait() == comm.size).all()
        second.close()
        assert rx.allreduce(first, 1) == comm.size
