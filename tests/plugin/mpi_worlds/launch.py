"""Jobs of their own, for tests of exits, signals and settings that a shared world cannot stand."""

import signal
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpi_worlds.job import Job, send
from mpi_worlds.stacks import Stack, required


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


class Launch:
    """``launch(script, n, *args)``: run a script on n ranks and clean up whatever happens."""

    def __init__(self, folder: Path, stacks: list[Stack]) -> None:
        self.folder = folder
        self.stacks = {stack.name: stack for stack in stacks}
        self.count = 0

    def __call__(
        self,
        script: str | Path,
        n: int,
        *args: str,
        env: dict[str, str] | None = None,
        timeout: float = 30,
        mpi: str | None = None,
        flags: tuple[str, ...] = (),
    ) -> Result:
        """Run `script` (source text, or a Path) on `n` ranks.

        Args:
            script: source text, dedented, or the path of a file.
            n: number of ranks.
            args: the script's arguments.
            env: added to the environment.
            timeout: seconds; then every rank's stack goes into the TimeoutError.
            mpi: name of the MPI stack; the first one by default.
            flags: options of the interpreter, such as ``("-m", "mpi4py")``.

        Raises:
            TimeoutError: the job did not end by itself; nothing of it is left.
        """
        stack = self.stacks[mpi] if mpi else next(iter(self.stacks.values()))
        if stack.mpiexec is None:
            (pytest.fail if required() else pytest.skip)("no mpiexec")
        self.count += 1
        folder = self.folder / f"job{self.count}"
        folder.mkdir()
        if isinstance(script, str):
            path = folder / "script.py"
            path.write_text(textwrap.dedent(script))
        else:
            path = script.resolve()
        begin = time.monotonic()
        job = Job(
            stack,
            n,
            [*flags, str(path), *args],
            folder=folder,
            cwd=folder,
            env={"PYTHONFAULTHANDLER": "1"} | (env or {}),
        )
        try:
            job.wait(min(1.0, timeout))
            job.note_segments()
            if not job.wait(begin + timeout - time.monotonic()):
                _dump(job)
                raise TimeoutError(f"{n} ranks did not end in {timeout:g} s\n{job.log()}")
        finally:
            job.kill()
        return Result(
            job.process.returncode,
            job.stdout.read_text(errors="replace"),
            job.stderr.read_text(errors="replace"),
            time.monotonic() - begin,
        )


def _dump(job: Job) -> None:
    """Have every rank print its stack: faulthandler does so on SIGABRT."""
    for pid in job.members():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if pid != job.process.pid and b"python" in Path(command[0].decode()).name.encode():
            send(pid, signal.SIGABRT)
    time.sleep(0.5)
