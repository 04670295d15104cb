"""Few rows get small batches and more epochs; what is typed stays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from flatout import BiLSTMConfig, TextDataConfig, fit
from flatout.checkpoints.settings import CheckpointConfig
from flatout.cli.words import refuse_two_sizes
from flatout.config import MonitorConfig, RunConfig
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.engine.run_length import (
    choose_batch,
    choose_batch_of_recordings,
    choose_epochs,
    choose_epochs_of_recordings,
)
from flatout.errors import UserError
from flatout.models.rnn import RNNConfig
from flatout.run.job import RunJob
from flatout.run.length import follows_rows
from flatout.run.usual_rows import usual_rows
from tests.composed import compose_run

QUIET = MonitorConfig(progress=False, verdict=False, rival=False)


@pytest.mark.parametrize(
    ("rows", "from_scratch", "pretrained"),
    [
        (3, (16, 20), (16, 20)),
        (250, (16, 20), (16, 10)),
        (500, (16, 16), (16, 10)),
        (1_000, (16, 8), (16, 8)),
        (2_000, (32, 8), (16, 4)),
        (5_000, (64, 8), (32, 4)),
        (10_000, (128, 8), (128, 8)),
        (1_000_000, (128, 8), (128, 8)),
    ],
)
def test_batch_and_epochs_follow_the_rows(rows, from_scratch, pretrained):
    for length, is_pretrained in ((from_scratch, False), (pretrained, True)):
        batch = choose_batch(rows, pretrained=is_pretrained)
        epochs = choose_epochs(rows, batch, 2, pretrained=is_pretrained)
        assert (batch, epochs) == length


@pytest.mark.parametrize(("rows", "epochs"), [(250, 20), (500, 16), (820, 10), (2_000, 4)])
def test_a_pretrained_encoder_takes_more_epochs_where_classes_have_few_rows(rows, epochs):
    assert choose_epochs(rows, 16, 41, pretrained=True) == epochs


@pytest.mark.parametrize(
    ("trainer", "source", "count"),
    [
        ({}, None, 8),
        ({}, {"text": ["a"], "label": ["x"]}, None),
        ({"max_epochs": 3}, {"text": ["a"], "label": ["x"]}, 3),
    ],
)
def test_a_sweep_knows_how_often_a_trial_validates_unless_its_rows_decide(trainer, source, count):
    config = RunConfig(data=TextDataConfig(source=source), trainer=trainer)
    assert RunJob(config).validations == count


def test_a_run_says_what_it_chose_and_takes_no_batch_that_was_typed(tmp_path, capsys):
    model = BiLSTMConfig(embedding=4, hidden=4, ngrams="off")
    table = {
        "text": [f"word{number % 9} and nr{number}" for number in range(90)],
        "label": ["x", "y", "x"] * 30,
    }
    cache = str(tmp_path / "cache")
    chosen = fit(
        TextDataConfig(source=table, cache=cache), model, folder=tmp_path / "1", monitor=QUIET
    )
    printed = capsys.readouterr().out
    typed = fit(
        TextDataConfig(source=table, cache=cache, batch_size=64),
        model,
        epochs=1,
        folder=tmp_path / "2",
        monitor=QUIET,
    )
    assert "batch size: 16 rows" in printed
    assert "epochs: 20" in printed
    assert chosen.summary["training"]["rows_per_step"] == 16
    assert typed.summary["training"]["rows_per_step"] == 64
    assert typed.summary["training"]["epochs"] == 1
    assert "batch size:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "length"),
    [(5, (16, 100)), (50, (16, 100)), (379, (16, 21)), (3_000, (32, 8)), (5_000, (64, 8))],
)
def test_recordings_have_a_rule_of_their_own(rows, length):
    batch = choose_batch_of_recordings(rows)
    assert (batch, choose_epochs_of_recordings(rows, batch)) == length


@pytest.mark.parametrize(
    ("settings", "follows"),
    [({}, True), ({"chunk": 9}, True), ({"problem": "label"}, True), ({"lookback": 9}, False)],
)
def test_recordings_and_chunks_follow_the_rule_and_windows_do_not(settings, follows):
    data = SequenceDataConfig(source="cells/", features=["a"], target="b", **settings)
    assert follows_rows(RunConfig(data=data)) == follows
    assert not follows_rows(RunConfig(data=SequenceDataConfig()))
    assert usual_rows(RunConfig(data=data), 300, world=2) == (8 if follows else 32)


def test_few_recordings_get_small_batches_and_more_epochs_and_say_so(tmp_path, capsys):
    table = {"a": np.arange(200.0) ** 1.5, "b": np.arange(200.0) % 5, "cell": np.arange(200) // 10}
    data = SequenceDataConfig(
        source=pa.table(table), features=["a"], target="b", group="cell", cache=str(tmp_path)
    )
    stop = CheckpointConfig(patience=1)
    fit(data, RNNConfig(hidden=2), folder=tmp_path / "run", monitor=QUIET, checkpoint=stop)
    printed = capsys.readouterr().out
    assert "batch size: 16 rows (16 training rows; larger batches would be fewer steps" in printed
    assert "epochs: 100 (100 steps; a network of few rows wants some 500" in printed


def test_auto_is_what_a_run_does_where_nothing_is_typed():
    typed = compose_run(["data.batch_size=auto", "trainer.max_epochs=auto"])
    assert (typed.data.batch_size, typed.trainer["max_epochs"]) == (None, None)
    with pytest.raises(UserError, match="which decides how many rows"):
        refuse_two_sizes(["data.batch_size=auto", "data.tokens_per_batch=4096"])
