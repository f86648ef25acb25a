"""What the others see when one rank ends, fails or stops; each case is a job of its own."""

import re

import pytest

PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
import relaxmpi as rx
comm = rx.Comm.world(timeout=float(os.environ.get("T", 20)))
x = np.ones(1000)
rx.allreduce(comm, x)
"""


def job(launch, body, n=3, timeout=40, **env):
    return launch(PRELUDE + body, n, env=env, timeout=timeout)


def test_an_exception_ends_the_job_and_names_the_rank(launch):
    done = job(
        launch,
        """
if comm.rank == 1:
    raise KeyError("the reason")
rx.allreduce(comm, x)
""",
    )
    assert done.returncode != 0
    assert "rank 1 of 3 failed" in done.stderr
    assert "the reason" in done.stderr
    assert "Traceback" in done.stderr
    assert done.seconds < 15


def test_an_exception_in_a_thread_ends_the_job(launch):
    done = job(
        launch,
        """
if comm.rank == 1:
    def fail():
        raise KeyError("in the thread")
    threading.Thread(target=fail, name="worker-7").start()
    time.sleep(30)
rx.allreduce(comm, x)
""",
    )
    assert done.returncode != 0
    assert "worker-7" in done.stderr
    assert "in the thread" in done.stderr
    assert done.seconds < 15


def test_an_exception_is_seen_beside_torch_distributed(launch):
    """Its own hook runs ours with stderr collected, to be printed when ours has returned."""
    pytest.importorskip("torch")
    done = job(
        launch,
        """
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[0]}.store",
                        rank=comm.rank, world_size=comm.size)
raise KeyError("beside torch")
""",
        n=2,
    )
    assert done.returncode != 0
    assert "beside torch" in done.stderr
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_leaving_early_is_told_to_the_peers(launch, code):
    done = job(
        launch,
        f"""
if comm.rank == 1:
    sys.exit({code})
begin = time.time()
try:
    rx.allreduce(comm, x, name="the second")
except rx.PeerLeft as error:
    print("LEFT", comm.rank, error, flush=True)
    assert time.time() - begin < 10
    try:
        rx.barrier(comm)
    except rx.BrokenComm:
        print("BROKEN", comm.rank, flush=True)
""",
    )
    said = re.findall(r"LEFT (\d) (.*)", done.stdout)
    assert {rank for rank, _ in said} <= {"0", "2"}
    assert said
    assert all("rank 1 ended" in text and "the second" in text for _, text in said)
    assert "BROKEN" in done.stdout
    assert done.returncode != 0
    assert done.seconds < 25


def test_the_end_of_the_script_counts_as_leaving(launch):
    done = job(
        launch,
        """
if comm.rank != 1:
    rx.allreduce(comm, x)
""",
    )
    assert done.returncode != 0
    assert "PeerLeft" in done.stderr
    assert done.seconds < 25


def test_a_normal_end_is_quiet(launch):
    done = job(launch, "other = comm.dup(); rx.barrier(other); print('end')")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.count("end") == 3


def test_a_late_peer_breaks_the_comm_on_all_ranks(launch):
    done = job(
        launch,
        """
if comm.rank == 1:
    time.sleep(5)
try:
    rx.allreduce(comm, x, name="slow one")
    rx.allreduce(comm, x)
    print("RETURNED", comm.rank)
except rx.PeerTimeout as error:
    print("TIMEOUT", comm.rank, error, flush=True)
y = x.copy()
try:
    rx.allreduce(comm, y)
except rx.BrokenComm:
    print("BROKEN", comm.rank, flush=True)
if comm.rank != 1:
    time.sleep(6)
