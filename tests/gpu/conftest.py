"""A table of what was found on the card, when all tests are over."""

from __future__ import annotations

from typing import Any

import pytest

ROW = "row of a card"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows: list[Any] = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                rows += [
                    value for name, value in getattr(report, "user_properties", ()) if name == ROW
                ]
    if rows:
        terminalreporter.section("card")
        for row in rows:
            terminalreporter.write_line(str(row))
