"""The rows of a step are what decides; how they are divided changes no loss and ends no run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.run_files import read_csv

from flatout import (
    BiLSTMConfig,
    HeadlinesConfig,
    MonitorConfig,
    OptimConfig,
    TextDataConfig,
    UserError,
    fit,
)
from flatout.callbacks.gpu import CURVES
from flatout.report.summary import read_summary

MODEL = BiLSTMConfig(embedding=8, hidden=8, dropout=0.0)
RATE = OptimConfig(lr=0.004, scale_lr="sqrt", base_batch=16, max_lr=0.5)


def train_scaled(
    tmp_path: Path, name: str, *, optim: OptimConfig = RATE, epochs: int = 2, resume=None, **batches
):
    data = TextDataConfig(sample=HeadlinesConfig(rows=200, eval_rows=40), **batches)
    result = fit(
        data,
        MODEL,
        epochs=epochs,
        optim=optim,
        output=str(tmp_path),
        name=name,
        resume=resume,
        precision="fp32",
        monitor=MonitorConfig(flush_every=1),
    )
    rows = [row for row in read_csv(result.folder / "metrics.csv") if row["train/loss"]]
    return result, [(float(row["train/loss"]), float(row["train/lr"])) for row in rows]


def choice(result, name: str) -> dict[str, str]:
    return next(each for each in read_summary(result.folder)["choices"] if each["name"] == name)


@pytest.mark.soak(seconds=2)
def test_a_divided_step_gives_the_losses_of_the_whole_one(tmp_path):
    assert {"train/loss", "train/lr"} <= CURVES.keys()
    whole, expected = train_scaled(tmp_path, "whole", batch_size=64)
    parts, found = train_scaled(tmp_path, "parts", batch_size=16, effective_batch=64)
    assert len(found) == len(expected) == 8
    assert found == [pytest.approx(each, rel=2e-5) for each in expected]
    assert parts.metrics == pytest.approx(whole.metrics, abs=1e-5)
    told = choice(parts, "micro × accumulation × devices")
    assert told["value"] == "16 × 4 × 1 = 64 rows, lr 0.004 → 0.008"
    assert told["evidence"] == "lr sqrt from 16 rows"
    assert read_summary(parts.folder)["training"]["rows_per_step"] == 64


@pytest.mark.soak(seconds=2)
def test_a_run_goes_on_with_the_same_rows_a_step_however_they_are_divided(tmp_path):
    begun, _ = train_scaled(tmp_path, "run", epochs=1, batch_size=64)
    gone_on, _ = train_scaled(
        tmp_path, "run", epochs=2, batch_size=20, effective_batch=64, resume=str(begun.folder)
    )
    summary = read_summary(gone_on.folder)
    assert gone_on.folder == begun.folder
    assert (summary["training"]["resumed_from"], summary["training"]["epochs"]) == (4, 2)
    with pytest.raises(UserError, match="rows a step was 64 and is 32"):
        train_scaled(
            tmp_path, "run", epochs=3, batch_size=20, effective_batch=32, resume=str(begun.folder)
        )


def test_a_rate_cannot_follow_rows_that_vary(tmp_path):
    with pytest.raises(UserError, match=r"optim.scale_lr: sqrt, but data.tokens_per_batch"):
        train_scaled(tmp_path, "run", tokens_per_batch=300)