""",
        T="2",
    )
    said = dict(re.findall(r"TIMEOUT (\d) (.*)", done.stdout))
    assert set(said) == {"0", "1", "2"}
    for rank in "02":
        assert "not heard from rank 1" in said[rank]
        assert "slow one" in said[rank]
        assert "RELAXMPI_TIMEOUT" in said[rank]
    assert done.stdout.count("BROKEN") == 3
    assert done.seconds < 25


def test_a_stopped_peer_is_named_within_the_timeout(launch):
    done = job(
        launch,
        """
if comm.rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
begin = time.time()
try:
    rx.allreduce(comm, x)
except rx.PeerTimeout as error:
    assert time.time() - begin < 8
    print("TIMEOUT", comm.rank, error, flush=True)
    raise
""",
        T="2",
    )
    said = dict(re.findall(r"TIMEOUT (\d) (.*)", done.stdout))
    assert {"0", "1"} & set(said)
    assert all("not heard from rank 2" in said[rank] for rank in {"0", "1"} & set(said))
    assert done.returncode != 0
    assert done.seconds < 25


def test_a_killed_peer_ends_the_job(launch):
    done = job(
        launch,
        """
if comm.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
rx.allreduce(comm, x)
""",
        T="5",
    )
    assert done.returncode != 0
    assert done.seconds < 25


def test_a_waiting_rank_says_so(launch):
    done = job(
        launch,
        """
if comm.rank == 1:
    time.sleep(2)
rx.allreduce(comm, x, name="patience")
""",
        RELAXMPI_WARN_AFTER="0.5",
    )
    assert done.returncode == 0
    assert re.search(r"rank 0 has waited .*patience", done.stderr)
    assert "rank 1 has waited" not in done.stderr


def test_a_call_that_fails_in_a_queue_fails_those_behind_it(launch):
    done = job(
        launch,
        """
if comm.rank == 1:
    time.sleep(6)
    sys.exit(0)
works = [rx.allreduce.start(comm, np.ones(10)) for _ in range(3)]
kinds = []
for work in works:
    try:
        work.wait()
    except rx.RelaxError as error:
        kinds.append(type(error).__name__)
print("KINDS", *kinds, flush=True)
""",
        T="2",
    )
    assert done.stdout.count("KINDS PeerTimeout BrokenComm BrokenComm") == 2


def test_launcher_and_library_of_different_mpis(launch):
    done = launch(
        """
import os
os.environ["OMPI_COMM_WORLD_SIZE"] = "4"
import relaxmpi as rx
rx.Comm.world()
""",
        1,
    )
    assert done.returncode != 0
    assert "different MPIs" in done.stderr
    assert "relaxmpi doctor" in done.stderr


def test_settings_that_differ_between_ranks(launch):
    done = launch(
        """
import os
from mpi4py import MPI
os.environ["RELAXMPI_MAX_MESSAGE"] = str(1000 + MPI.COMM_WORLD.rank)
import relaxmpi as rx
try:
    rx.Comm.world()
except rx.MismatchError as error:
    print("MISMATCH", error)
""",
        2,
    )
    assert done.stdout.count("RELAXMPI_MAX_MESSAGE") == 2


def test_a_forked_child_does_not_end_the_job(launch):
    """Data-loader children inherit the hooks; they are not ranks."""
    done = job(
        launch,
        """
child = os.fork()
if child == 0:
    try:
        raise KeyError("in the child")
    except KeyError:
        sys.excepthook(*sys.exc_info())
    os._exit(0)
os.waitpid(child, 0)
rx.allreduce(comm, x)
print("fine")
""",
        n=2,
    )
    assert done.stdout.count("fine") == 2
    assert done.returncode == 0


def test_an_exception_inside_with_does_not_hang(launch):
    done = launch(
        """
import numpy as np
import relaxmpi as rx
with rx.Comm.world(timeout=10) as comm:
    work = rx.allreduce.start(comm, np.ones(3))
    if comm.rank == 0:
        raise KeyError("inside with")
    rx.barrier(comm)
""",
        2,
    )
    assert done.returncode != 0
    assert "inside with" in done.stderr
    assert done.seconds < 20
