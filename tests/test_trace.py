"""comm.trace(): what it sees, and that others can read it."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

import relaxmpi as rx

NET = rx.Network(latency=1e-3, bandwidth=1e6, send_cost=0.0, receive_cost=0.0, agree_cost=0.0)


def events(path):
    """The events of a timeline, checked against the Trace Event Format and its own promises."""
    timeline = json.loads(Path(path).read_text())
    assert timeline["displayTimeUnit"] in ("ms", "ns")
    slices, arrows = {}, {"s": {}, "f": {}}
    for event in timeline["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name",
                "process_sort_index",
                "thread_name",
                "thread_sort_index",
            )
            assert set(event["args"]) <= {"name", "sort_index"}
        else:
            assert event["ts"] >= 0 and event["cat"]
            if event["ph"] == "X":
                assert event["dur"] >= 0
                slices.setdefault((event["pid"], event["tid"]), []).append(event)
            else:
                assert event["ph"] in arrows and event.get("bp", "s") in ("s", "e")
                assert event["id"] not in arrows[event["ph"]]
                arrows[event["ph"]][event["id"]] = event
    for track in slices.values():
        begin, open_ = 0.0, []
        for piece in track:
            assert piece["ts"] >= begin, "in the order of time"
            begin = piece["ts"]
            end = begin + piece["dur"]
            while open_ and open_[-1] <= begin + 1e-6:
                open_.pop()
            assert not open_ or end <= open_[-1] + 1e-6, "nested, or one after the other"
            open_.append(end)
    assert arrows["s"].keys() == arrows["f"].keys()
    for number, start in arrows["s"].items():
        end = arrows["f"][number]
        assert start["ts"] <= end["ts"]
        for tip in (start, end):
            around = slices[tip["pid"], tip["tid"]]
            assert any(s["ts"] <= tip["ts"] <= s["ts"] + s["dur"] for s in around)
    return timeline["traceEvents"]


def tracks(found):
    """Which slices lie on which named track of which rank."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    table = {}
    for event in found:
        if event["ph"] == "X":
            key = event["pid"], names[event["pid"], event["tid"]]
            table.setdefault(key, []).append(event)
    return table


def test_times_by_hand(tmp_path):
    """Two ranks, 1 ms, 1 MB/s: an agreement, then 2000 bytes to and fro, twice."""

    def program():
        with rx.Comm.world() as comm, comm.trace(tmp_path / "run.json") as trace:
            comm.compute(1e-3 * (1 + comm.rank))
            rx.allreduce(comm, np.ones(1000, "f4"), name="loss")
        return trace.recording

    recordings = rx.SimulatedWorld(2, network=NET).run(program)
    # Rank 1 comes at 2 ms; rank 0 knows of it 1 ms later, and rank 1 of that another ms later. Each
    # sends its half then, which takes 3 ms, and the sum of the other half when that has come.
    sents, ends = [(3e-3, 7e-3), (4e-3, 6e-3)], [9e-3, 10e-3]
    for rank, recording in enumerate(recordings):
        end = ends[rank]
        (call,), (compute,), (wait,) = recording.calls, recording.computes, recording.waits
        assert recording.rank == rank
        assert (compute.begin, compute.end) == (0.0, 1e-3 * (1 + rank))
        assert (call.title, call.sent, call.error) == ("allreduce 'loss'", 4000, "")
        assert (call.begin, wait.begin) == (compute.end, compute.end)
        assert call.end == pytest.approx(end) == wait.end
        assert [m.size for m in recording.messages] == [2000, 2000]
        for sent, message in zip(sents[rank], recording.messages, strict=True):
            assert (message.source, message.dest) == (rank, 1 - rank)
            assert message.sent == pytest.approx(sent) == message.left
            assert message.arrived == pytest.approx(sent + 1e-3 + 2e-3)
    # Rank 0 came at 1 ms, and heard of rank 1's coming at 3; the rest it waited for data.
    seconds, late = recordings[0].waits[0].rests[1]
    assert (seconds, late) == pytest.approx((8e-3, 2e-3))
    table = tracks(events(tmp_path / "run.json"))
    (call,) = table[1, "calls"]
    assert (call["ts"], call["dur"]) == pytest.approx((2000, 1e6 * end - 2000))
    assert call["args"]["bytes"] == 4000
    assert [s["name"] for s in table[0, "link out"]] == ["to 1", "to 1"]
    assert [s["ts"] for s in table[0, "link in"]] == pytest.approx([5000, 7000])
    assert list(tmp_path.iterdir()) == [tmp_path / "run.json"], "no temporary file is left"


