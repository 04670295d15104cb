"""Whole runs with `tune=auto`: what was asked for stays, answers are kept, a run that is gone on
with has its own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flatout import (
    BiLSTMConfig,
    MonitorConfig,
    OptimConfig,
    RunConfig,
    TextDataConfig,
    UserError,
)
from flatout.engine.precision import Precision
from flatout.perf.notes import Limit, MicroBatches
from flatout.perf.tune.answers import Answers, AnswerStore
from flatout.perf.tune.probe import ProbedSetting
from flatout.perf.tune.settings import TuneConfig
from flatout.perf.tune.speeds import OpenSettings
from flatout.report.summary import read_summary
from flatout.run.answers import apply_answers, read_answers
from flatout.run.closing import Result
from flatout.run.tuning import combine_answers, is_outdated, list_settled, override_line
from tests.cli.test_train import run_train
from tests.composed import compose_run, only_folder
from tests.fitting import quiet_fit
from tests.params import at_once
from tests.perf.tune.planted import SMALL
from tests.refusals import refused
from tests.verbs import verb

MODEL = BiLSTMConfig(embedding=8, hidden=8)
QUICK: dict[str, Any] = {"steps": 2, "share": 1e6, "budget_s": 60.0}
ALL_KEPT = {"enabled": True, "gain": 0.99, "compile": False} | QUICK
"""Measured, but so hard to beat that the answers are the settings as they are."""


def tune_run(folder: Path, tune: TuneConfig | str = "off", **settings: Any) -> Result:
    given = {
        "data": TextDataConfig(sample=SMALL, batch_size=32),
        "epochs": 1,
        "monitor": MonitorConfig(progress=False, flush_every=1),
    }
    return quiet_fit(model=MODEL, folder=folder, tune=tune, **(given | settings))


def weights(result: Result) -> dict[str, torch.Tensor]:
    """Those of the last checkpoint, with the optimizer's numbers."""
    return load_file(result.folder / "checkpoints" / "last" / "tensors.safetensors")


def choices(result: Result) -> dict[str, dict[str, Any]]:
    return {choice["name"]: choice for choice in result.summary["choices"]}


# What is open, and what is kept.


def composed(*words: str) -> tuple[RunConfig, list[str]]:
    return compose_run(["tune=auto", *words]), ["tune=auto", *words]


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        (["data.tokens_per_batch=512"], "data.batch_size", "data.tokens_per_batch decides"),
        (["tune.feed=false"], "data.feed", ""),
        *at_once(
            of=[
                (["data.feed=threaded"], "data.feed", "asked for"),
                (["precision=fp32"], "precision", "asked for"),
                (
                    ["+trainer.limit_train_batches=4"],
                    "data.batch_size",
                    "trainer.limit_train_batches counts batches",
                ),
            ],
            seconds=1,
        ),
        *at_once(
            of=[
                (["data.batch_size=128"], "data.batch_size", "asked for"),
                (["data.accumulate=2"], "data.batch_size", "asked for"),
                (["compile=false"], "compile", "asked for"),
                (["tune.learning_rate=true", "optim.lr=0.01"], "optim.lr", "asked for"),
            ],
            seconds=1,
        ),
    ],
)
def test_what_was_typed_is_kept(words, key, why):
    assert list_settled(*composed(*words))[key] == why
    assert key not in list_settled(*composed("tune.learning_rate=true"))


@pytest.mark.parametrize(
    "word", ["data.effective_batch=64", "+trainer.limit_train_batches=0.5", "+experiment=bert_tiny"]
)
def test_what_a_step_is_made_of_stays_open_where_only_its_rows_are_said(word):
    assert "data.batch_size" not in list_settled(*composed(word))


def test_from_python_what_differs_from_the_default_was_asked_for():
    python = RunConfig(data=TextDataConfig(batch_size=32), tune=TuneConfig(enabled=True))
    assert list_settled(python, [])["data.batch_size"] == "asked for"
    assert "data.batch_size" not in list_settled(RunConfig(tune=TuneConfig(enabled=True)), [])


