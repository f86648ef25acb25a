"""The machinery that runs multi-rank tests: whatever one item does, it costs that item only."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi_worlds.job import Job
from mpi_worlds.launch import Launch
from mpi_worlds.stacks import STACKS, Stack, describe, environment, stacks

HERE = Path(__file__).parent
INI = f"""
[pytest]
pythonpath = {HERE / "plugin"}
addopts = --import-mode=importlib --strict-markers -p no:cacheprovider
filterwarnings = error
xfail_strict = true
mpi_timeout = 20
mpi_grace = 1
"""
PRELUDE = """
import os, time, warnings
import pytest
from mpi4py import MPI
world = MPI.COMM_WORLD
"""
UNRULY = """
@pytest.mark.ranks(2)
def test_a_good(nranks):
    assert world.allreduce(1) == nranks

@pytest.mark.ranks(2)
def test_b_one_rank_fails_others_finish():
    assert world.rank == 0, "only rank 1"

@pytest.mark.ranks(2)
def test_c_one_rank_fails_others_wait():
    assert world.rank == 0, "gone"
    world.Barrier()

@pytest.mark.ranks(2, timeout=2)
def test_d_hang():
    if world.rank == 0:
        world.recv(source=1)
    else:
        while True:
            time.sleep(0.1)

@pytest.mark.ranks(2)
def test_e_abort():
    if world.rank == 1:
        world.Abort(7)
        time.sleep(60)  # MPICH's Abort returns, and the launcher kills some time later
    world.Barrier()

@pytest.mark.ranks(2)
def test_f_exit():
    if world.rank == 1:
        os._exit(3)
    world.Barrier()

@pytest.mark.ranks(2)
def test_g_segfault():
    import ctypes
    if world.rank == 0:
        ctypes.string_at(0)
    world.Barrier()

@pytest.mark.ranks(2)
def test_h_all_fail():
    print("seen by", world.rank)
    assert world.rank < 0

@pytest.mark.ranks(2)
def test_i_skip_on_one():
    if world.rank == 1:
        pytest.skip("not on rank 1")

@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="known")
def test_j_xfail_on_one():
    assert world.rank == 0

@pytest.mark.ranks(2)
def test_k_warning_is_an_error():
    warnings.warn("careful")

@pytest.mark.ranks(2)
def test_l_good_again(nranks):
    assert world.allreduce(world.rank) == 1
"""
ORDERLY = """
@pytest.fixture(scope="module")
def shared():
    yield 7

def test_without_ranks(shared):
    assert not MPI.Is_initialized()

@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.ranks(1, 3)
class TestClass:
    @classmethod
    def setup_class(cls):
        cls.sum = world.allreduce(1)

    def test_method(self, x, nranks, shared):
        assert self.sum == world.size == nranks

@pytest.mark.ranks(3)
@pytest.mark.skip(reason="all ranks")
def test_skipped():
    raise AssertionError

@pytest.mark.ranks(3)
def test_tmp_path(tmp_path):
    assert len(set(world.allgather(str(tmp_path)))) == 3
"""


def run(folder: Path, stack: Stack, source: str, *args: str, **env: str) -> tuple[list[str], str]:
    """Run pytest on `source`; the outcome lines, in order, and the whole output."""
    shutil.copy(HERE / "conftest.py", folder)
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_inner.py").write_text(PRELUDE + source)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "--color=no", "-rA", "--durations=12", *args],
        cwd=folder,
        env=environment()
        | {STACKS: describe([stack]), "MARK": str(folder), "COLUMNS": "200"}
        | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    text = done.stdout + done.stderr
    lines = [line for line in text.splitlines() if "::" in line and line.rstrip().endswith("%]")]
    return [" ".join(line.split("::", 1)[1].split()[:2]) for line in lines], text


def orphans(folder: Path) -> list[str]:
    """Processes that still carry this test's mark."""
    mark = f"MARK={folder}".encode()
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes():
                left.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return left


SEVERAL = [
    pytest.param(stack, id=stack.name, marks=[pytest.mark.long] if k else [])
    for k, stack in enumerate(stacks())
]


@pytest.fixture(params=SEVERAL)
def stack(request: pytest.FixtureRequest) -> Stack:
    chosen: Stack = request.param
    return chosen


