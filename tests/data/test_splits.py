"""Splits by content: the same text in the same split, whatever stands around it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.tables.splits import Dealer, _mixed, hash_texts, split_by_hash, split_groups

any_texts = st.lists(st.text(max_size=12), min_size=1, max_size=40)


@given(any_texts, st.data())
def test_a_text_hashes_the_same_in_any_block(texts, data):
    whole = hash_texts(pa.array(texts, pa.string()))
    start = data.draw(st.integers(0, len(texts) - 1))
    stop = data.draw(st.integers(start, len(texts)))
    sliced = hash_texts(pa.array(texts, pa.string()).slice(start, stop - start))
    np.testing.assert_array_equal(sliced, whole[start:stop])
    large = hash_texts(pa.array(texts, pa.large_string()))
    np.testing.assert_array_equal(large, whole)


@given(any_texts)
def test_equal_texts_hash_alike_and_others_do_not(texts):
    hashes = hash_texts(pa.array(texts, pa.string()))
    assert len(set(hashes.tolist())) == len({text.encode() for text in texts})


def test_the_hash_is_the_same_everywhere():
    assert hash_texts(pa.array(["", "a", "flat out", "é"])).tolist() == KNOWN


KNOWN = [12035550249420947055, 3024699920291800666, 1269837618955542677, 13616274269771723189]


def assign_splits(texts: pa.Array, *, seed: int = 0, **shares: float) -> np.ndarray:
    return split_by_hash(hash_texts(texts, seed), **shares)


def test_shares_are_met_and_another_seed_draws_others():
    texts = pa.array([f"row {i}" for i in range(20_000)])
    splits = assign_splits(texts, validation_share=0.1, test_share=0.2, seed=0)
    shares = np.bincount(splits, minlength=3) / len(splits)
    np.testing.assert_allclose(shares, [0.7, 0.1, 0.2], atol=0.01)
    others = assign_splits(texts, validation_share=0.1, test_share=0.2, seed=1)
    assert (others != splits).mean() > 0.3


def test_a_grown_file_keeps_its_old_split():
    old = [f"row {i}" for i in range(500)]
    grown = [*old, "new", "rows"]
    before = assign_splits(pa.array(old), validation_share=0.1, test_share=0.1)
    after = assign_splits(pa.array(grown), validation_share=0.1, test_share=0.1)
    np.testing.assert_array_equal(after[:500], before)


@given(any_texts, st.integers(-5, 5), st.data())
def test_the_split_does_not_follow_block_boundaries(texts, seed, data):
    cut = data.draw(st.integers(0, len(texts)))
    array = pa.array(texts, pa.string())
    shares = {"validation_share": 0.3, "test_share": 0.3, "seed": seed}
    before = assign_splits(array[:cut], **shares)
    after = assign_splits(array[cut:], **shares)
    whole = assign_splits(array, **shares)
    np.testing.assert_array_equal(np.concatenate([before, after]), whole)


def by_hand(text: str) -> int:
    """The sum that the hash mixes, a byte at a time."""
    data = text.encode()
    multiplier = 0x9E3779B97F4A7C15
    bits = (1 << 64) - 1
    total = len(data)
    power = 1
    for byte in data:
        power = power * multiplier & bits
        total += (byte + 1) * power
    return total & bits


def test_long_texts_pass_through_the_window_unchanged():
    texts = ["x", "é" * 40_000, "", "y" * 65_536, "z" * 200_001, "end"]
    mixed = hash_texts(pa.array(texts))
    for place, text in enumerate(texts):
        assert mixed[place] == hash_texts(pa.array([text]))[0]
    sums = np.array([by_hand(text) for text in texts], dtype=np.uint64)
    seed = _mixed(np.array([0], dtype=np.uint64))
    np.testing.assert_array_equal(mixed, _mixed(sums ^ seed))


def test_a_missing_text_counts_as_an_empty_one():
    null, empty = hash_texts(pa.array([None, ""], pa.string()))
    assert null == empty
    assert len(hash_texts(pa.array([], pa.string()))) == 0


def classes_of(sizes: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 9))
def test_every_class_gives_each_split_its_share_to_one_row(sizes, pieces, seed):
    classes = np.random.default_rng(seed).permutation(classes_of(sizes))
    dealer = Dealer(len(sizes), validation_share=0.1, test_share=0.2)
    blocks = np.array_split(classes, pieces)
    splits = np.concatenate([dealer.deal(block) for block in blocks])
    for number, size in enumerate(sizes):
        own = splits[classes == number]
        _, validation, test = np.bincount(own, minlength=3)
        assert abs(validation - 0.1 * size) < 1.5
        assert abs(test - 0.2 * size) < 1.5
        assert abs(validation + test - 0.3 * size) < 1


def test_dealing_does_not_depend_on_how_the_rows_are_cut_into_blocks():
    classes = np.random.default_rng(0).integers(0, 4, 500)
    shares = {"validation_share": 0.15, "test_share": 0.1}
    whole = Dealer(4, **shares).deal(classes)
    dealer = Dealer(4, **shares)
    in_blocks = [dealer.deal(block) for block in np.array_split(classes, 7)]
    np.testing.assert_array_equal(np.concatenate(in_blocks), whole)


@given(st.lists(st.integers(1, 40), min_size=3, max_size=40), st.integers(0, 5))
def test_groups_stay_whole_and_every_split_gets_one(rows, seed):
    hashes = hash_texts(pa.array([f"group {i}" for i in range(len(rows))]))
    splits = split_groups(hashes, np.array(rows), validation_share=0.2, test_share=0.1, seed=seed)
    assert set(splits.tolist()) == {0, 1, 2}
    if len(rows) > 30:
        _, validation, test = np.bincount(splits, weights=rows) / sum(rows)
        two_groups = 2 * max(rows) / sum(rows)
        assert abs(validation - 0.2) < two_groups
        assert abs(test - 0.1) < two_groups


def test_groups_do_not_depend_on_their_order():
    hashes = hash_texts(pa.array([f"group {i}" for i in range(50)]))
    order = np.random.default_rng(0).permutation(50)
    shares = {"validation_share": 0.2, "test_share": 0.1}
    rows = np.arange(1, 51)
    splits = split_groups(hashes, rows, **shares)
    of_shuffled = split_groups(hashes[order], rows[order], **shares)
    np.testing.assert_array_equal(splits[order], of_shuffled)
