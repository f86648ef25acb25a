"""Calls that a Comm has learned: compiled turns without the checks, and all the same errors."""

import re
import signal
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
from sharing import needs_sharing

import relaxmpi as rx
from relaxmpi.primitives.shared_schedule import _WARM_UP
from relaxmpi.primitives.wire import chunks

MANY = pytest.mark.ranks(2, 3, 4)


@pytest.fixture
def warm(comm):
    """A Comm whose calls are compiled."""
    needs_sharing()
    for _ in range(_WARM_UP):
        rx.allreduce(comm, 1)
    assert comm.schedule._turns is not None
    return comm


def learned(comm):
    return comm.schedule._learned


@MANY
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8"])
def test_bytes_are_those_of_messages(warm, dtype):
    """The first call of a kind is checked, the second is known."""
    by_messages = rx.Comm(warm._world, replace(warm.settings, shared_memory=0))
    draw = np.random.default_rng(warm.rank)
    for count in (1, 7, 1001, 70_001, 700_001):
        for op in (rx.SUM, rx.MEAN) if dtype[0] == "f" else (rx.SUM,):
            x = draw.integers(-50, 50, count).astype(dtype)
            right = rx.allreduce(by_messages, x.copy(), op=op)
            for _ in range(2):
                y, out = x.copy(), np.empty_like(x)
                assert rx.allreduce(warm, y, op=op) is y
                assert rx.allreduce(warm, x, out, op=op) is out
                assert y.tobytes() == out.tobytes() == right.tobytes()
    assert ((1001,), np.dtype(dtype), False, "") in learned(warm)


@MANY
def test_sums_are_rounded_in_the_order_of_ranks(warm):
    """Not only whole numbers: one turn and two, against numpy."""
    for count in (1001, 300_001):
        parts = [np.random.default_rng(r).standard_normal(count, "f4") for r in range(warm.size)]
        right = parts[0].copy()
        for part in parts[1:]:
            right += part
        for op in (rx.SUM, rx.MEAN, rx.SUM, rx.MEAN):
            x = parts[warm.rank].copy()
            expected = right / np.float32(warm.size) if op is rx.MEAN else right
            assert rx.allreduce(warm, x, op=op).tobytes() == expected.tobytes()


@MANY
def test_a_sum_is_put_again_where_another_turn_came_between(warm):
    """As where a primitive goes on with its parts by turns."""
    turns, n = warm.schedule._turns, warm.size
    x, y = np.arange(50.0) + warm.rank, np.ones(7)
    bounds = chunks(len(x), n)
    for between in (False, True):
        out = np.empty_like(x)
        scatter = turns.scatter(x, out, bounds, len(x), False)
        while not scatter.test():
            pass
        if between:
            turn = turns.at_once(y, y, True)
            while not turn.test():
                pass
        gather = turns.gather(out, bounds, scatter)
        while not gather.test():
            pass
        assert (out == np.arange(50) * n + sum(range(n))).all()
    assert (y == 1).all()


@MANY
def test_arrays_of_any_shape_and_names(warm):
    for turn in range(3):
        x = np.full((3, 4, 5), warm.rank + turn, "f4")
        right = sum(range(warm.size)) + warm.size * turn
        assert rx.allreduce(warm, x) is x
        assert (x == right).all()
        assert x.shape == (3, 4, 5)
        y = np.full(60, 1.0, "f4")
        assert (rx.allreduce(warm, y, name="y") == warm.size).all()
    assert ((3, 4, 5), np.dtype("f4"), False, "") in learned(warm)
    assert ((60,), np.dtype("f4"), False, "y") in learned(warm)


@MANY
def test_what_was_learned_is_counted_like_what_was_not(warm):
    def moved(x):
        before = replace(warm.stats)
        rx.allreduce(warm, x)
        after = warm.stats
        return (
            after.payload_bytes - before.payload_bytes,
            after.messages - before.messages,
            after.header_bytes - before.header_bytes,
        )

    x = np.ones(1000, "f4")
    assert moved(x) == moved(x) == moved(np.ones((10, 100), "f4"))
    assert moved(x)[0] == 2 * (warm.size - 1) * x.nbytes // warm.size


@MANY
def test_what_was_not_moved_is_not_counted(warm):
    x = np.ones(700_001 + (warm.rank == 0), "f4")
    before = warm.stats.payload_bytes
    with pytest.raises(rx.MismatchError):
        rx.allreduce(warm, x)
    assert warm.stats.payload_bytes == before


