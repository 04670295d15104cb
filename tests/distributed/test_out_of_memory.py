"""A rank that runs out of memory repeats its part; the others wait, and all train the weights they
would have.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from flatout import (
    BiLSTMConfig,
    CheckpointConfig,
    HeadlinesConfig,
    MonitorConfig,
    OptimConfig,
    TextDataConfig,
    UserError,
)
from flatout.run.closing import Result
from tests.encoders import calm_encoder
from tests.fitting import own_cache, quiet_fit
from tests.run_files import model_weights, read_log
from tests.scarce import Scarce

SOAK = pytest.mark.soak(seconds=30)
pytestmark = pytest.mark.timeout(120)  # ranks that wait for each other for ever
MODELS: dict[str, Any] = {
    "bilstm": BiLSTMConfig(hidden=16, embedding=16, dropout=0.0),
    "encoder": calm_encoder(hidden=32, layers=2, heads=4),
}
# its table of words is kept, and past DDP
MODELS["wide"] = replace(MODELS["encoder"], hidden=640, layers=1)
MIDDLE = {
    "bilstm": "model.layers.0.ahead.weight_hh_l0",
    "encoder": "model.net.bert.encoder.layer.1.output.dense.weight",
    "wide": "model.net.bert.encoder.layer.0.attention.self.query.weight",
}


def train_ranks(
    folder: Path, kind: str, scarce: Scarce | None = None, *, accumulate: int = 1, **given: Any
) -> Result:
    headlines = HeadlinesConfig(rows=403, eval_rows=51, classes=4)
    return quiet_fit(
        TextDataConfig(sample=headlines, batch_size=16, accumulate=accumulate),
        MODELS[kind],
        optim=OptimConfig(lr=3e-3, eps=1e-3),
        epochs=1,
        monitor=MonitorConfig(flush_every=1, progress=False),
        callbacks={} if scarce is None else {"scarce": scarce},
        trainer={"devices": 2} | given.pop("trainer", {}),
        folder=folder,
        **given,
    )


def assert_same(one: Result, other: Result) -> None:
    found = model_weights(one.folder)
    expected = model_weights(other.folder)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert one.metrics == pytest.approx(other.metrics, abs=1e-5)


def buckets_of(megabytes: float | None) -> dict[str, Any]:
    """Gradients in buckets of this size; None: those of the run itself, one for all on a CPU."""
    if megabytes is None:
        return {}
    return {
        "trainer": {"strategy": DDPStrategy(gradient_as_bucket_view=True, bucket_cap_mb=megabytes)}
    }


# The first step has other buckets than the later ones.
ONE_BUCKET = ("bilstm", None)
A_BUCKET_FOR_EACH_WEIGHT = ("encoder", 0.002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two ranks with memory enough, in ONE_BUCKET."""
    folder = tmp_path_factory.mktemp("whole")
    with own_cache(folder):
        return train_ranks(folder / "plain", "bilstm")


@pytest.mark.soak(seconds=6)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(ONE_BUCKET, id="one bucket"),
        pytest.param(A_BUCKET_FOR_EACH_WEIGHT, id="each weight", marks=SOAK),
    ],
)
@pytest.mark.parametrize("first", [3, pytest.param(0, marks=SOAK)])
def test_one_rank_without_memory_in_its_forward_pass_changes_nothing_for_any(
    tmp_path, whole, case, first
):
    kind, bucket_mb = case
    plain = (
        whole
        if case == ONE_BUCKET
        else train_ranks(tmp_path / "plain", kind, **buckets_of(bucket_mb))
    )
    scarce = Scarce(12, range(first, 100), "forward", rank=1)  # of sixteen rows: a half fits
    result = train_ranks(tmp_path / "scarce", kind, scarce, **buckets_of(bucket_mb))
    assert_same(result, plain)
    assert read_log(result.folder).count("micro-batch: 8 rows (was 16) (out of memory at step") == 1
    assert "; on another rank)" in read_log(result.folder)


@SOAK
def test_batches_that_were_added_up_are_kept_when_the_last_one_fails(tmp_path):
    plain = train_ranks(tmp_path / "plain", "wide", accumulate=3)
    scarce = Scarce(12, range(1, 100), "forward", rank=0, is_last=True)
    result = train_ranks(tmp_path / "scarce", "wide", scarce, accumulate=3)
    assert_same(result, plain)
    assert result.summary["training"]["out_of_memory"] == 1


@SOAK
def test_a_backward_pass_before_the_last_of_a_step_is_repeated(tmp_path):
    """Ranks exchange nothing in it."""
    plain = train_ranks(tmp_path / "plain", "wide", accumulate=3)
    scarce = Scarce(12, range(1, 100), MIDDLE["wide"], rank=0)
    result = train_ranks(tmp_path / "scarce", "wide", scarce, accumulate=3)
    assert_same(result, plain)
    assert result.summary["training"]["out_of_memory"] == 1


@pytest.mark.soak(seconds=5)
@pytest.mark.parametrize(
    ("case", "where"),
    [
        pytest.param(ONE_BUCKET, MIDDLE["bilstm"], id="one bucket"),
        pytest.param(
            A_BUCKET_FOR_EACH_WEIGHT, MIDDLE["encoder"], id="a bucket each weight", marks=SOAK
        ),
        pytest.param(ONE_BUCKET, "backward", id="before any gradient", marks=SOAK),
    ],
)
def test_a_rank_without_memory_in_its_last_backward_pass_ends_the_run_which_resumes_in_pieces(
    tmp_path, whole, case, where
):
    kind, bucket_mb = case
    given: dict[str, Any] = {"checkpoint": CheckpointConfig(every_steps=1), **buckets_of(bucket_mb)}
    plain = whole if case == ONE_BUCKET else train_ranks(tmp_path / "plain", kind, **given)
    scarce = Scarce(12, range(4, 100), where, rank=1)
    words = r"memory ran out at step 5 while ranks exchanged gradients \(CUDA out of memory"
    with pytest.raises(UserError, match=words):
        train_ranks(tmp_path / "cut", kind, scarce, **given)
    result = train_ranks(tmp_path / "cut", kind, scarce, resume=str(tmp_path / "cut"), **given)
    assert result.summary["training"]["resumed_from"] == 4
    assert "micro-batch: 8 rows of 16 (an earlier run like this one ran out of memory" in read_log(
        result.folder
    )
    assert_same(result, plain)


@SOAK
def test_ranks_without_memory_in_turn_and_again(tmp_path):
    plain = train_ranks(tmp_path / "plain", "encoder")
    result = train_ranks(tmp_path / "scarce", "encoder", Scarce(3, range(2, 100)))
    assert_same(result, plain)
    assert read_log(result.folder).count("micro-batch:") >= 1
