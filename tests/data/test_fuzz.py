"""Some damaged tables: no traceback, and what is accepted round-trips.

`tests/soak` has ten thousand.
"""

from __future__ import annotations

from tests.data.fuzz import fuzz


def test_a_few_damaged_tables_are_accepted_or_refused_in_words():
    assert sum(fuzz(60, is_fixed=True).values()) >= 60
