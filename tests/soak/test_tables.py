"""Damaged tables by ten thousands: no traceback, and accepted tables come back as they were."""

from __future__ import annotations

import pytest

from tests.data.fuzz import fuzz

pytestmark = pytest.mark.soak(seconds=200)


def test_damaged_tables_are_accepted_or_refused_in_words(rounds, survive):
    counts = fuzz(10_000 * rounds, is_fixed=rounds == 1)
    assert counts["accepted"] > 500
    assert counts["refused"] > 2_500
    survive([[]] * sum(counts.values()))
