"""Two thousand damaged tables: no traceback, and what is accepted round-trips."""

from __future__ import annotations

import pytest
from tests.data.fuzz import fuzz


def test_a_few_damaged_tables_are_accepted_or_refused_in_words():
    assert sum(fuzz(60, is_fixed=True).values()) >= 60


@pytest.mark.slow
def test_two_thousand_damaged_tables_are_accepted_or_refused_in_words():
    counts = fuzz(2_000, is_fixed=True)
    assert counts["accepted"] > 100
    assert counts["refused"] > 500
