"""A result says what stands against it, and which epoch answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout import TextDataConfig, fit
from flatout.checkpoints.kept import Best
from flatout.models.bilstm import BiLSTMConfig
from flatout.run.result_findings import find_in_result


def _summary(
    *, steps: int = 400, rows_per_step: int = 128, rows: int = 800, best_epoch: int | None = 3
) -> dict[str, Any]:
    return {
        "training": {
            "steps": steps,
            "rows_per_step": rows_per_step,
            "best_epoch": best_epoch,
        },
        "data": {"rows": {"train": rows}},
    }


def _find(
    summary: dict[str, Any],
    per_class: list[dict[str, Any]],
    max_epochs: int,
    *,
    batch_size_sets_steps: bool = True,
) -> list[dict[str, str]]:
    return find_in_result(
        summary, per_class, max_epochs, batch_size_sets_steps=batch_size_sets_steps
    )


def _class(name: str, recall: float, rows: int) -> dict[str, Any]:
    return {
        "class": name,
        "precision": recall,
        "recall": recall,
        "f1": recall,
        "support": rows,
    }


def test_a_run_that_is_right_for_no_class_says_so() -> None:
    per_class = [_class("person", 0.0, 97), _class("place", 0.0, 8)]
    (finding,) = _find(_summary(), per_class, 8)
    assert finding["name"] == "nothing right"
    assert "every word is called O" in finding["text"]
    assert finding["text"].endswith("try task.class_weights=auto trainer.max_epochs=32")
    assert _find(_summary(), [_class("rare", 0.0, 2)], 8) == []
    assert _find(_summary(), [], 8) == []


def test_a_run_that_is_right_for_one_class_alone_says_so_and_names_that_class_share() -> None:
    per_class = [_class("yes", 1.0, 97), _class("no", 0.0, 3)]
    (finding,) = _find(_summary(), per_class, 8)
    assert finding["name"] == "one class"
    assert "'yes'" in finding["text"]
    assert "97.0%" in finding["text"]
    assert "task.class_weights=auto" in finding["text"]


def test_a_class_of_few_rows_that_is_never_right_is_no_finding() -> None:
    per_class = [_class("yes", 1.0, 97), _class("no", 0.0, 2)]
    assert _find(_summary(), per_class, 8) == []


def test_two_classes_that_are_right_now_and_then_are_no_finding() -> None:
    per_class = [_class("a", 0.9, 50), _class("b", 0.1, 50), _class("c", 0.0, 50)]
    assert _find(_summary(), per_class, 8) == []


def test_few_steps_are_named_with_a_batch_size_that_makes_more_of_them() -> None:
    (finding,) = _find(_summary(steps=56), [], 8)
    assert finding["name"] == "few steps"
    assert "data.batch_size=16" in finding["text"]
    assert "448 steps" in finding["text"]


def test_a_batch_that_is_larger_than_the_file_counts_as_the_file() -> None:
    (finding,) = _find(_summary(steps=1, rows_per_step=1000, rows=319), [], 1)
    assert "data.batch_size=16, about 19 steps" in finding["text"]


def test_a_run_in_small_batches_is_not_told_to_take_smaller_ones() -> None:
    assert _find(_summary(steps=56, rows_per_step=16), [], 8) == []


def test_no_batch_size_is_advised_where_it_does_not_decide_the_steps() -> None:
    assert _find(_summary(steps=56), [], 8, batch_size_sets_steps=False) == []


def test_a_run_whose_last_epoch_is_best_names_a_longer_one() -> None:
    (finding,) = _find(_summary(best_epoch=8), [], 8)
    assert finding["name"] == "still rising"
    assert "trainer.max_epochs=16" in finding["text"]


def test_a_run_whose_score_cannot_rise_is_not_said_to_be_rising() -> None:
    summary = _summary(best_epoch=8) | {"metric": "f1", "metrics": {"val/f1": 1.0}}
    assert _find(summary, [], 8) == []
    summary |= {"metric": "rmse", "metrics": {"val/rmse": 1.0}}
    assert len(_find(summary, [], 8)) == 1


def test_a_run_of_one_epoch_is_not_said_to_be_rising() -> None:
    assert _find(_summary(best_epoch=1), [], 1) == []


def _judge(best: Best, epoch: int, accuracy: float, loss: float | None) -> None:
    logged = {"val/accuracy": torch.tensor(accuracy)}
    if loss is not None:
        logged["val/loss"] = torch.tensor(loss)
    trainer: Any = SimpleNamespace(callback_metrics=logged, current_epoch=epoch - 1)
    best.judge(trainer, 10 * epoch)


def test_where_the_metric_ties_the_epoch_of_the_lower_loss_is_the_best() -> None:
    best = Best("val/accuracy", "max")
    for epoch, loss in enumerate((0.6, 0.4, 0.5), 1):
        _judge(best, epoch, 0.75, loss)
    assert (best.epoch, best.step) == (2, 20)
    _judge(best, 4, 0.76, 0.9)
    assert best.epoch == 4


def test_where_no_loss_is_logged_the_first_of_equal_epochs_stays_the_best() -> None:
    best = Best("val/accuracy", "max")
    for epoch in (1, 2):
        _judge(best, epoch, 0.75, None)
    assert best.epoch == 1


def test_the_loss_of_the_best_epoch_outlives_a_resume() -> None:
    first = Best("val/accuracy", "max")
    _judge(first, 1, 0.75, 0.4)
    second = Best("val/accuracy", "max")
    second.load_state_dict(first.state_dict())
    _judge(second, 2, 0.75, 0.5)
    assert second.epoch == 1
    _judge(second, 3, 0.75, 0.3)
    assert second.epoch == 3


def test_a_finished_run_prints_and_keeps_its_best_epoch_and_what_to_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {
        "text": [f"{word} number {number}" for number in range(40) for word in ("good", "bad")],
        "label": ["yes", "no"] * 40,
    }
    cache = str(tmp_path / "cache")
    data = TextDataConfig(source=rows, text="text", label="label", batch_size=64, cache=cache)
    result = fit(data, BiLSTMConfig(hidden=8), epochs=2, folder=tmp_path / "run")
    printed = capsys.readouterr().out
    epoch = result.summary["training"]["best_epoch"]
    assert epoch in (1, 2)
    assert f"best epoch         {epoch} of 2, by val/accuracy" in printed
    assert "few steps" in printed
    shown = repr(result)
    assert len(shown.splitlines()) <= 12, "a notebook shows folder and scores, not the network"
    assert str(result.folder) in shown
    assert f"{result.metrics['test/accuracy']:.4f}" in shown
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert f"{epoch} of 2, by val/accuracy" in page
    assert "data.batch_size=16" in page
