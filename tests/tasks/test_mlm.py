"""Runs on masked words: they learn, answer, resume, are exported, and others begin from them."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from flatout import (
    MaskedLanguageConfig,
    OptimConfig,
    TextDataConfig,
    TransformerConfig,
    UserError,
    fit,
    load_predictor,
)
from flatout.data import TextData
from flatout.data.batches.flat_batch import flat_batch
from flatout.data.problem import Problem
from flatout.run.closing import Result
from flatout.tasks import Classifier, MaskedLanguageModel
from tests.faults.plants import Planted, RaiseAt
from tests.run_files import choices_of, model_weights
from tests.verbs import verb

SMALL = TransformerConfig(hidden=32, layers=2, heads=4)


def texts(rows: int, seed: int = 0) -> dict[str, list[str]]:
    """Sentences that name one tree again and again, and one number."""
    random = np.random.default_rng(seed)
    trees = "ash birch cedar elm fir hazel larch maple oak pine rowan willow".split()
    found = []
    for number in range(rows):
        words = [trees[random.integers(len(trees))]] * int(random.integers(3, 14))
        words.insert(int(random.integers(len(words))), f"n{number}")
        found.append(" ".join(words))
    return {"text": found}


def pretrain(
    folder: Path, rows: int = 500, model: TransformerConfig = SMALL, **settings: Any
) -> Result:
    data = TextDataConfig(
        train=texts(rows), batch_size=16, max_length=32, cache=str(folder / "cache")
    )
    given = {
        "optim": OptimConfig(lr=5e-3),
        "epochs": 15,
        "output": str(folder / "runs"),
        "logger": "none",
    }
    return fit(data, model, task=MaskedLanguageConfig(mask_share=0.3), **(given | settings))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return pretrain(
        tmp_path_factory.mktemp("pretrained"), optim=OptimConfig(lr=5e-3, ema=0.9), epochs=8
    )


@pytest.mark.soak(seconds=10)
def test_a_run_without_labels_learns_masked_words_and_measures_them(pretrained: Result) -> None:
    metrics = pretrained.metrics
    assert metrics["test/masked_accuracy"] > 0.4
    assert metrics["test/perplexity"] == pytest.approx(math.exp(metrics["test/loss"]), rel=1e-6)
    choices = choices_of(pretrained.summary)
    assert choices["batches"] == "flat"
    assert choices["masked tokens"].endswith("%")
    assert pretrained.summary["data"]["columns"]["label"] == ""


def test_a_loaded_run_fills_in_masked_words_as_the_run_did(pretrained: Result) -> None:
    asked = ["elm elm [MASK] elm elm elm", "elm", "oak oak [MASK] oak [MASK] oak"]
    expected = pretrained.predict(asked)
    found = load_predictor(pretrained.folder).predict(asked)
    assert found == expected
    assert [len(each) for each in found] == [1, 0, 2]
    assert found[0][0][0].word == "elm"


def test_the_export_opens_in_transformers_with_the_same_logits(
    pretrained: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    assert verb("export", pretrained.folder, "--out", tmp_path / "plain") == 0
    assert "AutoModelForMaskedLM" in capsys.readouterr().out
    net, tokenizer = (
        each.from_pretrained(tmp_path / "plain") for each in (AutoModelForMaskedLM, AutoTokenizer)
    )
    own = load_predictor(pretrained.folder)
    text = "elm elm [MASK] elm elm elm"
    ids = tokenizer(text)["input_ids"]
    with torch.inference_mode():
        theirs = net.eval()(torch.tensor([ids])).logits[0]
        ours = own.model.eval()(flat_batch([ids]))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("verb_name", ["predict", "evaluate"])
def test_verbs_that_answer_rows_refuse_it(
    verb_name: str, pretrained: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text("text,label\nash,a\n")
    assert verb(verb_name, pretrained.folder, tmp_path / "rows.csv") == 2
    assert "answers masked words, not rows" in capsys.readouterr().err


def labelled(rows: int) -> dict[str, list[str]]:
    found = texts(rows, seed=1)["text"]
    labels = ["odd", "even"]
    return {"text": found, "label": [labels[len(text.split()) % 2] for text in found]}


@pytest.mark.parametrize("way", ["run", "model", "export"])
def test_classes_go_on_from_a_run_and_from_its_export(
    way: str, pretrained: Result, tmp_path: Path
) -> None:
    name = pretrained.folder if way == "run" else pretrained.folder / "model"
    if way == "export":
        name = tmp_path / "plain"
        assert verb("export", pretrained.folder, "--out", name) == 0
    data = TextData(train=labelled(120), tokenizer=str(name), cache=str(tmp_path))
    data.setup()
    network = Classifier(TransformerConfig(pretrained=str(name))).build(data.info)
    weights = model_weights(pretrained.folder)
    own = network.state_dict()
    of_encoder = [each for each in weights if each.startswith("net.bert.")]
    assert len(of_encoder) > 20
    assert all(torch.equal(own[each], weights[each]) for each in of_encoder)
    vocabularies = (data.info.vocabulary, load_predictor(pretrained.folder).vocabulary)
    words, kept = (each.tokenizer.get_vocab() for each in vocabularies)
    assert words == kept


def test_masked_words_go_on_from_a_run(pretrained: Result, tmp_path: Path) -> None:
    after = pretrain(tmp_path, model=TransformerConfig(pretrained=str(pretrained.folder)), epochs=1)
    assert after.metrics["test/perplexity"] < 1.1 * pretrained.metrics["test/perplexity"]


@pytest.mark.soak(seconds=3)
def test_a_run_that_was_cut_short_resumes_to_the_same_weights(tmp_path: Path) -> None:
    small: dict[str, Any] = {"rows": 200, "epochs": 3, "precision": "fp32"}
    whole = pretrain(tmp_path / "whole", **small)
    plant = {"plant": RaiseAt(place="on_train_batch_end", step=15)}  # inside the second epoch
    with pytest.raises(Planted):
        pretrain(tmp_path / "cut", callbacks=plant, resume="auto", **small)
    resumed = pretrain(tmp_path / "cut", callbacks={}, resume="auto", **small)
    assert resumed.summary["training"]["resumed_from"] > 10
    expected = model_weights(whole.folder)
    found = model_weights(resumed.folder)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert resumed.metrics == whole.metrics


def test_accumulated_batches_make_the_same_step_as_one_large_batch(tmp_path: Path) -> None:
    calm = TransformerConfig(hidden=16, layers=1, heads=2, dropout=0.0, attention_dropout=0.0)
    found = []
    for size, accumulate in ((32, 1), (8, 4)):
        data = TextDataConfig(
            train=texts(150), batch_size=size, accumulate=accumulate, cache=str(tmp_path)
        )
        settings: dict[str, Any] = {
            "precision": "fp32",
            "trainer": {"max_steps": 4},
            "logger": "none",
        }
        result = fit(
            data, calm, task=MaskedLanguageConfig(), output=str(tmp_path / f"{size}"), **settings
        )
        found.append(model_weights(result.folder))
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*number of training batches.*",
    "ignore:.*TensorBoard support.*",
)
def test_it_trains_answers_and_judges_in_a_plain_trainer(tmp_path: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(0, verbose=False)
    data = TextData(train=texts(300), problem="none", batch_size=16, cache=str(tmp_path))
    model = MaskedLanguageModel(SMALL, optim=OptimConfig(lr=3e-3))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_epochs=4,
        accelerator="cpu",
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **quiet,
    )
    trainer.fit(model, datamodule=data)
    (first,) = trainer.test(model, datamodule=data, verbose=False)
    (again,) = trainer.test(model, datamodule=data, verbose=False)
    assert first == again
    assert first["test/perplexity"] < 100
    answers = trainer.predict(model, datamodule=data)
    assert answers is not None
    losses = torch.cat([each["loss"] for each in answers])
    assert len(losses) == len(data.store.splits["test"].fixed("rows"))
    assert losses.min() >= 0


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_share": 0.0}, "task.mask_share: 0.0"),
        ({"mask_share": 1.0}, "task.mask_share: 1.0"),
        ({"mask_token_share": 1.2}, "task.mask_token_share: 1.2"),
        ({"random_token_share": 0.3}, "add up to 1"),
    ],
)
def test_shares_that_cannot_be_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MaskedLanguageConfig(**settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bilstm"}, "predicts no masked words"),
        ({"problem": Problem.tags}, "Leave data.problem out"),
        ({"task": "classification"}, "Set task=mlm"),
        ({"label": "label"}, "Leave it out"),
        ({"strategy": "fsdp"}, "does not train masked language models"),
        ({"lora": 4}, "task=mlm trains the encoder itself"),
        ({"family": "vit"}, "no encoder 'vit'"),
        ({"family": "gpt2"}, "gpt2 has no head that predicts masked words"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from flatout import BiLSTMConfig, ClassificationConfig
    from flatout.models.encoder.lora import LoraConfig

    problem = changes.get("problem", Problem.none)
    task = ClassificationConfig() if changes.get("task") else MaskedLanguageConfig()
    model: Any = (
        BiLSTMConfig()
        if changes.get("model")
        else TransformerConfig(
            hidden=16,
            layers=1,
            heads=2,
            family=changes.get("family", "bert"),
            lora=LoraConfig(rank=changes.get("lora", 0)),
        )
    )
    trainer = {"strategy": changes["strategy"]} if "strategy" in changes else {}
    with pytest.raises(UserError, match=message):
        source = {} if problem is Problem.tags else {"train": texts(40)}
        data = TextDataConfig(
            problem=problem, label=changes.get("label"), cache=str(tmp_path), **source
        )
        fit(data, model, task=task, trainer=trainer, output=str(tmp_path / "runs"), epochs=1)


def test_a_tokenizer_without_a_mask_token_is_refused(pretrained: Result, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_predictor(pretrained.folder).vocabulary.tokenizer
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(
        tmp_path / "maskless"
    )
    data = TextDataConfig(
        train=texts(40), tokenizer=str(tmp_path / "maskless"), cache=str(tmp_path)
    )
    with pytest.raises(UserError, match=r"data\.tokenizer: .*maskless has no mask token"):
        fit(data, SMALL, task=MaskedLanguageConfig(), output=str(tmp_path / "runs"), epochs=1)


def test_a_classifier_refuses_texts_without_labels(tmp_path: Path) -> None:
    data = TextData(train=texts(40), problem="none", cache=str(tmp_path))
    data.setup()
    with pytest.raises(UserError, match="Use MaskedLanguageModel"):
        Classifier(SMALL).build(data.info)


@pytest.mark.parametrize(
    "harm", ["encoder.json", "model.safetensors", "tokenizer.json", "unfinished", "bilstm"]
)
def test_a_run_that_cannot_be_gone_on_from_is_named(
    harm: str, pretrained: Result, tmp_path: Path
) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(pretrained.folder, run)
    if harm == "unfinished":
        shutil.rmtree(run / "model")
    elif harm == "bilstm":
        (run / "model" / "encoder.json").unlink()
    else:
        (run / "model" / harm).write_text(json.dumps([1])[:-1])
    data = TextDataConfig(train=labelled(40), cache=str(tmp_path))
    with pytest.raises(UserError, match=r"model\.pretrained"):
        fit(data, TransformerConfig(pretrained=str(run)), output=str(tmp_path / "runs"), epochs=1)


def test_check_ends_with_the_command_that_trains_on_texts_without_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt.csv").write_text("text\n" + "\n".join(texts(60)["text"]))
    assert verb("check", tmp_path / "notes.txt.csv", "data.problem=none") == 0
    assert "data.problem=none model=transformer task=mlm" in capsys.readouterr().out
