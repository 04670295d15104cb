"""A wanted number of rows a step is divided exactly, or refused with numbers that can be."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as some
from tests.refusals import refused

from flatout.data.feeding import divided
from flatout.data.texts.settings import TextDataConfig
from flatout.errors import UserError


@pytest.mark.parametrize(
    ("wanted", "most", "world", "expected"),
    [
        (64, 16, 1, (16, 4)),
        (64, 128, 1, (64, 1)),
        (512, 64, 4, (64, 2)),
        (200, 128, 1, (100, 2)),
        (7, 128, 7, (1, 1)),
    ],
)
def test_the_largest_batch_that_divides_a_share_is_taken(wanted, most, world, expected):
    assert divided(wanted, most, world) == expected


@given(some.integers(1, 3000), some.integers(1, 300), some.integers(1, 9))
def test_the_product_is_exact_and_what_is_offered_instead_works(wanted, most, world):
    try:
        batch, accumulate = divided(wanted, most, world)
    except UserError as error:
        offered = [
            int(number)
            for number in re.findall(r"\d+", str(error).partition("Set ")[2].partition(",")[0])
        ]
        assert offered
        assert wanted not in offered
        for number in offered:
            divided(number, most, world)
        between = range(offered[0] + 1, wanted) if offered[0] < wanted else range(1, wanted)
        for number in between:
            with pytest.raises(UserError):
                divided(number, most, world)
    else:
        assert batch * accumulate * world == wanted
        assert batch <= most
        assert accumulate == 1 or 2 * batch >= most


def test_what_cannot_be_divided_names_the_nearest_that_can():
    with refused("data.effective_batch", 100, "8 devices", fix="96 or 104"):
        divided(100, 16, 8)


@pytest.mark.parametrize(
    "other",
    [
        {"accumulate": 2},
        {"tokens_per_batch": 900},
    ],
)
def test_nothing_else_may_say_how_many_rows_a_step_has(other):
    with pytest.raises(UserError, match=f"data.effective_batch: 64 .*{next(iter(other))}"):
        TextDataConfig(effective_batch=64, **other)
