"""The built-in headlines: the same everywhere, any number of them, with a known best accuracy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import xxhash
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.naive_bayes import MultinomialNB
from tests.data.whole_tables import whole_table
from tests.refusals import refused

from flatout.data.samples.headlines import GENERATOR_VERSION, HeadlinesConfig, HeadlinesTable
from flatout.errors import UserError


def read(split: str = "train", rows_per_block: int = 65_536, **settings) -> pa.Table:
    table = HeadlinesTable(HeadlinesConfig(**settings), split)
    return whole_table(table, ["text", "label", "topic"], rows_per_block)


def bag_of_words_accuracy(train: pa.Table, test: pa.Table, column: str) -> float:
    features = TfidfVectorizer()
    model = MultinomialNB(alpha=0.1).fit(
        features.fit_transform(train["text"].to_pylist()), train[column].to_pylist()
    )
    answers = model.predict(features.transform(test["text"].to_pylist()))
    return float((answers == np.array(test[column].to_pylist())).mean())


def test_the_same_settings_give_the_same_rows_in_any_blocks():
    assert read(rows=20_000).equals(read(rows=20_000, rows_per_block=1_000))


def test_blocks_hold_as_many_rows_as_asked_for():
    table = HeadlinesTable(HeadlinesConfig(rows=40_000), "train")
    assert [block.num_rows for block in table.blocks(["label"], 20_000)] == [20_000, 12_768, 7_232]
    assert sum(block.num_rows for block in table.blocks(["label"])) == table.num_rows


def test_a_smaller_sample_is_the_beginning_of_a_larger_one():
    assert (
        read(rows=40_000)
        .slice(0, 17_000)
        .combine_chunks()
        .equals(read(rows=17_000).combine_chunks())
    )


def test_columns_come_in_the_order_asked_for_and_alone_as_together():
    table = HeadlinesTable(HeadlinesConfig(rows=300), "train")
    (whole,) = table.blocks(["text", "label", "topic"])
    (some,) = table.blocks(["topic", "label"])
    assert some.schema.names == ["topic", "label"]
    assert some.equals(whole.select(["topic", "label"]))


def test_the_rows_of_a_generator_version_never_change():
    # Whoever changes the rows raises GENERATOR_VERSION, so that stores of the old rows are not
    # taken for the new ones.
    rows = read(rows=200, seed=7)
    found = xxhash.xxh3_64_hexdigest(
        "\n".join([*rows["text"].to_pylist(), *rows["label"].to_pylist()]).encode()
    )
    assert (GENERATOR_VERSION, found) == (1, "66c8ae4f832ddf65")


def ceiling(rows: pa.Table) -> float:
    """The best accuracy: the share of labels that were not changed."""
    return pc.mean(pc.equal(rows["label"], rows["topic"]).cast(pa.int8())).as_py()


def test_splits_share_no_rows():
    splits = [read(split, rows=5_000, eval_rows=2_000) for split in ("train", "validation", "test")]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert pc.sum(pc.is_in(splits[second]["text"], splits[first]["text"])).as_py() <= 2
    assert splits[1]["topic"].to_pylist() != splits[2]["topic"].to_pylist()


@pytest.mark.parametrize("noise", [0.0, 0.06, 0.3])
def test_the_best_accuracy_is_one_less_the_noise(noise):
    assert ceiling(read("test", eval_rows=20_000, noise=noise)) == pytest.approx(
        1 - noise, abs=0.01
    )


def test_changed_labels_fall_on_every_other_class_alike():
    rows = read(rows=16_000, noise=0.4, classes=4)
    topics, labels = (np.array(rows[name].to_pylist()) for name in ("topic", "label"))
    of_politics = labels[(topics == "politics") & (labels != topics)]
    shares = np.unique(of_politics, return_counts=True)[1] / len(of_politics)
    assert shares == pytest.approx([1 / 3] * 3, abs=0.04)


def test_lengths_spread_like_headlines():
    lengths = np.array([len(text.split()) for text in read(rows=10_000)["text"].to_pylist()])
    assert 9 < lengths.mean() < 12
    assert np.median(lengths) in (10, 11)
    assert np.percentile(lengths, 95) in (16, 17, 18)
    assert 25 < lengths.max() < 40


def test_texts_have_capitals_numbers_accents_and_punctuation():
    texts = read(rows=4_000)["text"]
    for pattern in (r"^([A-Z]\S* )+[A-Z]\S*$", r"^\d", r"[éö]", r"\?$", r"!$", r"\.\.\.$"):
        assert (
            0.01 < pc.mean(pc.match_substring_regex(texts, pattern).cast(pa.int8())).as_py() < 0.99
        ), pattern


def test_classes_differ_in_size_and_none_is_rare():
    shares = np.sort(pc.value_counts(read(rows=16_000)["label"]).field(1).to_numpy() / 16_000)
    assert shares[0] > 0.04
    assert shares[-1] > 2 * shares[0]


def test_topics_can_be_read_off_the_text_and_many_rows_teach_what_few_do_not():
    train = read(rows=20_000)
    test = read("test")
    assert bag_of_words_accuracy(train, test, "topic") >= 0.97
    best = ceiling(test)
    assert bag_of_words_accuracy(train, test, "label") > 0.97 * best
    assert bag_of_words_accuracy(train.slice(0, 300), test, "label") < 0.7 * best


@pytest.mark.parametrize("classes", [2, 12, 41, 64])
def test_any_number_of_classes(classes):
    assert len(pc.unique(read(rows=16_000, classes=classes)["label"])) == classes


def test_the_fingerprint_changes_with_the_settings():
    prints = {
        HeadlinesTable(HeadlinesConfig(seed=s), split).fingerprint()
        for s in (1, 2)
        for split in ("train", "test")
    }
    assert len(prints) == 4


MISTAKES = [
    ({"rows": 0}, "data.sample.rows", "1 or more"),
    ({"eval_rows": -1}, "data.sample.eval_rows", "1 or more"),
    ({"classes": 65}, "data.sample.classes", "2 to 64"),
    ({"noise": 0.7}, "data.sample.noise", "0 to below 0.5"),
    ({"noise": float("nan")}, "data.sample.noise", "0 to below 0.5"),
    ({"seed": -1}, "data.sample.seed", "0 to 2**63 - 1"),
    ({"seed": 2**63}, "data.sample.seed", "0 to 2**63 - 1"),
]


@pytest.mark.parametrize(("settings", "where", "allowed"), MISTAKES)
def test_settings_out_of_range_name_themselves(settings, where, allowed):
    with refused(where, *settings.values(), allowed=allowed):
        HeadlinesConfig(**settings)


def test_the_largest_seed_works_and_an_unknown_split_is_told():
    assert read("test", seed=2**63 - 1, eval_rows=5).num_rows == 5
    with pytest.raises(UserError, match=r"split: 'tset' \(train, validation, test\)"):
        HeadlinesTable(HeadlinesConfig(), "tset")
