"""A step whose loss or gradient is not finite changes no weight: found at once on a CPU, left out
by the device itself elsewhere and found at the next flush."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from flatout.callbacks.run_curves import RunCurves
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import BatchLayout, PlanSettings
from flatout.data.feeding import FeedKind
from flatout.data.problem import Problem
from flatout.engine.fast_loop import FastLoop
from flatout.engine.step_losses import NotFinite
from flatout.errors import UserError
from tests.tasks.test_step import fast_trainer, make_task
from tests.trainers import KeptFlushes, flat_weights

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

LENGTHS = [3, 5, 2, 7, 4, 4, 1, 6] * 4
BAD_STEP = 5
"""Of eight, counted from 1; flushes come after the third, the fourth (an epoch ends), the seventh
and the eighth."""


def spoilt(split, folder, *, value=1.0, late=False, policy=NotFinite.stop, clip=0.5):
    """A task that was trained with the outputs of one step multiplied, its weights after each step,
    and the error.
    """
    feed = Feed(
        split, PlanSettings(rows_per_batch=8, layout=BatchLayout.padded), kind=FeedKind.resident
    )
    task = make_task("bilstm", Problem.single, total_steps=8)
    loop = FastLoop(not_finite=policy)
    loop.checks_on_host = not late
    seen: list[torch.Tensor] = []

    def spoil(module, inputs, outputs):
        seen.append(
            torch.cat([weight.detach().flatten().clone() for weight in task.model.parameters()])
        )
        return outputs * value if len(seen) == BAD_STEP else outputs

    task.model.register_forward_hook(spoil)
    error = None
    try:
        fast_trainer(folder, 2, RunCurves([], 3), loop=loop, clip=clip).fit(
            task, train_dataloaders=feed
        )
    except UserError as found:
        error = found
    seen.append(flat_weights(task.model))
    return loop, seen, error


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_stops_the_run_before_it_changes_a_weight(
    make_split, tmp_path, value, late, clip
):
    _, seen, error = spoilt(make_split(LENGTHS), tmp_path, value=value, late=late, clip=clip)
    assert f"not finite at step {BAD_STEP}" in str(error)
    assert torch.equal(seen[-1], seen[BAD_STEP - 1])
    assert len(seen) - 1 == (7 if late else BAD_STEP)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_skipping_leaves_out_just_that_step_and_counts_it(make_split, tmp_path, late):
    task, seen, error = spoilt(
        make_split(LENGTHS), tmp_path, value=float("nan"), late=late, policy=NotFinite.skip
    )
    assert error is None
    assert task.skipped == [BAD_STEP - 1]
    assert task.trainer.global_step == 8
    assert torch.equal(seen[BAD_STEP], seen[BAD_STEP - 1])
    assert not torch.equal(seen[BAD_STEP + 1], seen[BAD_STEP])


def test_both_ways_of_finding_train_the_same_weights(make_split, tmp_path):
    split = make_split(LENGTHS)
    for value in (1.0, float("nan")):
        ways = [
            spoilt(split, tmp_path, value=value, late=late, policy=NotFinite.skip)
            for late in (False, True)
        ]
        assert torch.equal(ways[0][1][-1], ways[1][1][-1])


def test_the_rows_of_a_step_are_those_of_its_batches(make_split):
    feed = Feed(
        make_split(LENGTHS), PlanSettings(rows_per_batch=4, accumulate=2, layout=BatchLayout.padded)
    )
    batches = list(feed)
    for step in range(4):
        trained = torch.cat([batch.rows for batch in batches[2 * step : 2 * step + 2]])
        assert sorted(feed.rows_of_step(0, step).tolist()) == sorted(trained.tolist())


def scaled(split, folder, *, spoilt_steps=(), clip=0.5, epochs=2, factor=16.0):
    """A task trained in fp16 with a scaler (fp32 and none where the factor is 0), its gradient
    infinite at some steps, its output weights before each step, what each flush told, and the
    error."""
    feed = Feed(
        split, PlanSettings(rows_per_batch=8, layout=BatchLayout.padded), kind=FeedKind.resident
    )
    task = make_task("textcnn", Problem.single, total_steps=4 * epochs)
    loop = FastLoop()
    kept = KeptFlushes()
    seen: list[torch.Tensor] = []

    def spoil(gradient):
        seen.append(task.model.output.weight.detach().clone())
        return gradient * float("inf") if len(seen) - 1 in spoilt_steps else gradient

    task.model.output.weight.register_hook(spoil)
    plugins = (
        [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=factor))]
        if factor
        else None
    )
    trainer = fast_trainer(
        folder, epochs, RunCurves([kept], 3), plugins=plugins, loop=loop, clip=clip
    )
    error = None
    try:
        trainer.fit(task, train_dataloaders=feed)
    except UserError as found:
        error = found
    return loop, seen, kept.flushes, error


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_step_that_the_scaler_leaves_out_is_counted_and_the_others_are_taken(
    make_split, tmp_path, clip
):
    task, seen, told, error = scaled(
        make_split(LENGTHS), tmp_path, spoilt_steps={BAD_STEP - 1}, clip=clip
    )
    assert error is None
    assert task.skipped == [BAD_STEP - 1]
    changed = [not torch.equal(before, after) for before, after in itertools.pairwise(seen)]
    assert changed == [step != BAD_STEP - 1 for step in range(7)]
    assert all(
        math.isfinite(values[name])
        for values in told
        for name in ("train/loss", "train/gradient_norm")
    )


def norms_of_gradients(told):
    return [values["train/gradient_norm"] for values in told]


def test_clipping_in_fp16_is_of_the_gradient_without_the_factor_of_the_scaler(make_split, tmp_path):
    split = make_split(LENGTHS)
    found = [scaled(split, tmp_path, factor=factor, clip=0.05) for factor in (0.0, 1024.0)]
    norms = [norms_of_gradients(told) for _, _, told, _ in found]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    torch.testing.assert_close(found[1][1][-1], found[0][1][-1], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_gradient_that_stays_infinite_under_the_scaler_stops_the_run(make_split, tmp_path, clip):
    loop, seen, _, error = scaled(
        make_split(LENGTHS), tmp_path, spoilt_steps=range(2, 99), clip=clip, epochs=9
    )
    assert loop.skipped[:3] == [2, 3, 4]
    assert f"not finite at step {loop.skipped[-1] + 1}" in str(error)
    # the twenty-second step is the twentieth in a row; the flush after it tells
    assert len(seen) == 23
    assert torch.equal(loop.module.model.output.weight, seen[2])


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_skipping_ends_where_step_after_step_would_be_skipped(make_split, tmp_path, late):
    feed = Feed(
        make_split(LENGTHS),
        PlanSettings(rows_per_batch=8, layout=BatchLayout.padded),
        kind=FeedKind.resident,
    )
    task = make_task("textcnn", Problem.single, total_steps=36)
    loop = FastLoop(not_finite=NotFinite.skip)
    loop.checks_on_host = not late
    task.model.output.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(UserError, match="not finite at step 20"):
        fast_trainer(tmp_path, 9, RunCurves([], 3), loop=loop).fit(task, train_dataloaders=feed)
