"""Where the messages of one call of a neighbour verb go, as the ranks agreed on it."""

from __future__ import annotations

from typing import NamedTuple

from relaxmpi.primitives.topology import Topology

__all__ = ["Known", "Route", "checked_step", "look_at", "pair_with", "route_at"]

# A schedule is looked at for so many pairs of a step and a rank when it is first used.
_LOOKS = 4096
_STEPS = 2**63  # headers have a signed number of 64 bits


class Route(NamedTuple):
    """Who gets a message of this rank at one step, and who sends one.

    Attributes:
        out: For each rank that gets one, in order, the weight put on it.
        into: For each rank that sends one, in order, the weight that it puts on it.
        keep: The weight that this rank keeps.
    """

    out: dict[int, float]
    into: dict[int, float]
    keep: float


class Known(NamedTuple):
    """What was found out about a topology when it was first used.

    Attributes:
        doubly: Whether rows sum to 1, too.
        route: Of this rank, where the step does not matter.
    """

    doubly: bool
    route: Route | None


def pair_with(peer: int) -> Route:
    """The route of a pairwise exchange."""
    return Route({peer: 0.5}, {peer: 0.5}, 0.5)


def checked_step(topology: Topology, step: int | None) -> None:
    """Refuse a step that is none, or missing."""
    if step is not None and (not isinstance(step, int) or step < 0):
        raise TypeError(f"step must be an int, zero or more, not {step!r}")
    if step is not None and step >= _STEPS:
        raise ValueError(f"step must be less than 2**63, not {step}")
    if step is None and topology.varies:
        raise ValueError(
            f"{topology!r} has other peers at each step, so it needs step=, the same on all ranks"
        )


def look_at(topology: Topology, rank: int, n: int, step: int | None) -> Known:
    """Check a topology that is used for the first time.

    Raises:
        ValueError: The lists of its ranks do not fit each other.
    """
    period, first = topology.period(n), step or 0
    steps = range(period) if period and period * n <= _LOOKS else range(first, first + 1)
    for k in steps:
        topology.check(n, k)
    doubly = all(topology.doubly_stochastic(n, k) for k in steps)
    return Known(doubly, None if topology.varies else route_at(topology, rank, n, 0))


def route_at(topology: Topology, rank: int, n: int, step: int) -> Route:
    """Return the route of a rank at a step."""
    out, into = topology.out(rank, n, step), topology.into(rank, n, step)
    keep = max(0.0, float(topology.self_weight(rank, n, step)))
    # Sends begin with the right-hand neighbour, so that not all ranks begin with the same one.
    onwards = sorted(out, key=lambda peer: (peer - rank) % n)
    return Route(
        {peer: float(out[peer]) for peer in onwards},
        {peer: float(into[peer]) for peer in sorted(into)},
        keep,
    )
