"""Trainings whose captured steps follow each other in stretches, against plain ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch._ops import OpOverload

from flatout.callbacks import ExactCheckpoint, ProgressLine
from flatout.callbacks.run_curves import RunCurves
from flatout.data.batches import feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.engine.step_graph import StepGraphs
from flatout.engine.step_ring import StepRing
from tests.elsewhere.capture import Captured
from tests.elsewhere.device import There
from tests.elsewhere.graphs import NEVER_REPLAYED, RESULTS, Trained, begin_elsewhere, train
from tests.elsewhere.transcript import transcript

NAME = "window mlp"  # the quickest case; its rates fall, and its weights have a running mean
OTHERS = ("bilstm", "bert", "tags")  # each of another kind of batch
BROKEN = 11  # the batch that is not finite, counted from 0; it lies within a stretch
BROKEN_FIRST = (3, 4, 5)  # those with which steps are captured and proven


class Hears(L.Callback):
    """Somebody's callback that needs each batch."""

    def on_train_batch_end(self, *unused: Any) -> None:
        return


class CountsValidations(L.Callback):
    """Keeps at which steps a training was validated, and what came of it."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.scores: list[dict[str, float]] = []

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        self.steps.append(trainer.global_step)
        self.scores.append({name: float(value.cpu()) for name, value in metrics.items()})


class Rows:
    """Keeps what the curves hand to a file."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, list[float | None]]] = []

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        names = ("train/loss", "train/gradient_norm", "train/lr")
        # at the end of an epoch the test itself has read the losses before
        self.rows.append((step, epoch, [values.get(name) for name in names]))

    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None:
        return

    def close(self) -> None:
        return


def compare_all(folder: Path) -> None:
    """What trainings in stretches leave, beside plain ones."""
    begin_elsewhere()
    plain = train(NAME, "on", plain_first=NEVER_REPLAYED)
    with noting_between_replays() as asked_between:
        alone = train(NAME, "on")
    results = {
        "alone": {**_facts(alone, plain), "asked_between": asked_between},
        **{name: _compare_stretches(name) for name in OTHERS},
        "validated": _compare_stretches(
            NAME, val_check_interval=5, limit_val_batches=1, num_sanity_val_steps=0
        ),
        "with a last step": _compare_stretches(NAME, max_steps=14),
        "with a callback": _facts(train(NAME, "on", callbacks=[Hears()]), plain),
        "with parts of flatout": _tell_parts(folder),
        "transcript": transcript(NAME)[0],
        "broken": _break_steps([BROKEN]),
        "broken at first": _break_steps(BROKEN_FIRST),
    }
    (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")


def _compare_stretches(name: str, **settings: Any) -> dict[str, Any]:
    """A training in stretches beside a plain one; `settings`: of the Trainer."""
    counters = [CountsValidations(), CountsValidations()]
    plain = train(name, "on", plain_first=NEVER_REPLAYED, callbacks=counters[:1], **settings)
    with noting_between_replays() as asked_between:
        trained = train(name, "on", callbacks=counters[1:], **settings)
    return {
        **_facts(trained, plain),
        "asked_between": asked_between,
        "validated_at": counters[1].steps,
        "has_equal_validations": counters[0].scores == counters[1].scores,
    }


@contextmanager
def noting_between_replays() -> Iterator[list[str]]:
    """What is asked of the device between the replays of stretches, where a card waits for it."""
    noted = list[str]()

    def note(operator: OpOverload) -> None:
        noted.append(str(operator))

    def replay(self: Captured) -> None:
        There.watch = None
        plain_replay(self)
        There.watch = note

    def take(self: StepRing, count: int) -> Any:  # behind the last replay
        There.watch = None
        return plain_take(self, count)

    def replay_all(self: StepGraphs[Any, Any], *arguments: Any) -> None:
        with mock.patch.object(Captured, "replay", replay):
            plain_replay_all(self, *arguments)

    plain_replay = Captured.replay
    plain_take = StepRing.take
    plain_replay_all = StepGraphs.replay_all
    with (
        mock.patch.object(StepGraphs, "replay_all", replay_all),
        mock.patch.object(StepRing, "take", take),
    ):
        yield noted


def _facts(trained: Trained, plain: Trained) -> dict[str, Any]:
    return {
        "steps": trained.steps,
        "replayed": trained.replayed,
        "at_once": trained.at_once,
        "summary": trained.summary,
        "skipped": trained.skipped,
        "has_equal_losses": trained.losses == plain.losses,
        "has_equal_weights": torch.equal(trained.weights, plain.weights),
    }


def _tell_parts(folder: Path) -> dict[str, Any]:
    """Curves each 5 steps and checkpoints each 6 of a whole training, and of a resumed one."""
    rows = {}
    kept = {}
    trained = {}
    for name, plain_first in {"plain": NEVER_REPLAYED, "stretches": 3}.items():
        listener = Rows()
        parts = [
            RunCurves([listener], 5),
            ProgressLine(9, live=False),
            _exact(folder / name, every_steps=6),
        ]
        trained[name] = train(NAME, "on", plain_first=plain_first, callbacks=parts)
        rows[name] = listener.rows
        kept[name] = sorted(path.name for path in (folder / name).glob("step-*"))
    exact = _exact(folder / "stretches", every_steps=None)
    # Step 12 lies amid an epoch, and behind a stretch of the whole training.
    resumed = train(NAME, "on", callbacks=[exact], resume=folder / "stretches" / "step-12")
    return {
        **_facts(trained["stretches"], trained["plain"]),
        "has_equal_rows": rows["plain"] == rows["stretches"],
        "rows": len(rows["stretches"]),
        "kept": kept["stretches"],
        "kept_of_plain": kept["plain"],
        "resumed_at_once": resumed.at_once,
        "has_equal_resumed_weights": torch.equal(resumed.weights, trained["plain"].weights),
    }


def _exact(folder: Path, *, every_steps: int | None) -> ExactCheckpoint:
    return ExactCheckpoint(folder, every_steps=every_steps, every_minutes=None, keep=9)


def _break_steps(numbers: Sequence[int]) -> dict[str, Any]:
    """Some batches are not finite, and their steps are left out."""

    def train_broken(plain_first: int) -> Trained:
        number = 0

        def cut_run(run: Any) -> Iterator[FlatBatch]:
            nonlocal number
            for batch in plain_cut(run):
                if number in numbers:
                    batch.tokens.mul_(torch.nan)
                number += 1
                yield batch

        with mock.patch.object(feed, "cut_run", cut_run):
            return train(NAME, "on", plain_first=plain_first, not_finite="skip")

    plain_cut = feed.cut_run
    return _facts(train_broken(3), train_broken(NEVER_REPLAYED))
