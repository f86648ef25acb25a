"""The package as it is installed: wheel, editable checkout, and the folder named `cuda`."""

import configparser
import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "relaxmpi": "front",
    "relaxmpi.primitives": "primitives",
    "relaxmpi.algorithms": "algorithms",
    "relaxmpi.cuda": "cuda",
}
# Portions, present or likely, of NVIDIA's namespace package `cuda`: with the checkout on sys.path
# a module of ours with such a name would hide theirs.
NVIDIA = {"bench", "bindings", "cccl", "compute", "coop", "core", "pathfinder", "tile"}


def on_disk() -> dict[str, str]:
    """Every package below the four folders, with its folder relative to the root."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("__init__.py"):
            inner = file.parent.relative_to(ROOT / folder).parts
            found[".".join([package, *inner])] = "/".join([folder, *inner])
    return found


def python(where: Path, code: str, *, cwd: Path, path: Path | None = None) -> str:
    """Run `code` in an interpreter that knows nothing of this process's paths."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    if path:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [where, "-W", "error", "-c", code],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that neither old build files go in nor new ones stay."""
    source = tmp_path_factory.mktemp("source")
    for name in FOLDERS.values():
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("dist")
    # Without isolation: a test must not depend on a package index.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o"]
    command += [str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh venv with the wheel; dependencies come from our own."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder)
    interpreter = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet"]
    command += ["--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run(command, check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    # A folder named in a .pth file is a plain sys.path entry: the .pth files in it, and so the
    # editable install of this checkout, are not followed.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return interpreter


def test_every_package_is_listed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    mapping = dict(
        [word.strip() for word in line.split("=")]
        for line in config["options"]["package_dir"].strip().splitlines()
    )
    assert sorted(listed) == sorted(on_disk())
    assert mapping == FOLDERS


def test_every_folder_with_modules_is_a_package() -> None:
    for folder in FOLDERS.values():
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), file


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = set()
    for package, folder in on_disk().items():
        base = package.replace(".", "/")
        wanted |= {f"{base}/{file.name}" for file in (ROOT / folder).glob("*.py")}
    wanted |= {f"{package.replace('.', '/')}/py.typed" for package in FOLDERS}
    assert wanted <= names
    assert {name for name in names if name.endswith(".py")} <= wanted
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("place", ["elsewhere", "checkout"])
def test_an_installed_wheel_works(installed: Path, tmp_path: Path, place: str) -> None:
    code = """
import importlib.resources, pathlib, sys
import relaxmpi, relaxmpi.primitives, relaxmpi.algorithms, relaxmpi.cuda
for module in (relaxmpi, relaxmpi.primitives, relaxmpi.algorithms, relaxmpi.cuda):
    assert pathlib.Path(module.__file__).is_relative_to(sys.prefix), module.__file__
    assert importlib.resources.files(module).joinpath("py.typed").is_file(), module
print(relaxmpi.__version__)
"""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    cwd = ROOT if place == "checkout" else tmp_path
    assert python(installed, code, cwd=cwd) == config["metadata"]["version"]


def test_the_command_works_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    command = installed.parent / "relaxmpi"
    done = subprocess.run(
        [command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


@pytest.mark.parametrize("module", FOLDERS)
def test_importing_starts_nothing(module: str, tmp_path: Path) -> None:
    code = f"""
import sys
import {module}
print(*sorted({{"mpi4py.MPI", "torch", "cupy", "numba.cuda"}} & set(sys.modules)))
"""
    assert python(Path(sys.executable), code, cwd=tmp_path, path=_own_path()) == ""


def test_every_public_name_loads_without_torch(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["cupy"] = None
import relaxmpi
for name in relaxmpi.__all__:
    try:
        getattr(relaxmpi, name)
    except ModuleNotFoundError as error:
        assert name in relaxmpi._HOME["relaxmpi.algorithms"], (name, error)
        assert error.name == "torch", (name, error)
assert "mpi4py.MPI" not in sys.modules
"""
    python(Path(sys.executable), code, cwd=tmp_path, path=_own_path())


@pytest.fixture
def nvidia(tmp_path: Path) -> Path:
    """A sys.path entry with a portion of the namespace `cuda`, as NVIDIA's wheels install it."""
    portion = tmp_path / "nvidia" / "cuda" / "pathfinder"
    portion.mkdir(parents=True)
    (portion / "__init__.py").write_text("ANSWER = 42\n")
    return tmp_path / "nvidia"


def test_the_checkout_does_not_hide_nvidias_cuda(nvidia: Path, tmp_path: Path) -> None:
    code = "import cuda.pathfinder; print(cuda.pathfinder.ANSWER)"
    assert python(Path(sys.executable), code, cwd=ROOT, path=nvidia) == "42"
    both = f"import relaxmpi.cuda; {code}"
    path = Path(os.pathsep.join(str(p) for p in (nvidia, _own_path()) if p))
    assert python(Path(sys.executable), both, cwd=ROOT, path=path) == "42"


def test_pytest_as_a_module_does_not_hide_nvidias_cuda(nvidia: Path, tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("def test_it():\n    import cuda.pathfinder\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(nvidia)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_no_module_of_ours_takes_a_name_of_nvidias() -> None:
    assert not {path.stem for path in (ROOT / "cuda").iterdir()} & NVIDIA


def test_no_folder_is_named_like_the_package() -> None:
    assert not (ROOT / "relaxmpi").exists()


def _own_path() -> Path | None:
    """The entry of PYTHONPATH through which this process sees the package, if it is that."""
    given = os.environ.get("PYTHONPATH")
    return Path(given) if given else None
