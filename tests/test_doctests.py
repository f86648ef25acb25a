"""The examples in docstrings, each module in a world of one rank: they may start MPI."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"front": "", "primitives": ".primitives", "algorithms": ".algorithms", "cuda": ".cuda"}
OPTIONAL = {"torch", "cupy"}


def modules() -> list[str]:
    """Names of all modules, found without importing any."""
    found = []
    for folder, package in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            inner = [part for part in parts if part != "__init__"]
            found.append(".".join([f"relaxmpi{package}", *inner]))
    return [name for name in found if not name.endswith("__main__")]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name: str) -> None:
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=flags).failed == 0
