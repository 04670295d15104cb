"""The tests that `regressions.md` names are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS / "regressions.md"


def named_tests(page: str) -> Iterator[tuple[str, str]]:
    """File and name of each test: `tests/a.py::b, ::c` names two of one file."""
    file = ""
    for match in re.finditer(r"(tests/[\w/]+\.py)|::(\w+)", page):
        if match[1]:
            file = match[1]
        else:
            yield file, match[2]


def test_each_test_that_the_table_of_regressions_names_is_there():
    missing = []
    count = 0
    for file, name in named_tests(PAGE.read_text(encoding="utf-8")):
        count += 1
        path = TESTS.parent / file
        if not path.is_file() or f"def {name}(" not in path.read_text(encoding="utf-8"):
            missing.append(f"{file}::{name}")
    assert not missing
    assert count > 150
