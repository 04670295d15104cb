"""What a probe runs: the longest rows first, whole optimizer steps, the run's own feed and task."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from flatout import CellsConfig, RNNConfig
from flatout.data import SequenceData
from flatout.data.batches.gather import TOKENS
from flatout.data.feeding import FeedKind
from flatout.distributed.ranks import Ranks
from flatout.engine.precision import Precision
from flatout.perf.tune import probe
from flatout.perf.tune.probe import (
    Parts,
    ProbedSetting,
    about,
    feeds_alone,
    longest_batch,
    losses,
    measure,
)
from flatout.run.parts import build_parts
from flatout.tasks import SequenceRegressor
from tests.perf.tune.planted import config

SETTING = ProbedSetting(feed=FeedKind.resident, precision=Precision.fp32, rows=32, accumulate=1)


def test_the_longest_batch_holds_the_longest_rows_there_are(parts):
    lengths = np.sort(np.asarray(parts.split.lengths(TOKENS)))
    batch = longest_batch(parts, 20)
    assert batch.lengths.tolist() == lengths[-20:].tolist()
    assert batch.ends_step
    assert batch.num_real == batch.step_rows == 20
    assert longest_batch(parts, 10_000).num_rows == parts.split.num_rows


def test_a_probe_takes_optimizer_steps_on_the_longest_rows_and_on_typical_ones(parts, monkeypatch):
    monkeypatch.setattr(probe, "_LEAST_TIMED_S", 0.0)
    seen = []
    watched = parts.task.model.register_forward_pre_hook(
        lambda model, inputs: seen.append(inputs[0])
    )
    weights = {name: weight.clone() for name, weight in parts.task.named_parameters()}
    found = measure(parts, SETTING, steps=4, until=time.time() + 60)
    watched.remove()
    longest = longest_batch(parts, 32).num_tokens
    assert seen[0].num_tokens == longest > max(batch.num_tokens for batch in seen[1:])
    assert found.steps == 4 and len(seen) == 6  # the longest, one to warm up, four
    assert found.rows_per_s == pytest.approx(32 / found.step_s, rel=0.2)
    assert found.peak_bytes > 10_000_000
    assert 0 <= found.wait_share < 1
    assert all(torch.equal(weights[name], weight) for name, weight in parts.task.named_parameters())


def test_batches_that_are_added_up_count_as_one_step(parts, monkeypatch):
    monkeypatch.setattr(probe, "_LEAST_TIMED_S", 0.0)
    found = measure(
        parts,
        ProbedSetting(feed=FeedKind.resident, precision=Precision.fp32, rows=8, accumulate=4),
        3,
        1e12,
    )
    assert found.steps == 3
    assert found.rows_per_s == pytest.approx(32 / found.step_s, rel=0.2)


def test_steps_that_are_quick_are_timed_for_a_while(parts):
    found = measure(parts, SETTING, steps=2, until=time.time() + 60)
    assert found.steps > 2
    assert found.steps * found.step_s > 0.1


def test_a_probe_whose_time_is_over_ends_early(parts):
    assert measure(parts, SETTING, steps=500, until=time.time() - 1).steps < 20


def test_every_arithmetic_gives_its_loss_on_the_same_weights_and_rows(parts):
    again = [losses(parts, ["fp32", "bf16"], 16) for _ in range(2)]
    assert again[0] == again[1]
    assert again[0]["bf16"] == pytest.approx(again[0]["fp32"], rel=0.01)


def test_feeds_are_measured_without_a_model(parts):
    found = feeds_alone(parts, ["resident", "threaded"])
    assert found.keys() == {"resident", "threaded"}
    assert min(found.values()) > 0


def test_what_weights_will_bring_is_counted_before_anything_is_computed(parts):
    told = about(parts)
    assert told["fixed_bytes"] == 12 * told["weights"]
    assert told["is_recurrent"]
    assert told["longest"] == int(np.max(parts.split.lengths(TOKENS)))


def test_a_rank_probes_its_share_of_a_step():
    parts = build_parts(config(), Ranks(0, 2, 0, 2), torch.device("cpu"))
    assert parts.plan.world == 2
    found = measure(parts, SETTING, steps=2, until=time.time() + 60)
    assert found.rows_per_s == pytest.approx(32 / found.step_s, rel=0.2)


def test_a_cap_on_tokens_is_probed_as_it_is():
    parts = build_parts(config(data={"tokens_per_batch": 256}), Ranks(), torch.device("cpu"))
    seen = []
    parts.task.model.register_forward_pre_hook(lambda model, inputs: seen.append(inputs[0]))
    measure(parts, SETTING, steps=2, until=time.time() + 60)
    assert max(batch.longest() * batch.num_rows for batch in seen) <= 256


def test_chunks_that_carry_a_state_are_probed(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_LEAST_TIMED_S", 0.0)
    cells = CellsConfig(cells=4, cycles=3, samples=60)
    data = SequenceData(sample=cells, chunk=20, batch_size=4, cache=str(tmp_path))
    data.setup()
    task = SequenceRegressor(RNNConfig(hidden=4), total_steps=10)
    task.build(data.info)
    feed = data.train_dataloader()
    built = Parts(
        task, data.store.splits["train"], feed.plan, torch.device("cpu"), workers=1, clip=0.5
    )
    found = measure(built, replace(SETTING, rows=4), steps=3, until=time.time() + 60)
    assert found.steps == 3
    assert found.rows_per_s > 0
    compared = losses(built, ["fp32", "bf16"], rows=6)
    assert 0 < compared["fp32"] == pytest.approx(compared["bf16"], rel=0.1)
