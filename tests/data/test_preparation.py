"""From a table to a store: splits of every kind, cleaning by rule, and nothing that changes in
between.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.refusals import refused
from tests.stores import open_store

from flatout.data import TextData
from flatout.data.checks.cleaning import CleaningConfig
from flatout.data.checks.survey import TextSurvey
from flatout.data.problem import Problem
from flatout.data.tags.data import TagData
from flatout.data.texts.opening import open_source
from flatout.data.texts.settings import TextDataConfig
from flatout.errors import UserError


def table_of(number: int, classes: str = "aab", **columns) -> dict[str, list]:
    return {
        "text": [f"row {i} of many words {i * 7 % 13}" for i in range(number)],
        "label": [classes[i % len(classes)] for i in range(number)],
        **columns,
    }


def split_rows(config: TextDataConfig) -> dict[str, list[int]]:
    return {
        name: split.fixed("rows").tolist()
        for name, split in open_store(config).store.splits.items()
    }


def test_a_file_that_has_grown_keeps_its_old_splits():
    before = split_rows(TextDataConfig(train=table_of(500)))
    after = split_rows(TextDataConfig(train=table_of(900)))
    assert after.keys() == before.keys()
    for name, rows in after.items():
        assert [row for row in rows if row < 500] == before[name]


def test_splits_by_content_are_the_same_on_every_machine():
    rows = split_rows(TextDataConfig(train=table_of(200)))
    assert (rows["validation"], rows["test"]) == KNOWN


def test_another_seed_draws_other_rows():
    drawn = [
        split_rows(TextDataConfig(train=table_of(300), split_seed=seed))["test"] for seed in (0, 1)
    ]
    assert drawn[0] != drawn[1]


def test_stratified_splits_keep_the_share_of_every_class():
    data = table_of(1_000, "aaaaaaaaaaaaaaaaaaab")
    rows = split_rows(TextDataConfig(train=data, split_by="stratified"))
    for split, share in (("validation", 0.1), ("test", 0.1)):
        counts = Counter(data["label"][row] for row in rows[split])
        assert abs(counts["a"] - share * 950) <= 1.5
        assert abs(counts["b"] - share * 50) <= 1.5


def test_stratified_splits_do_not_depend_on_the_order_of_rows_even_if_a_text_has_several_labels():
    data = {
        "text": [f"text {i % 151} of many" for i in range(600)],
        "label": [("x", "b", "a")[i % 3] for i in range(600)],
    }
    found = []
    for turn in (1, -1):
        turned = {name: values[::turn] for name, values in data.items()}
        rows = split_rows(TextDataConfig(train=turned, split_by="stratified"))
        text_of = turned["text"].__getitem__
        found.append({split: set(map(text_of, numbers)) for split, numbers in rows.items()})
    assert found[0] == found[1]
    assert all(found[0].values())


def test_stratified_splits_share_out_rare_labels_where_there_are_several_a_row():
    labels = [["common"] for _ in range(1_000)]
    for row in range(0, 1_000, 20):
        labels[row].append("rare")
    config = TextDataConfig(
        train=table_of(1_000) | {"label": labels},
        problem=Problem.multi,
        split_by="stratified",
    )
    rows = split_rows(config)
    for split in ("validation", "test"):
        assert abs(sum("rare" in labels[row] for row in rows[split]) - 5) <= 1.5


@pytest.mark.parametrize("split_by", ["content", "stratified"])
def test_texts_that_are_alike_never_stand_on_both_sides(split_by):
    data = table_of(400)
    data["text"] += [text.upper() + "!" for text in data["text"]]
    data["label"] += data["label"]
    rows = split_rows(TextDataConfig(train=data, split_by=split_by))
    trained_on = {row % 400 for row in rows["train"]}
    assert trained_on.isdisjoint(row % 400 for row in rows["test"] + rows["validation"])


def test_groups_stay_in_one_split():
    who: list[str | None] = [f"patient {i % 40}" for i in range(1_000)]
    who[::50] = [None] * 20
    rows = split_rows(TextDataConfig(train=table_of(1_000, who=who), split_by="group", group="who"))
    groups = [set(map(who.__getitem__, numbers)) - {None} for numbers in rows.values()]
    assert sum(map(len, groups)) == 40
    assert {name: round(len(numbers) / 1_000, 1) for name, numbers in rows.items()} == {
        "train": 0.8,
        "validation": 0.1,
        "test": 0.1,
    }


def test_dropping_leaks_repeats_and_conflicts_leaves_the_rest():
    train = {
        "text": ["a a", "b b", "A A!", "c c", "c c", "d d", "d d", "e e"],
        "label": list("xyxxxxyy"),
    }
    test = {"text": ["a a", "z z"], "label": ["x", "y"]}
    kept = {
        "leaks": [1, 3, 4, 5, 6, 7],
        "duplicates": [0, 1, 2, 3, 5, 6, 7],
        "conflicts": [0, 1, 2, 3, 4, 7],
    }
    for setting, expected in kept.items():
        clean = CleaningConfig(**{setting: "drop"})
        config = TextDataConfig(
            train=train,
            test=test,
            validation={"text": ["v v"], "label": ["x"]},
            clean=clean,
        )
        assert split_rows(config)["train"] == expected, setting
        assert split_rows(config)["test"] == [0, 1]


def test_two_texts_whose_hash_for_splits_is_equal_are_no_conflict():
    word = "".join("ab"[number.bit_count() % 2] for number in range(2_048))
    others = word.translate(str.maketrans("ab", "ba"))
    table = {
        "text": ["one more", word, others, word],
        "label": ["a", "a", "b", "a"],
    }
    config = TextDataConfig(
        train=table,
        validation=table_of(9),
        test=table_of(7),
        clean=CleaningConfig(conflicts="drop"),
    )
    assert split_rows(config)["train"] == [0, 1, 2, 3]


def test_rows_read_are_rows_kept_repaired_and_dropped():
    data = {
        "text": ["a", "", "b", None, "c &amp; d"] * 30,
        "label": ["x", "y", None, "x", "y"] * 30,
    }
    config = TextDataConfig(train=data, clean=CleaningConfig(escapes="decode"))
    findings = TextSurvey(open_source(config)).run(lambda rows: None).findings["train"]
    assert findings.account() == "150 read = 30 kept as written + 30 repaired + 90 dropped"


def test_merged_labels_are_one_class_in_the_targets():
    data = table_of(90, "abA")
    kept = open_store(TextDataConfig(train=data))
    merged = open_store(TextDataConfig(train=data, clean=CleaningConfig(labels="merge")))
    assert (kept.classes, merged.classes) == (["A", "a", "b"], ["a", "b"])
    split = merged.store.splits["train"]
    assert [merged.classes[target] for target in split.fixed("targets")] == [
        data["label"][row].lower() for row in split.fixed("rows")
    ]


def test_several_columns_are_joined_and_gaps_left_out():
    data = table_of(60, title=[None, "T"] * 30)
    prepared = open_store(TextDataConfig(train=data, text=["title", "text"], join=" : "))
    split = prepared.store.splits["train"]
    with_title = split.ragged("tokens").lengths[split.fixed("rows") % 2 == 1]
    without = split.ragged("tokens").lengths[split.fixed("rows") % 2 == 0]
    assert set(with_title - without.max()) == {2}


def test_a_file_that_changes_while_it_is_read_ends_the_build(tmp_path: Path, monkeypatch):
    path = tmp_path / "rows.csv"
    path.write_text(
        "text,label\n" + "".join(f"row {i},{'ab'[i % 2]}\n" for i in range(100)),
        encoding="utf-8",
    )
    run = TextSurvey.run

    def then_changed(self, told):
        found = run(self, told)
        path.write_text(
            path.read_text(encoding="utf-8").replace("row 7,", "row X,"),
            encoding="utf-8",
        )
        return found

    monkeypatch.setattr(TextSurvey, "run", then_changed)
    with pytest.raises(UserError, match=r"rows.csv changed while it was read"):
        open_store(TextDataConfig(train=str(path)))
    assert not list((tmp_path / "cache").glob("*/manifest.json"))


def test_an_opened_store_says_the_same_as_a_built_one():
    built, opened = (open_store(TextDataConfig(train=table_of(100))) for _ in range(2))
    assert (built.report.hit, opened.report.hit) == (False, True)
    assert opened.facts["lines"] == built.facts["lines"]


def test_numbers_are_scaled_by_the_rows_that_are_kept():
    values = [float(i % 10) for i in range(200)]
    prepared = open_store(
        TextDataConfig(
            train=table_of(200) | {"label": values},
            problem=Problem.regression,
        )
    )
    kept = [values[row] for row in prepared.store.splits["train"].fixed("rows")]
    np.testing.assert_allclose(prepared.facts["target_mean"], np.mean(kept))
    np.testing.assert_allclose(prepared.facts["target_spread"], np.std(kept))


def test_of_rows_with_numbers_those_with_the_same_text_and_number_are_repeats():
    rows = {
        "text": ["a a", "b b", "a a", "a a", "c c"],
        "label": [1.0, 2.0, 1.0, 5.0, 3.0],
    }
    others = {
        "validation": {"text": ["v v"], "label": [1.0]},
        "test": {"text": ["t t"], "label": [2.0]},
    }
    clean = CleaningConfig(duplicates="drop")
    config = TextDataConfig(train=rows, **others, problem=Problem.regression, clean=clean)
    assert split_rows(config) == {
        "train": [0, 1, 3, 4],
        "validation": [0],
        "test": [0],
    }


KNOWN = (
    [
        0,
        6,
        19,
        20,
        25,
        37,
        50,
        62,
        75,
        85,
        90,
        120,
        140,
        142,
        157,
        165,
        174,
    ],
    [
        9,
        14,
        15,
        27,
        31,
        41,
        51,
        58,
        66,
        72,
        73,
        74,
        77,
        101,
        114,
        122,
        127,
        136,
        148,
        167,
        172,
        182,
        186,
        196,
    ],
)


def test_numbers_that_fp32_cannot_tell_apart_are_refused():
    far = {
        "text": [f"word{row % 10} x{row}" for row in range(200)],
        "label": [1e9 + row % 10 for row in range(200)],
    }
    told = (
        r"data\.label: numbers around 1e\+09 that differ by 2\.\d+, which fp32 keeps to 60\. Take a"
        r" constant off"
    )
    with pytest.raises(UserError, match=told):
        TextData(train=far, problem=Problem.regression).setup("fit")


def test_one_number_in_all_rows_is_refused_as_one_class_is():
    alike = {
        "text": [f"word{row % 10} x{row}" for row in range(200)],
        "label": [4.0] * 200,
    }
    with refused("data.label", "the number 4", fix="data.label=COLUMN"):
        TextData(train=alike, problem=Problem.regression).setup("fit")


def test_the_groups_of_rows_stand_in_the_store_where_the_column_is_there():
    who: list[str | None] = [f"patient {i % 40}" for i in range(1_000)]
    who[::50] = [None] * 20
    grouped = {"split_by": "group", "group": "who"}
    stored = open_store(TextDataConfig(train=table_of(1_000, who=who), **grouped)).store
    for split in stored.splits.values():
        names = [who[row] for row in split.fixed("rows")]
        numbers = split.fixed("groups").tolist()
        assert len(set(zip(names, numbers, strict=True))) == len(set(numbers))
        assert len(set(numbers)) == len(set(names) - {None}) + names.count(None)
    # A file for each split, of which one has no such column: its rows are groups of one row.
    tables = {
        "train": table_of(60, who=who[:60]),
        "validation": table_of(20, who=who[:20]),
    }
    parted = open_store(TextDataConfig(**tables, test=table_of(30), **grouped)).store
    assert len(set(parted.splits["test"].fixed("groups").tolist())) == 30
    single = open_store(TextDataConfig(train=table_of(90))).store
    assert "groups" not in single.splits["test"].columns


def test_sentences_of_a_document_stay_in_one_split_and_the_store_has_their_document():
    words = np.random.default_rng(0).choice(["oak", "fern", "rose", "slate", "flint"], (80, 4))
    sentences = {
        "tokens": words.tolist(),
        "tags": [["O", "B-plant", "O", "O"]] * 80,
        "document": [f"d{row // 4}" for row in range(80)],
    }
    data = TagData(train=sentences, split_by="group", group="document")
    data.prepare_data()
    documents = list[set[int]]()
    for split in data.store.splits.values():
        of_rows = [row // 4 for row in split.fixed("rows").tolist()]
        numbers = split.fixed("groups").tolist()
        assert len(set(zip(of_rows, numbers, strict=True))) == len(set(numbers))
        documents.append(set(of_rows))
    assert sum(map(len, documents)) == len(set.union(*documents)) == 20
