"""Few rows get small batches and more epochs; what is typed stays."""

from __future__ import annotations

import pytest

from flatout import BiLSTMConfig, TextDataConfig, fit
from flatout.config import MonitorConfig, RunConfig
from flatout.engine.run_length import choose_batch, choose_epochs
from flatout.run.job import RunJob

QUIET = MonitorConfig(progress=False, verdict=False, rival=False)


@pytest.mark.parametrize(
    ("rows", "from_scratch", "pretrained"),
    [
        (3, (16, 20), (16, 10)),
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
        epochs = choose_epochs(rows, batch, pretrained=is_pretrained)
        assert (batch, epochs) == length


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