def test_started_calls_overlap_parts_nest_and_all_comms_are_seen(tmp_path):
    @rx.primitive
    def twice(comm, x):
        def flow():
            yield from rx.allreduce.flow(comm, x, name="first")
            yield from rx.allreduce.flow(comm, x, name="second")

        return flow()

    def program():
        with rx.Comm.world() as comm:
            other = comm.dup()
            with comm.trace(tmp_path / "run.json") as trace, comm.by_node() as nodes:
                works = [rx.allreduce.start(comm, np.ones(500 * k), name=f"{k}") for k in (1, 2)]
                twice(other, np.ones(10))
                for work in works:
                    work.wait()
                comm.mark = "epoch 1"
                rx.allreduce(nodes, np.ones(100, "f4"), codec=rx.Quantizer(bits=8), step=7)
                rx.barrier(comm)
            other.close()
        return trace.recording

    recording = rx.SimulatedWorld(4, network=NET, ranks_per_node=2).run(program)[0]
    titles = [(call.title, call.inner) for call in recording.calls]
    assert titles == [
        ("by_node", False),
        ("split", False),
        ("split", False),
        ("allreduce '1'", False),
        ("allreduce '2'", False),
        ("twice", False),
        ("allreduce 'first'", True),
        ("allreduce 'second'", True),
        ("allreduce", False),
        ("barrier", False),
    ]
    whole = recording.calls[8]
    assert whole.sent > 400, "full precision inside the node, 8 bit between them"
    assert "step 7" not in whole.what, "so that calls of all steps are the same"
    assert [call.mark for call in recording.calls[-2:]] == ["", "epoch 1"]
    table = tracks(events(tmp_path / "run.json"))
    names = {name: [s["name"] for s in found] for (rank, name), found in table.items() if not rank}
    assert names["calls"][:4] == ["by_node", "split", "split", "allreduce '1'"]
    assert names["calls 2"] == ["allreduce '2'"], "it overlaps another, so it has its own track"
    assert names["calls 3"] == ["twice", "allreduce 'first'", "allreduce 'second'"]


def test_off_again_and_nothing_but_the_block():
    def program():
        with rx.Comm.world() as comm:
            rx.barrier(comm)
            with comm.trace() as outer:
                rx.allreduce(comm, 1)
                with comm.trace() as inner:
                    rx.allreduce(comm, 2.0)
                rx.allreduce(comm, 3)
            rx.barrier(comm)
            assert comm._world.recorder is None
        return [len(t.recording.calls) for t in (outer, inner)]

    assert rx.SimulatedWorld(2).run(program) == [[3, 1]] * 2


def test_without_a_path_one_rank_alone_may_record():
    def program():
        with rx.Comm.world() as comm:
            if comm.rank == 0:
                with comm.trace() as trace:
                    comm.compute(1.0)
                assert len(trace.recording.computes) == 1
            rx.barrier(comm)

    rx.SimulatedWorld(2).run(program)


@pytest.mark.long
def test_tracing_changes_no_time_of_a_simulated_world():
    def program(traced):
        with rx.Comm.world() as comm:
            if traced:
                comm.trace().__enter__()
            for k in range(5):
                comm.compute(1e-3 * (comm.rank + k))
                rx.allreduce(comm, np.ones(3000), codec=rx.Cast("fp16"))
            return comm.now()

    for n in (3, 66):
        world = rx.SimulatedWorld(n, network=NET)
        assert world.run(program, True) == world.run(program, False)


def test_a_collective_of_many_ranks_shows_the_last_message_of_each(tmp_path):
    def program():
        with rx.Comm.world() as comm, comm.trace(tmp_path / "run.json") as trace:
            comm.compute(1e-2 * (comm.rank == 5))
            rx.allgather(comm, np.ones(10))
        return trace.recording

    recordings = rx.SimulatedWorld(70, network=NET).run(program)
    found = [message for recording in recordings for message in recording.messages]
    assert sorted(m.dest for m in found) == list(range(70))
    assert all(m.sent + 1e-3 + 80 / 1e6 <= m.arrived + 1e-12 for m in found)
    seconds, late = recordings[0].waits[0].rests[5]
    assert seconds >= late == pytest.approx(1e-2), "all wait for the late rank"
    arrows = [e for e in events(tmp_path / "run.json") if e["ph"] == "s"]
    assert len(arrows) == 70


