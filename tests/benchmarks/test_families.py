"""The bench's table of families: every family is in it, and in the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.families import PADDED_FAMILIES, family_claims, largest_differences

from flatout.models.encoder.transformer import FLAT_FAMILIES
from tests.params import at_once

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


@pytest.mark.parametrize("family", ["deberta-v2", *at_once(of=["albert", "deberta"], seconds=1)])
def test_a_family_differs_from_the_library_by_less_than_rounding(family):
    of_logits, of_gradients = largest_differences(family)
    assert of_logits < 1e-5
    assert of_gradients < 1e-5
    assert (of_logits > 0) == (family in FLAT_FAMILIES), "flat rows are summed in another order"


def test_the_page_lists_every_family_and_whether_it_is_flat():
    rows = re.findall(
        r"^\| ([\w-]+) \| (yes|no, padded) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert dict(rows) == dict.fromkeys(FLAT_FAMILIES, "yes") | dict.fromkeys(
        PADDED_FAMILIES, "no, padded"
    )


@pytest.mark.soak(seconds=60)
def test_all_families_are_claimed_and_hold():
    found = list(family_claims())
    assert len(found) == 2 * (len(FLAT_FAMILIES) + len(PADDED_FAMILIES))
    assert all(claim.holds for claim in found)
