"""Inside a rank: run the wanted items in step with the other ranks and stream the reports."""

import faulthandler
import json
import os
import signal
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from mpi_worlds.reports import Phases, merge
from mpi_worlds.stacks import REQUIRE, STACKS, stacks
from mpi_worlds.world import FOLDER, TAKEN, announce, plan


class Inner:
    """What the plugins of inner pytests share."""

    index = 0

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.folder = Path(os.environ.pop(FOLDER))
        name, self.n, self.names = plan(self.folder)
        self.here = name, self.n
        # SIGUSR1 gives every thread's stack, also from inside an MPI call.
        self.stack = (self.folder / f"stack-{os.getpid()}").open("w")
        faulthandler.register(signal.SIGUSR1, self.stack, all_threads=True)
        self.absent: dict[str, pytest.CollectReport] = {}
        self.begin()
        self.file = (self.folder / f"reports-{self.index}").open("a")
        announce(self.folder, self.index)

    def begin(self) -> None:
        """Test modules may import mpi4py.MPI: that must not start MPI."""
        import mpi4py

        mpi4py.rc.initialize = False

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.absent[report.nodeid] = report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in self.names if name in found]
        for name in self.names:
            if name not in found:
                self.missing(name)
        (self.folder / f"ready-{self.index}").touch()

    def missing(self, nodeid: str) -> None:
        """Report an item whose module was skipped or cannot be imported in this world."""
        path = nodeid.partition("::")[0]
        why = self.absent.get(path)
        outcome = "skipped" if why and why.skipped else "failed"
        text = why.longrepr if why else f"{nodeid} was not collected in the ranks"
        for when in ("call", "teardown"):
            state, shown = (outcome, text) if when == "call" else ("passed", None)
            self.pytest_runtest_logreport(
                pytest.TestReport(nodeid, (path, 0, nodeid), {}, state, shown, when)  # type: ignore[arg-type]
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.file.write(json.dumps(data, default=repr) + "\n")
        self.file.flush()


class Beside(Inner):
    """Plugin of the inner pytest of items without ranks; several may share them out."""

    def begin(self) -> None:
        super().begin()
        self.taken = Path(os.environ.pop(TAKEN))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        mine = filter(self.take, session.items)
        item = next(mine, None)
        while item is not None:
            following = next(mine, None)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        return True

    def take(self, item: pytest.Item) -> bool:
        """Whether no other process has taken the item before."""
        try:
            (self.taken / sha256(item.nodeid.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Rank(Inner):
    """Plugin of the inner pytest of a rank."""

    def begin(self) -> None:
        """Start MPI and compare its size."""
        stacks()  # kept from now on: the variables go, so that no test depends on them
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Dup()
        if self.comm.size != self.n:
            raise RuntimeError(
                f"launched {self.n} ranks, but {MPI.Get_library_version()!r} sees "
                f"{self.comm.size}: mpiexec and the MPI library of mpi4py belong to different "
                "implementations"
            )
        self.index = self.comm.rank
        prepare()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        # In step: a rank that ends the world in this item must not spoil the item before,
        # which another rank might still be in.
        self.gate()
        return (yield)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in (0, 1, 5):
            self.gate()
            # Failures are in the reports; a launcher would kill the other ranks for a status.
            session.exitstatus = 0

    def gate(self) -> None:
        """A barrier that leaves the core to the ranks that are still busy."""
        request = self.comm.Ibarrier()
        pause = 0.0
        while not request.Test():
            time.sleep(pause)
            pause = min(1e-3, pause + 5e-5)


class Direct:
    """``mpiexec -n 4 python -m pytest``: all ranks are here, and rank 0 does the talking."""

    def __init__(self, config: pytest.Config) -> None:
        from mpi4py import MPI

        self.config = config
        self.comm = MPI.COMM_WORLD.Dup()
        prepare()

    @property
    def n(self) -> int:
        return int(self.comm.size)

    @property
    def quiet(self) -> bool:
        return bool(self.comm.rank)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        from mpi_worlds.outer import place

        mine = [item for item in items if (p := place(item)) and p.n == self.n]
        rest = [item for item in items if item not in mine]
        self.config.hook.pytest_deselected(items=rest)
        items[:] = mine

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        from _pytest.runner import runtestprotocol

        hook = self.config.hook
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        start = time.perf_counter()
        mine = [
            hook.pytest_report_to_serializable(config=self.config, report=report)
            for report in runtestprotocol(item, nextitem=nextitem, log=False)
        ]
        seconds = time.perf_counter() - start
        ranks: list[Phases] = []
        for theirs in self.comm.allgather(mine):
            reports = (
                hook.pytest_report_from_serializable(config=self.config, data=data)
                for data in theirs
            )
            ranks.append({report.when: report for report in reports})
        for report in merge(item, ranks, None, seconds):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def prepare() -> None:
    """Make this process a well-behaved rank before any test module is imported."""
    for name in (STACKS, REQUIRE):
        os.environ.pop(name, None)
    try:
        from hypothesis import HealthCheck, Phase, settings
    except ModuleNotFoundError:
        return
    # Ranks must draw the same examples and do the same number of them: no clocks, no database,
    # and no shrinking, which only the ranks that saw the failure would do.
    settings.register_profile(
        "ranks",
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("ranks")
