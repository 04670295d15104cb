"""Timed steps count what they train, wait for nothing they need not, and leave the weights as they
were.
"""

from __future__ import annotations

import time

import pytest
import torch

from flatout.data.feeding import FeedKind
from flatout.engine.precision import Precision
from flatout.perf.measure.steps import Steps, TrainingWay, endless, standing_optimizer
from flatout.perf.tune.probe import feed_of


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_steps_count_their_batches_rows_and_time_and_leave_the_weights(parts, precision):
    parts.plan.rows_per_batch = 8
    parts.plan.accumulate = 2
    task = parts.task.train()
    feed = feed_of(parts, FeedKind.resident, parts.plan)
    way = TrainingWay(
        feed=feed, precision=precision, threads=torch.get_num_threads(), model=task.model
    )
    weights = {name: weight.clone() for name, weight in task.named_parameters()}
    steps = Steps(task, way, endless(feed), standing_optimizer(task.model, task), clip=0.5)
    taken = steps.take(3)
    assert (taken.batches, taken.rows) == (6, 48)
    assert taken.tokens > taken.rows
    assert 0 <= taken.wait_s <= taken.seconds
    assert taken.rate == pytest.approx(48 / taken.seconds)
    assert steps.take(1).batches == 2, "each round counts for itself"
    steps.close()
    assert all(torch.equal(weights[name], weight) for name, weight in task.named_parameters())
    assert all(weight.grad is None for weight in task.parameters())


def test_steps_for_a_while_leave_waiting_out_of_what_the_model_takes(parts):
    task = parts.task.train()
    feed = feed_of(parts, FeedKind.resident, parts.plan)
    way = TrainingWay(
        feed=feed, precision=Precision.fp32, threads=torch.get_num_threads(), model=task.model
    )

    def late():
        for batch in endless(feed):
            time.sleep(0.02)
            yield batch

    steps = Steps(task, way, late(), standing_optimizer(task.model, task))
    least = steps.take(2)
    longer = steps.take(2, 0.3)
    steps.close()
    assert longer.batches > least.batches
    assert longer.seconds >= 0.3
    assert longer.computing_s <= longer.seconds - 0.02 * longer.batches
    assert longer.computing_rate == pytest.approx(longer.rows / longer.computing_s)
