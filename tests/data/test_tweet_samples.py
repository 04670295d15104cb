"""The built-in tweets, with moods and with tags: the same everywhere, and the best
score is known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import xxhash
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC
from tests.data.whole_tables import whole_table
from tests.refusals import refused

from flatout.data.samples.phrases import GENERATOR_VERSION
from flatout.data.samples.tagged_tweets import (
    ENTITY_TYPES,
    TAGS,
    TaggedTweetsConfig,
    TaggedTweetsTable,
)
from flatout.data.samples.tweets import MOODS, TweetsConfig, TweetsTable
from flatout.errors import UserError

SAMPLES = [(TweetsTable, TweetsConfig), (TaggedTweetsTable, TaggedTweetsConfig)]
SPLITS = ("train", "validation", "test")
both_samples = pytest.mark.parametrize(("table_class", "config_class"), SAMPLES)


def read(table: TweetsTable | TaggedTweetsTable, rows_per_block: int = 65_536) -> pa.Table:
    return whole_table(table, None, rows_per_block).combine_chunks()


def tweets(split: str = "train", **settings) -> pa.Table:
    return read(TweetsTable(TweetsConfig(**settings), split))


def tagged(split: str = "train", **settings) -> pa.Table:
    return read(TaggedTweetsTable(TaggedTweetsConfig(**settings), split))


def texts(rows: pa.Table) -> list[str]:
    if "text" in rows.column_names:
        return rows["text"].to_pylist()
    return [" ".join(tokens) for tokens in rows["tokens"].to_pylist()]


def names(rows: pa.Table, column: str = "clean_tags") -> list[tuple[str, str]]:
    """Every tagged name as its type and its words in small letters."""
    found: list[tuple[str, str]] = []
    for tokens, tags in zip(rows["tokens"].to_pylist(), rows[column].to_pylist(), strict=True):
        for token, tag in zip(tokens, tags, strict=True):
            if tag.startswith("B-"):
                found.append((tag[2:], token.lower()))
            elif tag.startswith("I-"):
                found[-1] = (found[-1][0], f"{found[-1][1]} {token.lower()}")
    return found


@both_samples
def test_the_same_settings_give_the_same_rows_in_any_blocks(table_class, config_class):
    table = table_class(config_class(rows=9_000), "train")
    assert read(table).equals(read(table, rows_per_block=1_000))
    assert {block.num_rows for block in table.blocks(table.columns, 3_000)} <= set(range(1, 3_001))


@both_samples
def test_another_seed_or_split_gives_other_rows_and_they_share_no_text(table_class, config_class):
    settings = {"rows": 6_000, "eval_rows": 2_000}
    split_texts = [texts(read(table_class(config_class(**settings), split))) for split in SPLITS]
    split_texts.append(texts(read(table_class(config_class(**settings, seed=1), "train"))))
    assert len(set().union(*split_texts)) == sum(len(set(some)) for some in split_texts)


@both_samples
def test_a_smaller_sample_is_the_beginning_of_a_larger_one(table_class, config_class):
    large, small = (read(table_class(config_class(rows=rows), "train")) for rows in (9_000, 5_000))
    assert large.slice(0, 5_000).combine_chunks().equals(small)


@both_samples
def test_columns_come_in_the_order_asked_for_and_alone_as_together(table_class, config_class):
    table = table_class(config_class(rows=300), "train")
    for columns in (table.columns[::-1], *([column] for column in table.columns)):
        (some,) = table.blocks(columns)
        assert some.schema.names == list(columns)
        assert pa.Table.from_batches([some]).equals(read(table).select(columns))


@both_samples
def test_the_fingerprint_changes_with_every_setting_and_split(table_class, config_class):
    others = {
        "rows": 77,
        "eval_rows": 77,
        "noise": 0.2,
        "seed": 77,
    }
    assert set(others) == {field.name for field in fields(config_class)}
    configs = [config_class(), *(config_class(**{name: value}) for name, value in others.items())]
    prints = [table_class(config, split).fingerprint() for config in configs for split in SPLITS]
    assert len(set(prints)) == len(prints)
    assert (
        table_class(config_class(), "test").fingerprint()
        == table_class(config_class(), "test").fingerprint()
    )


def test_the_two_samples_differ_in_name_and_fingerprint():
    tables = [
        table_class(config_class(rows=5, eval_rows=5, noise=0.1), "train")
        for table_class, config_class in SAMPLES
    ]
    assert (
        len({table.name for table in tables}) == len({table.fingerprint() for table in tables}) == 2
    )


def test_the_rows_of_a_generator_version_never_change():
    # Whoever changes the rows raises GENERATOR_VERSION, so that stores of the old rows are not
    # taken for the new ones.
    rows = tweets(rows=200)
    tagged_rows = tagged(rows=200)
    lines = [
        *texts(rows),
        *rows["label"].to_pylist(),
        *texts(tagged_rows),
        *map(str, tagged_rows["tags"].to_pylist()),
    ]
    assert (GENERATOR_VERSION, xxhash.xxh3_64_hexdigest("\n".join(lines).encode())) == (
        1,
        "6b2e3a57ebae7e2e",
    )


@pytest.mark.parametrize("noise", [0.0, 0.06, 0.3])
def test_the_best_score_is_one_less_the_noise(noise):
    rows = tweets("test", eval_rows=20_000, noise=noise)
    tagged_rows = tagged("test", eval_rows=20_000, noise=noise)
    tags, clean = (pc.list_flatten(tagged_rows[name]) for name in ("tags", "clean_tags"))
    begins = pc.starts_with(clean, "B-")
    for found, wanted in (
        (rows["label"], rows["topic"]),
        (tags.filter(begins), clean.filter(begins)),
    ):
        kept = pc.mean(pc.equal(found, wanted).cast(pa.int8())).as_py()
        assert kept == pytest.approx(1 - noise, abs=0.01 if noise else 0)


def test_every_mood_is_there_and_neutral_is_the_commonest():
    counts = {
        pair["values"]: pair["counts"]
        for pair in pc.value_counts(tweets(rows=8_000)["label"]).to_pylist()
    }
    assert counts.keys() == set(MOODS)
    assert counts["neutral"] > counts["positive"] > counts["negative"] > 0.15 * 8_000


def test_lengths_spread_like_tweets():
    lengths = np.array([len(text.split()) for text in texts(tweets(rows=8_000))])
    assert 15 <= np.median(lengths) <= 20
    assert 8 <= np.percentile(lengths, 5) <= 12
    assert 26 <= np.percentile(lengths, 95) <= 32


@pytest.mark.parametrize(
    "pattern",
    [
        r"@user",
        r"#[a-z]+",
        r"http$",
        "😀|😡|📷",
        r"\bsoooo\b",
        r"^[^a-z]+$",
        r"[a-z][!?]",
        "not bad|not a bad",
    ],
)
def test_texts_look_like_tweets(pattern):
    share = pc.mean(
        pc.match_substring_regex(tweets(rows=8_000)["text"], pattern).cast(pa.int8())
    ).as_py()
    assert 0.0005 < share < 0.7


def test_counting_words_is_not_enough_for_the_mood():
    train = tweets(rows=6_000, noise=0)
    test = tweets("test", eval_rows=2_000, noise=0)
    features = TfidfVectorizer(token_pattern=r"\S+")
    model = LinearSVC().fit(features.fit_transform(texts(train)), train["label"])
    assert 0.6 < model.score(features.transform(texts(test)), np.array(test["label"])) < 0.85


@pytest.mark.parametrize(
    ("pattern", "mood"),
    [
        ("is far from (good|great|nice)", "negative"),
        ("is far from (bad|awful|sad)", "positive"),
        ("is far from (good|great|nice) but", "positive"),
        ("even though .* is far from (bad|awful|sad)", "negative"),
        ("is the [a-z]+ (good|bad)[?]", "neutral"),
        ("looks (bad|awful|sad) [a-z]+ but", "positive"),
    ],
)
def test_the_order_of_words_decides_the_mood(pattern, mood):
    rows = tweets(rows=40_000)
    unclear = " but | even though " if "but" not in pattern and "though" not in pattern else "^$"
    chosen = pc.and_not(
        pc.match_substring_regex(rows["text"], pattern),
        pc.match_substring_regex(rows["text"], unclear),
    )
    moods = rows["topic"].filter(chosen).to_pylist()
    assert len(moods) > 5
    assert set(moods) == {mood}


def test_tags_are_valid_bio_and_as_many_as_tokens():
    for split in SPLITS:
        rows = tagged(split, noise=0.2)
        assert (
            rows.schema.field("tokens").type
            == rows.schema.field("tags").type
            == pa.list_(pa.large_string())
        )
        for column in ("tags", "clean_tags"):
            assert pc.list_value_length(rows[column]).equals(pc.list_value_length(rows["tokens"]))
            for tags in rows[column].to_pylist():
                for before, tag in zip(["O", *tags], tags, strict=False):
                    assert tag in TAGS
                    assert tag[0] != "I" or before in (f"B-{tag[2:]}", tag)


def test_names_of_every_type_have_one_to_four_words():
    found = names(tagged(rows=8_000))
    rows_of_type = Counter(kind for kind, _ in found)
    assert min(rows_of_type[kind] for kind in ENTITY_TYPES) > 0.1 * len(found)
    assert {len(name.split()) for _, name in found} == {1, 2, 3, 4}


def test_half_of_the_names_outside_training_are_unseen_there():
    train = {name for _, name in names(tagged())}
    own = []
    for split in SPLITS[1:]:
        found = [name for _, name in names(tagged(split))]
        own.append(set(found) - train)
        assert np.mean([name not in train for name in found]) == pytest.approx(0.5, abs=0.05)
        assert np.mean([name not in train for name in set(found)]) == pytest.approx(0.5, abs=0.06)
    assert len(own[0] & own[1]) < 0.1 * len(own[0])


def test_some_names_stand_for_several_types_and_some_are_written_small():
    rows = tagged(rows=8_000)
    types: dict[str, set[str]] = {}
    for kind, name in names(rows):
        types.setdefault(name, set()).add(kind)
    assert sum(len(kinds) > 1 for kinds in types.values()) > 0.1 * len(types)
    tokens, tags = (pc.list_flatten(rows[column]) for column in ("tokens", "clean_tags"))
    first = tokens.filter(pc.starts_with(tags, "B-"))
    assert pc.mean(pc.utf8_is_lower(first).cast(pa.int8())).as_py() == pytest.approx(0.23, abs=0.04)


def test_noise_changes_the_type_of_a_name_and_never_where_it_stands():
    rows = tagged(rows=4_000, noise=0.3)
    noisy = names(rows, "tags")
    clean = names(rows, "clean_tags")
    assert [name for _, name in noisy] == [name for _, name in clean]
    assert {kind for kind, _ in noisy} == set(ENTITY_TYPES)
    tags, clean_tags = (pc.list_flatten(rows[column]) for column in ("tags", "clean_tags"))
    assert pc.equal(tags, "O").equals(pc.equal(clean_tags, "O"))


MISTAKES = [
    ({"rows": 0}, "data.sample.rows", "1 or more"),
    ({"eval_rows": -1}, "data.sample.eval_rows", "1 or more"),
    ({"noise": 0.7}, "data.sample.noise", "0 to below 0.5"),
    ({"noise": float("nan")}, "data.sample.noise", "0 to below 0.5"),
    ({"seed": -1}, "data.sample.seed", "0 to 2**63 - 1"),
    ({"seed": 2**63}, "data.sample.seed", "0 to 2**63 - 1"),
]


@both_samples
@pytest.mark.parametrize(("settings", "where", "allowed"), MISTAKES)
def test_settings_out_of_range_name_themselves(table_class, config_class, settings, where, allowed):
    with refused(where, *settings.values(), allowed=allowed):
        config_class(**settings)


@both_samples
def test_the_largest_seed_works_and_an_unknown_split_is_told(table_class, config_class):
    assert read(table_class(config_class(seed=2**63 - 1, eval_rows=5), "test")).num_rows == 5
    with pytest.raises(UserError, match=r"split: 'tset' \(train, validation, test\)"):
        table_class(config_class(), "tset")