def test_a_rank_that_fails_writes_what_it_knows(tmp_path):
    def program():
        with rx.Comm.world(timeout=1.0) as comm, comm.trace(tmp_path / "run.json"):
            rx.barrier(comm)
            rx.allreduce(comm, np.ones(100))

    world = rx.SimulatedWorld(2, network=NET, faults=[rx.faults.Drop(source=0, dest=1)])
    with pytest.raises(rx.PeerTimeout):
        world.run(program)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert "run.json" not in written
    assert set(written) <= {"run.rank0.json", "run.rank1.json"} and written
    calls = [e for e in events(tmp_path / written[0]) if e.get("cat") == "calls"]
    assert calls[0]["name"] == "barrier"
    assert calls[1]["args"]["unfinished"] is True


def test_calls_that_fail_are_marked():
    def program():
        with rx.Comm.world() as comm, comm.trace() as trace:
            with pytest.raises(rx.MismatchError):
                rx.allreduce(comm, np.ones(3 + comm.rank))
        return [call.error for call in trace.recording.calls]

    assert rx.SimulatedWorld(2).run(program) == [["MismatchError"]] * 2


def test_waits_that_time_out_are_seen():
    def program():
        with rx.Comm.world() as comm, comm.trace() as trace:
            comm.compute(float(comm.rank))
            work = rx.barrier.start(comm)
            if comm.rank == 0:
                with pytest.raises(TimeoutError):
                    work.wait(0.25)
            work.wait()
        assert comm.stats.waited == pytest.approx(
            sum(w.end - w.begin for w in trace.recording.waits)
        )
        return len(trace.recording.waits), comm.stats.waited

    (count, waited), _ = rx.SimulatedWorld(2, network=NET).run(program)
    assert count == 2
    assert waited == pytest.approx(1.0, rel=0.01)


def test_no_folder():
    def program():
        with rx.Comm.world() as comm:
            comm.trace("/nowhere/at/all.json")

    with pytest.raises(FileNotFoundError, match="/nowhere/at"):
        rx.SimulatedWorld(1).run(program)


@pytest.mark.ranks(1, 2)
def test_real_ranks(comm, tmp_path):
    path = Path(comm.mpi.bcast(str(tmp_path))) / "run.json"
    path.write_text("an older file")
    begin = time.perf_counter()
    with comm.trace(path) as trace:
        comm.compute(0.01)
        work = rx.allreduce.start(comm, np.ones(100_000, "f4"), name="g")
        work.wait()
        rx.barrier(comm)
    assert [call.title for call in trace.recording.calls] == ["allreduce 'g'", "barrier"]
    assert begin <= trace.recording.begin <= trace.recording.end <= time.perf_counter()
    assert trace.recording.messages == []
    rx.barrier(comm)
    table = tracks(events(path))
    for rank in range(comm.size):
        assert [s["name"] for s in table[rank, "calls"]] == ["allreduce 'g'", "barrier"]
        (compute,) = table[rank, "compute"]
        assert compute["dur"] >= 1e4
        assert compute["ts"] + compute["dur"] <= table[rank, "calls"][0]["ts"]
    # Nobody leaves a barrier before the last has come: so it looks in the file, too.
    barriers = [table[rank, "calls"][1] for rank in range(comm.size)]
    assert max(b["ts"] for b in barriers) <= min(b["ts"] + b["dur"] for b in barriers)
    assert comm._world.recorder is None


@pytest.mark.ranks(2)
def test_clocks_of_hosts_are_compared(comm, monkeypatch):
    world = comm._world
    monkeypatch.setattr(world, "nodes", (0, 1))
    ahead = 100.0 * comm.rank
    monkeypatch.setattr(world, "now", lambda: time.perf_counter() + ahead, raising=False)
    assert world.clock_offset() == pytest.approx(-ahead, abs=0.05)
