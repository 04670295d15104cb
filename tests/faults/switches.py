"""Settings that may decide nothing: whatever they are, the weights are the same to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

from flatout.data.feeding import FeedKind
from tests.faults.runs import Spec, finished, other_weights, side_by_side


class Idle(L.Callback):
    """Hooks that do nothing."""

    def on_train_batch_start(self, *_: Any) -> None: ...

    def on_train_batch_end(self, *_: Any) -> None: ...

    def on_before_optimizer_step(self, *_: Any) -> None: ...


_PLAIN = Spec()


def _with(**changed: dict[str, Any]) -> Spec:
    """The plain run with some settings of its parts changed."""
    parts: dict[str, Any] = {
        part: {**getattr(_PLAIN, part), **values} for part, values in changed.items()
    }
    return replace(_PLAIN, **parts)


SWITCHES: dict[str, Spec] = {
    "a live line": _with(monitor={"progress": True}),
    "told each step": _with(monitor={"flush_every": 1}),
    "told at the end": _with(monitor={"flush_every": 10_000}),
    "a checkpoint each step": _with(checkpoint={"every_steps": 1}),
    "checkpoints after validations only": _with(
        checkpoint={"every_steps": None, "every_minutes": None}
    ),
    "best by another metric": _with(checkpoint={"metric": "loss"}),
    "two validations an epoch": _with(trainer={"val_check_interval": 0.5}),
    "a validation every 3 batches": _with(trainer={"val_check_interval": 3}),
    "a validation at the end": _with(trainer={"check_val_every_n_epoch": 3}),
    "a try of validation first": _with(trainer={"num_sanity_val_steps": 2}),
    "small batches in validation": _with(data={"eval_batch_size": 5}),
    "gathered in a thread": _with(data={"feed": FeedKind.threaded}),
    "gathered on the device": _with(data={"feed": FeedKind.resident}),
    "one worker": _with(data={"feed": FeedKind.workers, "workers": 1}),
    "two workers": _with(data={"feed": FeedKind.workers, "workers": 2}),
    "Lightning's profiler": _with(trainer={"profiler": "simple"}),
    "TensorBoard": replace(_PLAIN, logger="tensorboard"),
    "Lightning's logger": _with(trainer={"logger": True}),
    "Lightning's bar": _with(trainer={"enable_progress_bar": True}),
    "a table of the model": _with(trainer={"enable_model_summary": True}),
    "hooks that do nothing": _PLAIN.planted(Idle),
}


def without_effect(place: Path, count: int | None = None) -> list[list[str]]:
    """Runs with each switch against the plain run."""
    reference = finished(_PLAIN, place / "plain")

    def case(item: tuple[int, tuple[str, Spec]]) -> list[str]:
        number, (name, spec) = item
        return [
            f"{name}: {each}"
            for each in other_weights(finished(spec, place / f"switch-{number}"), reference)
        ]

    return side_by_side(case, enumerate(list(SWITCHES.items())[:count]))
