"""`SimulatedWorld`: what users make and run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from relaxmpi.primitives.errors import RelaxError
from relaxmpi.primitives.simulation.fabric import Counts, Fabric
from relaxmpi.primitives.simulation.faults import Fates, Fault, Kill, Pause
from relaxmpi.primitives.simulation.network import Network
from relaxmpi.primitives.simulation.scheduler import Rank, Scheduler
from relaxmpi.primitives.simulation.world import Group, Life, RankWorld
from relaxmpi.primitives.world import enter

__all__ = ["SimulatedWorld"]


class SimulatedWorld:
    """n ranks in this process, on a deterministic network with a virtual clock.

    Attributes:
        clocks: Seconds of virtual time at which each rank of the last run ended.
        killed: Ranks that a fault killed in the last run.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def program():
        ...     with rx.Comm.world() as comm:
        ...         return float(rx.allreduce(comm, np.ones(1000))[0]), comm.now()
        >>> world = rx.SimulatedWorld(3, network=rx.Network(latency=1e-3, bandwidth=1e6))
        >>> [total for total, seconds in world.run(program)]
        [3.0, 3.0, 3.0]
        >>> 0.01 < max(world.clocks) < 0.03
        True
    """

    def __init__(
        self,
        n: int,
        *,
        network: Network | None = None,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        ranks_per_node: int = 1,
        jitter: float = 0.0,
        grouped_above: int = 64,
        watchdog: float = 10.0,
    ) -> None:
        if n < 1 or ranks_per_node < 1:
            raise ValueError("a world needs one rank or more, and one or more per node")
        if not 0.0 <= jitter < float("inf"):
            raise ValueError(f"jitter must be zero or more, not {jitter!r}")
        self.n, self.network = n, Network() if network is None else network
        self.faults, self.seed, self.jitter = tuple(faults), seed, jitter
        self.nodes = tuple(rank // ranks_per_node for rank in range(n))
        self._per_node, self._grouped_above = ranks_per_node, grouped_above
        self._watchdog = watchdog
        Fates(self.faults, n, seed)
        self.clocks: list[float] = []
        self.killed: list[int] = []
        self._fabric: Fabric | None = None

    def __repr__(self) -> str:
        """What makes the same world again: a failing test prints it."""
        return (
            f"SimulatedWorld({self.n}, network={self.network}, faults={list(self.faults)}, "
            f"seed={self.seed}, ranks_per_node={self._per_node}, jitter={self.jitter}, "
            f"grouped_above={self._grouped_above})"
        )

    @property
    def counts(self) -> Counts:
        """What became of the messages of the last run."""
        if self._fabric is None:
            raise RelaxError("nothing has been run in this world yet")
        return self._fabric.counts()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(*args)` on every rank and return the results, by rank."""
        scheduler = Scheduler(self.n, self.seed, self._watchdog)
        fates = Fates(self.faults, self.n, self.seed)
        fabric = self._fabric = Fabric(scheduler, self.network, self.nodes, fates)
        group = Group(fabric, tuple(scheduler.ranks), self._grouped_above)
        fatal: dict[int, dict[int, None]] = {}
        for fault in fates.of_ranks:
            rank = scheduler.ranks[fault.rank]
            if isinstance(fault, Pause):
                scheduler.fate(fault.at, _hold, rank, fault.seconds)
            elif isinstance(fault, Kill) and fault.at is not None:
                scheduler.fate(fault.at, scheduler.kill, rank)
            elif isinstance(fault, Kill) and fault.call is not None:
                fatal.setdefault(fault.rank, {})[fault.call] = None

        def body(rank: Rank) -> Any:
            life = Life(rank, self.seed, self.jitter, fatal.get(rank.index, {}))
            enter(RankWorld(group, rank, life))
            try:
                result = fn(*args)
            except SystemExit:
                result = None
            finally:
                enter(None)
            for comm in life.comms:
                comm.leave()
            return result

        scheduler.run(body)
        self.clocks = [rank.clock for rank in scheduler.ranks]
        self.killed = [rank.index for rank in scheduler.ranks if rank.dead]
        if scheduler.failure is not None:
            error, at = scheduler.failure
            if at is not None:
                _name(error, f"on rank {at.index} of the simulated world, seed {self.seed}")
            raise error
        return [None if rank.dead else rank.result for rank in scheduler.ranks]


def _hold(time: float, rank: Rank, seconds: float) -> None:
    rank.held = max(rank.held, time + seconds)


def _name(error: BaseException, where: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(where)
    elif error.__cause__ is None:
        error.__cause__ = RelaxError(where)