def test_answers_become_settings_and_words():
    values = {
        "data.feed": "threaded",
        "precision": "bf16",
        "data.batch_size": 16,
        "data.accumulate": 4,
        "compile": True,
    }
    config = apply_answers(RunConfig(), values)
    assert (config.data.feed, config.precision, config.compile) == (
        "threaded",
        Precision.bf16,
        True,
    )
    assert config.data.batches(1) == (16, 4)
    shared = apply_answers(RunConfig(data=TextDataConfig(effective_batch=64)), values)
    assert shared.data.batches(1) == (16, 4)
    assert (
        override_line(values)
        == "data.feed=threaded precision=bf16 data.batch_size=16 data.accumulate=4 compile=true"
    )
    assert apply_answers(config, {}) is config


def test_an_answer_to_what_nothing_measures_is_ignored():
    config = RunConfig()
    assert apply_answers(config, {"data.source": "s3://somebody/rows", "seed": 3}) is config


def test_a_rate_that_was_found_is_not_scaled_again():
    optim = OptimConfig(scale_lr="linear", base_batch=32)
    config = apply_answers(RunConfig(optim=optim), {"optim.lr": 1e-3})
    assert (config.optim.lr, config.optim.scale_lr) == (1e-3, "none")
    assert override_line({"optim.lr": 1e-3}, optim) == "optim.lr=0.001 optim.scale_lr=none"
    assert override_line({"optim.lr": 1e-3}, OptimConfig()) == "optim.lr=0.001"


def test_rows_of_a_step_are_either_set_or_free():
    free = TuneConfig(enabled=True, effective_batch="free")
    with pytest.raises(
        UserError, match=r"tune\.effective_batch: free with data\.effective_batch=64"
    ):
        RunConfig(data=TextDataConfig(effective_batch=64), tune=free)


def test_of_unlike_devices_the_smallest_decides():
    large = Answers(
        values={
            "data.feed": "resident",
            "precision": "bf16",
            "data.batch_size": 64,
            "data.accumulate": 1,
            "compile": True,
            "optim.lr": 2e-3,
        }
    )
    small = Answers(
        values={
            "data.feed": "threaded",
            "precision": "fp16",
            "data.batch_size": 16,
            "data.accumulate": 4,
            "compile": False,
            "optim.lr": 1e-3,
        }
    )
    for found in (combine_answers([large, small]), combine_answers([small, large])):
        assert found.values == small.values
        assert found.choices[-1].name == "unlike devices"
    mixed = Answers(
        values=large.values
        | {
            "precision": "fp32",
            "data.batch_size": 32,
            "data.accumulate": 2,
        }
    )
    assert combine_answers([small, mixed]).values["precision"] == "fp32"
    assert combine_answers([large]) is large
    assert combine_answers([large, Answers()]).values == {}


def asked(**settings: Any) -> OpenSettings:
    start = ProbedSetting(feed="resident", precision="fp32", rows=8, accumulate=1)
    given: dict[str, Any] = {
        "settings": TuneConfig(),
        "start": start,
        "feeds": [],
        "precisions": [],
        "step_rows": 8,
        "num_rows": 80,
        "planned_steps": 1000,
        "room_bytes": 1,
        "is_cpu": True,
    }
    return OpenSettings(**(given | settings))


def test_answers_are_taken_again_until_the_time_would_find_more(tmp_path):
    store = AnswerStore(tmp_path)
    known = Answers(
        step_s=0.1, planned_steps=1000, allowed_s=5.0, row_key="k", values={"data.batch_size": 32}
    )
    assert not is_outdated(known, asked(), store)
    assert is_outdated(known, asked(planned_steps=5000), store)
    assert is_outdated(Answers(), asked(), store)
    compiled = Answers(step_s=0.1, planned_steps=1000, values={"compile": True})
    assert is_outdated(compiled, asked(planned_steps=400), store)
    cut = Answers(step_s=0.1, planned_steps=1000, allowed_s=5.0, is_complete=False)
    assert not is_outdated(cut, asked(), store)
    assert is_outdated(cut, asked(planned_steps=3000, settled={"compile": ""}), store)
    assert is_outdated(cut, asked(counts_time=False), store)
    MicroBatches(tmp_path, {}).note("training rows", Limit(32), "k")
    assert not is_outdated(known, asked(), store)
    MicroBatches(tmp_path, {}).note("training rows", Limit(16), "k")
    assert is_outdated(known, asked(), store)


# Mistakes.


