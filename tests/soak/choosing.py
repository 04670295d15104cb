"""Which soak tests run, how many cases each has, and the table at the end.

A soak test counts: it plants many faults and wants to survive all of them. `--rounds N` multiplies
the number of cases. `--slice HASH` runs only a part. The hash chooses which, so the commits of a
project together run all of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import pytest

PLANTED = "faults planted"
SURVIVED = "faults survived"
LINES = "lines to print"
HALF_AN_HOUR_S = 1800
SHORT_S = 20.0
Problems = Iterable[list[str]]
"""The problems of each case; an empty list for a case without any."""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak", "soak tests")
    group.addoption(
        "--rounds", type=int, default=1, metavar="N", help="N times as many cases in each soak test"
    )
    group.addoption("--slice", metavar="HASH", help="only the soak tests that this text chooses")
    group.addoption(
        "--slice-seconds",
        type=float,
        default=180.0,
        metavar="S",
        help="processor time of such a slice (default: 180, a minute and a half on two cores)",
    )


def seconds_of(item: pytest.Item) -> float:
    """The processor time that a soak test names in its marker."""
    marker = item.get_closest_marker("soak")
    return float(marker.kwargs.get("seconds", 10)) if marker else 0.0


def choose_slice(items: Sequence[pytest.Item], text: str, seconds: float) -> set[str]:
    """The node ids of a part of the soak tests that takes about so long; another for each text.

    Half of the time is for those of a few seconds, which are many: else a storm would take the
    place of dozens.
    """

    def place(item: pytest.Item) -> str:
        return hashlib.sha256(f"{text} {item.nodeid}".encode()).hexdigest()

    chosen: set[str] = set()
    short = [item for item in items if seconds_of(item) <= SHORT_S]
    for group in (short, [item for item in items if item not in short]):
        left = seconds / 2
        is_first = True
        for item in sorted(group, key=place):
            if is_first or seconds_of(item) <= left:
                chosen.add(item.nodeid)
                left = left - seconds_of(item)
                is_first = False
    return chosen


def set_time_limits(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Give each soak test half an hour a round."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(HALF_AN_HOUR_S * config.getoption("--rounds")))


def leave_out_others(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the soak tests that are not in the slice."""
    text = config.getoption("--slice")
    if text is None:
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    chosen = choose_slice(soak, text, config.getoption("--slice-seconds"))
    left_out = [item for item in soak if item.nodeid not in chosen]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


Survive = Callable[[Problems], None]


def survive_with(record: Callable[[str, object], None]) -> Survive:
    """Counts the cases and those without a problem for the table; fails with the problems."""

    def survive(problems: Problems) -> None:
        cases = list(problems)
        record(PLANTED, len(cases))
        record(SURVIVED, sum(not case for case in cases))
        assert cases, "no fault was planted"
        assert [case[0] for case in cases if case] == []

    return survive


def print_table(terminal: pytest.TerminalReporter) -> None:
    """A row for each test that planted faults: how many, and how many the project survived."""
    rows: list[tuple[str, int, int]] = []
    lines: list[str] = []
    for reports in terminal.stats.values():
        for report in reports:
            found = dict(getattr(report, "user_properties", ()))
            if PLANTED in found and report.when == "call":
                lines += found.get(LINES, [])
                rows.append((report.nodeid.partition("::")[2], found[PLANTED], found[SURVIVED]))
    if rows:
        terminal.section("faults")
        terminal.write_line(f"{'planted':>9} {'survived':>9}  test")
        for name, planted, survived in sorted(rows):
            terminal.write_line(f"{planted:>9} {survived:>9}  {name}")
        terminal.write_line(
            f"{sum(row[1] for row in rows):>9} {sum(row[2] for row in rows):>9}  in all"
        )
    for line in lines:
        terminal.write_line(line)
