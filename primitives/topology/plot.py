"""A picture of a topology."""

from __future__ import annotations

from math import cos, pi, sin
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from relaxmpi.primitives.topology.base import Topology

__all__ = ["plot"]


def plot(topology: Topology, n: int, path: str | Path | None, step: int) -> Any:
    """See `Topology.plot`."""
    try:
        from matplotlib.figure import Figure  # not pyplot: nothing global, no window
        from matplotlib.patches import FancyArrowPatch
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'relaxmpi[examples]'") from error
    side = max(5.0, n / 6)  # room for the names of the ranks
    figure = Figure(figsize=(side, side + 0.4))
    axes = figure.add_subplot()
    angle = [pi / 2 - 2 * pi * rank / n for rank in range(n)]
    place = [(cos(a), sin(a)) for a in angle]
    for rank in range(n):
        for peer, weight in topology.out(rank, n, step).items():
            # Bent, so that the two directions of a pair do not hide each other.
            arrow = FancyArrowPatch(
                place[rank],
                place[peer],
                arrowstyle="-|>",
                connectionstyle="arc3,rad=0.12",
                mutation_scale=12,
                shrinkA=11,
                shrinkB=11,
                linewidth=3 * weight**0.5,
                color="tab:blue",
                alpha=0.7,
            )
            axes.add_patch(arrow)
    for rank, (x, y) in enumerate(place):
        axes.text(
            x,
            y,
            str(rank),
            ha="center",
            va="center",
            bbox={"boxstyle": "circle", "facecolor": "white", "edgecolor": "black"},
        )
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
    axes.set_title(f"{topology!r}, n={n}" + (f", step {step}" if topology.varies else ""))
    axes.axis("off")
    if path is not None:
        figure.savefig(path)
    return figure