def test_mistakes_are_told_before_anything_starts():
    with refused("tune", "'atuo'", allowed="off, auto", fix="'auto'"):
        RunConfig(tune="atuo")
    with refused("tune", "'cut'", fix="python -m flatout probe scores layers and names the cut"):
        RunConfig(tune="cut")
    with refused("tune.budget_s", 0, allowed="above 0", fix="tune=off"):
        TuneConfig(budget_s=0)
    with pytest.raises(
        UserError, match="the processes that measure cannot build a model of your own"
    ):
        RunConfig(model=nn.Linear(2, 2), tune=TuneConfig(enabled=True))
    assert RunConfig(tune="auto").tune.enabled
    assert not RunConfig(tune="off").tune.enabled


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("tune=atuo", "tune: no option 'atuo' (auto, off). Did you mean 'auto'?"),
        (
            "tune=cut",
            "tune: no option 'cut' (auto, off). python -m flatout probe scores layers and names"
            " the cut; set model.freeze_layers.",
        ),
        ("tune.budget_s=-1", "tune.budget_s: -1.0 (above 0)"),
        *at_once(
            of=[
                ("tune.bugdet_s=3", "Did you mean 'tune.budget_s'?"),
                ("tune.effective_batch=kep", "(kept, free). Did you mean 'kept'?"),
            ],
            seconds=1,
        ),
    ],
)
def test_words_that_mean_nothing_are_told(word, told, monkeypatch, capsys, tmp_path):
    assert run_train(["tune=auto", word, f"output={tmp_path}"], monkeypatch) == 2
    assert told in capsys.readouterr().err


# Real runs.


@pytest.mark.soak(seconds=5)
def test_a_run_whose_answers_are_its_settings_has_the_same_weights_to_the_last_bit(
    tmp_path, capsys
):
    tuned = tune_run(tmp_path / "tuned", TuneConfig(**ALL_KEPT))
    plain = tune_run(tmp_path / "plain")
    told = capsys.readouterr().out
    assert "tune: measuring in a process apart" in told
    assert " probes in " in told
    found = tuned.summary["tune"]
    # which one wins is this machine's answer
    assert list(found["values"]) == ["data.feed"]
    assert not found["cached"]
    assert (
        choices(tuned)["precision"]["why"]
        == choices(tuned)["micro-batch"]["why"]
        == "kept: asked for"
    )
    ours = weights(tuned)
    theirs = weights(plain)
    assert ours.keys() == theirs.keys()
    assert ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert tuned.metrics == plain.metrics

    again = tune_run(tmp_path / "again", TuneConfig(**ALL_KEPT))
    assert "tune: cached (" in capsys.readouterr().out
    assert again.summary["tune"]["cached"]
    assert again.summary["tune"]["values"] == found["values"]
    assert again.metrics == plain.metrics

    # Other rows, another question; and a damaged file is measured anew.
    (path,) = (path for path in AnswerStore().folder.glob("*.json"))
    path.write_text("{", encoding="utf-8")
    with pytest.warns(UserWarning, match="is damaged: measured again"):
        anew = tune_run(tmp_path / "anew", TuneConfig(**ALL_KEPT))
    assert not anew.summary["tune"]["cached"]


@pytest.mark.soak(seconds=3)
def test_a_run_that_is_too_short_is_left_as_it_is(tmp_path, capsys):
    result = tune_run(tmp_path, "auto")
    assert result.summary["tune"]["values"] == {}
    assert "5% of it is too little to measure anything" in choices(result)["tune"]["why"]
    tune_run(tmp_path / "again", "auto")
    assert "tune: cached" in capsys.readouterr().out


