"""How a process joins the job: MPI's start, hosts, and settings that must agree."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from relaxmpi.primitives.errors import MismatchError, PeerTimeout, RelaxError
from relaxmpi.primitives.settings import Settings

if TYPE_CHECKING:
    from mpi4py import MPI

    from relaxmpi.primitives.world_mpi import MpiWorld

__all__ = ["prepare", "world"]

# Between nodes messages above a limit go by rendezvous, whose handshakes stall TCP links for a
# quarter to a half of the time. Open MPI reads its limits when it starts.
_LIMITS = tuple(
    f"OMPI_MCA_btl_tcp_{name}" for name in ("eager_limit", "rndv_eager_limit", "max_send_size")
)
_EAGER = 1024 * 1024
_DEFAULT = 64 * 1024

_PAUSE = 1e-4
_kept: list[object] = []
_eager = _DEFAULT
_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def world() -> MPI.Intracomm:
    """Start MPI if needed and return COMM_WORLD; RelaxError where launcher and library differ."""
    global _eager
    if "mpi4py.MPI" not in sys.modules:
        for limit in _LIMITS:
            os.environ.setdefault(limit, str(_EAGER))
        _eager = min(int(os.environ[limit]) for limit in _LIMITS)
    from mpi4py import MPI

    said = next((int(os.environ[name]) for name in _LAUNCHERS if name in os.environ), 1)
    if said > 1 and MPI.COMM_WORLD.size == 1:
        raise RelaxError(
            f"the launcher started {said} ranks, but the MPI library sees one: mpirun and the "
            f"library ({MPI.Get_library_version().split(',')[0]}) belong to different MPIs. "
            "Use the mpirun beside this Python; `relaxmpi doctor` shows both"
        )
    return MPI.COMM_WORLD


def prepare(mpi: MPI.Intracomm, settings: Settings) -> tuple[MpiWorld, Settings]:
    """See that settings agree, and find out who shares a host."""
    from mpi4py import MPI

    from relaxmpi.primitives.exits import install
    from relaxmpi.primitives.world_mpi import MpiWorld

    install()
    _meet(mpi, settings.timeout)
    eager = _eager if MPI.Get_library_version().startswith("Open MPI") else _DEFAULT
    segment = settings.segment or eager // 2
    layout = np.array([settings.max_message, settings.ranks_per_node, segment], "i8")
    all_ = np.empty((mpi.size, layout.size), "i8")
    mpi.Allgather(layout, all_)
    if not (all_[:, :2] == layout[:2]).all():
        raise MismatchError(
            "RELAXMPI_MAX_MESSAGE and RELAXMPI_RANKS_PER_NODE must be equal on all ranks; they are "
            f"{all_[:, :2].tolist()}"
        )
    settings = replace(settings, segment=int(all_[:, 2].min()))
    if settings.ranks_per_node:
        nodes = tuple(r // settings.ranks_per_node for r in range(mpi.size))
        return MpiWorld(mpi, nodes), settings
    host = mpi.Split_type(MPI.COMM_TYPE_SHARED)
    first = np.array([MPI.Group.Translate_ranks(host.group, [0], mpi.group)[0]], "i8")
    host.Free()
    firsts = np.empty(mpi.size, "i8")
    mpi.Allgather(first, firsts)
    order = sorted(set(firsts.tolist()))
    return MpiWorld(mpi, tuple(order.index(f) for f in firsts.tolist())), settings


def _meet(mpi: MPI.Intracomm, timeout: float) -> None:
    """Wait for all ranks, before MPI's own blocking calls."""
    end = time.perf_counter() + timeout
    barrier = mpi.Ibarrier()
    while not barrier.Test():
        if time.perf_counter() > end:
            _kept.append(barrier)
            raise PeerTimeout(
                f"not all {mpi.size} ranks made this Comm within {timeout:g} s: it is collective; "
                "if the others are only slow, raise timeout= or RELAXMPI_TIMEOUT"
            )
        time.sleep(_PAUSE)
