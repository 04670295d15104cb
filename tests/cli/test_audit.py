"""`python -m flatout audit`: planted errors are found and left out of the next run; what it
refuses.
"""

import csv
import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from flatout.audit.measure import scale_answers
from flatout.audit.next_rows import shorten
from flatout.audit.read_rows import read_audit_rows
from flatout.audit.rows import AuditRows, Sentences, deal_folds
from flatout.data.checks.checkup import check
from flatout.data.samples.headlines import HeadlinesConfig, HeadlinesTable
from flatout.data.samples.tagged_tweets import TaggedTweetsConfig, TaggedTweetsTable
from flatout.data.texts.settings import TextDataConfig
from flatout.errors import UserError
from tests.params import at_once
from tests.refusals import refused, require_printed
from tests.run_files import read_csv
from tests.verbs import verb

NUM_ROWS = 900
NUM_PLANTED = 60


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Headlines of three classes in a file, the first labels of which are wrong."""
    block = next(
        HeadlinesTable(HeadlinesConfig(rows=NUM_ROWS, classes=3, noise=0.0), "train").blocks(
            ["text", "label"]
        )
    )
    labels = block["label"].to_pylist()
    names = sorted(set(labels))
    labels[:NUM_PLANTED] = [names[(names.index(label) + 1) % 3] for label in labels[:NUM_PLANTED]]
    path = tmp_path_factory.mktemp("audit") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [("text", "label"), *zip(block["text"].to_pylist(), labels, strict=True)]
        )
    return path


def test_planted_errors_are_the_first_suspects_and_a_check_leaves_them_out(
    rows, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    assert verb("audit", f"data.source={rows}", "folds=3") == 0
    printed = capfd.readouterr().out
    assert "labels look wrong" in printed
    assert "more:" in printed
    assert "data.exclude=" in printed
    suspects = read_csv(tmp_path / "audit" / "suspects.csv")
    first = [int(line["row"]) for line in suspects[:NUM_PLANTED]]
    assert np.mean(np.array(first) <= NUM_PLANTED) > 0.7
    assert "Labels that look wrong" in (tmp_path / "audit" / "audit.html").read_text("utf-8")
    found = check(TextDataConfig(source=str(rows), exclude="audit/suspects.csv"))
    assert sum(found.rows.values()) == NUM_ROWS - len(suspects)
    assert any(
        "data.exclude" in remark.what and remark.count == len(suspects) for remark in found.remarks
    )
    relabelled = check(TextDataConfig(source=str(rows), relabel="audit/suspects.csv"))
    assert sum(relabelled.rows.values()) == NUM_ROWS
    assert relabelled.classes != found.classes
    Path("twice.csv").write_text(
        f"row,file,label\n5,{rows},sport\n5,{rows},science\n", encoding="utf-8"
    )
    with refused("data.relabel", "twice.csv:3", "row 5"):
        check(TextDataConfig(source=str(rows), relabel="twice.csv"))
    suspect = suspects[0]["row"]
    Path("both.csv").write_text(f"row,label\n{suspect},sport\n", encoding="utf-8")
    with refused("data.relabel", f"row {suspect}", "data.exclude"):
        check(TextDataConfig(source=str(rows), exclude="audit/suspects.csv", relabel="both.csv"))
    assert verb("audit", f"data.source={rows}") == 2  # what a person decided is not overwritten
    assert "out: audit/suspects.csv is there already." in capfd.readouterr().err


@pytest.mark.soak(seconds=3)
def test_files_that_are_the_splits_are_one_slice_of_rows_not_two(
    rows, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    head, *lines = rows.read_text("utf-8").splitlines()
    wrong = lines[:NUM_PLANTED]
    right = lines[NUM_PLANTED:]
    for name, own in (
        ("train", right[:500]),
        ("validation", right[500:600]),
        ("test", wrong),
    ):
        Path(f"{name}.csv").write_text("\n".join([head, *own]), "utf-8")
    assert (
        verb("audit", *(f"data.{name}={name}.csv" for name in ("train", "validation", "test"))) == 0
    )
    findings = [
        line
        for line in capfd.readouterr().out.splitlines()
        if f"of {NUM_PLANTED} rows are answered" in line
    ]
    assert len(findings) == 1
    assert "split test: " in findings[0]


@pytest.mark.soak(seconds=7)
def test_entities_of_a_wrong_type_are_the_first_suspects_of_tagged_words(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    sample = TaggedTweetsTable(TaggedTweetsConfig(rows=1_500, noise=0.1), "train")
    sentences = [row for block in sample.blocks(sample.columns) for row in block.to_pylist()]
    Path("rows.jsonl").write_text(
        "".join(
            json.dumps({"tokens": row["tokens"], "tags": row["tags"]}) + "\n" for row in sentences
        ),
        encoding="utf-8",
    )
    assert verb("audit", "data.source=rows.jsonl", "data.problem=tags", "folds=3") == 0
    printed = capfd.readouterr().out
    assert "and correct the tags in your file" in printed
    assert "data.exclude" not in printed
    first = read_csv(tmp_path / "audit" / "suspects.csv")[:40]
    is_wrong = [
        sentences[int(line["row"]) - 1]["tags"] != sentences[int(line["row"]) - 1]["clean_tags"]
        for line in first
    ]
    assert np.mean(is_wrong) > 0.75
    for line in first:
        shown = line["text"]
        row = sentences[int(line["row"]) - 1]
        assert shown[shown.index("[") + 1 : shown.index("]")] in " ".join(row["tokens"])
        assert line["given"] in ("no entity", *(tag[2:] for tag in row["tags"]))
    assert (
        verb(
            "audit",
            "data.source=rows.jsonl",
            "data.problem=tags",
            "unlabelled=rows.jsonl",
            "out=more",
        )
        == 2
    )
    require_printed(capfd.readouterr().err, "unlabelled: ", "texts with one class")
    assert verb("audit", "data.source=rows.jsonl", "data.problem=tags", "top=5", "out=more") == 2
    require_printed(capfd.readouterr().err, "top: ", "texts with one class")


def test_a_row_of_words_has_the_mean_of_what_its_own_words_have():
    words = np.empty(2, object)
    words[:] = [["it", "rains", "in", "Rome"], ["New", "York"]]
    spans = np.array([[0, 3, 4], [1, 0, 2], [0, 1, 2]])
    sentences = Sentences(words, words, np.array([4, 2]))
    groups = np.array([4, 2, 4])
    values = {
        name: np.empty(3)
        for name in "texts shown labels files numbers splits locations column".split()
    }
    rows = AuditRows(
        **values, groups=groups, classes=[], is_tagged=True, sentences=sentences, spans=spans
    )
    of_words = np.arange(12.0).reshape(6, 2)
    assert rows.average_words(of_words).tolist() == [[6, 7], [9, 10], [2, 3]]


def test_sentences_stay_in_the_fold_of_their_group_though_few_rows_are_drawn(tmp_path):
    sample = TaggedTweetsTable(TaggedTweetsConfig(rows=120), "train")
    sentences = [
        row for block in sample.blocks(["tokens", "tags"]) for row in block.to_pylist()
    ] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, sentences)), encoding="utf-8")
    rows = read_audit_rows(
        TextDataConfig(source=str(tmp_path / "rows.jsonl"), problem="tags"), 2, 60
    )
    folds = deal_folds(rows, 2)
    found = rows.sentences.find_folds(rows, folds)
    words = [" ".join(each).lower() for each in rows.sentences.words]
    assert set(found.tolist()) == {-1, 0, 1}
    assert len(rows) == 60 < sum(rows.of_splits.values())
    assert (found[rows.spans[:, 0]] == folds).all()
    assert len({(text, fold) for text, fold in zip(words, found.tolist(), strict=True)}) == len(
        set(words)
    )


def test_words_that_a_network_did_not_read_are_judged_by_words_alone_and_it_says_nothing_of_them():
    answers = np.array([[0.9, 0.1], [0.0, 0.0], [1.0, 0.0]])
    assert scale_answers(answers).toarray() == pytest.approx(
        np.array([[np.log(0.9), np.log(0.1)], [0, 0], [0, np.log(1e-4)]]) / 10
    )


def test_rows_of_several_files_are_named_by_their_own_file(rows, tmp_path):
    head, *lines = rows.read_text("utf-8").splitlines()
    for name, own in (
        ("a", lines[:300]),
        ("b", lines[300:400]),
        ("test", lines[400:600]),
    ):
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *own]), "utf-8")
    data = TextDataConfig(
        train=[str(tmp_path / f"{name}.csv") for name in "ab"], test=str(tmp_path / "test.csv")
    )
    found = read_audit_rows(data, 2, 400)
    assert (
        found.of_splits == {"train": 360, "validation": 40, "test": 200}
        or found.of_splits["test"] == 200
    )
    for text, place in zip(found.texts, found.locations, strict=True):
        file, row = place.rsplit(":", 1)
        written = Path(file).read_text("utf-8").splitlines()[int(row)]
        assert text in next(iter(csv.reader([written])))[0]


def test_of_labels_that_nothing_explains_it_says_that_their_errors_cannot_be_counted(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abcdefgh"), 12)) for _ in range(300)]
    with Path("rows.csv").open("w", newline="", encoding="utf-8") as file:
        rows = zip(texts, random.choice(["x", "y"], 300), strict=True)
        csv.writer(file).writerows([("text", "label"), *rows])
    assert verb("audit", "data.source=rows.csv", "folds=2") == 0
    said = capfd.readouterr().out
    assert "how many labels are wrong cannot be known from these rows" in said
    assert "look wrong" not in said
    assert "suspects, how many" not in said  # no finding is made of it


def test_pairs_are_shown_with_a_bar_between_them_and_an_exclusion_reads_it(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    words = "one two three four five six seven eight nine ten".split()
    lines = []
    for first, second in product(words, words):
        if first <= second:
            lines.append((first, second, "same" if first == second else "other"))
    lines *= 2
    with Path("pairs.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("first", "second", "label"), *lines])
    config = {
        "source": "pairs.csv",
        "text": ["first", "second"],
        "label": "label",
        "pair": True,
    }
    rows = read_audit_rows(TextDataConfig(**config), 2, 1_000)
    assert shorten(rows.shown[1]) == "one | two"
    Path("out.csv").write_text(f"row,text\n2,{shorten(rows.shown[1])}\n", encoding="utf-8")
    assert sum(check(TextDataConfig(**config, exclude="out.csv")).rows.values()) == len(lines) - 1


def test_each_word_of_plain_tags_is_a_row_whose_place_is_its_line(tmp_path):
    lines = []
    for number in range(40):
        lines += [f"# sent_id = {number}", f"Tree{number} NOUN", f"grows{number} VERB", ""]
    file = tmp_path / "rows.conll"
    file.write_text("\n".join(lines), encoding="utf-8")
    rows = read_audit_rows(TextDataConfig(source=str(file), problem="tags"), 2, 100)
    assert rows.classes == ["NOUN", "VERB"]
    assert len(rows) == 80
    for shown, label, location in zip(rows.shown, rows.labels, rows.locations, strict=True):
        name, _, line = location.rpartition(":")
        word, tag = lines[int(line) - 1].split()
        assert (name, f"[{word}]" in shown, rows.classes[label]) == (str(file), True, tag)


def test_few_entities_are_refused_in_one_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"tokens": ["it", "rains"], "tags": ["O", "O"]})[:-1]
    Path("rows.jsonl").write_text(
        "".join(f'{row}, "id": {number}}}\n' for number in range(60)), encoding="utf-8"
    )
    assert verb("audit", "data.source=rows.jsonl", "data.problem=tags") == 2
    require_printed(capfd.readouterr().err, "data.label: ", "0 entities", "0 types", "too few")


@pytest.mark.parametrize(
    "table_of",
    [
        "\ufeffrow;file;label\r\n61;rows.csv;{label}\r\n;;\r\n",
        "row, file, label\n61,rows.csv, {label} \n,,\n",
        "row\tlabel\n61.0\t{label}\n",
    ],
    ids=["semicolons, and an empty line", "blanks", "tabs, and a float"],
)
def test_decisions_that_a_spreadsheet_saved_are_read_and_a_label_that_nobody_else_has_is_told(
    rows, tmp_path, table_of
):
    path = tmp_path / "decided.csv"
    known = read_csv(rows)[0]["label"]
    path.write_text(table_of.format(label=known), encoding="utf-8", newline="")
    first = check(TextDataConfig(source=str(rows), relabel=str(path)))
    assert not any("labels that only data.relabel gives" in each.what for each in first.remarks)
    path.write_text(table_of.format(label="mistyped"), encoding="utf-8", newline="")
    second = check(TextDataConfig(source=str(rows), relabel=str(path)))
    (told,) = (
        each for each in second.remarks if "labels that only data.relabel gives" in each.what
    )
    assert "mistyped" in told.what
    assert told.hint == "correct its file, if they are mistyped"


def test_labels_with_formulas_and_escape_codes_are_harmless_in_what_audit_writes_and_prints(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    labels = ["=HYPERLINK(1)", "\x1b]0;PWNED\x07"]
    texts = ["=ball goal team", "market bank money"]
    with Path("rows.csv").open("w", newline="", encoding="utf-8") as file:
        lines = [(f"{texts[row % 2]} {row // 4}", labels[row % 2]) for row in range(120)]
        lines[:8] = [(text, labels[row % 2 - 1]) for row, (text, _) in enumerate(lines[:8])]
        csv.writer(file).writerows([("text", "label"), *lines])
    assert verb("audit", "data.source=rows.csv", "folds=2") == 0
    printed = capfd.readouterr()
    assert "\\x1b]0;PWNED\\x07" in printed.out
    assert not {"\x1b", "\x07"} & set(printed.out + printed.err)
    suspects = read_csv(Path("audit/suspects.csv"))
    assert any(line["text"].startswith("'=ball") for line in suspects)
    assert any(line["likely"] == "'=HYPERLINK(1)" for line in suspects)
    assert not any(cell.startswith("=") for line in suspects for cell in line.values())
    left = check(TextDataConfig(source="rows.csv", exclude="audit/suspects.csv"))
    assert sum(left.rows.values()) == 120 - len(suspects)
    relabelled = check(TextDataConfig(source="rows.csv", relabel="audit/suspects.csv"))
    assert not any(
        "labels that only data.relabel gives" in remark.what for remark in relabelled.remarks
    )


def test_a_group_with_an_escape_code_is_written_out_by_audit(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    names = [f"{letter}\x1b[31m" for letter in "abcd"]
    lines = [f"{name},{t},{t % 7},{t % 5 + k}" for k, name in enumerate(names) for t in range(40)]
    Path("rows.csv").write_text("cell,t,x,y\n" + "\n".join(lines), encoding="utf-8")
    words = ["data=sequence", "data.source=rows.csv", "data.group=[cell]", "data.time=t"]
    assert verb("audit", *words, "data.features=[x]", "data.target=[y]", "folds=2") == 0
    printed = capfd.readouterr()
    assert "\\x1b[31m" in printed.out
    assert "\x1b" not in printed.out + printed.err


@pytest.mark.soak(seconds=4)
def test_rows_to_label_next_are_unsure_ones_that_differ(rows, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    sure = read_csv(rows)[NUM_PLANTED]["text"]
    unsure = "the a of in to"
    (tmp_path / "more.csv").write_text(
        f"id,text\n1,{sure}\n2,{unsure}\n3,{unsure}\n4,who says what\n5, \n", encoding="utf-8"
    )
    assert verb("audit", f"data.source={rows}", "folds=2", "unlabelled=more.csv", "top=2") == 0
    assert "next_rows.csv: 2 rows of more.csv to label next" in capfd.readouterr().out
    found = [line["text"] for line in read_csv(tmp_path / "audit" / "next_rows.csv")]
    assert verb("audit", f"data.source={rows}", "folds=2", "unlabelled=more.csv", "out=all") == 0
    # there is nothing to label in a blank text
    assert len(read_csv(tmp_path / "all" / "next_rows.csv")) == 4
    assert len(found) == len(set(found)) == 2
    assert sure not in found
    assert all(map(str.strip, found))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["row", "9999"], "names rows that are not there: 9999 of"),
        (["row,text", "1,another text"], "is not 'another text'"),
        (["row", "0"], "names row '0' (a number). Rows count from 1."),
        (["line", "1"], "has no column row"),
        (["row,file", "1,other.csv"], "names the file 'other.csv'"),
    ],
)
def test_decisions_that_fit_no_row_are_refused_in_one_sentence(rows, tmp_path, lines, message):
    path = tmp_path / "decided.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        check(TextDataConfig(source=str(rows), exclude=str(path)))
    assert message in str(caught.value)
    assert str(caught.value).startswith("data.exclude: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data.problem=regression"],
            "audit: looks at texts with one class a row, and at tags, in this version",
        ),
        (["folds=1"], "folds: 1 (2 to 50)"),
        (["out=/proc/audit"], "out: cannot write to /proc/audit"),
        (
            ["data.split_by=group", "data.group=label", "folds=4"],
            "data.label: the training rows have only one class",
        ),
        *at_once(
            of=[
                (["folds=many"], "folds: 'many' does not fit (a whole number)"),
                (["column=author"], "no column 'author'"),
                (
                    ["top=5"],
                    "top: says how many rows of unlabelled= to label next. Name them: unlabelled=",
                ),
            ],
            seconds=1,
        ),
    ],
)
def test_what_an_audit_cannot_do_is_refused_in_one_sentence(
    rows, words, message, capfd, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert verb("audit", f"data.source={rows}", *words) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "audit").exists()


def test_few_rows_one_class_and_no_run_are_refused_in_one_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    few = tmp_path / "few.csv"
    few.write_text("text,label\na good one,x\na bad one,y\nanother,x\n", encoding="utf-8")
    assert verb("audit", f"data.source={few}") == 2
    require_printed(capfd.readouterr().err, "3 rows", "too few", "(40 or more)")
    few.write_text(
        "text,label\n" + "".join(f"text {number},x\n" for number in range(60)), encoding="utf-8"
    )
    assert verb("audit", f"data.source={few}") == 2
    assert "only one class" in capfd.readouterr().err
    few.write_text("text,label\n" + "a good one,x\na bad one,y\nanother,x\n" * 40, encoding="utf-8")
    assert verb("audit", f"data.source={few}") == 2
    said = capfd.readouterr().err
    require_printed(said, "data.source: ", "3 different texts", "too few", "(40 or more)")
    assert verb("audit", "nowhere") == 2
    assert "audit: no such folder: nowhere." in capfd.readouterr().err


@pytest.mark.soak(seconds=3)
def test_few_sound_rows_are_not_said_to_be_worth_more_than_the_suspects_among_them(
    rows, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    few = tmp_path / "few.csv"
    few.write_text(
        "".join(rows.read_text("utf-8").splitlines(keepends=True)[:1] + lines(rows, 150)),
        encoding="utf-8",
    )
    assert verb("audit", f"data.source={few}") == 0
    printed = capfd.readouterr().out
    assert re.search(
        r"labels: .* suspects; how many labels are wrong cannot be known from these rows", printed
    )
    suspects = len(read_csv(tmp_path / "audit" / "suspects.csv"))
    for worth in re.findall(r"([\d.]+) points  [\d,]+ suspects", printed):
        assert float(worth) <= 100 * suspects / 150 + 0.05


def lines(path: Path, number: int) -> list[str]:
    """Rows of the file whose labels are right."""
    return path.read_text("utf-8").splitlines(keepends=True)[1 + NUM_PLANTED :][:number]
