"""Items without ranks: processes that share them out, while worlds of ranks run and after."""

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpi_worlds.reports import merge
from mpi_worlds.stacks import Stack
from mpi_worlds.world import World


class Pool:
    """Processes that take one item after the other, each of them once."""

    def __init__(self, config: pytest.Config, chosen: list[Stack]) -> None:
        self._config, self._stacks = config, chosen
        self._taken = Path(tempfile.mkdtemp(prefix="taken-"))
        self._processes: list[World] = []

    def __len__(self) -> int:
        return len(self._processes)

    def add(self, items: Sequence[pytest.Item]) -> None:
        """Start another process; it takes the items in this order."""
        process = World(self._config, Stack("", sys.executable), 0, self._stacks)
        self._processes.append(process.start(items, taken=self._taken))

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Wait for what is to be said of an item."""
        pause = 1e-3
        while True:
            # Asked first: what they wrote until then is all there.
            ended = all(process.ended for process in self._processes)
            phases = {}
            for process in self._processes:
                process.poll()
                phases |= process.phases(item.nodeid)[0]
            if "teardown" in phases:
                return list(phases.values())
            if ended:
                codes = [process.job.process.returncode for process in self._processes]
                logs = "\n".join(process.job.log() for process in self._processes)
                why = (
                    f"the processes of the items without ranks ended (exit {codes}); one takes an "
                    f"item before it runs the one before, so this may never have begun\n{logs}"
                )
                return merge(item, [phases], ("process lost", why), 0)
            time.sleep(pause)
            pause = min(0.1, pause * 1.5)

    def close(self) -> None:
        for process in self._processes:
            process.close()
        shutil.rmtree(self._taken, ignore_errors=True)
