"""A world of ranks that run the inner pytest, seen from outside."""

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpi_worlds.job import Job, send
from mpi_worlds.stacks import REQUIRE, STACKS, Stack, describe, required

FOLDER, TAKEN = "MPI_WORLDS_FOLDER", "MPI_WORLDS_TAKEN"
# `-m pytest` would put the working directory on sys.path, where the plain command does not.
_PYTEST = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main())"
Phases = dict[str, pytest.TestReport]


class World:
    """One launcher with `n` ranks, working through `items`; n = 0: one process that is no rank.

    `modest` ranks leave the cores to those who run beside.
    """

    def __init__(
        self,
        config: pytest.Config,
        stack: Stack,
        n: int,
        chosen: list[Stack],
        *,
        modest: bool = False,
    ) -> None:
        self.n, self._processes, self._modest = n, max(n, 1), modest
        self._config = config
        self._stack, self._stacks = stack, chosen
        self._folder = Path(tempfile.mkdtemp(prefix="world-"))
        self._read = [0] * self._processes
        self._reports: list[dict[str, Phases]] = [{} for _ in range(self._processes)]

    def start(self, items: Sequence[pytest.Item], *, taken: Path | None = None) -> "World":
        """Start it; what is `taken` it shares with others of its kind."""
        (self._folder / "tmp").mkdir()
        (self._folder / "plan").write_text(
            json.dumps([self._stack.name, self.n, [item.nodeid for item in items]])
        )
        env = {
            FOLDER: str(self._folder),
            STACKS: describe(self._stacks),
            REQUIRE: str(int(required())),
            "TMPDIR": str(self._folder / "tmp"),
        }
        if taken is not None:
            env[TAKEN] = str(taken)
        files = list(dict.fromkeys(str(item.path) for item in items))
        self.job = Job(
            self._stack,
            self.n,
            ["-c", _PYTEST, *_options(self._config), *files],
            folder=self._folder,
            cwd=self._config.rootpath,
            env=env,
            modest=self._modest,
        )
        return self

    @property
    def up(self) -> bool:
        """Whether all ranks have collected: their imports must not count as a test's time."""
        return len(list(self._folder.glob("ready-*"))) == self._processes

    @property
    def ended(self) -> bool:
        return self.job.process.poll() is not None

    def poll(self) -> None:
        """Read what the ranks have reported since the last time."""
        for rank in range(self._processes):
            with contextlib.suppress(FileNotFoundError):
                with (self._folder / f"reports-{rank}").open("rb") as file:
                    file.seek(self._read[rank])
                    text = file.read()
                whole = text[: text.rfind(b"\n") + 1]
                self._read[rank] += len(whole)
                for line in whole.splitlines():
                    self._add(rank, json.loads(line))

    def phases(self, nodeid: str) -> list[Phases]:
        """Each rank's reports on one item so far."""
        return [reports.get(nodeid, {}) for reports in self._reports]

    def stacks(self) -> str:
        """Where every rank is now, without pytest's own frames."""
        pids = self._pids()
        for pid in pids.values():
            send(pid, signal.SIGUSR1)
        files = [self._folder / f"stack-{pid}" for pid in pids.values()]
        deadline, seen = time.monotonic() + 3, [-1]
        while time.monotonic() < deadline:
            sizes = [file.stat().st_size for file in files]
            if sizes == seen and all(sizes):
                break
            seen = sizes
            time.sleep(0.1)
        texts = []
        for rank, pid in sorted(pids.items()):
            lines = (self._folder / f"stack-{pid}").read_text().splitlines()
            own = [x for x in lines if "/_pytest/" not in x and "/pluggy/" not in x]
            texts.append(f"--- rank {rank} (pid {pid})\n" + "\n".join(own[:60]))
        return "\n".join(texts)

    def close(self) -> None:
        self.job.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _pids(self) -> dict[int, int]:
        return {
            int(path.name.removeprefix("pid-")): int(path.read_text() or 0)
            for path in self._folder.glob("pid-*")
        }

    def _add(self, rank: int, data: dict[str, object]) -> None:
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        if isinstance(report.longrepr, list):
            report.longrepr = tuple(report.longrepr)  # of a skip; JSON knows no tuples
        self._reports[rank].setdefault(report.nodeid, {})[report.when] = report


def _options(config: pytest.Config) -> list[str]:
    option = config.option
    chosen = [
        f"--rootdir={config.rootpath}",
        "--continue-on-collection-errors",
        "-pno:cacheprovider",
        "-q",
        f"--tb={option.tbstyle}",
    ]
    if config.inipath:
        chosen.append(f"-c{config.inipath}")
    if option.showlocals:
        chosen.append("--showlocals")
    chosen += [f"-W{warning}" for warning in option.pythonwarnings or ()]
    return chosen


def announce(folder: Path, rank: int) -> None:
    """Tell the outer process this rank's pid (atomically: it is polled)."""
    draft = folder / f".pid-{rank}"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / f"pid-{rank}")


def plan(folder: Path) -> tuple[str, int, list[str]]:
    """The world's MPI, its size and its items, as written by the outer process."""
    stack, n, items = json.loads((folder / "plan").read_text())
    return stack, n, items
