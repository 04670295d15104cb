"""Tags of any scheme as BIO, against writing the same entities in each scheme."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.whole_tables import rows_of
from tests.refusals import refused
from tests.run_files import write_jsonl

from flatout.data.checks.checkup import check
from flatout.data.checks.cleaning import CleaningConfig
from flatout.data.checks.findings import Level
from flatout.data.checks.tags import (
    Scheme,
    TagBlock,
    TagCensus,
    as_bio,
    find_entities,
    find_misplaced,
    split_words,
)
from flatout.data.problem import Problem
from flatout.data.tables.sources import open_source
from flatout.data.texts.settings import TextDataConfig
from flatout.errors import UserError


def in_bio(census: TagCensus, block: TagBlock) -> list[list[str]]:
    """The tags of each row by name."""
    names = [census.names()[number] for number in as_bio(block)]
    return [names[start:stop] for start, stop in itertools.pairwise(block.offsets)]


Entity = tuple[str | None, int]
sentences = st.lists(
    st.lists(st.tuples(st.sampled_from([None, "per", "loc"]), st.integers(1, 3)), max_size=5),
    min_size=1,
    max_size=8,
)


def write(sentence: list[Entity], scheme: Scheme) -> list[str]:
    """The tags of runs of words, each an entity or outside of any."""
    tags: list[str] = []
    end, single = ("L", "U") if scheme is Scheme.bilou else ("E", "S")
    before = None
    for kind, length in sentence:
        if kind is None:
            tags += ["O"] * length
        elif scheme is Scheme.bio:
            tags += [f"B-{kind}"] + [f"I-{kind}"] * (length - 1)
        elif scheme is Scheme.iob1:
            tags += [f"{'B' if before == kind else 'I'}-{kind}"] + [f"I-{kind}"] * (length - 1)
        else:
            letters = [single] if length == 1 else ["B", *["I"] * (length - 2), end]
            tags += [f"{letter}-{kind}" for letter in letters]
        before = kind
    return tags


def read(rows: list[list[str]]):
    census = TagCensus("rows")
    return census, census.read(pa.array(rows, pa.list_(pa.string())), np.arange(len(rows)), "train")


OF_ENTITIES = [scheme for scheme in Scheme if scheme is not Scheme.plain]


@pytest.mark.parametrize("scheme", OF_ENTITIES)
@given(given_sentences=sentences)
def test_every_scheme_says_the_same_in_bio(scheme, given_sentences):
    census, block = read([write(sentence, scheme) for sentence in given_sentences])
    assert in_bio(census, block) == [write(sentence, Scheme.bio) for sentence in given_sentences]
    assert not find_misplaced(block, scheme).any()


def test_schemes_are_told_apart():
    rows = [
        [
            ("per", 2),
            (None, 1),
            ("loc", 1),
            ("loc", 2),
        ],
        [("per", 3)],
    ]
    for scheme in OF_ENTITIES:
        assert read([write(row, scheme) for row in rows])[0].scheme() is scheme


@pytest.mark.parametrize(
    ("tags", "scheme", "wrong", "repaired"),
    [
        (["B-a", "I-b", "O", "I-a"], Scheme.bio, [1, 3], ["B-a", "B-b", "O", "B-a"]),
        (["B-a", "O", "E-a", "S-b"], Scheme.iobes, [0, 2], ["B-a", "O", "B-a", "B-b"]),
        (["U-a", "I-a", "L-a", "B-b"], Scheme.bilou, [1, 3], ["B-a", "B-a", "I-a", "B-b"]),
        (["I-a", "O", "B-a", "I-a"], Scheme.iob1, [2], ["B-a", "O", "B-a", "I-a"]),
    ],
)
def test_what_is_against_a_scheme_is_counted_and_keeps_its_words(tags, scheme, wrong, repaired):
    census, block = read([tags])
    assert np.flatnonzero(find_misplaced(block, scheme)).tolist() == wrong
    assert in_bio(census, block) == [repaired]


def test_an_entity_never_goes_on_in_the_next_row():
    census, block = read([["B-a"], [], ["I-a"]])
    assert in_bio(census, block) == [["B-a"], [], ["B-a"]]


def test_an_empty_tag_is_told_with_its_row():
    with refused("data.label", "rows row 2", "without a tag", "''"):
        read([["O"], ["O", None]])


CONLL = """-DOCSTART- X O

# a remark of more words
EU NNP B-ORG
rejects VBZ O

# sent = 2
Peter NNP B-PER
Blackburn NNP I-PER
"""


CONLL_U = """# sent_id = 1
# text = Vámonos al mar
1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tVamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
3\ta lo\ta\tADP\t_\t_\t4\tcase\t_\t_
3.1\tgran\t_\tADJ\t_\t_\t_\t_\t_\t_
4\tmar\tmar\tNOUN\t_\t_\t1\tobl\t_\tSpaceAfter=No

