"""Which soak tests a commit has: short ones get half of the time, and commits together have all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.soak.choosing import choose_slice, seconds_of


@dataclass(frozen=True)
class Item:
    nodeid: str
    seconds: float

    def get_closest_marker(self, name: str) -> Any:
        assert name == "soak"
        return pytest.mark.soak(seconds=self.seconds).mark


ITEMS: Any = [
    *(Item(f"short {n}", 2 + n % 3) for n in range(60)),
    *(Item(f"long {n}", 30 + 40 * n) for n in range(8)),
]


def test_half_of_a_slice_is_for_short_tests_and_half_for_long_ones():
    chosen = [item for item in ITEMS if item.nodeid in choose_slice(ITEMS, "a commit", 80)]
    assert 37 < sum(seconds_of(item) for item in chosen if item.seconds <= 20) <= 40
    assert any(item.seconds > 20 for item in chosen)


def test_each_commit_has_another_slice_and_together_they_have_all():
    slices = [choose_slice(ITEMS, f"commit {number}", 120) for number in range(150)]
    assert slices[0] == choose_slice(ITEMS, "commit 0", 120) != slices[1]
    assert set.union(*slices) == {item.nodeid for item in ITEMS}
