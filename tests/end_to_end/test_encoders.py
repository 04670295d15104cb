"""Whole runs of small encoders: classes, pairs, several labels; what they leave behind
answers the same.
"""

from __future__ import annotations

import io
import json
from itertools import compress

import lightning as L
import numpy as np
import pytest
import torch
from tests.encoders import calm_encoder
from tests.end_to_end.encoder_runs import (
    pa_texts,
    predict_rows,
    topic_rows,
    train_encoder,
    write_columns,
)
from tests.run_files import choices_of, model_weights
from tests.verbs import verb

from flatout import (
    CheckpointConfig,
    OptimConfig,
    TextDataConfig,
    TransformerConfig,
    UserError,
    fit,
    load_predictor,
)
from flatout.checkpoints.folder import FolderCheckpointIO
from flatout.data.problem import Problem
from flatout.engine.precision import Precision


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    return train_encoder(
        folder,
        TextDataConfig(train=topic_rows(400), batch_size=16, cache=str(folder)),
        optim=OptimConfig(lr=3e-3, ema=0.9),
    )


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
    data = TextDataConfig(train=topic_rows(60), cache=str(tmp_path))
    for optim, rate in (
        (OptimConfig(), "0.0003"),
        (OptimConfig(lr=1e-4), None),
    ):
        summary = train_encoder(tmp_path, data, pretrained, optim=optim, epochs=1).summary
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


def test_answers_in_sixteen_bits_are_near_those_of_fp32_which_a_cpu_gives_unasked(
    classes, tmp_path
):
    texts = topic_rows(60, seed=2)["text"]
    file = write_columns(tmp_path / "rows.jsonl", {"text": texts})
    found = {
        name: predict_rows(
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
    first = topic_rows(300)
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
    result = train_encoder(tmp_path, config, epochs=1)
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
        train=topic_rows(50) | {"more": ["x"] * 50},
        text=["text", "more"],
        pair=True,
    )
    with pytest.raises(UserError, match="only encoders read pairs"):
        fit(data)


@pytest.mark.soak(seconds=3)
def test_each_of_several_labels_has_a_threshold_that_answers_and_scores_use(tmp_path, capsys):
    rows = topic_rows(600)
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
    result = train_encoder(tmp_path, data)
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
    rows = topic_rows(300)
    labels = list(rows["label"])
    for row in range(0, 300, 5):
        labels[row] += "|odd"
    data = TextDataConfig(
        train=rows | {"label": labels},
        problem=Problem.multi,
        label_delimiter="|",
        cache=str(tmp_path),
    )
    result = train_encoder(tmp_path, data, epochs=1)
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


def test_an_export_keeps_what_is_left_out_and_verify_holds_it_to_the_run(classes, tmp_path, capsys):
    folder = tmp_path / "export"
    assert verb("export", classes.folder, "--out", folder) == 0
    kept = json.loads((folder / "abstention.json").read_text())
    assert kept[0]["share"] == 1
    assert kept[0]["error"] == classes.summary["abstention"][0]["error"]
    file = write_columns(tmp_path / "rows.jsonl", topic_rows(8, seed=1))
    asked = ("--form", folder, "--at-error", kept[0]["at_most"])
    assert verb("verify", classes.folder, file, *asked) == 0
    assert "each form holds" in capsys.readouterr().out
    (folder / "abstention.npz").unlink()
    assert verb("verify", classes.folder, file, *asked) == 2
    assert "kept no answers to validation rows" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_names_its_step_and_keeps_the_last_checkpoint(
    tmp_path,
):
    class Spoil(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 9:
                with torch.no_grad():
                    pl_module.model.net.classifier.bias.fill_(float("nan"))

    folder = tmp_path / "run"
    data = TextDataConfig(train=topic_rows(200), batch_size=32, cache=str(tmp_path))
    with pytest.raises(UserError, match="not finite at step 10"):
        train_encoder(
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
            train=topic_rows(200),
            batch_size=batch_size,
            accumulate=accumulate,
            cache=str(tmp_path),
        )
        result = train_encoder(
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
