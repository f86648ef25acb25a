"""The command line: its table, its errors, and the units of its options."""

import subprocess
import sys

import pytest

from relaxmpi import __version__, cli, lab
from relaxmpi.units import parse_duration, parse_rate


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5ms", 5e-3),
        ("100us", 1e-4),
        ("0.1ms", 1e-4),
        (".5 ms", 5e-4),
        ("1s", 1.0),
        ("250ns", 2.5e-7),
        ("0", 0.0),
        ("1e-3s", 1e-3),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100Mbit", 1e8),
        ("1Gbit", 1e9),
        ("2.5Gbit", 2.5e9),
        ("10gbit", 1e10),
        ("64kbit", 64e3),
        ("100 Mbit/s", 1e8),
        ("100Mbps", None),
        ("100Mbitps", 1e8),
    ],
)
def test_rates(text, rate):
    if rate is None:
        with pytest.raises(ValueError, match="100Mbit"):
            parse_rate(text)
    else:
        assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "5", "ms", "-5ms", "5 minutes", "5Mbit", "1e9"])
def test_a_wrong_duration_is_told_how_to_be_right(text):
    with pytest.raises(ValueError, match="write for example 5ms"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "100", "fast", "0Mbit", "100MB", "5ms", "1e999Gbit"])
def test_a_wrong_rate_is_told_how_to_be_right(text):
    with pytest.raises(ValueError, match="write for example 100Mbit"):
        parse_rate(text)


def test_help_and_version(capsys):
    for arguments, expected in (
        (["--version"], f"relaxmpi {__version__}"),
        (["--help"], "doctor"),
        (["lab", "--help"], "--latency"),
        (["doctor", "--help"], "--json"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "COMMAND"),
        (["lob"], "lob"),
        (["lab"], "program"),
        (["lab", "--latency", "5", "--", "true"], "needs one of the units ns, us, ms, s"),
        (["lab", "--bandwidth", "100", "--", "true"], "needs one of the units bit, kbit"),
        (["lab", "--queue", "16", "--", "true"], "needs one of the units B, kB"),
        (["lab", "--queue", "16Mb", "--", "true"], "needs one of the units B, kB"),
    ],
)
def test_wrong_arguments_end_with_status_2(arguments, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--hosts", "0"], "hosts must be 1 to 60"),
        (["--hosts", "61"], "hosts must be 1 to 60"),
        (["--bandwidth", "1bit"], "bandwidth must be"),
        (["--latency", "99s"], "latency must be"),
        (["--mtu", "100"], "mtu must be"),
        (["--queue", "1500B"], "queue must be at least 65536 bytes"),
    ],
)
def test_numbers_out_of_range(arguments, expected, capsys):
    assert cli.main(["lab", *arguments, "--", "true"]) == 2
    assert expected in capsys.readouterr().err


def test_a_refusal_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(lab, "refusal", lambda: "no hosts today; come again tomorrow")
    assert cli.main(["lab", "--", "true"]) == 2
    assert "relaxmpi lab: no hosts today; come again tomorrow" in capsys.readouterr().err


def test_python_m_relaxmpi():
    done = subprocess.run(
        [sys.executable, "-m", "relaxmpi", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, f"relaxmpi {__version__}")


def test_the_command_line_starts_without_numpy_mpi_or_torch():
    program = "import sys, relaxmpi.cli; print({'numpy', 'mpi4py.MPI', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
