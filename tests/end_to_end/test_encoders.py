"""Whole runs of small encoders: classes, pairs, several labels, tags; what they leave behind
answers the same.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.encoders import calm_encoder
from tests.fitting import quiet_fit
from tests.run_files import choices_of, model_weights, read_log, write_jsonl
from tests.verbs import verb

from flatout import (
    CheckpointConfig,
    OptimConfig,
    TaggedTweetsConfig,
    TagPredictor,
    TextDataConfig,
    TransformerConfig,
    UserError,
    fit,
    load_predictor,
)
from flatout.checkpoints.folder import FolderCheckpointIO
from flatout.data.problem import Problem
from flatout.engine.precision import Precision
from flatout.inference.run_predictor import FileOptions
from flatout.tasks.abstention import Abstention

SMALL = TransformerConfig(hidden=32, layers=2, heads=4)


def table(rows: int, seed: int = 0) -> dict[str, list[Any]]:
    random = np.random.default_rng(seed)
    things = {
        "animals": ["cat", "dog", "horse"],
        "plants": ["rose", "oak", "fern"],
    }
    texts = []
    labels = []
    for number in range(rows):
        topic = list(things)[number % 2]
        words = [f"w{random.integers(30)}" for _ in range(random.integers(1, 12))]
        words.insert(
            random.integers(len(words) + 1),
            things[topic][random.integers(3)],
        )
        texts.append(f"{' '.join(words)} {number}")
        labels.append(topic)
    return {"text": texts, "label": labels}


def run(
    tmp_path: Path,
    data: TextDataConfig,
    model: TransformerConfig = SMALL,
    **settings: Any,
):
    given: dict[str, Any] = {
        "optim": OptimConfig(lr=3e-3),
        "epochs": 4,
        "output": str(tmp_path / "runs"),
    }
    return fit(data, model, **(given | settings))


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    return run(
        folder,
        TextDataConfig(train=table(400), batch_size=16, cache=str(folder)),
        optim=OptimConfig(lr=3e-3, ema=0.9),
    )


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
    return run(folder, data, epochs=6)


def test_an_encoder_learns_is_flat_and_says_how_sure_it_may_be(classes):
    assert classes.metrics["test/accuracy"] > 0.9
    assert classes.summary["speed"]["padding_share"] == 0
    choices = choices_of(classes.summary)
    assert choices["batches"] == "flat"
    assert float(choices["temperature"]) == pytest.approx(
        classes.summary["calibration"]["temperature"], abs=0.01
    )


@pytest.mark.soak(seconds=3)
def test_pretrained_weights_get_small_steps_unless_a_person_says_otherwise(classes, tmp_path):
    assert verb("export", classes.folder, "--out", tmp_path / "plain") == 0
    pretrained = TransformerConfig(pretrained=str(tmp_path / "plain"))
    data = TextDataConfig(train=table(60), cache=str(tmp_path))
    for optim, rate in (
        (OptimConfig(), "0.0003"),
        (OptimConfig(lr=1e-4), None),
    ):
        summary = run(tmp_path, data, pretrained, optim=optim, epochs=1).summary
        chosen = choices_of(summary)
        assert chosen.get("optim.lr") == rate


def test_a_loaded_encoder_answers_as_the_run_did(classes):
    texts = ["w1 w2 cat", "rose w3", "w1 " * 200]
    expected = classes.predict(texts)
    found = load_predictor(classes.folder).predict(texts)
    assert [each.label for each in found] == [each.label for each in expected]
    assert [each.label for each in found[:2]] == ["animals", "plants"]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.probability == pytest.approx(theirs.probability, abs=1e-6)


def answered(folder, file, out, *options):
    assert verb("predict", folder, file, "--out", out, *options) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_answers_in_sixteen_bits_are_near_those_of_fp32_which_a_cpu_gives_unasked(
    classes, tmp_path
):
    texts = table(60, seed=2)["text"]
    file = write_columns(tmp_path / "rows.jsonl", {"text": texts})
    found = {
        name: answered(
            classes.folder,
            file,
            tmp_path / "out.jsonl",
            "--device",
            "cpu",
            "--precision",
            name,
        )
        for name in ("auto", "fp32", "bf16")
    }
    assert found["auto"] == found["fp32"]
    assert [row["prediction"] for row in found["bf16"]] == [
        row["prediction"] for row in found["fp32"]
    ]
    exact, near = (
        load_predictor(classes.folder, precision=name).outputs(pa_texts(texts))
        for name in (Precision.fp32, Precision.bf16)
    )
    assert 0 < float((near - exact).abs().max() / exact.abs().max()) < 0.03


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


def test_what_is_saved_is_the_running_mean_of_the_weights(classes):
    best = FolderCheckpointIO().load_checkpoint(classes.folder / "checkpoints" / "best")
    saved = model_weights(classes.folder)
    name = "net.classifier.weight"
    assert torch.equal(saved[name], best["average"][name])
    assert not torch.equal(saved[name], best["state_dict"][f"model.{name}"])


def test_rows_come_over_standard_input_and_the_likeliest_classes_are_listed(
    classes, monkeypatch, capsysbinary
):
    given = io.TextIOWrapper(io.BytesIO(b'{"text": "w1 cat"}\n{"text": null}\n'))
    monkeypatch.setattr("sys.stdin", given)
    assert verb("predict", classes.folder, "-", "--top-k", "9") == 0
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert lines[0] == '"text","prediction","probability","top_labels","top_probabilities"'
    assert lines[1].startswith('"w1 cat","animals",')
    assert '"animals|plants"' in lines[1]
    assert len(lines) == 3


def test_nothing_over_standard_input_is_a_mistake(classes, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert verb("predict", classes.folder, "-") == 2
    assert "nothing came over standard input" in capsys.readouterr().err


def test_pairs_are_parted_as_the_tokenizer_parts_them(tmp_path):
    first = table(300)
    data = {
        "premise": first["text"],
        "hypothesis": [f"it is about {label}" for label in first["label"]],
    }
    data["label"] = ["no", "yes", "yes"] * 100
    config = TextDataConfig(
        train=data,
        text=["premise", "hypothesis"],
        pair=True,
        cache=str(tmp_path),
    )
    result = run(tmp_path, config, epochs=1)
    model = result.predictor.model
    assert model._numbers_pairs
    again = load_predictor(result.folder)
    pair = ("w1 cat", "it is about plants")
    assert again.predict([pair])[0].probability == pytest.approx(
        result.predict([pair])[0].probability, abs=1e-6
    )
    assert (
        verb(
            "evaluate",
            result.folder,
            write_columns(tmp_path / "rows.jsonl", data),
        )
        == 0
    )


def test_only_encoders_read_pairs():
    data = TextDataConfig(
        train=table(50) | {"more": ["x"] * 50},
        text=["text", "more"],
        pair=True,
    )
    with pytest.raises(UserError, match="only encoders read pairs"):
        fit(data)


@pytest.mark.soak(seconds=3)
def test_each_of_several_labels_has_a_threshold_that_answers_and_scores_use(tmp_path, capsys):
    rows = table(600)
    random = np.random.default_rng(1)
    labels = list(rows["label"])
    for row in np.flatnonzero(random.random(600) < 0.15):
        labels[row] += "|odd"
    lists = [label.split("|") for label in labels]
    data = TextDataConfig(
        train=rows | {"label": lists},
        problem=Problem.multi,
        cache=str(tmp_path),
    )
    result = run(tmp_path, data)
    saved = json.loads((result.folder / "model" / "config.json").read_text())["thresholds"]
    assert len(saved) == 3
    loaded = load_predictor(result.folder)
    assert loaded.least_shares().tolist() == pytest.approx(saved)
    assert (
        loaded.temperature
        == result.predictor.temperature
        == result.summary["calibration"]["temperature"]
    )
    outputs = result.predictor.outputs(pa_texts(rows["text"][:50]))
    shares = result.predictor.shares(outputs)
    torch.testing.assert_close(shares, (outputs / loaded.temperature).sigmoid())
    names = result.predictor.labels.classes
    are_answered = shares >= torch.tensor(saved)
    expected = [list(compress(names, row)) for row in are_answered.tolist()]
    assert [each.label for each in result.predict(rows["text"][:50])] == expected
    given = {
        "text": rows["text"][:50],
        "label": labels[:50],
    }  # as a csv of answers has them
    capsys.readouterr()
    assert (
        verb(
            "evaluate",
            result.folder,
            write_columns(tmp_path / "rows.jsonl", given),
            "--json",
        )
        == 0
    )
    scores = json.loads(capsys.readouterr().out)
    right = [
        sorted(names) == sorted(label.split("|"))
        for names, label in zip(expected, labels, strict=False)
    ]
    assert scores["subset_accuracy"] == pytest.approx(sum(right) / 50)


@pytest.mark.soak(seconds=3)
def test_the_likeliest_of_several_labels_are_listed_too(tmp_path):
    rows = table(300)
    labels = list(rows["label"])
    for row in range(0, 300, 5):
        labels[row] += "|odd"
    data = TextDataConfig(
        train=rows | {"label": labels},
        problem=Problem.multi,
        label_delimiter="|",
        cache=str(tmp_path),
    )
    result = run(tmp_path, data, epochs=1)
    out = tmp_path / "answers.jsonl"
    texts = rows["text"][:20]
    file = write_columns(tmp_path / "rows.jsonl", {"text": texts})
    assert (
        verb(
            "predict",
            result.folder,
            file,
            "--top-k",
            2,
            "--device",
            "cpu",
            "--out",
            out,
        )
        == 0
    )
    found = [json.loads(line) for line in out.read_text().splitlines()]
    predictor = load_predictor(result.folder)
    best = (predictor.outputs(pa_texts(texts)) / predictor.temperature).sigmoid().topk(2)
    for row, shares, ids in zip(found, best.values.tolist(), best.indices.tolist(), strict=True):
        assert row["top_labels"] == [predictor.labels.classes[number] for number in ids]
        assert row["top_probabilities"] == pytest.approx(shares, abs=1e-5)


def test_where_there_are_no_classes_the_likeliest_cannot_be_listed(tags, tmp_path, capsys):
    numbers = {
        "text": table(100)["text"],
        "label": [float(number) for number in range(100)],
    }
    data = TextDataConfig(train=numbers, problem=Problem.regression, cache=str(tmp_path))
    result = run(tmp_path, data, epochs=1)
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
    assert (answered.given, answered.answers) == (
        (found.probabilities > limit).sum(),
        240,
    )
    tags = answered.block.column("prediction").flatten().to_pylist()
    possible = answered.block.column("possible").flatten().to_pylist()
    assert tags.count(None) == 240 - answered.given >= 120
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


def pa_texts(texts: list[str]):
    return pa.array(texts, pa.large_string())


def write_columns(path: Path, columns: dict[str, list[Any]]) -> Path:
    """Write a row as JSON on each line; the path."""
    values_of_rows = zip(*columns.values(), strict=True)
    return write_jsonl(
        path,
        (dict(zip(columns, row, strict=True)) for row in values_of_rows),
    )


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
    assert (answered.given, answered.answers) == (len(given), len(entities))
    assert 0.4 < len(given) / len(entities) < 0.6
    for row in rows:
        left = [entity for entity in row["entities"] if entity["type"] is None]
        blank = [place for place, tag in enumerate(row["prediction"]) if tag is None]
        assert len(blank) == sum(entity["stop"] - entity["start"] for entity in left)
        for entity in row["entities"]:
            assert (entity["probability"] > limit) == (entity["possible"] is None)
            assert entity["possible"] != []


def test_an_export_keeps_what_is_left_out_and_verify_holds_it_to_the_run(classes, tmp_path, capsys):
    folder = tmp_path / "export"
    assert verb("export", classes.folder, "--out", folder) == 0
    kept = json.loads((folder / "abstention.json").read_text())
    assert kept[0]["share"] == 1
    assert kept[0]["error"] == classes.summary["abstention"][0]["error"]
    file = write_columns(tmp_path / "rows.jsonl", table(8, seed=1))
    asked = ("--form", folder, "--at-error", kept[0]["at_most"])
    assert verb("verify", classes.folder, file, *asked) == 0
    assert "each form holds" in capsys.readouterr().out
    (folder / "abstention.npz").unlink()
    assert verb("verify", classes.folder, file, *asked) == 2
    assert "kept no answers to validation rows" in capsys.readouterr().err


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


def test_a_loss_that_is_not_finite_names_its_step_and_keeps_the_last_checkpoint(
    tmp_path,
):
    class Spoil(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 9:
                with torch.no_grad():
                    pl_module.model.net.classifier.bias.fill_(float("nan"))

    folder = tmp_path / "run"
    data = TextDataConfig(train=table(200), batch_size=32, cache=str(tmp_path))
    with pytest.raises(UserError, match="not finite at step 10"):
        run(
            tmp_path,
            data,
            callbacks={"spoil": Spoil()},
            folder=folder,
            checkpoint=CheckpointConfig(patience=None),
        )
    kept = FolderCheckpointIO().load_checkpoint(folder / "checkpoints" / "last")
    assert kept["global_step"] < 10
    assert all(torch.isfinite(tensor).all() for tensor in kept["state_dict"].values())


@pytest.mark.soak(seconds=2)
def test_accumulated_batches_take_the_same_steps_as_one_large_batch(
    tmp_path,
):
    exact = calm_encoder(hidden=32, layers=2, heads=4)
    weights = []
    for batch_size, accumulate in ((32, 1), (8, 4)):
        data = TextDataConfig(
            train=table(200),
            batch_size=batch_size,
            accumulate=accumulate,
            cache=str(tmp_path),
        )
        result = run(
            tmp_path,
            data,
            exact,
            epochs=1,
            precision="fp32",
            optim=OptimConfig(lr=1e-3, eps=1e-4),
        )
        weights.append(model_weights(result.folder))
    for name, weight in weights[0].items():
        torch.testing.assert_close(
            weights[1][name],
            weight,
            rtol=1e-3,
            atol=1e-4,
            msg=lambda told, at=name: f"{at}: {told}",
        )