@pytest.mark.soak(seconds=7)
def test_a_run_that_is_gone_on_with_has_the_answers_it_was_begun_with(
    tmp_path, monkeypatch, capsys
):
    words = [
        "tune=auto",
        "tune.share=1000",
        "tune.steps=2",
        "tune.compile=false",
        "data.sample.rows=400",
        "data.sample.eval_rows=40",
        "model.embedding=8",
        "model.hidden=8",
        "trainer.max_epochs=1",
        f"output={tmp_path}",
        "data.effective_batch=64",
    ]
    assert run_train(words, monkeypatch) == 0
    folder = only_folder(tmp_path / "default")
    summary = read_summary(folder)
    assert summary["tune"]["values"].keys() >= {"data.feed", "precision", "data.batch_size"}
    # As if they had been others: what was measured since counts for new runs only.
    summary["tune"]["values"] |= {
        "data.batch_size": 16,
        "data.accumulate": 4,
        "precision": "fp32",
    }
    summary["tune"]["values"]["data.feed"] = "threaded"
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    capsys.readouterr()
    more = [word for word in words if "max_epochs" not in word] + [
        "trainer.max_epochs=2",
        "resume=auto",
    ]
    code = run_train([*more, "resume_anyway=true"], monkeypatch)
    told = capsys.readouterr().out
    assert code == 0
    assert (
        "tune: as at the beginning of this run (data.feed=threaded precision=fp32"
        " data.batch_size=16" in told
    )
    assert read_summary(folder)["tune"]["values"]["data.batch_size"] == 16
    answers = read_answers(str(folder), folder)
    assert answers is not None
    assert answers["values"]["data.batch_size"] == 16


def test_a_run_begun_without_it_goes_on_as_it_was(tmp_path, capsys):
    first = tune_run(tmp_path / "run")
    result = tune_run(tmp_path / "run", TuneConfig(**ALL_KEPT), resume=str(first.folder), epochs=2)
    assert "tune: this run began without it and continues without it" in capsys.readouterr().out
    assert result.summary["tune"] is None


@pytest.mark.soak(seconds=6)
def test_the_verb_prints_a_table_and_a_line_and_a_run_finds_its_answers(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    words = [
        "data.sample.rows=400",
        "data.sample.eval_rows=40",
        "model.embedding=8",
        "model.hidden=8",
    ]
    words += ["tune.steps=2", "tune.compile=false", "data.effective_batch=64"]
    assert verb("tune", *words) == 0
    told = capfd.readouterr().out
    assert "rows/s" in told
    assert "as set" in told
    assert "feed alone" in told
    # Which feed wins is this machine's answer: the line names one of them and every other knob.
    assert re.fullmatch(
        r"data\.feed=\w+ precision=\w+ data\.batch_size=64 data\.accumulate=1",
        told.splitlines()[-1],
    )
    assert not list(tmp_path.glob("outputs/**/*"))
    assert run_train(["tune=auto", *words, "trainer.max_epochs=1"], monkeypatch) == 0
    assert "tune: cached (" in capfd.readouterr().out


def test_the_verb_tells_mistakes(capfd):
    assert verb("tune", "tune.budget_s=0") == 2
    assert "tune.budget_s: 0.0 (above 0)" in capfd.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["data=bits", "model=bitmlp", "task=grams"],
        [
            "model=transformer",
            "model.hidden=16",
            "model.layers=1",
            "model.heads=2",
            "data.sample.eval_rows=40",
        ],
    ],
)
@pytest.mark.soak(seconds=5)
def test_bit_strings_and_encoders_are_measured_too(words, capfd):
    assert verb("tune", *words, "data.sample.rows=400", "tune.steps=2", "tune.compile=false") == 0
    assert "precision=" in capfd.readouterr().out.splitlines()[-1]


@pytest.mark.soak(seconds=30)
def test_two_ranks_share_one_answer(tmp_path):
    result = tune_run(
        tmp_path,
        TuneConfig(**(ALL_KEPT | {"gain": 0.0})),
        trainer={"devices": 2},
        data=TextDataConfig(sample=SMALL),
    )
    found = result.summary["tune"]
    assert found["values"]["data.batch_size"] * found["values"]["data.accumulate"] == 128
    assert result.summary["training"]["rows_per_step"] == 256
    assert result.summary["status"] == "finished"


@pytest.mark.soak(seconds=20)
def test_a_search_alone_measures_the_batches_of_the_run(tmp_path, capsys):
    rows = [f"{word} number {row},{word}" for row in range(30) for word in ("sea", "land")]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows, ""]), encoding="utf-8")
    words = [f"data.source={tmp_path}/rows.csv", f"data.cache={tmp_path}/cache", "model=textcnn"]
    assert verb("tune", *words, "tune.steps=2", "tune.compile=false") == 0
    assert "data.batch_size=16 data.accumulate=1" in capsys.readouterr().out
