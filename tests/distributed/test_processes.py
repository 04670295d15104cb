"""Two processes train what one trains: the same losses, metrics and answers, however the two were
started.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    BitsDataConfig,
    GramsConfig,
    HeadlinesConfig,
    MaskedLanguageConfig,
    MonitorConfig,
    OptimConfig,
    PeopleConfig,
    TaggedTweetsConfig,
    TextDataConfig,
    TransformerConfig,
    UserError,
    fit,
)
from flatout.data.problem import Problem
from flatout.distributed.ranks import Ranks
from flatout.run.closing import Result
from flatout.run.devices import choose_devices
from tests.fitting import quiet_fit
from tests.params import at_once
from tests.run_files import losses, read_log

ENCODER = TransformerConfig(hidden=32, layers=2, heads=4, dropout=0.0, attention_dropout=0.0)
HEADLINES = HeadlinesConfig(rows=203, eval_rows=51, classes=4)


def train_on_devices(
    folder: Path, data: Any, model: Any, devices: int, strategy: str | None = None, **settings: Any
) -> Result:
    given: dict[str, Any] = {
        "optim": OptimConfig(lr=3e-3),
        "epochs": 2,
        "threads": 1,
        "monitor": MonitorConfig(flush_every=1, progress=False),
    }
    return quiet_fit(
        data,
        model,
        folder=folder / f"{devices}",
        trainer={"devices": devices, "strategy": strategy or "auto"},
        **(given | settings),
    )


def both(folder: Path, data: Any, model: Any, **settings: Any) -> tuple[Result, Result]:
    """One process, and two with half the rows each."""
    rows = data.batch_size
    one = train_on_devices(folder, data, model, 1, **settings)
    data.batch_size = rows // 2
    return one, train_on_devices(folder, data, model, 2, **settings)


def texts(**settings: Any) -> TextDataConfig:
    return TextDataConfig(sample=HEADLINES, **({"batch_size": 32} | settings))


def rows_of(labels: list[Any], count: int) -> dict[str, list[Any]]:
    """So many that the 17th of each evaluated split stands alone in its step."""
    texts = [f"w{number % 11} w{number % 7} w{number}" for number in range(count)]
    return {"text": texts, "label": [labels[number % len(labels)] for number in range(count)]}


NUMBERS = rows_of([1.0, 2.5, 4.0], 170)
SEVERAL = rows_of([["a"], ["a", "b"], ["b", "c"]], 170)
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "an encoder on flat batches": (texts(), ENCODER, {}),
    "batches added up": (texts(batch_size=16, accumulate=2), ENCODER, {}),
    "layers that thaw": (
        texts(),
        replace(ENCODER, freeze_layers=2, unfreeze_epochs=1.0),
        {},
    ),
    "a running mean": (texts(), ENCODER, {"optim": OptimConfig(lr=3e-3, ema=0.9)}),
    "padded batches of like length": (
        texts(),
        BiLSTMConfig(hidden=16, embedding=16, dropout=0.0),
        {},
    ),
    "bit strings": (
        BitsDataConfig(sample=PeopleConfig(rows=501), batch_size=32),
        BitMLPConfig(widths=[32], dropout=0.0),
        {"task": GramsConfig(exposure=False, recombine=0.0)},
    ),
    "numbers, with one row for the last step of two ranks": (
        TextDataConfig(train=NUMBERS, problem=Problem.regression, batch_size=32, eval_batch_size=8),
        ENCODER,
        {},
    ),
    "several labels, likewise": (
        TextDataConfig(train=SEVERAL, problem=Problem.multi, batch_size=32, eval_batch_size=8),
        ENCODER,
        {},
    ),
    "tags": (
        TextDataConfig(
            problem=Problem.tags,
            sample=TaggedTweetsConfig(rows=301, eval_rows=51),
            max_length=20,
            batch_size=16,
        ),
        ENCODER,
        {},
    ),
    "masked words": (texts(), ENCODER, {"task": MaskedLanguageConfig()}),
}


SOAK = pytest.mark.soak(seconds=5)


@pytest.mark.parametrize("case", at_once("an encoder on flat batches", of=CASES, seconds=5))
def test_two_ranks_train_like_one_with_twice_the_batch(case, tmp_path):
    data, model, settings = CASES[case]
    one, two = both(tmp_path, data, model, **settings)
    assert len(losses(one.folder)) == len(losses(two.folder)) > 8
    assert losses(two.folder) == pytest.approx(losses(one.folder), rel=1e-5)
    # The correlation of answers that hardly differ yet follows their last digits.
    settled = {name: value for name, value in one.metrics.items() if not name.endswith("pearson")}
    assert {name: two.metrics[name] for name in settled} == pytest.approx(settled, rel=1e-5)
    ends = one.summary["intervals"]
    of_two = two.summary["intervals"]
    assert ends.keys() == of_two.keys()
    for name in ends.keys() & settled.keys():
        assert of_two[name] == pytest.approx(ends[name], rel=1e-4)
    assert (two.summary["calibration"] or {}) == pytest.approx(
        one.summary["calibration"] or {}, rel=1e-3
    )
    assert two.summary["hardware"]["count"] == 2
    assert one.summary["hardware"]["count"] == 1


@pytest.mark.soak(seconds=5)
def test_two_ranks_read_what_the_first_has_stored_of_frozen_layers(tmp_path):
    model = replace(ENCODER, freeze_layers=1)
    two = train_on_devices(tmp_path, texts(batch_size=16), model, 2)
    said = read_log(two.folder)
    assert said.count("reuse: True (layer 1 and the embeddings never change") == 1
    one = train_on_devices(tmp_path, texts(), replace(model, reuse=False), 1)
    assert losses(two.folder) == pytest.approx(losses(one.folder), rel=1e-5)
    assert two.metrics == pytest.approx(one.metrics, rel=1e-5)


@pytest.mark.soak(seconds=4)
def test_the_first_rank_alone_prints_and_the_speed_is_that_of_all(tmp_path):
    two = train_on_devices(tmp_path, texts(), ENCODER, 2)
    said = read_log(two.folder)
    assert said.count("training:") == 1
    assert (
        "rows a step: 64 rows (each rank trains its share; 32 rows x 1 batches x 2 ranks)" in said
    )
    training = two.summary["training"]
    speed = two.summary["speed"]
    assert training["rows_per_step"] == 64
    parts = {name: value for name, value in speed["step_ms"].items() if value is not None}
    per_step_ms = sum(parts.values()) - parts["validation"]
    assert speed["rows_per_s"] == pytest.approx(203 / 4 / per_step_ms * 1000, rel=0.02)
    assert two.predict(["some words"])[0].label in ("politics", "science", "sport", "business")


OTHERS = (
    "albert",
    "distilbert",
    "roberta",
    "electra",
    "modernbert",
    "deberta-v2",
    "eurobert",
    "mpnet",
)


@pytest.mark.soak(seconds=5)
@pytest.mark.parametrize("family", ["bert", *(pytest.param(name, marks=SOAK) for name in OTHERS)])
def test_every_weight_of_an_encoder_takes_part_in_every_step(family, tmp_path):
    """What ranks exchange must be complete: a weight without a gradient would make them wait for
    ever.
    """
    settings = {
        "epochs": 1,
        "folder": tmp_path / family,
        "trainer": {"devices": 2, "limit_train_batches": 2},
    }
    result = fit(texts(), replace(ENCODER, family=family), **settings)
    assert result.summary["status"] == "finished"


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (64, "trainer.devices: 64 (at most"),
        (0, "trainer.devices: 0 (1 or more, or auto)"),
        ("two", "trainer.devices: 'two' (a number, auto, or a list of numbers)"),
        ([0, 0], "trainer.devices: [0, 0] (each number once)"),
        ([0, 99], "trainer.devices: no device 99 (0 to"),
    ],
)
def test_devices_that_are_not_there_are_refused_before_anything_starts(devices, message, tmp_path):
    with pytest.raises(UserError) as caught:
        fit(
            texts(),
            ENCODER,
            folder=tmp_path / "run",
            trainer={"devices": devices, "accelerator": "cpu"},
        )
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "run").exists()


def test_machines_that_nobody_started_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no rank runs on another machine\. Start the run on each"):
        fit(texts(), ENCODER, folder=tmp_path / "run", trainer={"num_nodes": 2})


def test_devices_are_counted_listed_or_left_out():
    cpu = {"accelerator": "cpu"}
    assert choose_devices(cpu) == choose_devices({**cpu, "devices": "auto"}) == [0]
    assert (
        choose_devices({**cpu, "devices": 2}) == choose_devices({**cpu, "devices": "2"}) == [0, 1]
    )
    assert choose_devices({**cpu, "devices": [1]}) == [1]
    assert choose_devices({**cpu, "devices": "1,0"}) == [1, 0]


def test_one_gpu_of_several_is_the_one_that_was_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    (number,) = choose_devices({"devices": [2]})
    device = Ranks().device("auto", number)
    assert device == torch.device("cuda", 2)
    assert Ranks().lightning_settings(device) == {
        "accelerator": "cuda",
        "devices": [2],
        "num_nodes": 1,
    }
    third = Ranks(rank=2, world=4, local=2, local_world=4)
    assert third.device("auto") == device
    assert third.lightning_settings(device) == {
        "accelerator": "cuda",
        "devices": 4,
        "num_nodes": 1,
    }


@pytest.mark.soak(seconds=3)
def test_a_mistake_that_only_ranks_can_see_is_told_once_and_plainly(tmp_path):
    with pytest.raises(UserError) as told:
        train_on_devices(tmp_path, texts(tokens_per_batch=2), ENCODER, 2)
    assert str(told.value).count("2 tokens cannot hold the longest row") == 1
    assert not (tmp_path / "2").exists()
