"""Texts are rebuilt from their grams: exactly where grams leave no doubt, likeliest first where
they do.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.bits.people import people as people_table

from flatout.bits.exposure import by_frequency, conclusion, count_grams, dice_of, most_and_least
from flatout.bits.grams import GramIndex, join_fields, pad_with_blanks
from flatout.bits.people import FIELDS
from flatout.bits.reconstruct import LetterOrder, Rates, Reconstructor, measure_rates, shape_of


@pytest.fixture(scope="module")
def people() -> tuple[list[str], GramIndex, LetterOrder]:
    """Raw texts, the grams they hold, and what they look like."""
    table = people_table(1_500)
    raw = join_fields([table[name].combine_chunks() for name in FIELDS])
    grams = GramIndex()
    grams.rows(pad_with_blanks(raw))
    return (
        raw.to_pylist(),
        GramIndex(grams.names, is_frozen=True),
        LetterOrder.learn(raw, grams.names),
    )


def certain(texts: list[str], grams: GramIndex, sureness: float = 0.999) -> np.ndarray:
    ids, lengths = grams.rows(pad_with_blanks(pa.array(texts, pa.large_string())))
    found = np.full((len(texts), len(grams)), 1 - sureness, dtype=np.float32)
    found[np.repeat(np.arange(len(texts)), lengths), ids] = sureness
    return found


@given(st.lists(st.permutations("abcdefgh012"), min_size=1, max_size=8), st.integers(2, 11))
def test_a_text_whose_grams_allow_one_walk_is_found_at_the_first_try(letters, length):
    texts = ["".join(each[:length]) for each in letters]
    raw = pa.array(texts, pa.large_string())
    grams = GramIndex()
    grams.rows(pad_with_blanks(raw))
    order = LetterOrder.learn(raw, grams.names)
    found = Reconstructor(grams.names, order).candidates(certain(texts, grams))
    assert [next(iter(each)) for each in found] == texts


def test_most_texts_are_among_the_first_ten(people):
    texts, grams, order = people
    wanted = texts[:200]
    found = measure_rates(
        list(Reconstructor(grams.names, order).candidates(certain(wanted, grams))), wanted
    )
    assert found.at_10 > 0.6
    assert found.at_1 <= found.at_5 <= found.at_10
    assert found.at_1 + found.wrong + found.without == pytest.approx(1.0)


def test_every_walk_is_made_of_grams_that_follow_each_other(people):
    _, grams, order = people
    random = np.random.default_rng(0)
    noisy = random.random((20, len(grams))).astype(np.float32)
    for each in Reconstructor(grams.names, order).candidates(noisy):
        assert len(each) <= 10
        assert list(each.values()) == sorted(each.values(), reverse=True)
        for text in each:
            whole = f" {text} "
            assert all(
                whole[place : place + 2] in set(grams.names) for place in range(len(whole) - 1)
            )


def test_records_are_rebuilt_alike_alone_and_among_many(people):
    texts, grams, order = people
    probabilities = certain(texts[:300], grams, 0.9)
    reconstructor = Reconstructor(grams.names, order)
    together = list(reconstructor.candidates(probabilities))
    for place in (0, 17, 255, 256, 299):
        (alone,) = reconstructor.candidates(probabilities[place : place + 1])
        assert next(iter(alone)) == next(iter(together[place]))


def test_a_sure_gram_counts_for_more_than_a_doubtful_one():
    names = [" a", "an", "nn", "na", "a ", "am", "ma"]
    order = LetterOrder.learn(pa.array(["anna", "ama"]), names)
    probabilities = np.array([[0.99, 0.9, 0.9, 0.9, 0.99, 0.02, 0.02]], dtype=np.float32)
    (found,) = Reconstructor(names, order).candidates(probabilities)
    assert next(iter(found)) == "anna"


def test_the_order_of_letters_is_kept_on_disk(people, tmp_path):
    _, grams, order = people
    order.save(tmp_path / "letters.safetensors")
    loaded = LetterOrder.load(tmp_path / "letters.safetensors", grams.names)
    assert np.array_equal(loaded.log_next, order.log_next)
    assert (loaded.shapes, loaded.longest, loaded.letters) == (
        order.shapes,
        order.longest,
        order.letters,
    )


def test_what_usually_follows_two_letters_is_likelier():
    names = [" a", "an", "nn", "na", "a ", "nt", "ta"]
    order = LetterOrder.learn(pa.array(["anna"] * 9 + ["anta"]), names)
    after = dict(zip(order.letters, order.log_next[names.index("an")], strict=True))
    assert after["n"] > after["t"] > after["a"]
    assert np.exp(order.log_next).sum(axis=1) == pytest.approx(np.ones(len(names)), abs=1e-4)


def test_shapes_tell_letters_digits_and_signs_apart():
    assert shape_of("ann lée12/5/1994") == "a a00/0/0000"


def test_rates_count_ranks_and_records_without_a_candidate():
    found = [dict.fromkeys(texts, 0.0) for texts in ("ab", "xb", "", "y")]
    assert measure_rates(found, ["a", "b", "c", "d"]) == Rates(0.25, 0.5, 0.5, 0.5, 0.25, 4)


def test_grams_are_counted_sorted_and_gathered_by_frequency():
    probabilities = torch.tensor([[0.9, 0.1, 0.8]] * 6)
    targets = torch.tensor([[1.0, 1.0, 0.0]] * 6)
    counts = count_grams(probabilities, targets, 0.5)
    assert dice_of(counts).tolist() == [1.0, 0.0, 0.0]
    most, least = most_and_least(("aa", "bb", "cc"), counts)
    assert [row["gram"] for row in most] == ["aa", "bb"] == [row["gram"] for row in reversed(least)]
    rows = by_frequency(counts, np.array([100, 3, 3]))
    assert [(row["from"], row["grams"], row["dice"]) for row in rows] == [(2, 1, 0.0), (64, 1, 1.0)]


@pytest.mark.parametrize(
    ("dice", "words"),
    [
        (0.25, "Hardly anything"),
        (0.4, "Some of"),
        (0.8, "Much of"),
        (0.99, "Nearly all"),
    ],
)
def test_the_conclusion_is_in_plain_words(dice, words):
    said = conclusion(dice, 0.23, Rates(0.5, 0.6, 0.7, 0.5, 0.0, 1000))
    assert said[0].startswith(words)
    assert "no proof of safety" in said[-1]
