"""`comm.trace()`: record what the ranks do, and write it as a timeline."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from relaxmpi.primitives.recorder import Message, Recorder, Recording
from relaxmpi.primitives.timeline import write_timeline
from relaxmpi.primitives.world import World

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Trace"]


class Trace:
    """What the ranks do in a block, as a timeline; made by `Comm.trace`.

    It sees all Comms of this rank: calls from start to end, where the caller was blocked,
    `compute`, and, in a simulated world, messages: each one, or, where a collective of many ranks
    is one event, the last for each rank. Open the file in https://ui.perfetto.dev or
    chrome://tracing.

    With a path the end of the block is collective, and rank 0 writes the file, at once when all is
    there. Each host has a clock of its own: how much it differs from that of rank 0's is measured
    at the end, by messages to and fro, the fastest of which counts. The error is below half their
    time; that clocks drift meanwhile is not corrected. A rank that leaves the block by an exception
    writes what it knows to `NAME.rankR.SUFFIX`.

    Attributes:
        recording: What this rank did, once the block has ended.

    Raises:
        FileNotFoundError: On rank 0, before anything is recorded: there is no such folder.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> with rx.Comm.world() as comm:
        ...     with comm.trace() as trace:     # or comm.trace("run.json")
        ...         rx.allreduce(comm, np.ones(2), name="loss")
        array([1., 1.])
        >>> [call.title for call in trace.recording.calls]
        ["allreduce 'loss'"]
    """

    recording: Recording

    def __init__(
        self, world: World, meet: Callable[[], None], path: str | os.PathLike[str] | None
    ) -> None:
        self._world, self._meet = world, meet
        self._path = None if path is None else Path(path)
        if self._path is not None and world.rank == 0 and not self._path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {self._path.parent} for the timeline")
        self._owned = False

    def __enter__(self) -> Self:
        recorder = self._world.recorder
        self._owned = recorder is None
        if recorder is None:
            recorder = Recorder(self._world.rank, self._world.now)
        recorder.keeps_messages = True
        self._world.record(recorder)
        self._recorder, self._lengths = recorder, recorder.lengths()
        self._begin = self._world.now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.recording = self._recorder.since(self._lengths, self._begin)
        path = self._path
        if path is not None and kind is None:
            self._meet()
            # What this rank has sent may have been under way when it came to the end.
            self.recording = self.recording._replace(messages=self._messages())
        if self._owned:
            self._world.record(None)
        if path is None:
            return
        if kind is None:
            found = self._world.gather((self.recording, self._world.clock_offset()))
            if found is not None:
                write_timeline(path, dict(enumerate(found)))
        elif issubclass(kind, Exception):
            # The others may never come: what this rank knows goes into a file of its own.
            own = path.with_suffix(f".rank{self._world.rank}{path.suffix}")
            write_timeline(own, {self._world.rank: (self.recording, 0.0)})

    def _messages(self) -> list[Message]:
        later = self._recorder.since(self._lengths, self._begin).messages
        return [message for message in later if message.sent <= self.recording.end]
