"""Sizes to try, the memory they will take, and where more rows stop to pay."""

from __future__ import annotations

import itertools

import pytest

from flatout.perf.tune.reading import divisors, doublings, first_guess, predicted_bytes

GB = 10**9


@pytest.mark.parametrize(
    ("memory", "rows"),
    [
        (12, 16),
        (16, 32),
        (24, 48),
        (40, 64),
        (80, 128),
    ],
)
def test_the_first_guess_is_the_guides_table_for_a_bert_on_128_tokens(memory, rows):
    guess = first_guess(memory * GB, 110_000_000, 128)
    assert guess == 1 << (rows.bit_length() - 1)  # 48 is no power of two


def test_the_first_guess_grows_with_smaller_models_and_shorter_rows():
    assert first_guess(16 * GB, 110_000_000, 512) == 8
    assert first_guess(16 * GB, 22_000_000, 128) == 128
    assert first_guess(16 * GB, 1000, 1) == 1024
    assert first_guess(1 * GB, 10**9, 4096) == 8


@pytest.mark.parametrize("share", [1, 2, 7, 48, 100, 128, 513])
def test_rows_at_once_divide_a_step_evenly(share):
    found = divisors(share)
    assert found[0] == 1
    assert found[-1] == share
    assert found == sorted(set(found))
    assert all(share % rows == 0 for rows in found)
    assert all(below * 2 <= above for below, above in itertools.pairwise(found))


def test_free_sizes_double_up_to_a_bound():
    assert doublings(8, 100) == [8, 16, 32, 64]
    assert doublings(8, 4) == []


def test_memory_is_predicted_from_one_size_without_what_every_size_takes():
    # 1 GB of process, 0.5 GB of gradients and means, 8 rows of 0.1 GB
    seen = [(8, int(2.3 * GB))]
    assert predicted_bytes(seen, 32, base=GB, fixed=GB // 2) == pytest.approx(4.7 * GB)


def test_memory_is_predicted_from_two_sizes_by_their_difference():
    seen = [(32, 5 * GB), (8, 2 * GB), (16, 3 * GB)]
    assert predicted_bytes(seen, 64, base=GB, fixed=0) == 9 * GB
    assert predicted_bytes([(8, GB), (16, GB)], 64, base=GB, fixed=0) == GB
