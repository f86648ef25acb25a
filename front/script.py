"""A script for mpirun, run once per rank of a simulated world, in threads of this process."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, TextIO

from relaxmpi.primitives.recorder import Recorder
from relaxmpi.primitives.simulation.simulated import SimulatedWorld
from relaxmpi.primitives.world import entered

__all__ = ["Failure", "Run", "run_script"]

_here = threading.local()  # rank: which one this thread is; main: its `__main__`


class Failure(NamedTuple):
    """The exception that ended a run."""

    rank: int | None  # None: nobody's in particular, such as a deadlock
    error: BaseException
    text: str


class Run(NamedTuple):
    """What became of a run.

    Attributes:
        recorders: By rank.
        clocks: Seconds of virtual time at which each rank ended; empty after a failure.
        status: The exit status that mpirun would give.
        hidden: Lines that ranks other than 0 have printed and nobody has seen.
        failure: What ended the run early.
    """

    recorders: list[Recorder]
    clocks: list[float]
    status: int
    hidden: int
    failure: Failure | None


class _Measured(Recorder):
    """Counts the processor time of the script's own code between two calls as computation.

    What comes before the first Comm does not count: one rank imports for all.
    """

    def __init__(self, world: Any, factor: float) -> None:
        super().__init__(world.rank, world.now)
        self._world, self._factor, self._since = world, factor, 0.0

    def enter(self) -> None:
        """Let the rank's clock advance by what it has computed."""
        if not self.stats:
            return
        seconds = (time.thread_time() - self._since) * self._factor
        begin = self.now()
        self._world.compute(seconds)
        self.computed(begin, self.now())
        self.leave()

    def leave(self) -> None:
        """Count from here."""
        self._since = time.thread_time()


class _Main(ModuleType):
    """`sys.modules["__main__"]`: to each rank its own, for pickle and the like."""

    def __getattr__(self, name: str) -> Any:
        main = getattr(_here, "main", None)
        if main is None:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        return getattr(main, name)


class _Output(io.TextIOBase):
    """Standard output or error: rank 0's as it is; the others' with their rank, or not at all."""

    def __init__(self, real: TextIO, everybody: bool) -> None:
        self._real, self._everybody = real, everybody
        self._begun: dict[int, str] = {}
        self.hidden = 0

    def write(self, text: str) -> int:
        """Write."""
        rank = getattr(_here, "rank", None)
        if rank is None or (rank == 0 and not self._everybody):
            return self._real.write(text)
        if not self._everybody:
            self.hidden += text.count("\n")
            return len(text)
        *lines, self._begun[rank] = (self._begun.get(rank, "") + text).split("\n")
        for line in lines:
            self._real.write(f"[{rank}] {line}\n")
        return len(text)

    def flush(self) -> None:
        """Flush."""
        self._real.flush()

    def finish(self) -> None:
        """Write what lacks the end of its line."""
        for rank, text in sorted(self._begun.items()):
            if text:
                self._real.write(f"[{rank}] {text}\n")
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _NoMpi(MetaPathFinder):
    """Refuses mpi4py.MPI: it would say rank 0 of 1 to every simulated rank."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        """Refuse."""
        if name == "mpi4py.MPI":
            raise ImportError(
                "a simulated world has no MPI: the script, or a module of it, imports mpi4py.MPI. "
                "Ranks, sizes and messages come from relaxmpi's Comm here: comm.rank, comm.size, "
                "rx.allreduce and so on; guard the rest, or run it under mpirun"
            )


@contextlib.contextmanager
def _installed(path: Path, arguments: Sequence[str], everybody: bool) -> Iterator[list[_Output]]:
    """Make this process look like Python running the script."""
    held = sys.argv, sys.stdout, sys.stderr, sys.modules["__main__"], sys.path[:]
    no_mpi = _NoMpi()
    known = sys.modules.pop("mpi4py.MPI", None)
    outputs = [_Output(sys.stdout, everybody), _Output(sys.stderr, everybody)]
    sys.argv = [str(path), *arguments]
    sys.stdout, sys.stderr = outputs
    sys.modules["__main__"] = _Main("__main__")
    sys.path.insert(0, str(path.resolve().parent))
    sys.meta_path.insert(0, no_mpi)
    try:
        yield outputs
    finally:
        for output in outputs:
            output.finish()
        sys.meta_path.remove(no_mpi)
        if known is not None:
            sys.modules["mpi4py.MPI"] = known
        sys.argv, sys.stdout, sys.stderr, sys.modules["__main__"], sys.path[:] = held


def run_script(
    path: Path,
    arguments: Sequence[str],
    world: SimulatedWorld,
    *,
    everybody: bool = False,
    measured: float = 0.0,
    messages: bool = False,
) -> Run:
    """Run a script on every rank of a world, as its `__main__`.

    Each rank has module globals of its own. Modules that the script imports are imported once
    and shared, and so is what they hold, such as global random states.

    Args:
        path: The script.
        arguments: Its arguments.
        world: Where.
        everybody: Show what all ranks print, each line with its rank, instead of rank 0 only.
        measured: Count so many times the processor time of the script's code as computation.
        messages: Record messages.

    Raises:
        OSError: The script cannot be read.
        SyntaxError: It is no Python.
    """
    code = compile(path.read_bytes(), str(path), "exec")
    recorders: list[Recorder | None] = [None] * world.n
    statuses: dict[int, int] = {}
    failures: list[Failure] = []

    def body() -> None:
        place = entered()
        assert place is not None  # a rank of the simulated world
        rank = place.rank
        recorder = _Measured(place, measured) if measured else Recorder(rank, place.now)
        recorder.keeps_messages = messages
        recorders[rank] = recorder
        place.record(recorder)
        main = ModuleType("__main__")
        main.__dict__.update(__file__=str(path), __cached__=None, __spec__=None)
        _here.rank, _here.main = rank, main
        try:
            exec(code, main.__dict__)
            recorder.enter()
        except SystemExit as end:
            statuses[rank] = _status(end, rank)
        except Exception as error:
            if not failures:
                when = f"at {place.now():.6g} s of virtual time"
                trace = _own(error.__traceback__, str(path))
                lines = traceback.format_exception(type(error), error, trace)
                failures.append(Failure(rank, error, f"rank {rank}, {when}:\n{''.join(lines)}"))
            raise

    with _installed(path, arguments, everybody) as outputs:
        try:
            world.run(body)
        except KeyboardInterrupt:
            raise
        except Exception as error:
            if not failures or failures[0].error is not error:
                failures.insert(0, Failure(None, error, f"{type(error).__name__}: {error}\n"))
    status = next((code for _, code in sorted(statuses.items()) if code), 0)
    return Run(
        [recorder for recorder in recorders if recorder is not None],
        [] if failures else world.clocks,
        1 if failures else status,
        sum(output.hidden for output in outputs),
        failures[0] if failures else None,
    )


def _status(end: SystemExit, rank: int) -> int:
    """Return the exit status, as Python gives it, and say what is to be said."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(f"relaxmpi simulate: rank {rank} exits: {end.code}", file=sys.__stderr__)
    return 1


def _own(trace: TracebackType | None, path: str) -> TracebackType | None:
    """Return the traceback from the script's first frame on."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename != path:
        own = own.tb_next
    return own or trace
