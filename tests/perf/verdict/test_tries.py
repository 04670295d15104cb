"""What is tried at the end of a run leaves nothing behind, and `doctor` says what a
folder tells.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import time
from contextlib import redirect_stdout
from unittest.mock import patch

import lightning as L
import pytest
import torch
from benchmarks.plants import Recompiles, SleepyCollate
from safetensors.torch import load_file

from flatout import BiLSTMConfig, HeadlinesConfig, MonitorConfig, TextDataConfig, UserError, fit
from flatout.bits.settings import BitsDataConfig
from flatout.bits.task import GramsConfig
from flatout.checkpoints.kept import CHECKPOINTS
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import PlanSettings
from flatout.data.feeding import FeedKind
from flatout.engine import precision
from flatout.models.bit_mlp import BitMLPConfig
from flatout.models.encoder.transformer import TransformerConfig
from flatout.perf.measure.steps import Taken
from flatout.perf.verdict import experiments as tries
from flatout.perf.verdict import gathering, ways
from flatout.perf.verdict.gathering import _rows_a_batch, evidence_in
from flatout.report.summary import read_summary
from tests.fitting import own_cache
from tests.params import at_once
from tests.verbs import verb


@pytest.fixture
def long_enough(monkeypatch):
    """Runs of a second are long enough to try things, in few rounds: other tests run beside this
    one.
    """
    let_short_runs_try(monkeypatch)


@pytest.fixture
def one_core(monkeypatch):
    """Other threads are not tried: they would wait for each other while tests beside this one hold
    the cores.
    """
    try_no_threads(monkeypatch)


def try_no_threads(monkeypatch):
    monkeypatch.setattr(gathering, "cores_here", lambda: {0})


def let_short_runs_try(monkeypatch):
    monkeypatch.setattr(tries, "SHARE", 1000.0)
    monkeypatch.setattr(tries, "LEAST_S", 0.0)
    for name, value in {"ROWS_AROUND": 64, "_CALM_S": 0.1, "MOST_ROUNDS": 5}.items():
        monkeypatch.setattr(tries, name, value)
    monkeypatch.setattr(tries, "starved", lambda evidence: None)


def trained_once(folder, **settings):
    """A run that several tests look at, and what it printed."""
    printed = io.StringIO()
    with own_cache(folder) as changed, redirect_stdout(printed):
        let_short_runs_try(changed)
        try_no_threads(changed)
        torch.manual_seed(0)
        result = texts(folder, **settings)
    return result, printed.getvalue()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return trained_once(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return trained_once(tmp_path_factory.mktemp("slow"), callbacks={"mine": Slow()})


class Slow(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        time.sleep(0.05)
        assert float(batch.offsets[0]) == 0


def texts(output, *, verdict=True, model=None, **settings):
    return fit(
        TextDataConfig(sample=HeadlinesConfig(rows=500, eval_rows=60), batch_size=8, max_length=12),
        model or BiLSTMConfig(embedding=8, hidden=8, dropout=0.3),
        epochs=1,
        output=str(output),
        monitor=MonitorConfig(verdict=verdict, flush_every=10),
        **settings,
    )


def bits(output, *, verdict=True):
    data = BitsDataConfig(batch_size=8)
    data.sample.rows = 500
    monitor = MonitorConfig(verdict=verdict)
    model = BitMLPConfig(widths=[24], dropout=0.2)
    task = GramsConfig(recombine=1.0, exposure=False)
    return fit(data, model, task=task, epochs=1, output=str(output), monitor=monitor)


def encoder(output, *, verdict=True):
    return texts(
        output, verdict=verdict, model=TransformerConfig(hidden=16, layers=1, heads=2, dropout=0.1)
    )


@pytest.mark.parametrize("train", at_once(texts, of=[texts, bits, encoder], seconds=12))
def test_what_is_tried_leaves_nothing_behind(tmp_path, long_enough, one_core, train):
    tried, plain = (train(tmp_path, verdict=verdict) for verdict in (True, False))
    assert [each["cause"] for each in tried.summary["evidence"]["tried"]], tried.verdict
    assert not plain.summary["evidence"]["tried"]
    for file in ("model/model.safetensors", f"{CHECKPOINTS}/last/state.safetensors"):
        paths = [run.folder / file for run in (tried, plain)]
        if not paths[0].exists():
            assert file != "model/model.safetensors"
            continue
        ours, theirs = (load_file(path) for path in paths)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert tried.metrics == plain.metrics


def test_small_batches_are_tried_larger_and_the_verdict_says_so(small):
    result, printed = small
    tried = {each["override"]: each for each in result.summary["evidence"]["tried"]}
    assert "data.batch_size=32" in tried
    assert not any("dropout" in override for override in tried)
    assert tried["data.batch_size=32"]["rows_per_batch"] == pytest.approx(32, rel=0.2)
    assert all(each["rows_per_s"] > 0 and each["as_was"] > 0 for each in tried.values())
    assert result.verdict["sentence"]
    assert "verdict" in printed


@pytest.mark.parametrize(
    ("asked", "share", "other"),
    [
        pytest.param("bf16", 1.8, "fp32", marks=pytest.mark.soak(seconds=4)),
        ("fp32", 0.2, "bf16"),
    ],
)
def test_the_number_format_that_auto_would_choose_is_tried_where_another_was_asked_for(
    tmp_path, long_enough, one_core, monkeypatch, asked, share, other
):
    monkeypatch.setattr(precision, "bf16_is_native_on_cpu", lambda: True)
    monkeypatch.setattr(precision, "bf16_share", lambda: share)
    tried = {
        each["override"] for each in texts(tmp_path, precision=asked).summary["evidence"]["tried"]
    }
    assert f"precision={other}" in tried


@pytest.mark.soak(seconds=3)
def test_a_callback_that_takes_its_time_is_named(slow):
    result, _ = slow
    named = [result.verdict, *result.verdict["others"]]
    told = next(each["sentence"] for each in named if each["fix"] == "~callbacks.mine")
    assert "1 reads of the device's numbers a step" in told


@pytest.mark.soak(seconds=15)
def test_a_run_that_compiles_again_and_again_is_tried_uncompiled(tmp_path, long_enough):
    # put back afterwards
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        trained = texts(tmp_path, callbacks={"plant": Recompiles()})
    evidence = evidence_in(trained.folder)
    found = read_summary(trained.folder)["verdict"]
    assert found["cause"] == "compile"
    assert found["override"] == "compile=false"
    assert evidence.eager_ms is not None
    assert 3 * evidence.eager_ms < evidence.model_ms
    without = evidence.total_ms / (evidence.total_ms - evidence.model_ms + evidence.eager_ms)
    assert found["gain_low"] < without < found["gain_high"]


@pytest.mark.parametrize(
    ("was", "other", "most"),
    [
        (("resident", 1), ("threaded", 1), 100.0),
        (("threaded", 1), ("resident", 1), math.inf),
        (("threaded", 1), ("workers", 4), 400.0),
        (("workers", 2), ("workers", 4), 200.0),
        (("workers", 2), ("threaded", 1), math.inf),
    ],
)
def test_no_feed_counts_for_more_than_its_hands_can_make(make_split, was, other, most):
    split = make_split([3] * 8)
    feeds = [
        Feed(split, PlanSettings(rows_per_batch=2), kind=FeedKind(kind), workers=hands)
        for kind, hands in (other, was)
    ]
    assert ways.most_fed(*feeds, alone=100.0) == most
    assert ways.most_fed(*feeds, alone=None) == math.inf


@pytest.fixture
def slow_source():
    """Batches are made slowly, by a feed that sleeps."""
    SleepyCollate(ms=15)
    yield
    patch.stopall()


@pytest.mark.soak(seconds=5)
# more workers than cores: they sleep
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_other_feeds_are_tried_from_their_start_on_in_turn_with_the_feed_as_it_was(
    tmp_path, long_enough, slow_source
):
    result = texts(tmp_path)
    evidence = evidence_in(result.folder)
    assert evidence.feed_cores < 0.5, "it sleeps"
    tried = next(each for each in evidence.tried if each.cause == "data")
    assert tried.override.startswith("data.feed=workers data.workers=")
    assert tried.low <= tried.rows_per_s / tried.as_was <= tried.high
    assert "data" in [each["cause"] for each in (result.verdict, *result.verdict["others"])]


@pytest.mark.soak(seconds=4)
def test_feeds_that_the_time_is_too_short_for_are_named_as_untested(
    tmp_path, long_enough, slow_source, monkeypatch
):
    monkeypatch.setattr(tries, "_needed_s", lambda sides, evidence: math.inf)
    result = texts(tmp_path)
    assert not evidence_in(result.folder).tried
    named = next(
        each for each in (result.verdict, *result.verdict["others"]) if each["cause"] == "data"
    )
    assert named["fix"].startswith("try data.feed=workers")
    assert "(untested)" in named["sentence"]


@pytest.mark.soak(seconds=6)
def test_a_plain_bottleneck_is_told_while_the_run_goes_on(slow):
    _, printed = slow
    told = [line for line in printed.splitlines() if line.startswith("after ")]
    assert len(told) == 1
    assert "~callbacks.mine would make this run" in told[0]


def test_a_short_run_has_no_verdict_and_says_so(tmp_path, capsys):
    result = fit(
        TextDataConfig(sample=HeadlinesConfig(rows=60, eval_rows=40), batch_size=8),
        BiLSTMConfig(embedding=4, hidden=4),
        epochs=1,
        output=str(tmp_path),
    )
    assert result.verdict is None
    line = "verdict: none; what limits the speed is judged from 30 steps after the first 5 on"
    assert line in capsys.readouterr().out
    with pytest.raises(UserError, match=r"has \d+ steps .*Train it for longer"):
        evidence_in(result.folder)


def test_doctor_tells_of_a_finished_run_where_its_time_went_and_what_was_tried(small, capsys):
    result, _ = small
    assert verb("doctor", result.folder) == 0
    told = capsys.readouterr().out
    assert "where the time went" in told
    assert "forward" in told
    assert "data.batch_size=32" in told
    assert result.verdict["sentence"] in " ".join(told.split())
    assert verb("doctor", result.folder, "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["cause"] == result.verdict["cause"]


@pytest.mark.soak(seconds=5)
def test_doctor_tells_of_a_run_that_was_cut_short_what_its_curves_say(slow, tmp_path, capsys):
    folder = shutil.copytree(slow[0].folder, tmp_path / "run")
    summary = read_summary(folder) | {"status": "failed", "evidence": {}, "verdict": None}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert verb("doctor", folder) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "limited by callbacks of your own" in told
    assert "from the curves of a run that is failed" in told
    evidence = evidence_in(folder)
    assert evidence.rows_per_batch == pytest.approx(8, rel=0.1)
    assert (evidence.device, evidence.world, evidence.machine_cores) == (
        "cpu",
        1,
        summary["hardware"]["cores"],
    )
    with (folder / "metrics.csv").open("a") as file:
        file.write("60,1.9,2.1e")  # being written
    assert evidence_in(folder) == evidence


def test_rows_a_batch_are_read_row_by_row_of_the_curves():
    quick = {
        "speed/rows_per_s": "4000",
        "time/forward_ms": "6",
        "time/wait_ms": "2",
        "time/validation_ms": "90",
    }
    slow = {
        "speed/rows_per_s": "500",
        "time/forward_ms": "60",
        "time/wait_ms": "4",
        "time/transfer_ms": "",
    }
    assert [_rows_a_batch(row) for row in (quick, slow)] == pytest.approx([32, 32])


def test_shares_of_cores_say_nothing_of_a_machine_that_is_not_known(slow, tmp_path):
    folder = shutil.copytree(slow[0].folder, tmp_path / "run")
    summary = read_summary(folder) | {"status": "running", "evidence": {}, "verdict": None}
    assert evidence_in(folder).host
    summary["hardware"] = dict.fromkeys(summary["hardware"])
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert evidence_in(folder).host == {}


def test_doctor_wants_a_runs_folder(tmp_path, capsys):
    assert verb("doctor", tmp_path) == 2
    assert "no summary.json there" in capsys.readouterr().err


class SlowSteps:
    """Steps that take more and more seconds of a clock, as threads do that wait for one core."""

    rows_a_step = 32

    def __init__(self, now: list[float], step_s: float) -> None:
        self.now = now
        self.step_s = step_s
        self.count = 0

    def take(self, least: int) -> Taken:
        self.count += least
        self.now[0] += least * self.step_s
        return Taken(wall_s=least * self.step_s, rows=least * self.rows_a_step)


def test_steps_that_warm_up_end_with_the_time_of_the_tries(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("flatout.perf.verdict.experiments.time.perf_counter", lambda: now[0])
    was = SlowSteps(now, 0.01)
    waiting = SlowSteps(now, 0.8)
    never = SlowSteps(now, 0.01)
    sides = tries._affordable([was, waiting, never], 3_200.0, until=101.5)
    assert list(sides) == [was]
    assert was.count == 9
    assert waiting.count == 3, "one more than fits, and the one that is timed"
    assert never.count == 0
