"""Runs that read what frozen layers answer train as runs that compute it; and what is refused."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from flatout import (
    CheckpointConfig,
    MaskedLanguageConfig,
    MonitorConfig,
    OptimConfig,
    Result,
    TaggedTweetsConfig,
    TextDataConfig,
    TransformerConfig,
    UserError,
)
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import FeedKind
from flatout.data.problem import Problem
from flatout.data.store.cache import Cache
from flatout.data.store.store import SplitWriter, written
from flatout.models.encoder.lora import LoraConfig
from flatout.models.encoder.transformer import ReuseFormat
from flatout.report.summary import read_summary
from flatout.run import reuse
from flatout.tasks.frozen_outputs import FrozenPart, StoredStates
from tests.composed import run_train
from tests.faults.plants import Planted, RaiseAt
from tests.fitting import quiet_fit
from tests.params import at_once
from tests.refusals import refused
from tests.run_files import losses, model_weights, read_log
from tests.verbs import verb

ENCODER = TransformerConfig(
    hidden=32,
    layers=3,
    heads=4,
    dropout=0.0,
    attention_dropout=0.0,
    head_dropout=0.2,
    freeze_layers=2,
)
"""Nothing is dropped below the cut, as an encoder would that is not read; its head drops."""


def table(rows: int = 160) -> dict[str, list[Any]]:
    random = np.random.default_rng(4)
    words = []
    for _ in range(rows):
        count = random.integers(1, 14)
        words.append(" ".join(f"w{number}" for number in random.integers(30, size=count)))
    labels = [("rose", "cat")[number % 2] for number in range(rows)]
    texts = [
        f"{text} {label} {number}"
        for number, (text, label) in enumerate(zip(words, labels, strict=True))
    ]
    return {"text": texts, "label": labels, "more": [f"about {label}" for label in labels]}


LORA = LoraConfig(rank=2, targets=["layer.2.attention.self.query", "layer.2.attention.self.value"])
CLASSES = TextDataConfig(train=table(), text="text", batch_size=16)
PAIRS = replace(CLASSES, text=["text", "more"], pair=True, batch_size=8, accumulate=2)
SEVERAL = replace(
    CLASSES,
    train={**table(), "label": ["cat|odd", "rose", "cat", "rose|odd"] * 40},
    problem=Problem.multi,
    label_delimiter="|",
)
TAGS = TextDataConfig(
    problem=Problem.tags,
    sample=TaggedTweetsConfig(rows=120, eval_rows=40),
    max_length=24,
    batch_size=16,
)


def train(data: TextDataConfig, model: TransformerConfig, folder: Path, **settings: Any) -> Any:
    """A run in fp32; its cache lies in the folder."""
    given: dict[str, Any] = {
        "optim": OptimConfig(lr=3e-3),
        "epochs": 2,
        "output": str(folder / "runs"),
        "compile": False,
        "monitor": MonitorConfig(flush_every=1, verdict=False, progress=False, rival=False),
    }
    return quiet_fit(replace(data, cache=str(folder / "cache")), model, **(given | settings))


def choice_of(result: Result) -> dict[str, Any] | None:
    choices = read_summary(result.folder)["choices"]
    return next((each for each in choices if each["name"] == reuse.REUSE), None)


def reads(result: Result) -> bool:
    choice = choice_of(result)
    return bool(choice and choice["value"])


def require_equal(found: Result, expected: Result) -> None:
    assert reads(found)
    assert not reads(expected)
    assert len(losses(found.folder)) > 5
    np.testing.assert_allclose(losses(found.folder), losses(expected.folder), rtol=1e-5, atol=1e-6)
    weights = model_weights(found.folder)
    wanted = model_weights(expected.folder)
    assert weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_allclose(weights[name], weight, rtol=1e-3, atol=2e-5, err_msg=name)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-4)


SOAK = pytest.mark.soak(seconds=3)


def be_killed_while_storing(folder: Path, settings: dict[str, Any]) -> None:
    """Train in a process of its own, which ends as if the power had failed when it begins to store
    outputs.
    """

    def end(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(FrozenPart, "write", end):
        train(CLASSES, replace(ENCODER, reuse=True), folder, **settings)


@pytest.mark.parametrize(
    "has_checkpoint",
    [True, *at_once(of=[False], seconds=2)],
    ids=["from a checkpoint", "no checkpoint yet"],
)
def test_a_run_that_was_killed_while_it_stored_outputs_goes_on_reading_them(
    first, tmp_path, has_checkpoint
):
    settings: dict[str, Any] = {"checkpoint": CheckpointConfig(every_steps=4), "resume": "auto"}
    if has_checkpoint:
        harm = {"harm": RaiseAt(place="on_train_batch_end", step=10)}
        with pytest.raises(Planted):
            train(CLASSES, replace(ENCODER, reuse=True), tmp_path, callbacks=harm, **settings)
        (entry,) = states_in(tmp_path)
        shutil.rmtree(tmp_path / "cache" / entry.key)
    process = multiprocessing.get_context("fork").Process(
        target=be_killed_while_storing, args=(tmp_path, settings)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert states_in(tmp_path) == []
    again = train(CLASSES, replace(ENCODER, reuse=True), tmp_path, **settings)
    assert reads(again)
    assert len(list((tmp_path / "runs" / "default").iterdir())) == 1
    assert again.summary["training"]["resumed_from"] == (10 if has_checkpoint else None)
    found = model_weights(again.folder)
    wanted = model_weights(first[1].folder)
    for name, weight in wanted.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize(
    ("data", "changes", "settings"),
    [
        pytest.param(CLASSES, {}, {"optim": OptimConfig(lr=3e-3, ema=0.9)}, id="classes, averaged"),
        pytest.param(PAIRS, {}, {}, id="pairs, accumulated", marks=SOAK),
        pytest.param(
            SEVERAL, {"freeze_layers": "all"}, {}, id="several labels, head alone", marks=SOAK
        ),
        pytest.param(TAGS, {}, {}, id="tags", marks=SOAK),
        pytest.param(
            CLASSES, {"unfreeze_epochs": 6.0}, {"epochs": 3}, id="until the cut moves", marks=SOAK
        ),
        pytest.param(
            CLASSES,
            {"freeze_layers": 0, "lora": LORA},
            {},
            id="small matrices on the last layer alone",
            marks=SOAK,
        ),
    ],
)
def test_a_run_that_reads_trains_as_one_that_computes(data, changes, settings, tmp_path):
    model = replace(ENCODER, **changes)
    found = train(data, model, tmp_path, **settings)
    require_equal(found, train(data, replace(model, reuse=False), tmp_path, **settings))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run that has stored what it reads, below its folder."""
    folder = tmp_path_factory.mktemp("first")
    return folder, train(CLASSES, ENCODER, folder)


