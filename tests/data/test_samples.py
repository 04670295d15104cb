"""The built-in headlines: the same everywhere, any number of them, with a known best accuracy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC

from flatout.data.samples import HeadlinesConfig, HeadlinesTable
from flatout.errors import UserError


def read(split: str = "train", rows_per_block: int = 65_536, **settings) -> pa.Table:
    table = HeadlinesTable(HeadlinesConfig(**settings), split)
    return pa.Table.from_batches(table.blocks(["text", "label", "topic"], rows_per_block))


def test_the_same_settings_give_the_same_rows_in_any_blocks():
    assert read(rows=20_000).equals(read(rows=20_000, rows_per_block=1_000))


def test_a_smaller_sample_is_the_beginning_of_a_larger_one():
    assert read(rows=40_000).slice(0, 17_000).combine_chunks().equals(read(rows=17_000).combine_chunks())


def test_splits_share_no_rows():
    train, test = read(rows=5_000)["text"], read("test", eval_rows=2_000)["text"]
    assert pc.sum(pc.is_in(test, train)).as_py() <= 2


def test_the_best_accuracy_is_one_less_the_noise():
    table = HeadlinesTable(HeadlinesConfig(eval_rows=20_000, noise=0.1), "test")
    assert table.known_ceiling() == pytest.approx(0.9, abs=0.01)


def test_lengths_spread_like_headlines():
    lengths = np.array([len(text.split()) for text in read(rows=10_000)["text"].to_pylist()])
    assert 9 < lengths.mean() < 12
    assert np.percentile(lengths, 95) in (16, 17, 18)
    assert 25 < lengths.max() < 40


def test_no_class_is_rare_and_topics_can_be_read_off_the_text():
    train, test = read(rows=12_000), read("test")
    shares = pc.value_counts(train["label"]).field(1).to_numpy() / 12_000
    assert shares.min() > 0.03
    features = TfidfVectorizer()
    model = LinearSVC().fit(features.fit_transform(train["text"].to_pylist()), train["topic"].to_pylist())
    answers = model.predict(features.transform(test["text"].to_pylist()))
    assert (answers == np.array(test["topic"].to_pylist())).mean() > 0.96


@pytest.mark.parametrize("classes", [2, 12, 41])
def test_any_number_of_classes(classes):
    assert len(pc.unique(read(rows=16_000, classes=classes)["label"])) == classes


def test_the_fingerprint_changes_with_the_settings():
    prints = {
        HeadlinesTable(HeadlinesConfig(seed=s), split).fingerprint() for s in (1, 2) for split in ("train", "test")
    }
    assert len(prints) == 4


def test_settings_out_of_range_name_themselves():
    with pytest.raises(UserError, match=r"data.sample.noise: 0.7 \(0 to below 0.5\)"):
        HeadlinesConfig(noise=0.7)
