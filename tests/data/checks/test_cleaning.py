"""Rows are dropped or kept by rule, counted, and never lost in silence."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused

from flatout.data.checks.cleaning import (
    BlockRules,
    CleaningConfig,
    clean_block,
)
from flatout.data.checks.findings import Findings, Level, Remark, lines_of
from flatout.data.checks.labels import LabelCensus, normalise_labels
from flatout.data.problem import Problem
from flatout.data.tables.roles import Roles
from flatout.errors import UserError

ROLES = Roles(("text",), "label")
TEXTS = ["fine", "", "  ", None, "no label", "also fine"]
LABELS = ["a", "a", "b", "b", None, "c"]


def clean(is_train: bool, texts=TEXTS, labels=LABELS, problem=Problem.single):
    findings = Findings("rows.csv")
    block = pa.RecordBatch.from_pydict({"text": texts, "label": labels})
    rows = np.arange(len(texts)) + 100
    return (
        clean_block(block, rows, BlockRules(ROLES, problem, is_train), findings),
        findings,
    )


def test_training_drops_rows_that_teach_nothing():
    block, findings = clean(is_train=True)
    assert block.texts.to_pylist() == ["fine", "also fine"]
    assert block.rows.tolist() == [100, 105]
    assert [remark.line() for remark in findings.remarks()] == [
        "rows.csv: 1 row without a label, dropped (row 105); data.clean.unlabelled=refuse",
        "rows.csv: 1 row without a text (null), dropped (row 104); data.clean.empty=keep",
        "rows.csv: 2 rows with an empty text, dropped (rows 102, 103); data.clean.empty=keep",
    ]


def test_evaluation_keeps_empty_texts_so_that_scores_stay_comparable():
    block, findings = clean(is_train=False)
    assert block.texts.to_pylist() == ["fine", "", "  ", "", "also fine"]
    assert findings.rows_kept == 5


@pytest.mark.parametrize("is_train", [False, True])
def test_rows_read_are_rows_kept_and_dropped(is_train):
    block, findings = clean(is_train)
    dropped = sum(f.count for name, f in findings.by_kind.items() if "kept" not in name)
    assert findings.rows_read == findings.rows_kept + dropped == len(TEXTS)
    assert findings.rows_kept == len(block.rows)


def test_many_findings_name_only_the_first_rows():
    _, findings = clean(True, texts=[""] * 9 + ["a"], labels=["x"] * 10)
    assert [remark.line() for remark in findings.remarks()] == [
        "rows.csv: 9 rows with an empty text, dropped (rows 101, 102, 103, 104, 105, …);"
        " data.clean.empty=keep"
    ]


def test_numbers_as_texts_are_read_as_written_and_counted():
    block, findings = clean(True, texts=[7, 8], labels=["a", "b"])
    assert block.texts.to_pylist() == ["7", "8"]
    assert "2 rows whose text is no text, read as one" in findings.remarks()[0].line()


def test_a_list_is_no_text():
    with refused("data.text", "'text' of rows.csv", "list", allowed="texts"):
        clean(True, texts=[["a"], ["b"]], labels=["a", "b"])


def normalised(labels, problem, delimiter=None):
    array = pa.array(labels)
    rows = np.arange(len(array))
    return normalise_labels(
        array,
        rows,
        Findings("rows.csv"),
        problem=problem,
        delimiter=delimiter,
    ).to_pylist()


def test_labels_become_texts_without_being_guessed():
    assert normalised(["007", "NA"], Problem.single) == ["007", "NA"]
    assert normalised([7, 8], Problem.single) == ["7", "8"]
    assert normalised([1.0, 2.0], Problem.single) == ["1", "2"]
    assert normalised([True, False], Problem.single) == ["true", "false"]


def test_several_labels_come_from_lists_or_from_a_delimiter():
    assert normalised([["a", "b"], []], Problem.multi) == [["a", "b"], []]
    assert normalised(["a | b", "", "c|"], Problem.multi, "|") == [
        ["a", "b"],
        [],
        ["c"],
    ]
    with pytest.raises(UserError, match=r"data.label_delimiter"):
        normalised(["a b"], Problem.multi)


def test_a_list_where_one_class_is_asked_for_says_what_to_set():
    with pytest.raises(UserError, match=r"Set data.problem=multi"):
        normalised([["a"]], Problem.single)


def test_numbers_are_numbers_or_the_row_is_named():
    assert normalised(["1", "2.5", "-3e2"], Problem.regression) == [
        1.0,
        2.5,
        -300.0,
    ]
    with refused("data.label", "rows.csv row 2", "'x'"):
        normalised(["1", "x"], Problem.regression)


def test_an_empty_text_is_a_fine_list_of_several_labels():
    block, _ = clean(True, texts=["a", "b"], labels=["", "x"], problem=Problem.multi)
    assert block.labels.to_pylist() == ["", "x"]


def census_of(problem=Problem.single, **splits) -> LabelCensus:
    census = LabelCensus(problem)
    for split, labels in splits.items():
        if problem is Problem.regression:
            census.add_numbers(np.array(labels))
        else:
            census.settle(split, np.bincount(census.code(pa.array(labels))))
    return census


def test_classes_have_one_order():
    assert census_of(train=["b", "a", "c"]).classes() == ["a", "b", "c"]
    assert census_of(train=["10", "9", "-1"]).classes() == ["-1", "9", "10"]


def test_a_class_that_only_validation_has_stays_a_class_and_is_named():
    census = census_of(train=["a", "b"], validation=["z", "z", "a"])
    assert census.classes() == ["a", "b", "z"]
    assert census.train_counts() == [1, 1, 0]
    assert (
        "validation: 1 class that no training row has, scored as misses: 'z' (2 rows)"
        in "\n".join(remark.line() for remark in census.remarks("rows.csv"))
    )


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "no training row has one"),
        (["a", "a"], "the training rows have only one class: 'a' "),
    ],
)
def test_one_class_cannot_be_learnt(labels, message):
    with pytest.raises(UserError, match=message):
        census_of(train=pa.array(labels, pa.string()), validation=["b"]).require_classes(
            "data.label"
        )


def test_a_share_of_one_of_several_labels_is_that_of_the_rows():
    census = LabelCensus(Problem.multi)
    codes = census.code(pa.array([["a", "b"], ["a"], ["a", "b", "c"], []]))
    census.settle("train", np.bincount(codes))
    assert census.remarks("training rows")[0].line() == (
        "training rows: 3 classes in 4 rows: 'a' 3 (75.0%), 'b' 2 (50.0%), 'c' 1 (25.0%)"
    )


def test_targets_are_class_numbers_or_ragged_ones_or_values():
    assert census_of(train=["b", "a"]).targets(pa.array(["a", "b"])).tolist() == [0, 1]
    ids, counts = census_of(Problem.multi, train=[["b", "a"], []]).targets(
        pa.array([["b"], [], ["a", "b"]])
    )
    assert (ids.tolist(), counts.tolist()) == ([1, 0, 1], [1, 0, 2])
    numbers = census_of(Problem.regression, train=[1.0, 3.0])
    assert numbers.scale() == (2.0, 1.0)
    assert numbers.targets(pa.array([1.5])).tolist() == [1.5]


def test_white_space_of_any_alphabet_is_no_text_and_no_label():
    block, findings = clean(True, texts=["\u3000\u00a0", "a", "b"], labels=["x", " ", "y"])
    assert block.texts.to_pylist() == ["b"]
    assert {name: finding.rows for name, finding in findings.by_kind.items()} == {
        "null_label": [102],
        "empty_text_dropped": [101],
    }


def test_a_label_that_is_not_a_number_is_missing_and_the_others_stay_whole():
    block, findings = clean(True, texts=["a", "b", "c"], labels=[1.0, float("nan"), None])
    assert normalised(block.labels, Problem.single) == ["1"]
    assert findings.by_kind["null_label"].rows == [102, 103]


def test_categories_are_read_as_their_words():
    findings = Findings("rows.csv")
    words = pa.array(["a", "", "b"]).dictionary_encode()
    block = pa.RecordBatch.from_arrays([words, words], names=["text", "label"])
    rules = BlockRules(ROLES, Problem.single, is_train=True)
    found = clean_block(block, np.arange(3), rules, findings)
    assert (
        found.texts.to_pylist(),
        normalised(found.labels, Problem.single),
    ) == (
        ["a", "b"],
        ["a", "b"],
    )


def test_numbers_in_a_text_column_keep_their_gaps():
    block, findings = clean(False, texts=[7.0, None, float("nan"), 2.5], labels=["a"] * 4)
    assert block.texts.to_pylist() == ["7", "", "", "2.5"]
    assert findings.by_kind["null_text_kept"].rows == [102, 103]


def test_the_first_rows_are_named_in_order_whatever_split_came_first():
    findings = Findings("rows.csv")
    findings.add("null_label", np.array([8, 3, 11, 40, 41, 42]))
    findings.add("null_label", np.array([1, 2]))
    assert findings.by_kind["null_label"].rows == [2, 3, 4, 9, 12]


def test_whole_floats_are_written_as_numbers_of_any_size():
    assert normalised([1e10, 2.5, -3.0], Problem.single) == [
        "10000000000",
        "2.5",
        "-3",
    ]


def test_every_label_counts_once_a_row_and_gaps_are_no_labels():
    assert normalised([["b", "a", "b", None, ""], None], Problem.multi) == [
        ["b", "a"],
        [],
    ]
    assert normalised([[1, 2], [2]], Problem.multi) == [["1", "2"], ["2"]]
    assert normalised(["a|b|a", "|"], Problem.multi, "|") == [
        ["a", "b"],
        [],
    ]
    assert normalised(pa.array([["x"], ["a", "b"], [], ["c"]]).slice(1), Problem.multi) == [
        ["a", "b"],
        [],
        ["c"],
    ]


@pytest.mark.parametrize("problem", [each for each in Problem if each is not Problem.none])
def test_labels_that_cannot_be_labels_are_told_with_their_type(problem):
    labels = [{"a": 1}] if problem is not Problem.multi else [[{"a": 1}]]
    with refused("data.label", "rows.csv", "struct<a: int64>"):
        normalised(labels, problem)


@pytest.mark.parametrize("wrong", ["nan", "inf", "1e400", "NA", "1_0", "0x10", "1,5", "x"])
def test_a_text_that_is_no_finite_number_is_told_with_its_row(wrong):
    assert normalised([" 1.5 ", "+2", ".5", "3."], Problem.regression) == [
        1.5,
        2.0,
        0.5,
        3.0,
    ]
    with refused("data.label", "rows.csv row 2", repr(wrong)):
        normalised(["1", wrong], Problem.regression)


def test_an_infinite_number_is_told_with_its_row():
    with refused("data.label", "rows.csv row 2", "'1,5'", fix="point"):
        normalised(["1", "1,5"], Problem.regression)
    with refused("data.label", "rows.csv row 2", "'inf'"):
        normalised([1.0, float("inf")], Problem.regression)


def test_the_scale_of_large_numbers_is_exact_over_blocks():
    census = LabelCensus(Problem.regression)
    values = np.random.default_rng(0).normal(1e9, 1.0, 10_000)
    for block in np.array_split(values, 7):
        census.add_numbers(block)
    np.testing.assert_allclose(census.scale(), (values.mean(), values.std()), rtol=1e-8)


def test_labels_that_merely_look_whole_are_ordered_by_spelling():
    assert census_of(train=["10", "9", "x"]).classes() == ["10", "9", "x"]
    assert census_of(train=["7", "007", "10"]).classes() == [
        "007",
        "7",
        "10",
    ]
    assert census_of(train=["9" * 5000, "1"]).classes() == ["1", "9" * 5000]


label_lists = st.lists(
    st.none() | st.sampled_from(["a", "b", "", " "]),
    min_size=1,
    max_size=20,
)


@given(label_lists, st.data())
def test_no_row_is_lost_in_silence(labels, data):
    texts = data.draw(
        st.lists(
            st.none() | st.sampled_from(["a", "", " "]),
            min_size=len(labels),
            max_size=len(labels),
        )
    )
    is_train = data.draw(st.booleans())
    block = pa.RecordBatch.from_arrays(
        [pa.array(texts, pa.string()), pa.array(labels, pa.string())],
        ["text", "label"],
    )
    findings = Findings("rows.csv")
    rules = BlockRules(ROLES, Problem.single, is_train)
    found = clean_block(block, np.arange(len(texts)), rules, findings)
    dropped = sum(one.count for name, one in findings.by_kind.items() if "kept" not in name)
    assert findings.rows_read == len(texts) == findings.rows_kept + dropped
    assert findings.rows_dropped == dropped
    expected = [
        row
        for row, (text, label) in enumerate(zip(texts, labels, strict=True))
        if label and label.strip() and (not is_train or (text and text.strip()))
    ]
    assert found.rows.tolist() == expected
    assert found.texts.null_count == 0


@pytest.mark.parametrize("name", [field.name for field in fields(CleaningConfig)])
def test_every_rule_takes_its_own_words_and_no_others(name):
    with pytest.raises(UserError, match=f"data.clean.{name}: 'perhaps'"):
        CleaningConfig(**{name: "perhaps"})


def about(source: str, what: str = "2 rows kept") -> Remark:
    return Remark(Level.note, source, what)


def test_a_file_is_named_with_its_folder_once_and_then_by_its_own_name():
    rows = "/far/away/in my data/rows.csv"
    others = "/elsewhere/others.csv"
    remarks = [
        about(f"{rows}, {others}", "csv"),
        about("columns"),
        about(rows),
        about(others),
        about(rows, "3 rows"),
    ]
    assert lines_of(remarks) == [
        f"{rows}, {others}: csv",
        "columns: 2 rows kept",
        "rows.csv: 2 rows kept",
        "others.csv: 2 rows kept",
        "rows.csv: 3 rows",
    ]
    assert lines_of([]) == []


def test_rows_of_several_files_name_their_folder_once():
    remarks = [
        about(
            "/far/a.csv and 2 more",
            "2 rows kept (rows /far/a.csv:1, /far/b.csv:7)",
        ),
        about("/far/a.csv and 2 more"),
    ]
    assert lines_of(remarks) == [
        "/far/a.csv and 2 more: 2 rows kept (rows a.csv:1, b.csv:7)",
        "a.csv and 2 more: 2 rows kept",
    ]


def test_files_of_one_name_in_two_folders_keep_their_folders():
    remarks = [
        about("/one/rows.csv"),
        about("/two/rows.csv"),
        about("/one/rows.csv"),
    ]
    assert lines_of(remarks) == [remark.line() for remark in remarks]


def test_a_folder_is_not_looked_for_inside_of_words():
    remarks = [
        about("a/rows.csv", "csv"),
        about("a/rows.csv", "labels n/a/b"),
    ]
    assert lines_of(remarks) == [
        "a/rows.csv: csv",
        "rows.csv: labels n/a/b",
    ]
