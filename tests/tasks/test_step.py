"""The training step: its gradients are those of the full batch, and it never waits for
the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.callbacks.run_curves import RunCurves
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import BatchLayout, PlanSettings
from flatout.data.feeding import FeedKind
from flatout.data.problem import Problem
from flatout.engine.fast_loop import FastLoop
from flatout.engine.optimizer import OptimConfig, Schedule
from flatout.engine.step_losses import NotFinite, StepLosses
from flatout.models.bilstm import BiLSTMConfig
from flatout.models.textcnn import TextCNNConfig
from flatout.tasks.classification import ClassificationConfig, Classifier, ClassWeights, Labels
from tests.trainers import KeptFlushes, flat_weights, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

SMALL = {
    "bilstm": BiLSTMConfig(embedding=6, hidden=5, dropout=0.0),
    "textcnn": TextCNNConfig(embedding=6, filters=4, dropout=0.0, embedding_dropout=0.0),
}


def make_task(kind: str, problem: Problem, total_steps: int, **settings) -> Classifier:
    torch.manual_seed(0)
    classes = ["value"] if problem is Problem.regression else ["a", "b", "c"]
    labels = Labels(problem, classes, [5, 3, 2][: len(classes)], 10, mean=1.0, spread=2.0)
    model = SMALL[kind].build(num_outputs=len(classes), vocabulary_size=50)
    optim = OptimConfig(lr=0.05, schedule=Schedule.constant, warmup=0.0, weight_decay=0.1)
    config = ClassificationConfig(**settings)
    return Classifier(model, config, optim, labels=labels, total_steps=total_steps)


def fast_trainer(
    folder: Path,
    epochs: int,
    *callbacks: L.Callback,
    feed: Feed | None = None,
    loop: FastLoop | None = None,
    clip: float = 0.5,
    **settings: Any,
) -> L.Trainer:
    """A quiet Trainer with the fast loop."""
    return quiet_trainer(
        folder,
        accumulate_grad_batches=1 if feed is None else feed.plan.accumulate,
        gradient_clip_val=clip or None,
        max_epochs=epochs,
        callbacks=[loop or FastLoop(), *callbacks],
        **settings,
    )


def train(
    task: Classifier, feed: Feed, folder: Path, epochs: int = 2, loop: FastLoop | None = None
) -> tuple[list[float], list[float]]:
    """Losses of every step, and the weights at the end."""
    kept = KeptFlushes()
    trainer = fast_trainer(folder, epochs, RunCurves([kept], 1), feed=feed, loop=loop)
    trainer.fit(task, train_dataloaders=feed)
    losses = [values["train/loss"] for values in kept.flushes]
    return losses, flat_weights(task.model).tolist()


@pytest.mark.parametrize("problem", [Problem.single, Problem.multi, Problem.regression])
@pytest.mark.parametrize("kind", list(SMALL))
def test_accumulation_gives_the_losses_and_weights_of_the_full_batch(
    make_split, tmp_path, kind, problem
):
    lengths = [3, 5, 2, 7, 4, 4, 1, 6, 2, 3, 5]  # 11 rows: the last step is a small one
    split = make_split(lengths, several=problem is Problem.multi)
    if problem is Problem.regression:
        split.columns["targets"] = split.fixed("targets").astype("float32")
    found = []
    for rows, accumulate in ((8, 1), (4, 2), (1, 8)):
        plan = PlanSettings(rows_per_batch=rows, accumulate=accumulate, layout=BatchLayout.padded)
        feed = Feed(split, plan, kind=FeedKind.resident)
        found.append(train(make_task(kind, problem, total_steps=4), feed, tmp_path))
    for losses, weights in found[1:]:
        assert losses == pytest.approx(found[0][0], abs=1e-6)
        assert weights == pytest.approx(found[0][1], abs=1e-6)


class CountSyncs(TorchDispatchMode):
    """Counts what makes the host wait for a device: a value read from a tensor, or a shape that
    depends on one.
    """

    WAITS = (
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::masked_select",
        "aten::unique_dim",
        "aten::equal",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in self.WAITS:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("problem", [Problem.single, Problem.multi, Problem.regression])
@pytest.mark.parametrize("kind", list(SMALL))
def test_no_training_step_waits_for_the_device(make_split, tmp_path, kind, problem):
    split = make_split([3, 5, 2, 7, 4, 4, 1, 6] * 4, several=problem is Problem.multi)
    if problem is Problem.regression:
        split.columns["targets"] = split.fixed("targets").astype("float32")
    plan = PlanSettings(rows_per_batch=4, accumulate=2, layout=BatchLayout.padded)
    feed = Feed(split, plan, kind=FeedKind.resident)
    weigh = ClassWeights.none if problem is Problem.regression else ClassWeights.auto
    task = make_task(kind, problem, total_steps=4, class_weights=weigh)
    loop = FastLoop()
    loop.checks_on_host = False  # as on a GPU
    counter = CountSyncs()
    plain_step = task.training_step

    def counted_step(batch, batch_idx):
        # The host's own lengths are read on the host: only what is asked of device tensors counts.
        lengths, batch.lengths = batch.lengths, HostOnly(batch.lengths)
        with counter:
            loss = plain_step(batch, batch_idx)
        batch.lengths = lengths
        return loss

    task.training_step = counted_step
    train(task, feed, tmp_path, epochs=1, loop=loop)
    assert task.trainer.global_step == 4
    assert counter.found == []


class HostOnly:
    """Lengths as the plain integers they are, so that reading them is no operation on a tensor."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.values = lengths.tolist()
        self.shape = lengths.shape

    def __getitem__(self, index: int) -> int:
        return self.values[index]


def test_the_counter_does_find_a_wait(make_split, tmp_path):
    counter = CountSyncs()
    with counter:
        float(torch.ones(3).sum())
    assert counter.found == ["aten::_local_scalar_dense"]


def test_losses_come_over_once_a_flush():
    losses = StepLosses(NotFinite.stop)
    losses.values += [torch.tensor(1.0), torch.tensor(2.0)]
    losses.norms += [torch.tensor(3.0), torch.tensor(4.0)]
    assert losses.take(2, is_scaled=False) == ([1.0, 2.0], [3.0, 4.0])
    assert losses.take(2, is_scaled=False) == ([], [])


def test_steps_are_counted_the_same_with_and_without_optimizer_hooks(make_split, tmp_path):
    class Watch(L.Callback):
        seen = 0

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.seen += 1

    feed = Feed(make_split([3] * 12), PlanSettings(rows_per_batch=4), kind=FeedKind.resident)
    plain = make_task("textcnn", Problem.single, total_steps=3)
    _, expected = train(plain, feed, tmp_path, epochs=1)
    watched = make_task("textcnn", Problem.single, total_steps=3)
    watch = Watch()
    feed = Feed(feed.split, PlanSettings(rows_per_batch=4), kind=FeedKind.resident)
    trainer = fast_trainer(tmp_path, 1, watch)
    trainer.fit(watched, train_dataloaders=feed)
    assert watch.seen == trainer.global_step == plain.trainer.global_step == 3
    assert flat_weights(watched.model).tolist() == expected