def test_whatever_an_item_does_costs_that_item_only(tmp_path: Path, stack: Stack) -> None:
    outcomes, text = run(tmp_path, stack, UNRULY)
    n = f"[{stack.name}-n2]"
    assert outcomes == [
        f"test_a_good{n} PASSED",
        f"test_b_one_rank_fails_others_finish{n} FAILED",
        f"test_c_one_rank_fails_others_wait{n} FAILED",
        f"test_d_hang{n} FAILED",
        f"test_e_abort{n} FAILED",
        f"test_f_exit{n} FAILED",
        f"test_g_segfault{n} FAILED",
        f"test_h_all_fail{n} FAILED",
        f"test_i_skip_on_one{n} SKIPPED",
        f"test_j_xfail_on_one{n} XFAIL",
        f"test_k_warning_is_an_error{n} FAILED",
        f"test_l_good_again{n} PASSED",
    ], text
    assert "8 failed, 2 passed, 1 skipped, 1 xfailed" in text
    # All ranks' failures and what they printed; of a hang, where each rank is.
    assert "rank 0 (call)" in text
    assert "rank 1 (call)" in text
    assert "seen by 0" in text
    assert "seen by 1" in text
    assert "rank 1 (call): AssertionError: only rank 1" in text
    assert "did not finish in 2 s" in text
    assert "in test_d_hang" in text
    assert "rank 0 did not finish\n" in text
    assert not orphans(tmp_path)


def test_good_items_of_every_kind(tmp_path: Path, stack: Stack) -> None:
    outcomes, text = run(tmp_path, stack, ORDERLY)
    s = stack.name
    assert sorted(outcomes[1:3]) == [
        f"TestClass::test_method[{s}-n1-{x}] PASSED" for x in (1, 2)
    ], text
    assert outcomes[0] == "test_without_ranks PASSED"
    assert sorted(outcomes[3:]) == [
        f"TestClass::test_method[{s}-n3-1] PASSED",
        f"TestClass::test_method[{s}-n3-2] PASSED",
        f"test_skipped[{s}-n3] SKIPPED",
        f"test_tmp_path[{s}-n3] PASSED",
    ]
    assert not orphans(tmp_path)


def test_items_without_ranks_run_beside_the_others(tmp_path: Path) -> None:
    stack = stacks()[0]
    source = """
@pytest.fixture(scope="module")
def shared():
    yield []

@pytest.mark.parametrize("k", [1, 2])
def test_one_after_the_other(shared, k):
    assert not MPI.Is_initialized()
    shared.append(k)
    assert shared == list(range(1, k + 1))

def test_it_fails():
    print("said aloud")
    raise ValueError("wrong")

def test_it_is_skipped():
    pytest.skip("why not")

@pytest.mark.xfail
def test_it_is_known():
    assert False

@pytest.mark.parametrize("k", range(2))
@pytest.mark.ranks(2)
def test_ranks(k):
    assert world.size == 2
"""
    outcomes, text = run(tmp_path, stack, source, "-o", "mpi_beside=2")
    n = f"{stack.name}-n2"
    assert outcomes == [
        f"test_ranks[{n}-0] PASSED",
        f"test_ranks[{n}-1] PASSED",
        "test_one_after_the_other[1] PASSED",
        "test_one_after_the_other[2] PASSED",
        "test_it_fails FAILED",
        "test_it_is_skipped SKIPPED",
        "test_it_is_known XFAIL",
    ], text
    assert "said aloud" in text
    assert "ValueError: wrong" in text
    assert not orphans(tmp_path)


def test_a_process_beside_that_ends_early_fails_what_is_left(tmp_path: Path) -> None:
    source = """
def test_a(): pass
def test_b(): os._exit(3)
def test_c(): pass

@pytest.mark.parametrize("k", range(3))
@pytest.mark.ranks(1)
def test_ranks(k): pass
"""
    outcomes, text = run(tmp_path, stacks()[0], source, "-o", "mpi_beside=3")
    assert outcomes[3:5] == ["test_a PASSED", "test_b FAILED"], text
    codes = re.search(r"processes of the items without ranks ended \(exit \[([0-9, ]+)\]\)", text)
    assert codes is not None
    assert sorted(codes[1].split(", ")) == ["0", "0", "3"]


def test_processes_share_the_items_without_ranks(tmp_path: Path) -> None:
    source = f"""
from pathlib import Path
file = Path({str(tmp_path)!r}) / "came"

@pytest.fixture(scope="module")
def once():
    yield []

def test_a(once):
    once.append("a")
    end = time.time() + 30
    while not file.exists() and time.time() < end: time.sleep(0.01)
    assert file.exists(), "nobody came meanwhile"

def test_b(once):
    assert once == ["a"]

def test_c(once):
    assert once == []
    once.append("c")

def test_d(once):
    assert once == ["c"]
    file.touch()

@pytest.mark.parametrize("k", range(4))
@pytest.mark.ranks(1)
def test_ranks(k): pass
"""
    outcomes, text = run(tmp_path, stacks()[0], source, "-o", "mpi_beside=4")
    assert outcomes[4:] == [f"test_{name} PASSED" for name in "abcd"], text


