"""Whole runs of taggers: entities and parts of speech, and the files of words they answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.end_to_end.encoder_runs import SMALL, topic_rows, train_encoder, write_columns
from tests.fitting import quiet_fit
from tests.run_files import read_log
from tests.verbs import verb

from flatout import (
    OptimConfig,
    TaggedTweetsConfig,
    TagPredictor,
    TextDataConfig,
    TransformerConfig,
    UserError,
    fit,
    load_predictor,
)
from flatout.data.problem import Problem
from flatout.engine.precision import Precision
from flatout.inference.run_predictor import FileOptions
from flatout.tasks.abstention import Abstention


@pytest.fixture(scope="module")
def tags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tags")
    data = TextDataConfig(
        problem=Problem.tags,
        sample=TaggedTweetsConfig(rows=600, eval_rows=80),
        max_length=24,
        batch_size=16,
        cache=str(folder),
    )
    return train_encoder(folder, data, epochs=6)


@pytest.mark.soak(seconds=8)
def test_tags_in_sixteen_bits_are_near_those_of_fp32(tags):
    words = pa_words(["met Zarbo in Velm tonight", "saw Zarbo", "nothing to see"])
    exact, found = (
        load_predictor(tags.folder, precision=name).tags(words)
        for name in (Precision.fp32, Precision.bf16)
    )
    assert 0 < np.abs(found.probabilities - exact.probabilities).max() < 0.05


def test_taggers_part_sentences_at_marks_and_read_words_without_tags(tags, tmp_path):
    said = 'met "Zarbo (the new one)", in Velm.'
    words = [
        "met",
        '"',
        "Zarbo",
        "(",
        "the",
        "new",
        "one",
        ")",
        '"',
        ",",
        "in",
        "Velm",
        ".",
    ]
    assert tags.predict([said])[0].words == words
    (tmp_path / "said.csv").write_text(
        f'sentence\n"{said.replace(chr(34), chr(34) * 2)}"\n',
        encoding="utf-8",
    )
    (tmp_path / "said.conll").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    found = []
    for name, words_of in (
        ("said.csv", ["--text", "sentence"]),
        ("said.conll", ["--text", "tokens"]),
    ):
        assert (
            verb(
                "predict",
                tags.folder,
                tmp_path / name,
                *words_of,
                "--out",
                tmp_path / "out.jsonl",
            )
            == 0
        )
        answered = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))
        assert answered.get("words", words) == words
        assert ("words" in answered) == ("sentence" in words_of)
        found.append(answered["prediction"])
    assert found == [tags.predict([words])[0].tags] * 2


def pa_words(texts: list[str]):
    import pyarrow as pa

    return pa.array([text.split() for text in texts], pa.list_(pa.large_string()))


def test_where_there_are_no_classes_the_likeliest_cannot_be_listed(tags, tmp_path, capsys):
    numbers = {
        "text": topic_rows(100)["text"],
        "label": [float(number) for number in range(100)],
    }
    data = TextDataConfig(train=numbers, problem=Problem.regression, cache=str(tmp_path))
    result = train_encoder(tmp_path, data, epochs=1)
    for folder, answers in (
        (result.folder, "numbers"),
        (tags.folder, "words with tags"),
    ):
        capsys.readouterr()
        assert (
            verb(
                "predict",
                folder,
                write_columns(tmp_path / "rows.jsonl", {"text": ["a"]}),
                "--top-k",
                "2",
            )
            == 2
        )
        assert f"--top-k: this run answers {answers}. Leave it out." in capsys.readouterr().err


NOUNS = ["tree", "house", "cat"]


VERBS = ["grows", "stands", "sleeps"]


def write_conllu(path: Path, sentences: int) -> Path:
    """Sentences such as `the tree grows`, each with a line of two words and a comment."""
    lines = []
    for number in range(sentences):
        words = [
            "the",
            NOUNS[number % 3],
            VERBS[number // 3 % 3],
            f"w{number}",
        ]
        lines += [f"# sent_id = {number}", "1-2\tx" + "\t_" * 8]
        for place, (word, tag) in enumerate(zip(words, TAGS_OF_WORDS, strict=True), 1):
            lines.append(f"{place}\t{word}\t_\t{tag}" + "\t_" * 6)
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


TAGS_OF_WORDS = ["DET", "NOUN", "VERB", "X"]


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """A file of parts of speech, and a run on it."""
    folder = tmp_path_factory.mktemp("speech")
    file = write_conllu(folder / "rows.conllu", 60)
    data = TextDataConfig(
        source=str(file),
        problem=Problem.tags,
        max_length=24,
        batch_size=8,
        cache=str(folder),
    )
    model = TransformerConfig(hidden=16, layers=1, heads=2)
    optim = OptimConfig(lr=2e-2)
    return file, quiet_fit(data, model, epochs=2, optim=optim, output=str(folder / "runs"))


def test_parts_of_speech_are_learned_and_answered_word_by_word_in_conll_u(speech, tmp_path, capsys):
    file, result = speech
    assert result.metrics["test/word_accuracy"] == result.metrics["test/f1"] > 0.9
    assert {row["class"] for row in result.per_class} == set(TAGS_OF_WORDS)
    answer = result.predict([["the", "cat", *["w"] * 40]])[0]
    assert (answer.tags[0], answer.tags[-1], answer.entities) == (
        "DET",
        "_",
        [],
    )

    out = tmp_path / "answers.conllu"
    assert verb("predict", result.folder, file, "--out", out) == 0
    assert out.read_text("utf-8").startswith("1\tthe\t_\tDET\t_\t_\t_\t_\t_\t_\n2\ttree\t")
    capsys.readouterr()
    assert verb("evaluate", result.folder, out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["word_accuracy"] == 1.0
    assert (
        verb(
            "predict",
            result.folder,
            file,
            "--out",
            tmp_path / "answers.jsonl",
        )
        == 0
    )
    first = json.loads((tmp_path / "answers.jsonl").read_text("utf-8").splitlines()[0])
    assert list(first) == ["tokens", "tags", "prediction"]


def test_unsure_parts_of_speech_are_left_out_word_by_word(speech, tmp_path):
    file, result = speech
    assert len(result.summary["abstention"]) == 20
    predictor = load_predictor(result.folder)
    # the first of four words has another tag here than the run has learned
    other = tmp_path / "other.conllu"
    other.write_text(
        file.read_text("utf-8").replace("\tDET\t", "\tX\t"),
        encoding="utf-8",
    )
    table = predictor.open(str(other), "evaluate")
    scored = predictor.score_table(table, FileOptions(), [predictor], lambda rows: None)
    assert scored.values["word_accuracy"] == 1 - scored.held_out.wrong.mean() == 0.75
    found = predictor.tags(pa.array(list(predictor.rows(table, FileOptions()))))
    limit = float(np.median(found.probabilities))
    predictor.abstention = Abstention(0.5, above=limit, possible_from=0.2)
    (answered,) = predictor.answer_table(table, FileOptions(), [predictor])
    assert (answered.num_given, answered.num_answers) == (
        (found.probabilities > limit).sum(),
        240,
    )
    tags = answered.block.column("prediction").flatten().to_pylist()
    possible = answered.block.column("possible").flatten().to_pylist()
    assert tags.count(None) == 240 - answered.num_given >= 120
    for tag, names in zip(tags, possible, strict=True):
        assert (tag is None) == (names is not None)
        assert tag is not None or set() < set(names) <= set(TAGS_OF_WORDS)
    written = answered.sentences.column("prediction").flatten().to_pylist()
    assert written == [tag or "_" for tag in tags]
    # a word that was not seen is not left out
    answer = predictor.predict([["the", *["w"] * 40]])[0]
    assert (answer.tags[-1], answer.possible[-1]) == ("_", None)


def test_a_tagger_of_entities_answers_in_conll_and_not_in_conll_u(tags, tmp_path, capsys):
    (tmp_path / "rows.conll").write_text("met\nZarbo\n\nin\n", encoding="utf-8")
    out = tmp_path / "answers.conll"
    assert verb("predict", tags.folder, tmp_path / "rows.conll", "--out", out) == 0
    first, second = (row.tags for row in tags.predict([["met", "Zarbo"], ["in"]]))
    assert out.read_text("utf-8") == f"met\t{first[0]}\nZarbo\t{first[1]}\n\nin\t{second[0]}\n\n"
    assert (
        verb(
            "predict",
            tags.folder,
            tmp_path / "rows.conll",
            "--out",
            f"{out}u",
        )
        == 2
    )
    assert "--out: cannot write .conllu" in capsys.readouterr().err


def test_a_tagger_finds_entities_and_counts_what_was_cut(tags):
    assert tags.metrics["test/f1"] > 0.1
    assert {row["class"] for row in tags.per_class} == {
        "person",
        "place",
        "group",
        "work",
    }
    assert "lie beyond data.max_length" in read_log(tags.folder)


def test_a_loaded_tagger_answers_as_the_run_did_word_by_word(tags):
    rows = [
        "met Zarbo in Velm tonight",
        ["one", "two three"],
        [],
        ["word"] * 60,
    ]
    loaded = TagPredictor.load(tags.folder)
    assert (
        loaded.temperature
        == tags.predictor.temperature
        == tags.summary["calibration"]["temperature"]
    )
    expected = tags.predict(rows)
    found = loaded.predict(rows)
    for mine, theirs in zip(found, expected, strict=True):
        probabilities = [entity.probability for entity in theirs.entities]
        assert [entity.probability for entity in mine.entities] == pytest.approx(
            probabilities, abs=1e-5
        )
    assert [each.tags for each in found] == [each.tags for each in expected]
    assert [len(each.tags) for each in found] == [5, 2, 0, 60]
    assert set(found[3].tags[30:]) == {"O"}
    for row in found:
        for entity in row.entities:
            assert entity.text == " ".join(row.words[entity.start : entity.stop])


def test_unsure_entities_are_left_out_and_name_their_possible_types(tags, tmp_path):
    from flatout.data.samples.tagged_tweets import TaggedTweetsTable

    blocks = TaggedTweetsTable(TaggedTweetsConfig(rows=600, eval_rows=80), "test").blocks(
        ["tokens", "tags"]
    )
    columns = pa.Table.from_batches(blocks).to_pydict()
    predictor = load_predictor(tags.folder)
    table = predictor.open(write_columns(tmp_path / "rows.jsonl", columns), "predict")
    scored = predictor.score_table(table, FileOptions(), [predictor], lambda rows: None)
    # of all entities that are found, those are wrong that are not among the right ones
    right = scored.values["precision"] * len(scored.held_out.wrong)
    assert (~scored.held_out.wrong).sum() == pytest.approx(right)
    limit = float(np.median(scored.held_out.sureness))
    predictor.abstention = Abstention(0.5, above=limit, possible_from=0.2)
    (answered,) = predictor.answer_table(table, FileOptions(), [predictor])
    rows = answered.block.to_pylist()
    entities = [entity for row in rows for entity in row["entities"]]
    given = [entity for entity in entities if entity["type"] is not None]
    assert (answered.num_given, answered.num_answers) == (len(given), len(entities))
    assert 0.4 < len(given) / len(entities) < 0.6
    for row in rows:
        left = [entity for entity in row["entities"] if entity["type"] is None]
        blank = [place for place, tag in enumerate(row["prediction"]) if tag is None]
        assert len(blank) == sum(entity["stop"] - entity["start"] for entity in left)
        for entity in row["entities"]:
            assert (entity["probability"] > limit) == (entity["possible"] is None)
            assert entity["possible"] != []


def test_the_temperature_divides_the_logits_of_words(tags):
    words = pa.array(
        [["met", "Zarbo", "in", "Velm", "tonight"]],
        pa.list_(pa.large_string()),
    )
    plain, cooled = (replace(tags.predictor, temperature=each).tags(words) for each in (1.0, 2.0))
    assert plain.ids.tolist() == cooled.ids.tolist()
    block = tags.predictor.vocabulary.encode_words(words, max_length=24).block
    batch = next(tags.predictor.batches((block.tokens, block.lengths), 1, 1))
    with torch.inference_mode():
        shares = (tags.predictor.model(batch).float() / 2).softmax(-1).max(-1).values.numpy()
    assert set(cooled.probabilities.round(4)) <= set(shares.round(4))
    assert cooled.probabilities.max() < plain.probabilities.max()


def test_a_file_of_words_is_answered_and_scored_as_the_run_scores(tags, tmp_path, capsys):
    from flatout.data.samples.tagged_tweets import TaggedTweetsTable

    blocks = TaggedTweetsTable(TaggedTweetsConfig(rows=600, eval_rows=80), "test").blocks(
        ["tokens", "tags"]
    )
    columns = pa.Table.from_batches(blocks).to_pydict()
    file = write_columns(tmp_path / "rows.jsonl", columns)
    assert verb("evaluate", tags.folder, file, "--json") == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["rows"] == 80
    # fp32 here, bf16 where the run has it: an answer on the edge may differ
    assert scores["f1"] == pytest.approx(tags.metrics["test/f1"], abs=0.03)
    assert scores["intervals"]["f1"] == pytest.approx(
        tags.summary["intervals"]["test/f1"], abs=0.06
    )
    out = tmp_path / "answers.jsonl"
    assert verb("predict", tags.folder, file, "--out", out) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(row["prediction"]) for row in answers] == [len(row) for row in columns["tokens"]]
    again = tmp_path / "again.jsonl"
    assert (
        verb("predict", tags.folder, file, "--out", tmp_path / "answers.csv") == 0
    )  # words and tags with bars between
    assert verb("predict", tags.folder, tmp_path / "answers.csv", "--out", again) == 0
    assert [json.loads(line)["prediction"] for line in again.read_text().splitlines()] == [
        row["prediction"] for row in answers
    ]
    capsys.readouterr()
    assert verb("evaluate", tags.folder, tmp_path / "answers.csv", "--json") == 0
    assert json.loads(capsys.readouterr().out)["f1"] == scores["f1"]


def test_words_that_the_model_did_not_see_are_told_and_counted(tags, tmp_path, capsys):
    # a letter is a token, and 22 fit a row of 24
    row = {"tokens": ["a"] * 60, "tags": [*["O"] * 59, "B-person"]}
    short = {"tokens": ["b", "c"], "tags": ["O", "O"]}
    file = write_columns(
        tmp_path / "rows.jsonl",
        {name: [row[name], short[name], row[name]] for name in ("tokens", "tags")},
    )
    told = (
        "words beyond data.max_length=24 of this run: 76; each is answered O, entities among them"
        " are missed\n"
    )
    assert (
        verb(
            "predict",
            tags.folder,
            file,
            "--out",
            tmp_path / "answers.jsonl",
        )
        == 0
    )
    assert capsys.readouterr().err == told
    assert verb("evaluate", tags.folder, file, "--json") == 0
    said = capsys.readouterr()
    assert said.err == told
    found = json.loads(said.out)
    assert (found["lost_words"], found["recall"]) == (76, 0.0)
    alone = write_columns(
        tmp_path / "short.jsonl",
        {name: [short[name]] for name in ("tokens", "tags")},
    )
    assert verb("predict", tags.folder, alone) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": None}, "predicts no tags"),
        ({"task": "classification"}, "Set task=tagging"),
    ],
)
def test_tags_want_a_model_and_a_task_of_their_own(settings, message, tmp_path):
    from flatout import ClassificationConfig

    given = {"task": ClassificationConfig()} if "task" in settings else {}
    model = SMALL if "model" not in settings else None
    with pytest.raises(UserError, match=message):
        fit(
            TextDataConfig(problem=Problem.tags),
            model,
            output=str(tmp_path),
            **given,
        )