@MANY
def test_ranks_that_differ_in_a_learned_call(warm):
    x = np.ones(8, "f4")
    for _ in range(2):
        rx.allreduce(warm, x.copy())
        rx.allreduce(warm, np.ones(9, "f4"))
        rx.allreduce(warm, x.copy(), name="b")
        rx.allreduce(warm, x.copy(), op=rx.MEAN)
    odd = warm.rank == warm.size - 1
    for mine, theirs in [
        (lambda: rx.allreduce(warm, x), lambda: rx.allreduce(warm, np.ones(9, "f4"))),
        (lambda: rx.allreduce(warm, x), lambda: rx.allreduce(warm, x, op=rx.MEAN)),
        (lambda: rx.allreduce(warm, x), lambda: rx.allreduce(warm, x, name="b")),
        (lambda: rx.allreduce(warm, x), lambda: rx.allreduce(warm, x, op=rx.MAX)),
        (lambda: rx.allreduce(warm, x), lambda: rx.barrier(warm)),
        (lambda: rx.allreduce(warm, x), lambda: rx.allreduce.start(warm, np.ones(9)).wait()),
    ]:
        for _ in range(2):
            with pytest.raises(rx.MismatchError, match="nothing was moved"):
                (mine if odd else theirs)()
            assert (x == 1).all()
            assert (rx.allreduce(warm, x.copy()) == warm.size).all()


@MANY
def test_what_may_not_be_reduced_is_refused_after_it_was_learned(warm):
    x = np.ones((4, 4), "f4")
    for _ in range(2):
        rx.allreduce(warm, x.copy())
    frozen = x.copy()
    frozen.flags.writeable = False
    both = np.ones((5, 4), "f4")
    for error, call in [
        (ValueError, lambda: rx.allreduce(warm, np.asfortranarray(np.ones((4, 4), "f4")))),
        (ValueError, lambda: rx.allreduce(warm, frozen)),
        (ValueError, lambda: rx.allreduce(warm, both[:4], both[1:])),
        (TypeError, lambda: rx.allreduce(warm, x, np.empty((4, 4)))),
        (ValueError, lambda: rx.allreduce(warm, x, np.empty((2, 8), "f4"))),
        (TypeError, lambda: rx.allreduce(warm, x, name=["a"])),
        (TypeError, lambda: rx.allreduce(warm, x, op="sum")),
        (TypeError, lambda: rx.allreduce(warm, x, op=["sum"])),
        (TypeError, lambda: rx.allreduce(warm, np.ma.masked_array(x, x > 5))),
        (TypeError, lambda: rx.allreduce(warm, x.astype(">f4"))),
    ]:
        with pytest.raises(error):
            call()
        assert (x == 1).all()
    assert (rx.allreduce(warm, frozen, np.empty_like(x)) == warm.size).all()
    assert (rx.allreduce(warm, np.asfortranarray(x), np.empty_like(x)) == warm.size).all()


@MANY
def test_marks_are_told_with_learned_calls(warm):
    x = np.ones(5, "f4")
    for _ in range(2):
        rx.allreduce(warm, x.copy())
    warm.mark = f"epoch {warm.rank == 0}"
    for _ in range(2):
        with pytest.raises(rx.MismatchError, match="epoch True"):
            rx.allreduce(warm, x)
    warm.mark = ""
    assert (rx.allreduce(warm, x) == warm.size).all()


@MANY
def test_started_and_blocking_calls_in_turns(warm):
    """Some ranks wait for each call, others start all of them."""
    for lap in range(3):
        xs = [np.full(50, k + warm.rank, "f4") for k in range(20)]
        if (warm.rank + lap) % 2:
            for x in xs:
                rx.allreduce(warm, x)
        else:
            works = [rx.allreduce.start(warm, x) for x in xs]
            for work in works:
                work.wait()
        for k, x in enumerate(xs):
            assert (x == k * warm.size + sum(range(warm.size))).all()


@MANY
@pytest.mark.parametrize("count", [50, 300_001])
def test_a_learned_call_keeps_no_arrays(warm, count):
    for _ in range(3):
        x, out = np.ones(count, "f4"), np.empty(count, "f4")
        rx.allreduce(warm, x, out)
        held = weakref.ref(x), weakref.ref(out)
        del x, out
        assert [ref() for ref in held] == [None, None]


