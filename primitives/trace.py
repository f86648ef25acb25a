"""`comm.trace()`: record what the ranks do, and write it as a timeline."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from relaxmpi.primitives.recorder import Recorder, Recording
from relaxmpi.primitives.timeline import write_timeline
from relaxmpi.primitives.world import World

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Trace"]


class Trace:
    """Made by `Comm.trace`; a context manager.

    Attributes:
        recording: What this rank did, once the block has ended.
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
        if self._owned:
            self._world.record(None)
        if self._path is None:
            return
        if kind is None:
            self._together(self._path)
        elif issubclass(kind, Exception):
            # The others may never come: what this rank knows goes into a file of its own.
            path = self._path.with_suffix(f".rank{self._world.rank}{self._path.suffix}")
            write_timeline(path, {self._world.rank: self.recording}, {self._world.rank: 0.0})

    def _together(self, path: Path) -> None:
        self._meet()
        offset = self._world.clock_offset()
        found = self._world.gather((offset, self.recording))
        if found is not None:
            recordings = {rank: recording for rank, (_, recording) in enumerate(found)}
            write_timeline(path, recordings, {rank: seconds for rank, (seconds, _) in enumerate(found)})
