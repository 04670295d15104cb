"""Lengths of rows, and what cutting loses."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.checks.lengths import Lengths

lengths = st.lists(st.integers(0, 300) | st.integers(65_000, 90_000), min_size=1, max_size=80)


@given(lengths, st.integers(0, 300))
def test_what_is_cut_is_what_slicing_every_row_loses(rows, longest):
    found = Lengths()
    for piece in np.array_split(np.array(rows), 3):
        found.add(piece)
    assert found.rows == len(rows)
    assert found.tokens == sum(rows)
    assert found.longest == max(rows)
    assert found.cut_rows(longest) == sum(row > longest for row in rows)
    assert found.cut_tokens(longest) == sum(max(0, row - longest) for row in rows)


@given(lengths)
def test_the_fine_length_cuts_under_one_row_in_a_hundred_and_one_less_does_not(rows):
    found = Lengths()
    found.add(np.array(rows))
    fine = found.fine_length()
    assert found.cut_rows(fine) <= 0.01 * len(rows)
    assert fine == 0 or found.cut_rows(fine - 1) > 0.01 * len(rows)


def test_the_report_says_what_is_lost_and_what_would_not_be():
    found = Lengths()
    found.add(np.array([10] * 95 + [40] * 5))
    assert (
        found.truncation(20)
        == "cut at 20: 5 rows (5.00%), 100 tokens (8.70%) lost; 40 would cut under 1%"
    )
    assert found.truncation(40) == ""
    assert found.is_cut_much(20)
    assert not found.is_cut_much(40)


def test_the_histogram_holds_every_row():
    found = Lengths()
    found.add(np.array([0, 1, 2, 3, 4, 7, 8, 70_000]))
    bars = found.as_dict()["histogram"]
    assert sum(bar["rows"] for bar in bars) == 8
    assert [(bar["from"], bar["to"]) for bar in bars][:4] == [
        (0, 0),
        (1, 1),
        (2, 3),
        (4, 7),
    ]
