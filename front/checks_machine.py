"""Checks of Python and its packages, the machine, its network and its GPUs."""

import ctypes
import os
import platform
import re
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import TYPE_CHECKING

from relaxmpi.findings import Finding, bad, ok, warn

if TYPE_CHECKING:
    from relaxmpi.primitives.settings import Settings

__all__ = [
    "check_cuda_driver",
    "check_cuda_packages",
    "check_interfaces",
    "check_kernel_cache",
    "check_packages",
    "check_python",
    "check_settings",
    "check_thread_counts",
    "check_transport",
    "versions",
]

_NEEDED = ("relaxmpi", "numpy", "mpi4py", "numba")
_OPTIONAL = ("torch",)
_VIRTUAL = re.compile(r"docker|virbr|br-|veth|cni|flannel|cali|tun|tap|vboxnet|vmnet|zt|wg")
_CUDA_PACKAGES = re.compile(r"cupy(-cuda\d+x)?|numba-cuda|nvidia-nccl-cu\d+", re.IGNORECASE)


def versions() -> dict[str, str]:
    """Return the versions that all ranks of a job should share; a missing package is absent."""
    found = {"python": platform.python_version()}
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_python() -> Finding:
    """Which Python this is; one too old would not have come as far as here."""
    return ok("Python", f"{platform.python_version()} ({sys.executable})")


def check_packages() -> Finding:
    """Whether the packages that the library needs are there."""
    found = versions()
    text = ", ".join(f"{name} {found[name]}" for name in (*_NEEDED, *_OPTIONAL) if name in found)
    missing = [name for name in _NEEDED[1:] if name not in found]
    if missing:
        return bad("packages", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return ok("packages", text)


def check_interfaces() -> Finding:
    """Whether MPI may send its traffic to an interface that leads nowhere."""
    names = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("OMPI_MCA_btl_tcp_if_include") or os.environ.get(
        "OMPI_MCA_btl_tcp_if_exclude"
    )
    text = ", ".join(names) + (f" (chosen: {chosen})" if chosen else "")
    virtual = [name for name in names if _VIRTUAL.match(name)]
    if virtual and not chosen:
        real = next((name for name in names if name != "lo" and name not in virtual), "eth0")
        return warn(
            "network",
            text,
            f"jobs on several hosts may hang on {', '.join(virtual)}; export "
            f"OMPI_MCA_btl_tcp_if_include={real} PRTE_MCA_prte_if_include={real}",
        )
    return ok("network", text)


def _count(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() and int(value) > 0 else None


def check_thread_counts() -> Finding:
    """Whether the ranks of this node start more threads than there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    ranks = _count("OMPI_COMM_WORLD_LOCAL_SIZE") or _count("MPI_LOCALNRANKS") or 1
    # torch takes OMP_NUM_THREADS; numba takes its own variable, and both otherwise all cores.
    threads = max(_count("OMP_NUM_THREADS") or cores, _count("NUMBA_NUM_THREADS") or cores)
    text = f"{cores} cores; ranks here: {ranks}, with up to {threads} threads each"
    share = max(1, cores // ranks)
    names = f"OMP_NUM_THREADS={share} NUMBA_NUM_THREADS={share}"
    if ranks > 1 and ranks * threads > max(cores, ranks):
        return warn("cores", text, f"export {names}")
    if ranks == 1 and threads > 1:
        return ok("cores", text, "before starting n ranks here, set both to cores / n: "
                  "OMP_NUM_THREADS, NUMBA_NUM_THREADS")  # fmt: skip
    return ok("cores", text)


def check_kernel_cache() -> Finding:
    """Whether compiled kernels can be kept, so that not every process compiles them again."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    beside = Path(__file__).resolve().parent
    places = [Path(given)] if given else [beside, Path.home() / ".cache"]
    for place in places:
        existing = next(p for p in (place, *place.parents) if os.access(p, os.F_OK))
        if os.access(existing, os.W_OK):
            return ok("kernel cache", f"{place} can be written")
    return warn(
        "kernel cache",
        f"{places[0]} cannot be written, so every process compiles its kernels",
        "export NUMBA_CACHE_DIR=/a/directory/you/can/write",
    )


def _cuda_packages() -> list[str]:
    found = {}
    for package in distributions():
        name = package.metadata["Name"]
        if name and _CUDA_PACKAGES.fullmatch(name):
            found[name.lower()] = package.version
    return [f"{name} {number}" for name, number in sorted(found.items())]


def _gpus() -> int | None:
    """Return how many GPUs the driver sees, or None if there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def check_cuda_packages() -> Finding:
    """Whether the packages for GPUs are there, once each."""
    found = _cuda_packages()
    text = ", ".join(found) or "none: CPU only"
    if sum(name.startswith("cupy") for name in found) > 1:
        return bad("CUDA packages", text, "uninstall all cupy packages, then install one")
    if _gpus() and not found:
        return warn("CUDA packages", text, "for the GPUs here: pip install 'relaxmpi[cuda12]'")
    return ok("CUDA packages", text)


def check_cuda_driver() -> Finding:
    """Whether there is a driver, and GPUs that it sees."""
    gpus = _gpus()
    tool = " (nvidia-smi is there)" if shutil.which("nvidia-smi") else ""
    if gpus:
        return ok("CUDA driver", f"{gpus} GPUs{tool}")
    if gpus == 0:
        return warn(
            "CUDA driver",
            f"libcuda sees no GPU{tool}",
            "see whether nvidia-smi lists one, and whether CUDA_VISIBLE_DEVICES hides it",
        )
    if _cuda_packages():
        return warn(
            "CUDA driver",
            "no libcuda.so.1, though CUDA packages are installed",
            "install NVIDIA's driver, or in a container start it with --gpus all",
        )
    return ok("CUDA driver", "none")


def check_settings() -> Finding:
    """Which settings are in force, and whether one is unknown or unreadable."""
    given = {name: value for name, value in os.environ.items() if name.startswith("RELAXMPI_")}
    text = ", ".join(f"{name}={value}" for name, value in sorted(given.items())) or "all default"
    try:
        _settings()
    except ValueError as error:
        return bad("settings", str(error), "unset it, or correct it")
    except ImportError as error:
        return warn("settings", f"{text}; unchecked: {error}", "mend the packages named above")
    return ok("settings", text)


def check_transport() -> Finding:
    """Which transport moves CPU buffers, and why."""
    try:
        given = _settings().segment
        piece = f"messages of {given:,} bytes" if given else "messages that MPI sends eagerly"
    except (ImportError, ValueError):
        piece = "short messages"
    return ok(
        "CPU transport",
        "memory that ranks share for sums in full precision within a host; else MPI: whole "
        f"messages within a host, between hosts {piece}, on which TCP does not stall",
    )


def _settings() -> "Settings":
    # Here, because it loads numpy, whose absence must not end the doctor.
    from relaxmpi.primitives.settings import Settings

    return Settings.read()