1\tSí\tsí\tINTJ\t_\t_\t0\troot\t_\t_
"""


@pytest.mark.parametrize("name", ["es.conllu", "es.conll"])
def test_words_and_parts_of_speech_of_conll_u_are_read_without_its_other_lines(tmp_path, name):
    file = tmp_path / name
    file.write_text(CONLL_U, encoding="utf-8")
    table = open_source(file, where="data.source")
    assert rows_of(table) == [
        {"tokens": ["Vamos", "nos", "a lo", "mar"], "tags": ["VERB", "PRON", "ADP", "NOUN"]},
        {"tokens": ["Sí"], "tags": ["INTJ"]},
    ]
    assert "CoNLL-U" in table.how()
    assert list(table.word_lines()) == [[4, 5, 6, 8], [10]]


def test_the_lines_of_words_are_counted_in_each_of_several_files(tmp_path):
    (tmp_path / "a.conll").write_text("Anna O\n\nBo O\n", encoding="utf-8")
    (tmp_path / "b.conll").write_text("\n\nCy O\nsleeps O\n", encoding="utf-8")
    table = open_source(f"{tmp_path}/*.conll", where="data.source")
    assert list(table.word_lines()) == [[1], [3], [3, 4]]
    (tmp_path / "c.jsonl").write_text('{"tokens": ["a"], "tags": ["O"]}\n', encoding="utf-8")
    names = [f"{tmp_path}/a.conll", f"{tmp_path}/c.jsonl"]
    assert open_source(names, where="data.source").word_lines() is None


def test_conll_files_are_read_and_checked(tmp_path):
    (tmp_path / "train.conll").write_text(CONLL, encoding="utf-8")
    (tmp_path / "dev.conll").write_text("Paris NNP B-LOC\n\nis VBZ O\n", encoding="utf-8")
    found = check(TextDataConfig(source=str(tmp_path)))
    assert found.rows == {"train": 2, "validation": 2}
    assert found.classes == {"train": {"ORG": 1, "PER": 1}, "validation": {"LOC": 1}}
    said = "\n".join(remark.line() for remark in found.remarks)
    assert "tags: BIO, 3 types, 6 words" in said
    assert "validation: entities that no training row has: LOC" in said


def test_words_and_tags_in_one_text_a_row_are_parted_at_blanks(tmp_path):
    (tmp_path / "rows.csv").write_text("tokens,tags\na b,B-x O\nc,O\n", encoding="utf-8")
    found = check(
        TextDataConfig(
            train=str(tmp_path / "rows.csv"), test=None, validation_share=0.01, test_share=0.01
        )
    )
    assert found.classes == {"train": {"x": 1}}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["The|Beatles|play", "Anna"], [["The", "Beatles", "play"], ["Anna"]]),
        (["The|Beatles play", "a|b"], [["The|Beatles", "play"], ["a|b"]]),
        ([":|", "|", " hm "], [[":|"], ["|"], ["hm"]]),
    ],
)
def test_words_are_parted_at_bars_where_no_text_has_a_blank(texts, words):
    assert (
        split_words(pa.array(texts), name="tokens", table="rows.csv", key="data.text").to_pylist()
        == words
    )


def test_a_line_with_too_few_columns_is_told(tmp_path):
    (tmp_path / "rows.conll").write_text("a B-x\nb\n", encoding="utf-8")
    with refused("data.train", "rows.conll: line 2", "2 columns", "got 1", "'b'"):
        check(TextDataConfig(train=str(tmp_path / "rows.conll")))


def test_a_sentence_without_words_is_told_as_such(tmp_path):
    rows = [{"tokens": [f"w{row}", "b"], "tags": ["O", "B-x"]} for row in range(20)]
    rows.insert(9, {"tokens": [], "tags": []})
    file = tmp_path / "rows.jsonl"
    write_jsonl(file, rows)
    found = check(TextDataConfig(source=str(file), problem=Problem.tags))
    said = "\n".join(remark.line() for remark in found.remarks)
    assert "1 row without words, dropped (row 10); data.clean.unlabelled=refuse" in said
    assert "without a label" not in said
    refusing = TextDataConfig(
        source=str(file), problem=Problem.tags, clean=CleaningConfig(unlabelled="refuse")
    )
    with pytest.raises(UserError, match=r"rows\.jsonl row 10: no words"):
        check(refusing)


def test_a_word_that_is_null_is_a_blank_word_and_a_row_that_is_null_has_none():
    column = pa.array([["before"], ["a", None, "b"], None, ["c"]], pa.list_(pa.string())).slice(1)
    lists = split_words(column, name="tokens", table="rows.jsonl", key="data.text")
    assert lists.to_pylist() == [["a", "", "b"], [], ["c"]]


def test_equal_sentences_that_leave_a_split_empty_are_an_error_of_the_check(tmp_path):
    (tmp_path / "rows.conll").write_text("Ann B-person\nsleeps O\n\n" * 40, encoding="utf-8")
    found = check(TextDataConfig(source=str(tmp_path / "rows.conll"), problem=Problem.tags))
    errors = [remark.line() for remark in found.remarks if remark.level is Level.error]
    assert any("no rows are left for the" in line for line in errors)


def test_tags_without_letters_are_plain_and_stay_as_they_are():
    rows = [["DET", "NOUN", "VERB"], [], ["NOUN"]]
    census, block = read(rows)
    assert census.scheme() is Scheme.plain
    assert in_bio(census, block) == rows
    assert census.entities == {"train": {"DET": 1, "NOUN": 2, "VERB": 1}}
    assert not find_misplaced(block, Scheme.plain).any()
    found = find_entities(as_bio(block), block.offsets, is_plain=True)
    words = zip(found.row, found.start, found.stop, found.kind, strict=True)
    assert list(words) == [(0, 0, 1, 0), (0, 1, 2, 1), (0, 2, 3, 2), (2, 0, 1, 1)]


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        ([["NOUN"], ["VERB", "_"]], ("row 2", "without a tag", "'_'")),
        ([["NOUN"], ["VERB", "B-x"]], ("row 2", "'B-x' beside plain tags")),
        ([["O", "NOUN"]], ("row 1", "no tag of a scheme we know: 'NOUN'")),
        ([[f"w{word}" for word in range(2000)]], ("2,000 different tags",)),
    ],
)
def test_a_tag_of_another_kind_than_the_first_is_named_with_its_row(rows, values):
    with refused("data.label", *values):
        read(rows)