def test_a_launcher_started_by_hand_is_honoured(tmp_path: Path, stack: Stack) -> None:
    run(tmp_path, stack, UNRULY, "--collect-only")
    chosen = "a_good or b_one or h_all or i_skip or l_good"
    folder = tmp_path / "out"
    folder.mkdir()
    wide = {"COLUMNS": "200", "NO_COLOR": "1"}
    command = ["-m", "pytest", "-v", "-k", chosen]
    job = Job(stack, 2, command, folder=folder, cwd=tmp_path, env=wide)
    assert job.wait(60)
    text = job.log(20_000)
    job.kill()
    assert text.count("test session starts") == 1
    assert "2 failed, 2 passed, 1 skipped" in text
    assert "rank 1 (call): AssertionError: only rank 1" in text
    job = Job(stack, 3, ["-m", "pytest", "-v"], folder=folder, cwd=tmp_path)
    assert job.wait(60)
    job.kill()
    assert "12 deselected" in job.log()


def test_a_module_that_only_the_ranks_cannot_import(tmp_path: Path) -> None:
    stack = stacks()[0]
    source = """
if MPI.Is_initialized(): pytest.importorskip("no_such_module")
@pytest.mark.ranks(2)
def test_one(): pass
"""
    outcomes, text = run(tmp_path, stack, source)
    assert outcomes == [f"test_one[{stack.name}-n2] SKIPPED"], text
    assert "no_such_module" in text
    outcomes, text = run(tmp_path, stack, source.replace("pytest.importorskip", "__import__"))
    assert outcomes == [f"test_one[{stack.name}-n2] FAILED"], text
    assert "No module named 'no_such_module'" in text


def test_a_world_that_cannot_start_shows_the_launchers_log(tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "mpiexec").write_text("#!/bin/sh\necho no slots today >&2\nexit 9\n")
    (fake / "mpiexec").chmod(0o755)
    good = """
@pytest.mark.ranks(2)
@pytest.mark.parametrize("x", range(4))
def test_one(x): pass
"""
    outcomes, text = run(tmp_path, Stack("fake", str(fake / "python")), good)
    assert [x.split()[1] for x in outcomes] == ["FAILED"] * 4
    assert "exit 9" in text
    assert "no slots today" in text


def test_without_a_launcher(tmp_path: Path) -> None:
    nothing = Stack("none", str(tmp_path / "python"))
    good = "@pytest.mark.ranks(2)\ndef test_one(): pass\n"
    outcomes, text = run(tmp_path, nothing, good, PATH="")
    assert outcomes == ["test_one[none-n2] SKIPPED"], text
    outcomes, text = run(tmp_path, nothing, good, PATH="", RELAXMPI_TEST_REQUIRE_MPI="1")
    assert outcomes == ["test_one[none-n2] FAILED"], text
    assert "no mpiexec" in text


def test_a_killed_pytest_takes_its_ranks_with_it(tmp_path: Path, stack: Stack) -> None:
    run(tmp_path, stack, UNRULY, "--collect-only")
    outer = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-k", "d_hang", "-o", "mpi_timeout=99"],
        cwd=tmp_path,
        env=environment() | {STACKS: describe([stack]), "MARK": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while len(orphans(tmp_path)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    outer.kill()
    outer.wait()
    while orphans(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not orphans(tmp_path)


def test_launch_returns_how_the_job_ended(launch: Launch, stack: Stack) -> None:
    script = """
        import os, sys
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        ranks = world.gather(world.rank)
        if world.rank == 0:
            print(ranks, sys.argv[1], flush=True)
            print(os.environ["EXTRA"], file=sys.stderr, flush=True)
        world.Barrier()
        if world.rank == 1 and sys.argv[1] != "0":
            os._exit(int(sys.argv[1]))
    """
    good = launch(script, 3, "0", env={"EXTRA": "more"}, mpi=stack.name)
    assert good.returncode == 0, good
    assert good.stdout.split("\n")[0].strip() == "[0, 1, 2] 0"
    assert "more" in good.stderr
    # MPICH's launcher may tell of the rank that it then kills.
    told = (3, 9) if stack.name == "mpich" else (3,)
    assert launch(script, 2, "3", env={"EXTRA": ""}, mpi=stack.name).returncode in told


def test_launch_leaves_nothing_of_a_job_that_hangs(
    launch: Launch, stack: Stack, tmp_path: Path
) -> None:
    script = """
        import os, signal, time
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        def wait_for_ever():
            MPI.COMM_WORLD.Barrier()
        wait_for_ever()
    """
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="in wait_for_ever"):
        launch(script, 2, env={"MARK": str(tmp_path)}, timeout=3, mpi=stack.name)
    assert time.monotonic() - begin < 12
    assert not orphans(tmp_path)
    assert os.environ.get("MARK") is None
