"""Many ranks' reports on one item made into one outcome."""

from collections.abc import Sequence
from typing import Any

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter

Phases = dict[str, pytest.TestReport]


class RanksRepr(TerminalRepr):
    """What went wrong, rank by rank."""

    def __init__(self, item: pytest.Item, parts: list[tuple[str, Any]]) -> None:
        self.parts = parts
        path, line, _ = item.location
        title, first = parts[0]
        crash = getattr(first, "reprcrash", None)
        text = crash.message if crash else str(first).strip()
        # pytest's short summary shows the message of `reprcrash`.
        self.reprcrash = ReprFileLocation(path, (line or 0) + 1, f"{title}: {text}")

    def toterminal(self, tw: TerminalWriter) -> None:
        for title, part in self.parts:
            tw.sep("-", title, bold=True)
            if hasattr(part, "toterminal"):
                part.toterminal(tw)
            else:
                tw.line(str(part))


def merge(
    item: pytest.Item, ranks: Sequence[Phases], trouble: tuple[str, str] | None, seconds: float
) -> list[pytest.TestReport]:
    """One set of reports for `item`; `trouble`: title and text of what ended its world."""
    every = [(r, phase) for r, phases in enumerate(ranks) for phase in phases.values()]
    failed = [(r, x) for r, x in every if x.failed]
    skipped = [(r, x) for r, x in every if x.skipped]
    expected = [x for _, x in skipped if hasattr(x, "wasxfail")]
    if expected:
        # A strict xfail that fails as expected on some ranks passes on the others.
        failed = [(r, x) for r, x in failed if not str(x.longrepr).startswith("[XPASS(strict)]")]
    parts = [(f"rank {r} ({x.when})", x.longrepr) for r, x in failed]
    if trouble:
        parts.append(trouble)
    call = _report(item, "call", seconds)
    if parts:
        call.outcome, call.longrepr = "failed", RanksRepr(item, parts)
    elif skipped:
        call.outcome, call.longrepr = "skipped", skipped[0][1].longrepr
        if expected:
            call.wasxfail = expected[0].wasxfail
    for r, phases in enumerate(ranks):
        last = list(phases.values())[-1:]
        call.sections += [(f"{title} (rank {r})", text) for x in last for title, text in x.sections]
    if every:
        call.user_properties = every[0][1].user_properties
    return [_report(item, "setup"), call, _report(item, "teardown")]


def unanimous(ranks: Sequence[Phases]) -> bool:
    """Whether all ranks failed, or none."""
    return len({any(x.failed for x in phases.values()) for phases in ranks}) == 1


def _report(item: pytest.Item, when: Any, seconds: float = 0.0) -> pytest.TestReport:
    words: Any = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(
        item.nodeid, item.location, words, "passed", None, when, duration=seconds
    )
