"""What a simulated run says about a network: step times, bytes, and who waited for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple, TypeVar

from relaxmpi.primitives.recorder import Recorder
from relaxmpi.primitives.simulation.simulated import SimulatedWorld
from relaxmpi.units import show_bytes, show_duration, show_rate

__all__ = ["Steps", "forecast", "steps_of"]

_PEERS, _PAIRS = 3, 5
_Key = TypeVar("_Key", int, tuple[int, int])


class Steps(NamedTuple):
    """The steps of a program.

    Attributes:
        call: What ends a step.
        seconds: Between the ends of one step and the next, each on the last rank that ends it.
    """

    call: str
    seconds: list[float]


def steps_of(recorders: Sequence[Recorder], wanted: str | None = None) -> Steps | None:
    """Find the steps: from one completion to the next of the call that rank 0 makes most often.

    Calls are the same if verb, operation, dtype, shape, codec and name are; among several that
    are made equally often, such as the buckets of a model, the one that comes last counts.

    Args:
        recorders: Of all ranks.
        wanted: Look only at calls whose description contains this.

    Returns:
        None where no call is completed twice.
    """
    counts: Counter[str] = Counter()
    for span in recorders[0].calls:
        text = " ".join(span.what)
        if not span.inner and span.end is not None and (wanted is None or wanted in text):
            counts[text] += 1
    most = max(counts.values(), default=0)
    if most < 2:
        return None
    call = [text for text, count in counts.items() if count == most][-1]
    ends = [
        [s.end for s in r.calls if s.end is not None and not s.inner and " ".join(s.what) == call]
        for r in recorders
    ]
    # Ranks of another part of a split make other calls, or more of them, or fewer.
    together = [completed for completed in ends if len(completed) == most]
    last = [max(times) for times in zip(*together, strict=True)]
    return Steps(call, [b - a for a, b in pairwise(last)])


def forecast(
    recorders: Sequence[Recorder],
    clocks: Sequence[float],
    world: SimulatedWorld,
    step: str | None = None,
    measured: bool = False,
) -> str:
    """Return the report of a run as text.

    Args:
        recorders: Of all ranks.
        clocks: Virtual seconds at which each rank ended.
        world: Where it ran.
        step: What ends a step, see `steps_of`.
        measured: Whether real computation was counted.
    """
    net, nodes = world.network, len(set(world.nodes))
    rows = [
        (
            "world",
            f"{_many(world.n, 'rank')} on {_many(nodes, 'node')}, {show_duration(net.latency)}, "
            f"{show_rate(8 * net.bandwidth)}, seed {world.seed}",
        ),
        ("time", show_duration(max(clocks)) + ("" if measured else " besides real computation")),
        *_step_rows(steps_of(recorders, step), step),
        *_sent(recorders, net.scale),
        *_shares(recorders, clocks),
    ]
    lines = [f"{title:<10}{text}" for title, text in rows]
    return "\n".join(["", *lines, *_waits(recorders)])


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _step_rows(steps: Steps | None, wanted: str | None) -> list[tuple[str, str]]:
    if steps is None:
        said = "" if wanted is None else f" with {wanted!r} in its description"
        return [("step", f"none: no call{said} is made twice")]
    low, middle, high = (
        quantiles(steps.seconds, n=4, method="inclusive")
        if len(steps.seconds) > 1
        else steps.seconds * 3
    )
    return [
        (
            "step",
            f"{show_duration(middle)} (median of {len(steps.seconds)}; quartiles "
            f"{show_duration(low)} and {show_duration(high)}), from the end of one",
        ),
        ("", f"{steps.call} to that of the next"),
    ]


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)


def _sent(recorders: Sequence[Recorder], scale: float) -> list[tuple[str, str]]:
    payload = [scale * sum(s.payload_bytes for s in r.stats) for r in recorders]
    messages = [sum(s.messages for s in r.stats) for r in recorders]
    middle, low, high = _spread(payload)
    several, fewest, most = _spread(messages)
    return [
        (
            "sent",
            f"{show_bytes(middle)} a rank (median; {show_bytes(low)} to {show_bytes(high)}) in "
            f"{several:.0f} messages ({fewest} to {most})",
        )
    ]


def _shares(recorders: Sequence[Recorder], clocks: Sequence[float]) -> list[tuple[str, str]]:
    rows = []
    for title, seconds in (
        ("waiting", [sum(w.end - w.begin for w in r.waits) for r in recorders]),
        ("computing", [sum(c.end - c.begin for c in r.computes) for r in recorders]),
    ):
        middle, low, high = _spread(seconds)
        share = median(s / clock if clock else 0.0 for s, clock in zip(seconds, clocks, strict=True))
        rows.append(
            (
                title,
                f"{show_duration(middle)} a rank (median; {show_duration(low)} to "
                f"{show_duration(high)}), {share:.1%} of the time",
            )
        )
    return rows


def _waits(recorders: Sequence[Recorder]) -> list[str]:
    """The ranks that were waited for longest, and the pairs that waited longest, as a table."""
    everybody: dict[int, _Waited] = {}
    pairs: dict[tuple[int, int], _Waited] = {}
    for recorder in recorders:
        for wait in recorder.waits:
            for peer, rest in wait.rests.items():
                everybody[peer] = everybody.get(peer, _Waited()).plus(*rest)
                pair = recorder.index, peer
                pairs[pair] = pairs.get(pair, _Waited()).plus(*rest)
    if not pairs:
        return []
    rows = [("who waited", "for whom", "how long", "before it had sent")]
    for peer, waited in _longest(everybody, _PEERS):
        rows.append(("all together", f"rank {peer}", *waited.words()))
    for (rank, peer), waited in _longest(pairs, _PAIRS):
        rows.append((f"rank {rank}", f"rank {peer}", *waited.words()))
    return ["", *(f"{who:<14}{whom:<12}{long:>12}{late:>20}" for who, whom, long, late in rows)]


class _Waited(NamedTuple):
    """Seconds, and how many of them passed before the other had sent."""

    seconds: float = 0.0
    late: float = 0.0

    def plus(self, seconds: float, late: float) -> _Waited:
        """Add."""
        return _Waited(self.seconds + seconds, self.late + late)

    def words(self) -> tuple[str, str]:
        """Return both as text."""
        return show_duration(self.seconds), show_duration(self.late)


def _longest(waited: dict[_Key, _Waited], count: int) -> list[tuple[_Key, _Waited]]:
    # To the nanosecond, so that what only rounding tells apart comes in the order of ranks.
    return sorted(waited.items(), key=lambda item: (-round(item[1].seconds, 9), item[0]))[:count]