def states_in(folder: Path) -> list[Any]:
    return [entry for entry in Cache(folder / "cache").entries() if "outputs of" in entry.name]


def test_the_decision_is_printed_with_its_figures(first):
    text = (first[1].folder / "log.txt").read_text(encoding="utf-8")
    assert (
        "reuse: True (layers 1 to 2 and the embeddings never change and are computed once; they"
        " drop nothing;" in text
    )
    assert "128 bytes a token, " in text
    assert " s to build, and as much less in each epoch" in text


def test_the_cache_lists_counts_and_removes_it(first, capsys, tmp_path):
    folder, _ = first
    (entry,) = states_in(folder)
    assert entry.rows.keys() == {"train", "validation"}
    assert verb("cache", "--cache", folder / "cache", "list") == 0
    assert "outputs of 2 layers" in capsys.readouterr().out
    assert verb("cache", "--cache", folder / "cache", "size") == 0
    assert "2 stores" in capsys.readouterr().out
    shutil.copytree(folder / "cache", tmp_path / "cache")
    assert verb("cache", "--cache", tmp_path / "cache", "clear", entry.key) == 0
    assert states_in(tmp_path) == []
    assert len(Cache(tmp_path / "cache").entries()) == 1


@pytest.mark.soak(seconds=12)
@pytest.mark.parametrize(
    "swept",
    [
        ["seed=1,2"],
        ["seed=1,2", "optim.lr=1e-3,2e-3"],
    ],
)
def test_seeds_and_trials_read_one_store_where_weights_are_the_same(
    swept, first, tmp_path, monkeypatch
):
    _, result = first
    assert verb("export", result.folder, "--out", tmp_path / "plain") == 0
    written = [",".join(row) for row in zip(*table().values(), strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label,more", *written]))
    rows = [
        f"data.source={tmp_path}/rows.csv",
        "data.text=text",
        "data.label=label",
        f"data.cache={tmp_path}/cache",
    ]
    model = [
        "model=transformer",
        f"model.pretrained={tmp_path}/plain",
        "model.freeze_layers=2",
        "trainer.max_epochs=2",
    ]
    short = [
        "precision=fp32",
        "monitor.verdict=false",
        "logger=none",
        f"hydra.sweep.dir={tmp_path}/many",
    ]
    assert run_train(["-m", *rows, *model, *swept, *short], monkeypatch) == 0
    texts = [path.read_text(encoding="utf-8") for path in (tmp_path / "many").glob("*/log.txt")]
    assert len(texts) == 2 ** len(swept)
    assert all("reuse: True" in text for text in texts)
    assert sum(" built in " in text.partition("reuse: True")[2] for text in texts) == 1
    assert len(states_in(tmp_path)) == 1


def test_a_damaged_store_is_built_again(first):
    folder, result = first
    (entry,) = states_in(folder)
    file = folder / "cache" / entry.key / "train" / "states.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.warns(UserWarning, match=r"is damaged \(train/states\.bin\): it is built again"):
        again = train(CLASSES, ENCODER, folder)
    np.testing.assert_array_equal(losses(again.folder), losses(result.folder))


def test_beside_workers_the_training_process_reads_what_frozen_layers_put_out(
    first, tmp_path, monkeypatch
):
    call = StoredStates.__call__
    readers = []

    def noting(self: StoredStates, batch: FlatBatch) -> FlatBatch:
        readers.append(os.getpid())
        return call(self, batch)

    monkeypatch.setattr(StoredStates, "__call__", noting)
    result = train(replace(CLASSES, feed=FeedKind.workers, workers=1), ENCODER, tmp_path)
    np.testing.assert_array_equal(losses(result.folder), losses(first[1].folder))
    assert set(readers) == {os.getpid()}


def test_a_run_that_was_cut_short_goes_on_reading_to_the_same_weights(first, tmp_path):
    settings: dict[str, Any] = {"checkpoint": CheckpointConfig(every_steps=4)}
    with pytest.raises(Planted):
        train(
            CLASSES,
            ENCODER,
            tmp_path,
            callbacks={"harm": RaiseAt(place="on_train_batch_end", step=10)},
            **settings,
        )
    again = train(CLASSES, ENCODER, tmp_path, resume="auto", **settings)
    assert again.summary["training"]["resumed_from"] > 0
    assert reads(again)
    found = model_weights(again.folder)
    wanted = model_weights(first[1].folder)
    for name, weight in wanted.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"freeze_layers": 0, "reuse": True},
            r"^model\.reuse: true, but nothing is frozen\. Set model\.freeze_layers",
        ),
        ({"freeze_layers": 9, "reuse": True}, r"^model\.freeze_layers: 9 \(at most 3 layers\)"),
        ({"freeze_layers": "most"}, r"^model\.freeze_layers: most \(0 or more, or all\)"),
        ({"freeze_layers": -1}, r"^model\.freeze_layers: -1 \(0 or more, or all\)"),
        ({"reuse": "yes"}, r"^model\.reuse: yes \(auto, true, false\)"),
        (
            {"dropout": 0.1, "reuse": True},
            r"^model\.reuse: true, but model\.dropout=0\.1 is asked for below the cut",
        ),
        (
            {"compute": "padded", "reuse": True},
            r"^model\.reuse: true, but asked for, and only flat layers are stored",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(changes, message, tmp_path):
    with pytest.raises(UserError, match=message) as refused:
        train(CLASSES, replace(ENCODER, **changes), tmp_path)
    assert "\n" not in str(refused.value)


def test_masked_words_differ_in_each_epoch_so_nothing_is_stored(tmp_path):
    with refused("model.reuse", "true", "the texts change"):
        train(
            CLASSES,
            replace(ENCODER, reuse=True, head_dropout=None),
            tmp_path,
            task=MaskedLanguageConfig(),
        )


@pytest.mark.soak(seconds=3)
def test_auto_leaves_it_out_where_it_would_not_pay_or_dropout_is_asked_for(tmp_path):
    short = train(CLASSES, ENCODER, tmp_path, epochs=1)
    assert not reads(short)
    assert "reuse: False (1 epochs read them" in (short.folder / "log.txt").read_text(
        encoding="utf-8"
    )
    dropping = train(CLASSES, replace(ENCODER, dropout=0.1), tmp_path)
    assert not reads(dropping)
    assert states_in(tmp_path) == []
    whole = train(CLASSES, replace(ENCODER, freeze_layers=0), tmp_path, epochs=1)
    assert choice_of(whole) is None


def test_a_disk_that_is_short_is_named_with_the_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(reuse, "disk_free", lambda folder: 100_000)
    assert not reads(train(CLASSES, ENCODER, tmp_path))
    message = (
        r"^model\.reuse: true, but the disk is short: 128 bytes a token, [\d.]+ MB of 0 MB free;"
        r" .*cache clear"
    )
    with pytest.raises(UserError, match=message):
        train(CLASSES, replace(ENCODER, reuse=True), tmp_path)


def test_a_disk_that_runs_full_midway_leaves_nothing_half_written(tmp_path, monkeypatch):
    write = SplitWriter.append

    def out_of_space(self: SplitWriter, **blocks: Any) -> None:
        if "states" in blocks and self.name == "validation":
            with written():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, **blocks)

    monkeypatch.setattr(SplitWriter, "append", out_of_space)
    with refused("data.cache", "no space left", "needs about", fix="cache clear"):
        train(CLASSES, ENCODER, tmp_path)
    kept = [
        path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".lock-")
    ]
    assert kept == [entry.key for entry in Cache(tmp_path / "cache").entries()]
    assert states_in(tmp_path) == []


@pytest.mark.soak(seconds=3)
def test_half_the_bytes_are_a_choice_and_its_store_another_one(tmp_path):
    model = replace(ENCODER, reuse_format=ReuseFormat.bf16)
    found = train(CLASSES, model, tmp_path)
    assert "64 bytes a token" in read_log(found.folder)
    exact = train(CLASSES, ENCODER, tmp_path)
    assert len(states_in(tmp_path)) == 2
    difference = np.abs(np.subtract(losses(found.folder), losses(exact.folder))).max()
    assert 0 < difference < 0.01
