"""Killed during a save, at every moment: the newest complete checkpoint always loads."""

import contextlib
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import relaxmpi as rx
from relaxmpi.primitives.checkpoint.folder import Draft

# The parent forks a child for each moment, which is fast, and may not have run any thread before.
SCRIPT = """
import os, random, signal, sys, time
import numpy as np, relaxmpi as rx

FOLDER = sys.argv[1]

def state(comm, step):
    return np.full(20_000, step, "f4"), np.full(300, 10 * step + comm.rank, "f4")

def load():
    with rx.Comm.world() as comm:
        x, own = state(comm, 0)
        found = rx.load(FOLDER, comm, missing_ok=True, x=x, own=own)
        step = found.get("step", 0)
        want = state(comm, step)
        assert (x == want[0]).all() and (own == want[1]).all()
        return step

def save(last):
    with rx.Comm.world() as comm:
        for step in range(load() + 1, last):
            x, own = state(comm, step)
            rx.save(FOLDER, comm, keep=2, x=x, own=own, step=step)
            if comm.rank == 0:
                os.write(done, bytes([step % 256]))

def killed_at(event, rest):
    def watch(name, args):
        global left
        if name.startswith(("os.", "open", "shutil.")) and FOLDER in repr(args):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    global left
    left = event
    sys.addaudithook(watch)

def killed_after(seconds):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)

def child(prepare, *args):
    global done
    read, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            prepare(*args)
            rx.SimulatedWorld(2).run(save, 10**6)
        finally:
            os._exit(1)
    os.close(done)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    finished = os.read(read, 65536)
    os.close(read)
    return finished[-1] if finished else None

rx.SimulatedWorld(2).run(load)
newest, moments = 0, 0
plan = [(killed_at, k, None) for k in range(1, 61, 2)]
plan += [(killed_after, random.Random(k).uniform(0.001, 0.08)) for k in range(10)]
for prepare, *args in plan:
    finished = child(prepare, *args)
    first, second = rx.SimulatedWorld(2).run(load)
    assert first == second >= newest, (first, second, newest)
    if finished is not None:
        assert (first - finished) % 256 <= 1, "what save has returned from is there"
    moments += first > newest
    newest = first
print(len(plan), "kills,", moments, "with progress")
names = sorted(os.listdir(FOLDER))
assert len(names) <= 5, names
"""


def test_killed_at_any_moment_the_newest_complete_checkpoint_loads(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills, progress = (int(word) for word in done.stdout.split() if word.isdigit())
    assert kills == 40
    assert progress > 5


@pytest.mark.long
def test_an_example_resumes_bit_for_bit_on_two_ranks(launch, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("tqdm")
    script = Path(__file__).parent.parent / "examples" / "char_lm.py"
    small = "--steps 9 --width 32 --layers 1 --context 32 --algorithm sign --save-every 3".split()
    folder, aside = tmp_path / "run", tmp_path / "aside"

    def run():
        result = launch(script, 2, *small, "--resume", str(folder), timeout=120)
        assert result.returncode == 0, result.stderr
        return result

    begun = run()
    assert "resumed" not in begun.stdout
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["00000002", "00000003"]
    shutil.move(folder / names[-1], aside)  # as if it had been killed after step 6
    resumed = run()
    assert "resumed after step 6" in resumed.stdout
    again = (folder / names[-1] / "index.json").read_bytes()
    assert again == (aside / "index.json").read_bytes(), "the hashes of all that there is"
    bits = [result.stdout.split(" bits per")[0].split()[-1] for result in (begun, resumed)]
    assert bits[0] == bits[1]


def test_a_save_that_another_job_cleans_away_gets_no_number(tmp_path):
    slow = Draft(tmp_path)
    (slow.folder / "shared.safetensors").write_bytes(b"first half")
    fast = Draft(tmp_path)
    assert not slow.folder.exists(), "it could go on, and half of it would pass for a checkpoint"
    fast.finish()
    with pytest.raises(FileNotFoundError):
        slow.finish()
    assert [entry.name for entry in tmp_path.iterdir()] == ["00000001"]


@pytest.mark.ranks(2)
def test_two_saves_at_once_leave_what_loads(comm, tmp_path):
    shared = rx.broadcast(comm, np.frombuffer(f"{tmp_path!s:<500}".encode(), np.uint8).copy())
    folder, x = shared.tobytes().decode().strip(), np.ones(7)
    with comm.dup() as other:

        def save():
            with contextlib.suppress(rx.CheckpointError):
                rx.save(folder, other, x=x)

        thread = threading.Thread(target=save)
        thread.start()
        with contextlib.suppress(rx.CheckpointError):
            rx.save(folder, comm, x=x)
        thread.join()
    y = np.zeros(7)
    rx.load(folder, comm, missing_ok=True, x=y)
    assert set(y) in ({0.0}, {1.0})
