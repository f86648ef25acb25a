"""`SimulatedWorld`: what users make and run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from relaxmpi.primitives.errors import RelaxError
from relaxmpi.primitives.simulation.fabric import Counts, Fabric
from relaxmpi.primitives.simulation.faults import Fates, Fault, Kill, Pause
from relaxmpi.primitives.simulation.network import Network
from relaxmpi.primitives.simulation.rank import Rank
from relaxmpi.primitives.simulation.scheduler import Scheduler
from relaxmpi.primitives.simulation.world import Group, Life, RankWorld
from relaxmpi.primitives.world import enter

__all__ = ["SimulatedWorld"]


class SimulatedWorld:
    """n ranks in this process, on a deterministic network with a virtual clock.

    `run(fn)` calls `fn` once a rank, as `mpirun` would; inside, `Comm.world()` is that rank's,
    and Comms, verbs, primitives, algorithms and `attach` are those that run on MPI. Ranks are
    threads of which one runs at a time: the one with the smallest clock, ties by the seed. Time
    passes in `comm.compute(seconds)`, in waiting for messages, by what messages cost a processor
    (see `Network`), and by a microsecond in each look with `work.test()` or `comm.progress()`
    (more after a thousand looks in vain, in the end a thousandth of the time looked). What
    Python code, sums and codecs take is not in it: say so with `compute`. The same seed gives
    the same bytes and the same times on every machine; other seeds give other interleavings.

    Laws, besides those of the verbs: clocks never run backwards; a message arrives no earlier
    than latency + size / bandwidth; links are never used beyond their rate; sent + duplicated =
    received + discarded + dropped + in flight. Results are MPI's, bit for bit, wherever the
    order of additions is fixed; plain sums are always added in the order of ranks.

    While a rank computes, short messages travel and long ones wait (`Network.eager`); under
    `comm.background()` its calls advance meanwhile. Above `grouped_above` ranks, and unless
    messages have faults, a collective is one event that costs what its n^2 messages would (within
    5 %; where parts of a `split` share the link of a node at once, up to a fifth more or less). A
    program that returns, or calls `sys.exit`, with open Comms has left: peers that need it get
    `PeerLeft`. An exception on one rank ends all.

    Args:
        n: Number of ranks.
        network: What messages cost; default `Network()`.
        faults: Values of `relaxmpi.faults`.
        seed: Any integer; for ties, jitter and faults.
        ranks_per_node: Consecutive ranks that share a node and its link.
        jitter: Each `compute` takes up to this part longer, drawn evenly.
        grouped_above: Number of ranks above which collectives are one event.
        watchdog: Real seconds without a call of any rank after which the stack of the rank that
            runs is logged; after six times that, where nothing uses the processor, the world is
            ended.

    Attributes:
        clocks: Seconds of virtual time at which each rank of the last run ended.
        killed: Ranks that a fault killed in the last run.

    Raises:
        ValueError: There are no ranks, or a fault is for a rank that does not exist.

    Example:
        >>> import numpy as np, relaxmpi as rx
        >>> def program():
        ...     with rx.Comm.world() as comm:
        ...         comm.compute(0.5)
        ...         return float(rx.allreduce(comm, np.ones(1000))[0])
        >>> world = rx.SimulatedWorld(3, network=rx.Network(latency=1e-3, bandwidth=1e6))
        >>> world.run(program)
        [3.0, 3.0, 3.0]
        >>> 0.51 < max(world.clocks) < 0.53
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
        self._counts = Counts(0, 0, 0, 0, 0, 0)

    def __repr__(self) -> str:
        """What makes the same world again: a failing test prints it."""
        return (
            f"SimulatedWorld({self.n}, network={self.network}, faults={list(self.faults)}, "
            f"seed={self.seed}, ranks_per_node={self._per_node}, jitter={self.jitter}, "
            f"grouped_above={self._grouped_above})"
        )

    @property
    def counts(self) -> Counts:
        """What became of the messages with data: of the run that goes on, or the last one."""
        return self._counts if self._fabric is None else self._fabric.counts()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(*args)` on every rank.

        Returns:
            What it returned, by rank; None for a rank that was killed or called `sys.exit`.

        Raises:
            Deadlock: No rank can move, no message is on its way and no fault has lost anything.
                It says which ranks wait in which call.
            RelaxError: A rank blocked for real, see `watchdog`.
            BaseException: What `fn` raised first, in virtual time, with a note that names the
                rank and the seed. All other ranks have been ended.
        """
        scheduler = Scheduler(self.n, self.seed, self._watchdog)
        fates = Fates(self.faults, self.n, self.seed)
        fabric = self._fabric = Fabric(scheduler, self.network, self.nodes, fates)
        group = Group(fabric, tuple(scheduler.ranks), self._grouped_above)
        lives = [Life(rank, self.seed, self.jitter) for rank in scheduler.ranks]
        for fault in fates.of_ranks:
            rank = scheduler.ranks[fault.rank]
            if isinstance(fault, Pause):
                scheduler.fate(fault.at, rank.pause, fault.seconds)
            elif isinstance(fault, Kill) and fault.at is not None:
                scheduler.fate(fault.at, scheduler.kill, rank)
            elif isinstance(fault, Kill) and fault.call is not None:
                lives[fault.rank].fatal.append(fault.call)

        def body(rank: Rank) -> Any:
            life = lives[rank.index]
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

        try:
            scheduler.run(body)
        finally:
            self._counts, self._fabric = fabric.counts(), None
        self.clocks = [rank.clock for rank in scheduler.ranks]
        self.killed = [rank.index for rank in scheduler.ranks if rank.dead]
        if scheduler.failure is not None:
            error, at = scheduler.failure
            if at is not None:
                _name(error, f"on rank {at.index} of the simulated world, seed {self.seed}")
            raise error
        return [None if rank.dead else rank.result for rank in scheduler.ranks]


def _name(error: BaseException, where: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(where)
    elif error.__cause__ is None:
        error.__cause__ = RelaxError(where)
