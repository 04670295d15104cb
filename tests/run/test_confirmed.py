"""`tune` takes what `doctor --confirm` has measured for the same settings, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flatout import BiLSTMConfig, RunConfig, TextDataConfig
from flatout.distributed.ranks import Ranks
from flatout.perf.measure.intervals import SpeedupInterval
from flatout.perf.tune.settings import TuneConfig
from flatout.perf.verdict.confirmation import Confirmed, OverrideConfirmation, keep_confirmation
from flatout.report.summary import hardware, plain, versions
from flatout.run.answers import build_question
from flatout.run.claimed_folders import SETTINGS
from flatout.run.confirmed import find_confirmed
from flatout.run.kinds import kind_of
from flatout.run.tuning import list_open_settings, measure_answers
from flatout.run_log import RunLog
from tests.perf.tune.planted import SMALL

CPU = torch.device("cpu")
WORDS = ["tune=auto", "data.sample.rows=400"]


def build_run(output: Path, **data) -> RunConfig:
    settings = {"sample": SMALL, "batch_size": 32, "cache": str(output / "cache")} | data
    tune = TuneConfig(enabled=True, compile=False, budget_s=20, steps=2)
    return RunConfig(
        data=TextDataConfig(**settings),
        model=BiLSTMConfig(embedding=8, hidden=8),
        output=str(output),
        tune=tune,
    )


def runs_of(build: RunConfig) -> tuple[Path, dict[str, Any]]:
    """Where its runs are, and its settings as they keep them."""
    return Path(build.output, build.name), plain(build)


def confirm_beside(build: RunConfig, override: str, gain: float, **changed) -> None:
    run = runs_of(build)[0] / "2026-01-01_00-00-00"
    run.mkdir(parents=True, exist_ok=True)
    (run / SETTINGS).write_text(yaml.safe_dump(plain(build)), encoding="utf-8")
    measured = SpeedupInterval(gain, gain * 0.98, gain * 1.02)
    device = hardware(CPU, 1, "")["device"]
    version = versions()["flatout"]
    given = {
        "override": override,
        "predicted": None,
        "measured": measured,
        "steps": 60,
        "rates": ((1.0,), (gain,)),
        "device": device,
        "version": version,
    }
    keep_confirmation(run, OverrideConfirmation(**given | changed))


def test_a_confirmed_override_is_taken_and_one_that_slows_is_left_out(tmp_path):
    build = build_run(tmp_path)
    confirm_beside(build, "data.feed=threaded", 1.4)
    confirm_beside(build, "precision=bf16", 0.7)
    found = find_confirmed(*runs_of(build), CPU, WORDS)
    assert found.values == {"data.feed": "threaded"}
    assert found.slower == {"precision=bf16"}
    assert found.why["data.feed"].startswith("confirmed by doctor: 1.40× (1.37–1.43) in 2026")


@pytest.mark.parametrize(
    ("override", "gain", "changed"),
    [
        ("data.feed=threaded", 1.04, {}),
        ("data.feed=threaded", 1.4, {"version": "0.0.1"}),
        ("data.feed=threaded", 1.4, {"device": "another processor"}),
        ("data.feed=workers data.workers=1 threads=1", 1.4, {}),
        ("data.batch_size=128", 1.4, {}),
        ("~callbacks.mine", 1.4, {}),
    ],
)
def test_what_is_uncertain_or_of_another_machine_or_not_to_be_tuned_is_not_taken(
    tmp_path, override, gain, changed
):
    build = build_run(tmp_path)
    confirm_beside(build, override, gain, **changed)
    assert find_confirmed(*runs_of(build), CPU, WORDS) == Confirmed()


def test_what_was_typed_or_set_otherwise_is_not_replaced(tmp_path):
    build = build_run(tmp_path)
    confirm_beside(build, "data.feed=threaded", 1.4)
    assert find_confirmed(*runs_of(build), CPU, [*WORDS, "data.feed=auto"]) == Confirmed()
    for other in (build_run(tmp_path, batch_size=16), build_run(tmp_path, feed="resident")):
        assert find_confirmed(*runs_of(other), CPU, WORDS) == Confirmed()


def test_rows_of_a_step_stay_where_batches_are_put_together(tmp_path):
    build = build_run(tmp_path, batch_size=8, accumulate=4)
    confirm_beside(build, "data.batch_size=32 data.accumulate=1", 2.0)
    found = find_confirmed(*runs_of(build), CPU, WORDS)
    assert found.values == {"data.batch_size": 32, "data.accumulate": 1}


def test_tune_sets_what_was_confirmed_and_names_its_evidence(tmp_path):
    build = build_run(tmp_path)
    confirm_beside(build, "data.feed=threaded", 1.4)
    data = kind_of(build.data).data.of(build.data, seed=build.seed, log=RunLog())
    data.prepare_data()
    data.setup()
    asked = replace(build_question(build, data, Ranks(), CPU, WORDS), counts_time=False)
    assert list_open_settings(asked).start.feed == "threaded"
    answers = measure_answers(replace(asked, prober=NoProber()), lambda line: None).answers
    choice = next(each for each in answers.choices if each.name == "feed")
    assert answers.values["data.feed"] == choice.value == "threaded"
    assert "confirmed by doctor: 1.40×" in choice.why


class NoProber:
    """Has no answer: what was confirmed stands without any."""

    def ask(self, what, latest, **asked):
        from flatout.perf.tune.answers import NoAnswer

        return NoAnswer("nothing is measured here")

    def close(self):
        return
