"""docs/simulation.md: its files and commands are run in order, and print what it shows.

`python tests/test_simulation_guide.py` writes what they print into the guide.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

GUIDE = Path(__file__).parent.parent / "docs" / "simulation.md"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def played(text: str, folder: Path, mpirun: Callable[[list[str]], str]) -> str:
    """The guide with what really is printed, after running it in a folder."""

    def play(found: re.Match[str]) -> str:
        kind, body = found.groups()
        if kind == "python":
            (folder / re.match(r"# (\S+\.py)\n", body)[1]).write_text(body)
        elif kind == "diff":
            change(folder, body)
        elif kind == "console":
            command = body.splitlines()[0]
            body = f"{command}\n{answer(shlex.split(command.removeprefix('$ ')))}"
        else:
            raise ValueError(f"a block of {kind!r}")
        return f"```{kind}\n{body}```"

    def answer(words: list[str]) -> str:
        if words[0] == "mpirun":
            return mpirun(words[1:])
        program = ["-m", "relaxmpi"] if words[0] == "relaxmpi" else []
        done = subprocess.run(
            [sys.executable, *program, *words[1:]],
            cwd=folder,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        return done.stdout

    return BLOCK.sub(play, text)


def change(folder: Path, diff: str) -> None:
    """Apply a diff whose file is the only one that has the lines to be removed."""
    old, new = (
        "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] == sign) for sign in "-+"
    )
    (file,) = (path for path in folder.glob("*.py") if old in path.read_text())
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.long
def test_the_guide_shows_what_is_printed(tmp_path, launch):
    def mpirun(words):
        number, ranks, python, script = words
        assert (number, python) == ("-n", "python")
        done = launch(tmp_path / script, int(ranks))
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = GUIDE.read_text()
    assert played(text, tmp_path, mpirun) == text
    assert (tmp_path / "failing.json").stat().st_size > 10_000


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        shown = played(
            GUIDE.read_text(),
            place,
            lambda words: (
                subprocess.run(
                    ["mpirun", *words], cwd=place, capture_output=True, text=True, check=True
                ).stdout
            ),
        )
    GUIDE.write_text(shown)
