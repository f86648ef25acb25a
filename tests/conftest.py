"""Fixtures and hooks of the test-suite; how multi-rank tests run is in plugin/mpi_worlds."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mpi_worlds.launch import Launch
from mpi_worlds.outer import Outer, Place, parametrize
from mpi_worlds.rank import Beside, Direct, Rank
from mpi_worlds.stacks import stacks, world_size
from mpi_worlds.world import FOLDER

if TYPE_CHECKING:
    from relaxmpi.primitives import Comm


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("mpi_timeout", "seconds one multi-rank test may take", default="60")
    parser.addini(
        "mpi_beside",
        "items of either kind from which those without ranks run beside the others; 0: never",
        default="50",
    )
    parser.addini("mpi_grace", "seconds the others get once one rank has failed", default="3")


@pytest.hookimpl(trylast=True)  # after the terminal reporter has been set up
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(*n, timeout=None, mpi=None): run on n MPI ranks, once for each n and MPI stack",
    )
    config.addinivalue_line("markers", "long: seconds of its own; `make test` alone leaves it out")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with & by a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    plugin: object
    if FOLDER in os.environ:
        plugin = Rank(config) if world_size() else Beside(config)
    elif world_size():
        plugin = Direct(config)
        if plugin.quiet:
            config.pluginmanager.unregister(name="terminalreporter")
    else:
        plugin = Outer(config)
    config.pluginmanager.register(plugin, "mpi-worlds")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc)


@pytest.fixture
def mpi_world(request: pytest.FixtureRequest) -> Place:
    """The MPI stack and rank count of an item marked `ranks`."""
    if not hasattr(request, "param"):
        pytest.fail("mark the test with pytest.mark.ranks(...)")
    where: Place = request.param
    return where


@pytest.fixture
def nranks(mpi_world: Place) -> int:
    return mpi_world.n


@pytest.fixture
def comm(nranks: int) -> Iterator["Comm"]:
    """A fresh Comm over all ranks of this item's world."""
    from relaxmpi.primitives import Comm

    with Comm.world(timeout=20) as world:
        assert world.size == nranks
        yield world


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run a script in an MPI job of its own."""
    return Launch(tmp_path, stacks())
