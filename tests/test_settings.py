import os

import pytest

from relaxmpi.primitives.settings import Settings


def test_defaults_and_given_values():
    assert Settings.read({}) == Settings()
    read = Settings.read({"RELAXMPI_TIMEOUT": "2.5", "RELAXMPI_SEGMENT": "100", "HOME": "/"})
    assert (read.timeout, read.segment) == (2.5, 100)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"RELAXMPI_TIMOUT.*RELAXMPI_TIMEOUT"):
        Settings.read({"RELAXMPI_TIMOUT": "5"})


@pytest.mark.parametrize("text", ["soon", "", "0", "-1"])
def test_bad_values_are_refused(text):
    with pytest.raises(ValueError, match="RELAXMPI_TIMEOUT"):
        Settings.read({"RELAXMPI_TIMEOUT": text})


def test_names_set_by_the_tools_are_left_alone():
    assert Settings.read({"RELAXMPI_LAB": "hosts=4", "RELAXMPI_TEST_MPI": "x"}) == Settings()


@pytest.mark.ranks(1)
def test_ranks_that_share_cores_yield_at_once(comm, monkeypatch):
    from relaxmpi.primitives.world_mpi import MpiWorld

    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert MpiWorld(comm.mpi, (0,) * cores)._patient > 0
    assert MpiWorld(comm.mpi, (0,) * (cores + 1))._patient == 0
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
    assert MpiWorld(comm.mpi, (0,))._patient == 0
