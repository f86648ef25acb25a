"""The benchmark of step time against nodes predicts what the arithmetic says."""

import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent / "benchmarks" / "scaling.py"


def table(*options):
    """Milliseconds of each method, for each number of nodes."""
    command = [sys.executable, str(FILE), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    start = next(k for k, line in enumerate(lines) if line[0] == "nodes")
    rows = {int(k): map(float, v) for k, *v in lines[start + 1 :] if k.isdigit()}
    return {n: dict(zip(lines[start][1:], row, strict=True)) for n, row in rows.items()}


def test_four_and_eight_nodes():
    found = table("--nodes", 4, 8, "--jitter", 0, "--steps", 8, "--no-calibrate")
    one = 25.6e6 * 4 * (1 + 90 / 1448) / 1.25e6  # ms of all parameters, on the wire
    for n, row in found.items():
        assert row["AllReduce"] == pytest.approx(265 + 2 * (n - 1) / n * one, rel=0.01)
        assert row["SGP"] == pytest.approx(265 + one, rel=0.01)
        assert row["OSGP"] == pytest.approx(265, rel=0.001)
        assert row["OSGP"] < row["overlapped"] < row["SGP"] < row["AllReduce"]
    assert found[4]["AllReduce"] < found[8]["AllReduce"]
    assert found[4]["overlapped"] < found[8]["overlapped"]
    assert found[8]["OSGP"] < 1.05 * found[4]["OSGP"]


def test_jitter_costs_those_that_wait():
    found = table("--nodes", 8, "--steps", 12, "--methods", "AllReduce", "OSGP", "--no-calibrate")
    assert found[8]["OSGP"] == pytest.approx(265, rel=0.03)
    assert found[8]["AllReduce"] > 265 + 150 + 10
