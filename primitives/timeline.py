"""Recordings as a file that https://ui.perfetto.dev and chrome://tracing show.

The format is the Trace Event Format: a JSON object whose `traceEvents` have a phase `ph`, times in
microseconds, a process and a thread. Here a rank is a process, and its threads are tracks: what it
called, when it was blocked, what it computed, and when its messages kept the links busy. Events of
one track nest or follow each other; calls that overlap get tracks of their own. Arrows lead from
each message on its sender's link to the same message on its receiver's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relaxmpi.primitives.recorder import CallSpan, Recording

__all__ = ["events_of", "write_timeline"]

_TRACKS = ("calls", "waiting", "compute", "link out", "link in")
_Event = dict[str, Any]


class _Slice(NamedTuple):
    begin: float
    end: float
    name: str
    args: dict[str, Any]
    arrow: tuple[str, int] | None = None
    inner: bool = False


def write_timeline(path: Path, recordings: Mapping[int, tuple[Recording, float]]) -> None:
    """Write a file, or replace it at once when it is complete.

    Args:
        path: Where to.
        recordings: By rank; with the seconds to add to its times.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            for number, event in enumerate(events_of(recordings)):
                file.write(",\n" if number else "\n")
                file.write(json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def events_of(found: Mapping[int, tuple[Recording, float]]) -> Iterator[_Event]:
    """Yield the events, track by track in the order of time; see `write_timeline`."""
    start = min(recording.begin + offset for recording, offset in found.values())
    recordings = {rank: recording for rank, (recording, _) in found.items()}
    ranks = {recording.rank: rank for rank, recording in recordings.items()}
    messages = [
        (number, message)
        for number, message in enumerate(m for r in recordings.values() for m in r.messages)
        if message.source in ranks and message.dest in ranks
    ]
    links: dict[tuple[str, int], list[_Slice]] = {}
    for number, m in messages:
        source, dest = ranks[m.source], ranks[m.dest]
        told = {"bytes": m.size, "sent": round((m.sent - start) * 1e6, 3)}
        if m.arrived is None:
            lost = _Slice(m.left, m.left + m.up, f"to {dest}, lost", told)
            links.setdefault(("link out", source), []).append(lost)
            continue
        told["arrived"] = round((m.arrived - start) * 1e6, 3)
        out = _Slice(m.left, m.left + m.up, f"to {dest}", told, ("s", number))
        into = _Slice(m.arrived - m.down, m.arrived, f"from {source}", told, ("f", number))
        links.setdefault(("link out", source), []).append(out)
        links.setdefault(("link in", dest), []).append(into)
    for rank, recording in sorted(recordings.items()):
        yield _metadata("process_name", rank, 0, name=f"rank {rank}")
        yield _metadata("process_sort_index", rank, 0, sort_index=rank)
        tracks = {
            "calls": [_call(span, recording.end) for span in recording.calls],
            "waiting": [
                _Slice(w.begin, w.end, "wait", {"for": w.call, **_rests(w.rests)})
                for w in recording.waits
            ],
            "compute": [_Slice(c.begin, c.end, "compute", {}) for c in recording.computes],
            "link out": links.get(("link out", rank), []),
            "link in": links.get(("link in", rank), []),
        }
        thread = 0
        for track in _TRACKS:
            for number, lane in enumerate(_lanes(tracks[track])):
                thread += 1
                name = track if number == 0 else f"{track} {number + 1}"
                yield _metadata("thread_name", rank, thread, name=name)
                yield _metadata("thread_sort_index", rank, thread, sort_index=thread)
                for piece in lane:
                    yield from _complete(piece, track, rank, thread, found[rank][1] - start)


def _call(span: CallSpan, latest: float) -> _Slice:
    args: dict[str, Any] = {"what": " ".join(span.what), "bytes": span.sent}
    if span.mark:
        args["mark"] = span.mark
    if span.turn is not None:
        args["queued"] = round((span.turn - span.begin) * 1e6, 3)
    if span.end is None:
        args["unfinished"] = True
    if span.error:
        args["error"] = span.error
    end = latest if span.end is None else span.end
    return _Slice(span.begin, end, span.title, args, inner=span.inner)


def _rests(rests: dict[int, tuple[float, float]]) -> dict[str, Any]:
    return {
        f"for rank {peer}": {"us": round(seconds * 1e6, 3), "before it sent": round(late * 1e6, 3)}
        for peer, (seconds, late) in rests.items()
    }


def _lanes(slices: list[_Slice]) -> list[list[_Slice]]:
    """Part them into as few tracks as are needed for events that nest or follow each other.

    A part of another primitive's call goes into the shortest one that encloses it.
    """
    lanes: list[list[_Slice]] = []
    ends: list[list[float]] = []  # of what is open in each lane
    for piece in sorted(slices, key=lambda s: s.begin):  # what is inside came after its whole
        for open_ in ends:
            while open_ and open_[-1] <= piece.begin:
                open_.pop()
        around = [(e[-1], k) for k, e in enumerate(ends) if e and piece.end <= e[-1]]
        idle = [(0.0, k) for k, e in enumerate(ends) if not e]
        fitting = (around if piece.inner else []) or idle
        if not fitting:
            fitting = [(0.0, len(lanes))]
            lanes.append([])
            ends.append([])
        _, number = min(fitting)
        lanes[number].append(piece)
        ends[number].append(piece.end)
    return lanes


def _complete(piece: _Slice, track: str, rank: int, thread: int, shift: float) -> Iterator[_Event]:
    where = {"pid": rank, "tid": thread}
    # To the nanosecond, both ends alike, so that what nests or follows still does.
    begin, end = round((piece.begin + shift) * 1e6, 3), round((piece.end + shift) * 1e6, 3)
    yield {
        "name": piece.name, "cat": track, "ph": "X", "ts": begin,
        "dur": round(end - begin, 3), **where, "args": piece.args,
    }  # fmt: skip
    if piece.arrow is not None:
        phase, number = piece.arrow
        arrow = {"name": "message", "cat": "message", "ph": phase, "id": number, "ts": begin}
        yield arrow | where | ({"bp": "e"} if phase == "f" else {})


def _metadata(name: str, rank: int, thread: int, /, **args: Any) -> _Event:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": args}
