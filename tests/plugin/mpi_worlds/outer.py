"""Outside: one outcome for each item, and a new world where one is lost."""

import time
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import mpi4py
import pytest
from _pytest.runner import runtestprotocol

from mpi_worlds.beside import Pool
from mpi_worlds.reports import Phases, merge, unanimous
from mpi_worlds.stacks import Stack, required, stacks
from mpi_worlds.world import World

START = 120.0  # seconds a world may take to come up
ATTEMPTS = 2  # worlds in a row that may fail to come up

Trouble = tuple[str, str]


class Place(NamedTuple):
    """Where an item runs."""

    stack: Stack
    n: int


def place(item: pytest.Item) -> Place | None:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return params.get("mpi_world")


def backwards(items: list[pytest.Item]) -> list[pytest.Item]:
    """The last file first, and the items of a file as they are."""
    files = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    return [item for file in reversed(files) for item in file]


def from_the_middle(items: list[pytest.Item]) -> list[pytest.Item]:
    """The file of the middle item and those behind it first."""
    paths = [item.path for item in items]
    middle = paths.index(paths[len(paths) // 2])
    return items[middle:] + items[:middle]


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Run an item marked ``ranks(*n, timeout=None, mpi=None)`` in a world of each kind."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if not mark:
        return
    only = mark.kwargs.get("mpi")
    worlds = [Place(s, n) for s in stacks() if only in (None, s.name) for n in mark.args]
    here = getattr(metafunc.config.pluginmanager.get_plugin("mpi-worlds"), "here", None)
    if here:  # a rank needs the items of its own world only
        worlds = [w for w in worlds if (w.stack.name, w.n) == here]
    if "mpi_world" not in metafunc.fixturenames:
        metafunc.fixturenames.append("mpi_world")
    metafunc.parametrize(
        "mpi_world", worlds, indirect=True, ids=[f"{w.stack.name}-n{w.n}" for w in worlds]
    )


class Outer:
    """Plugin of the pytest that the user started."""

    def __init__(self, config: pytest.Config) -> None:
        # Test modules may import mpi4py.MPI: in this process that must not start MPI, or the
        # launchers would take it for a rank.
        mpi4py.rc.initialize = False
        self.config = config
        self.stacks = stacks()
        self.world: World | None = None
        self.at: Place | None = None
        self.pool: Pool | None = None
        self.left: dict[Place, list[pytest.Item]] = {}
        self.stillborn: dict[Place, list[str]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.plain = [item for item in items if place(item) is None]
        least, option = int(self.config.getini("mpi_beside")), self.config.option
        beside = 0 < least <= min(len(self.plain), len(items) - len(self.plain))
        if option.usepdb or option.maxfail or option.capture == "no" or option.collectonly:
            beside = False
        self.beside = beside
        # Stable: worlds of one kind together; items without ranks first, or last where they run
        # beside.
        plain = len(self.stacks) if beside else -1
        items.sort(
            key=lambda i: (self.stacks.index(p.stack), p.n) if (p := place(i)) else (plain, 0)
        )
        for item in items:
            if p := place(item):
                self.left.setdefault(p, []).append(item)

    def pytest_runtestloop(self) -> None:
        """Where there are many, a process runs the items without ranks at the same time."""
        if self.beside:
            self.pool = Pool(self.config, self.stacks)
            self.pool.add(self.plain)

    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        where = place(item)
        if where is None and self.pool is None and (nextitem is None or place(nextitem) is None):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if self.pool and len(self.pool) == 1 and self.world:
            # Beside worlds, too, for many items of both kinds wait for something.
            self.pool.add(backwards(self.plain))
        if where is None and self.pool is not None:
            if len(self.pool) == 2:  # no more worlds: what they took is free for a third one
                self.pool.add(from_the_middle(self.plain))
            for report in self.pool.reports(item):
                item.ihook.pytest_runtest_logreport(report=report)
        elif where is None:
            # The next item is never set up in this process: tear down everything now.
            runtestprotocol(item, nextitem=None)
        else:
            for report in self.run(item, where):
                item.ihook.pytest_runtest_logreport(report=report)
            self.left[where].remove(item)
            if nextitem is None or place(nextitem) != where:
                self.leave()
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        self.close()
        if self.pool:
            self.pool.close()

    def run(self, item: pytest.Item, where: Place) -> list[pytest.TestReport]:
        if where.stack.mpiexec is None:
            return self.no_launcher(item)
        failures = self.stillborn.setdefault(where, [])
        if len(failures) >= ATTEMPTS:
            return merge(item, [], ("no world", failures[-1]), 0)
        begin = time.monotonic()
        if self.world is None or self.at != where:
            self.close()
            modest = self.pool is not None
            self.world = World(self.config, where.stack, where.n, self.stacks, modest=modest)
            self.at = where
            self.world.start(self.left[where])
            trouble = self.await_start(self.world)
            if trouble:
                failures.append(trouble[1])
                self.close()
                return merge(item, [], trouble, time.monotonic() - begin)
            failures.clear()
        world = self.world
        trouble = self.await_item(world, item)
        ranks = world.phases(item.nodeid)
        if trouble or not unanimous(ranks):
            # What a lone failure leaves in MPI (messages, half a collective) is no ground for
            # the next item.
            self.close()
        return merge(item, ranks, trouble, time.monotonic() - begin)

    def await_start(self, world: World) -> Trouble | None:
        for _ in _ticks(START):
            ended = world.ended  # asked first: a world may be up and done between two questions
            if world.up:
                world.job.note_segments()
                return None
            if ended:
                break
        if world.ended:
            what = f"ended at once (exit {world.job.process.returncode})"
        else:
            what = f"was not up after {START:g} s\n{world.stacks()}"
        return "no world", f"the world of {world.n} ranks {what}\n{world.job.log()}"

    def await_item(self, world: World, item: pytest.Item) -> Trouble | None:
        limit, grace = self.limit(item), float(self.config.getini("mpi_grace"))
        broke = None
        for now in _ticks(limit):
            # Asked before reading: what a world that has ended wrote is then all there.
            ended = world.ended
            world.poll()
            ranks = world.phases(item.nodeid)
            if all("teardown" in phases for phases in ranks):
                return None
            late = [str(r) for r, phases in enumerate(ranks) if "teardown" not in phases]
            if ended:
                code = world.job.process.returncode
                return "world lost", (
                    f"the world of {world.n} ranks ended (exit {code}) before rank "
                    f"{', '.join(late)} had finished\n{world.job.log()}"
                )
            if broke is None and any(_broken(phases) for phases in ranks):
                broke = now
            if broke is not None and now - broke > grace:
                return "others hang", f"rank {', '.join(late)} did not finish\n{world.stacks()}"
        return "timeout", f"rank {', '.join(late)} did not finish in {limit:g} s\n{world.stacks()}"

    def limit(self, item: pytest.Item) -> float:
        mark = item.get_closest_marker("ranks")
        return float((mark and mark.kwargs.get("timeout")) or self.config.getini("mpi_timeout"))

    def no_launcher(self, item: pytest.Item) -> list[pytest.TestReport]:
        why = "no mpiexec beside the interpreter or on PATH"
        if required():
            return merge(item, [], ("no mpiexec", why), 0)
        skipped, rest = merge(item, [], None, 0)[1:]
        skipped.outcome, skipped.longrepr = "skipped", (str(item.path), 0, f"Skipped: {why}")
        return [skipped, rest]

    def leave(self) -> None:
        """The last item is done: let the ranks finalise MPI in peace, for a while."""
        if self.world:
            self.world.job.wait(5)
        self.close()

    def close(self) -> None:
        if self.world:
            self.world.close()
        self.world = self.at = None


def _broken(phases: Phases) -> bool:
    return any(x.failed or hasattr(x, "wasxfail") for x in phases.values())


def _ticks(seconds: float) -> Iterator[float]:
    """The time, often, until `seconds` have passed."""
    end, pause = time.monotonic() + seconds, 1e-3
    while (now := time.monotonic()) < end:
        yield now
        time.sleep(pause)
        pause = min(0.02, pause * 1.2)
