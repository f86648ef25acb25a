"""What a simulated run says about a network: step times, bytes, and who waited for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
    place = f"{_many(world.n, 'rank')} on {_many(nodes, 'node')}"
    links = f"{show_duration(net.latency)}, {show_rate(8 * net.bandwidth)}"
    besides = "" if measured else " (only comm.compute takes time: see --compute)"
    payload = [net.scale * sum(s.payload_bytes for s in r.stats) for r in recorders]
    messages = [sum(s.messages for s in r.stats) for r in recorders]
    waited = [sum(w.end - w.begin for w in r.waits) for r in recorders]
    computed = [sum(c.end - c.begin for c in r.computes) for r in recorders]
    return "\n".join(
        [
            f"world      {place}, {links}, seed {world.seed}",
            f"time       {show_duration(max(clocks))}{besides}",
            f"step       {_step_words(steps_of(recorders, step), step)}",
            f"sent       {_spread(payload, show_bytes)}",
            f"messages   {_spread(messages, '{:.0f}'.format)}",
            f"waiting    {_spread(waited, show_duration)}, {_share(waited, clocks):.1%} of it",
            f"computing  {_spread(computed, show_duration)}, {_share(computed, clocks):.1%}",
            *_waits(recorders),
        ]
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _step_words(steps: Steps | None, wanted: str | None) -> str:
    if steps is None:
        said = "" if wanted is None else f" with {wanted!r} in its description"
        return f"none: no call{said} is made twice"
    several = len(steps.seconds) > 1
    values = quantiles(steps.seconds, n=4, method="inclusive") if several else steps.seconds * 3
    low, middle, high = map(show_duration, values)
    return (
        f"{middle}, quartiles {low} and {high}, of {_many(len(steps.seconds), 'step')}, "
        f"each from\n{'':11}{steps.call} to the next"
    )


def _spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    text = f"{show(median(values))} a rank"
    low, high = show(min(values)), show(max(values))
    return text if low == high else f"{text} (median; {low} to {high})"


def _share(seconds: Sequence[float], clocks: Sequence[float]) -> float:
    return median(s / clock if clock else 0.0 for s, clock in zip(seconds, clocks, strict=True))


def _waits(recorders: Sequence[Recorder]) -> list[str]:
    """The ranks that were waited for longest, and the pairs that waited longest, as a table."""
    everybody: dict[int, _Waited] = {}
    pairs: dict[tuple[int, int], _Waited] = {}
    for recorder in recorders:
        for wait in recorder.waits:
            for peer, rest in wait.rests.items():
                if peer == recorder.index:  # it came last itself: then it is the network
                    continue
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