@MANY
def test_a_learned_call_is_seen_in_a_trace(warm):
    x = np.ones(5, "f4")
    for _ in range(2):
        rx.allreduce(warm, x)
    with warm.trace() as trace:
        rx.allreduce(warm, x)
    (call,) = trace.recording.calls
    assert (call.title, call.sent) == ("allreduce", 2 * (warm.size - 1) * x.nbytes // warm.size)


@pytest.mark.ranks(2)
def test_a_signal_in_a_learned_call_leaves_it_pending(warm):
    class Alarm(Exception):
        pass

    def ring(number, frame):
        raise Alarm

    for _ in range(2):
        rx.allreduce(warm, np.ones(5))
    x = np.full(5, 1.0 + warm.rank)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        if warm.rank:
            time.sleep(0.3)
            rx.allreduce(warm, x)
        else:
            signal.setitimer(signal.ITIMER_REAL, 1e-3)  # inside the look-out
            with pytest.raises(Alarm):
                rx.allreduce(warm, x)
                time.sleep(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    while not warm.queue.idle:
        warm.progress()
    assert (x == 3).all()
    assert (rx.allreduce(warm, np.ones(5)) == 2).all()


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a destructor
@pytest.mark.parametrize("count", [50, 300_001])
@pytest.mark.parametrize("calls", ["cold", "warm"])
def test_alarms_at_any_moment_leave_a_call_right_or_the_comm_broken(comm, calls, count):
    """Rank 1 is interrupted hundreds of times; what is pending is finished, and nothing is lost."""

    class Alarm(BaseException):
        pass

    def ring(number, frame):
        raise Alarm

    needs_sharing()
    draw, hit = np.random.default_rng(3), 0
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(12):
            other = rx.Comm.wrap(comm.mpi, timeout=5)
            other.schedule._cold = 1 if calls == "warm" else 0
            for k in range(60):
                x = np.full(count, 1.0 + k + comm.rank)
                posted = other._started._count
                alarms = [*draw.uniform(1e-5, 5e-4, 5), 0]  # the last one never rings
                try:
                    while comm.rank == 1:
                        try:
                            try:
                                signal.setitimer(signal.ITIMER_REAL, alarms.pop(0))
                                rx.allreduce(other, x)
                            finally:
                                signal.setitimer(signal.ITIMER_REAL, 0)
                        except Alarm:
                            hit += 1
                            while other.queue.broken is None and not other.queue.idle:
                                other.progress()
                            if other.queue.broken is None and other._started._count == posted:
                                continue  # it rang before the call
                        break
                    else:
                        rx.allreduce(other, x)
                except rx.RelaxError:
                    break
                if other.queue.broken is not None:
                    break
                assert (x == 2 * k + 3).all()
            comm.mpi.Barrier()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert comm.rank == 0 or hit


@pytest.mark.ranks(2)
def test_a_vote_may_be_heard_twice(warm):
    """As after a signal between the hearing and the note that it was heard."""
    board = warm.shared.boards[0]
    for _ in range(3):
        board.heard(board._read)
    for _ in range(600):
        assert (rx.allreduce(warm, np.ones(5)) == 2).all()
    assert not board._early


@MANY
def test_names_of_another_type_are_not_learned(warm):
    class Name(str):
        def __repr__(self):
            return "another"

    rx.allreduce(warm, np.ones(5), name=Name("a"))
    unaligned = np.empty(41, "u1")[1:].view("f8")
    unaligned[:] = 1
    x = unaligned if warm.rank else np.ones(5)
    assert (rx.allreduce(warm, x, name="a") == warm.size).all()


@MANY
def test_parts_that_move_numbers_run_one_after_the_other(comm):
    """By turns they would meet each other's scratch, or a slot that nobody has read."""

    @rx.primitive
    def woven(comm, xs):
        def flow():
            parts = [rx.allreduce.flow(comm, x) for x in xs]
            while parts:
                for part in list(parts):
                    try:
                        request = next(part)
                    except StopIteration:
                        parts.remove(part)
                    else:
                        yield request

        return flow()

    with comm.dup() as other, pytest.raises(rx.RelaxError, match="one after the other"):
        woven(other, [np.ones(700_001, "f4"), np.ones(5, "f4"), np.ones(5, "f4")])
    assert rx.allreduce(comm, 1) == comm.size


def test_a_rank_that_ends_is_named_in_a_learned_call(launch):
    needs_sharing()
    done = launch(
        """
import sys, time
import numpy as np
import relaxmpi as rx

comm = rx.Comm.world(timeout=20)
x = np.ones(10, "f4")
for _ in range(150):
    rx.allreduce(comm, x, op=rx.MEAN)
assert ((10,), np.dtype("f4"), True, "") in comm.schedule._learned
if comm.rank == 1:
    sys.exit(0)
try:
    for _ in range(2):
        rx.allreduce(comm, x)
except rx.PeerLeft as error:
    print("LEFT", error, flush=True)
""",
        2,
    )
    assert re.search(r"LEFT .*rank 1", done.stdout)
    assert done.seconds < 15


def test_where_numba_does_not_compile_python_goes_on(launch, monkeypatch):
    needs_sharing()
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    done = launch(
        """
import numpy as np
import relaxmpi as rx

with rx.Comm.world() as comm:
    for _ in range(150):
        assert (rx.allreduce(comm, np.ones(10)) == 2).all()
    assert comm.shared is not None
    print("FINE", flush=True)
""",
        2,
    )
    assert done.stdout.count("FINE") == 2
