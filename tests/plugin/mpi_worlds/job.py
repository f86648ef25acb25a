"""One ``mpiexec``, from its start until none of its processes is left."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from mpi_worlds.stacks import Stack, environment

_MARK = "MPI_WORLDS_JOB"


class Job:
    """A running launcher; output goes to files, since a pipe would wait for orphans.

    With `n=0` there is none, and the command runs by itself. `modest` ranks, which spin while they
    wait, leave the cores to others who want them.
    """

    def __init__(
        self,
        stack: Stack,
        n: int,
        command: Sequence[str],
        *,
        folder: Path,
        cwd: Path,
        env: dict[str, str] | None = None,
        modest: bool = False,
    ) -> None:
        self._segments: set[Path] = set()
        mark = uuid.uuid4().hex
        self._needle = f"{_MARK}={mark}".encode()
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        launcher = [str(stack.mpiexec), "-n", str(n)] if n else []
        begin = (_modest if modest else _die_with_parent) if n else _killed_with_parent
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [*launcher, stack.python, *command],
                env=(environment() if n else os.environ) | (env or {}) | {_MARK: mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=begin,
            )

    def members(self) -> list[int]:
        """Every live process of the job, found by its environment.

        The launcher's process group does not hold the ranks, and a rank may leave its session;
        what is inherited by all of them is the environment.
        """
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._needle in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def note_segments(self) -> None:
        """Remember the shared memory in use: ranks that are killed leave it behind."""
        for pid in self.members():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    if "/dev/shm/" in line and not line.endswith("(deleted)"):
                        self._segments.add(Path(line[line.index("/dev/shm/") :]))

    def wait(self, timeout: float) -> bool:
        """Wait for the launcher to end; False: it did not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        return self.process.poll() is not None

    def kill(self, grace: float = 2.0) -> None:
        """End the launcher, then whatever it left behind (stopped ranks included)."""
        self.note_segments()
        if self.process.poll() is None:
            # SIGTERM first: only then does the launcher remove its files.
            self.process.terminate()
            self.wait(grace)
        deadline = time.monotonic() + 10
        while (left := self.members()) and time.monotonic() < deadline:
            for pid in left:
                send(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.wait(5)
        for path in self._segments:
            path.unlink(missing_ok=True)

    def log(self, limit: int = 4000) -> str:
        texts = (p.read_text(errors="replace").strip()[-limit:] for p in (self.stdout, self.stderr))
        return "\n".join(text for text in texts if text)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _modest() -> None:
    os.nice(10)
    _die_with_parent()


def _die_with_parent(number: int = signal.SIGTERM) -> None:
    # A pytest that is killed cannot clean up: let the kernel end its launchers.
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


def _killed_with_parent() -> None:
    _die_with_parent(signal.SIGKILL)  # tests may handle SIGTERM
