"""What is decided from what was measured, by a machine whose speed and memory are made up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flatout.data.feeding import FeedKind
from flatout.engine.precision import Precision
from flatout.perf.notes import Limit, MicroBatches
from flatout.perf.tune.answers import Answers, AnswerStore, NoAnswer
from flatout.perf.tune.probe import ProbedSetting, SettingMeasurement
from flatout.perf.tune.search import Search
from flatout.perf.tune.settings import TuneConfig
from flatout.perf.tune.speeds import OpenSettings

GB = 10**9
START = ProbedSetting(feed=FeedKind.resident, precision=Precision.bf16, rows=64, accumulate=1)


class Machine:
    """Answers as a child would: `rate` and `bytes_of` say how fast a setting is and
    what it takes.
    """

    def __init__(
        self,
        rate: Callable[[ProbedSetting], float] = lambda setting: 1000.0,
        bytes_of: Callable[[ProbedSetting], int] = lambda setting: GB + setting.rows * 10**6,
        **facts: Any,
    ) -> None:
        self.rate = rate
        self.bytes_of = bytes_of
        self.facts = {
            "weights": 10**6,
            "fixed_bytes": 0,
            "base_bytes": GB,
            "longest": 128,
            "is_recurrent": False,
        } | facts
        self.wait_share = self.facts.pop("wait_share", 0.0)
        self.losses = self.facts.pop("losses", {"fp32": 2.0, "bf16": 2.001})
        self.breaks = self.facts.pop("breaks", lambda setting: None)
        self.takes_s = self.facts.pop("takes_s", 0.0)
        self.compile_s = self.facts.pop("compile_s", 20.0)
        self.tried: list[ProbedSetting] = []
        self.is_closed = False
        self.is_afresh = False

    def ask(self, what: str, latest: float, **asked: Any) -> Any:
        self.is_afresh, self.is_closed = self.is_closed, False
        if what == "about":
            return {**self.facts, "row_keys": {str(each): str(each) for each in Precision}}
        if what == "feeds":
            return dict.fromkeys(asked["kinds"], 1000000.0)
        if what == "losses":
            return {name: self.losses[name] for name in asked["precisions"]}
        if what == "range":
            assert self.is_afresh, "weights that other probes have trained tell nothing"
            return {"rates": [1e-4] * 20, "losses": [1.0] * 20}
        setting = asked["setting"]
        self.tried.append(setting)
        time.sleep(self.takes_s)
        if (broken := self.breaks(setting)) is not None:
            return broken
        rate = self.rate(setting)
        return SettingMeasurement(
            step_s=setting.rows * setting.accumulate / rate,
            rows_per_s=rate,
            tokens_per_s=10 * rate,
            wait_share=self.wait_share,
            peak_bytes=self.bytes_of(setting),
            steps=asked["steps"],
            warm_s=self.compile_s if setting.compile else 0.0,
        )

    def close(self) -> None:
        self.is_closed = True


def search(machine: Machine, tmp_path, tune: dict[str, Any] | None = None, **asked: Any) -> Answers:
    given: dict[str, Any] = {
        "settings": TuneConfig(enabled=True, **(tune or {})),
        "start": START,
        "feeds": [FeedKind.resident, FeedKind.threaded, FeedKind.workers],
        "precisions": [Precision.fp32, Precision.bf16],
        "step_rows": 64,
        "num_rows": 100_000,
        "planned_steps": 10**6,
        "room_bytes": 100 * GB,
        "is_cpu": True,
    }
    closed = {"optim.lr": ""} | asked.pop("settled", {})
    closed.pop(asked.pop("open_too", ""), None)
    given["settled"] = closed
    found = Search(OpenSettings(**(given | asked)), machine, AnswerStore(tmp_path)).decide()
    assert machine.is_closed
    return found


def chosen(answers: Answers) -> dict[str, str]:
    return {choice.name: f"{choice.value}: {choice.why}" for choice in answers.choices}


def test_what_nothing_beats_stays_as_it_is(tmp_path):
    found = search(
        Machine(
            lambda setting: 2000.0 if setting.precision == "bf16" else 1000.0, is_recurrent=True
        ),
        tmp_path,
    )
    assert found.values == {
        "data.feed": "resident",
        "precision": "bf16",
        "data.batch_size": 64,
        "data.accumulate": 1,
        "compile": False,
    }
    assert found.is_complete
    assert found.step_s == 64 / 2000


def test_sixteen_bits_that_bring_little_give_way_to_fp32(tmp_path):
    found = search(
        Machine(lambda setting: 1030.0 if setting.precision == "bf16" else 1000.0), tmp_path
    )
    assert found.values["precision"] == "fp32"


def test_what_the_rule_says_is_not_given_up_for_one_slow_moment(tmp_path):
    slow = iter([100.0])

    def rate(setting: ProbedSetting) -> float:
        return next(slow, 2000.0) if setting.precision == "bf16" and setting.rows == 64 else 1000.0

    assert search(Machine(rate), tmp_path).values["precision"] == "bf16"


@pytest.mark.parametrize("loss", [2.5, 1.5, float("nan"), float("inf")])
def test_an_arithmetic_with_another_loss_is_refused_and_named(loss, tmp_path):
    machine = Machine(
        lambda setting: 9000.0 if setting.precision == "bf16" else 1000.0,
        losses={"fp32": 2.0, "bf16": loss},
    )
    found = search(machine, tmp_path)
    assert found.values["precision"] == "fp32"
    (choice,) = (choice for choice in found.choices if choice.name == "precision")
    assert "refused: bf16, over 1.0% from fp32" in choice.evidence
    assert any(
        row.value == "bf16" and row.verdict.startswith("refused: its loss is")
        for row in found.tried
    )


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_of_fp32_that_is_not_finite_is_named_as_the_reason(loss, tmp_path):
    found = search(Machine(losses={"fp32": loss, "bf16": 2.0}), tmp_path)
    assert chosen(found)["precision"] == "bf16: the loss in fp32 is not finite"


def test_noise_does_not_win_twice(tmp_path):
    # once, and never again: but the best of all tries counts, so the other must win it too
    luck = iter([5000.0])
    machine = Machine(
        lambda setting: next(luck, 1000.0) if setting.rows == 32 else 4900.0, is_recurrent=True
    )
    assert search(machine, tmp_path).values["data.batch_size"] == 64


def test_rows_at_once_grow_while_the_rows_of_a_step_stay(tmp_path):
    machine = Machine(lambda setting: {8: 500, 16: 800, 32: 1200, 64: 1210}[setting.rows])
    start = replace(START, rows=8, accumulate=8)
    found = search(machine, tmp_path, start=start)
    assert (found.values["data.batch_size"], found.values["data.accumulate"]) == (32, 2)
    assert all(each.rows * each.accumulate == 64 for each in machine.tried)
    assert "still 64 rows of a device in a step" in chosen(found)["micro-batch"]


def test_free_rows_double_to_the_knee(tmp_path):
    machine = Machine(lambda setting: 100.0 * min(setting.rows, 256))
    # On a card the first guess is past it, and the way goes down; on a CPU it goes up from what was
    # set.
    for is_cpu in (True, False):
        found = search(machine, tmp_path, {"effective_batch": "free"}, is_cpu=is_cpu)
        assert (found.values["data.batch_size"], found.values["data.accumulate"]) == (256, 1)
        assert "64 were set" in chosen(found)["micro-batch"]


@pytest.mark.parametrize(
    ("rates", "rows"),
    [
        ((100.0, 190.0, 250.0, 255.0, 400.0), 256),
        ((100.0, 50.0), 64),
    ],
)
def test_the_knee_is_where_twice_the_rows_bring_little(rates, rows, tmp_path):
    by_rows = {64 << place: rate for place, rate in enumerate(rates)}
    machine = Machine(lambda setting: by_rows.get(setting.rows, 10.0))
    assert search(machine, tmp_path, {"effective_batch": "free"}).values["data.batch_size"] == rows


def test_one_size_to_choose_from_is_taken(tmp_path):
    # more rows would pay, but an epoch has no more
    machine = Machine(lambda setting: 100.0 * setting.rows)
    found = search(machine, tmp_path, {"effective_batch": "free"}, num_rows=8 * 64)
    assert found.values["data.batch_size"] == 64
    assert max(each.rows for each in machine.tried) == 64


@pytest.mark.parametrize(
    ("num_rows", "refusal", "why"),
    [
        (8 * 64, None, "with twice as many an epoch has fewer than 8 steps"),
        (10**6, NoAnswer("out of memory", is_memory=True), "128 do not fit"),
        (10**6, NoAnswer("the time was spent"), "128 were not measured: the time was spent"),
    ],
)
def test_a_size_that_was_not_measured_is_not_called_slow(num_rows, refusal, why, tmp_path):
    machine = Machine(
        lambda setting: 100.0 * setting.rows,
        breaks=lambda setting: refusal if setting.rows > 64 else None,
    )
    found = search(machine, tmp_path, {"effective_batch": "free"}, num_rows=num_rows)
    assert chosen(found)["micro-batch"].startswith(f"64 × 1: {why}; ")


def test_free_rows_never_shrink(tmp_path):
    found = search(Machine(), tmp_path, {"effective_batch": "free"})
    assert found.values["data.batch_size"] == 64


def test_on_a_cpu_what_would_not_fit_is_predicted_and_never_run(tmp_path):
    machine = Machine(
        lambda setting: 100.0 * setting.rows, lambda setting: GB + setting.rows * GB // 10
    )
    found = search(machine, tmp_path, room_bytes=4 * GB)
    assert max(each.rows for each in machine.tried) == 16
    assert (found.values["data.batch_size"], found.values["data.accumulate"]) == (16, 4)
    (first, *_) = (row for row in found.tried if row.is_predicted)
    assert first.memory_gb == pytest.approx(7.4)
    assert first.verdict == "not run: 4.0 GB may be taken"
    assert chosen(found)["micro-batch"] == "16 × 4: 64 do not fit; 64 rows of a device in a step"


@pytest.mark.parametrize(
    "why", ["out of memory", "its process was ended by SIGKILL, out of memory is the usual cause"]
)
def test_on_a_card_out_of_memory_is_an_answer(why, tmp_path):
    lost = NoAnswer(why, is_memory=True)
    machine = Machine(
        lambda setting: 10.0 * setting.rows,
        breaks=lambda setting: lost if setting.rows > 16 else None,
    )
    found = search(machine, tmp_path, is_cpu=False)
    assert found.values["data.batch_size"] == 16
    assert any(row.verdict == why for row in found.tried)


def test_a_card_keeps_its_margin(tmp_path):
    machine = Machine(lambda setting: 100.0 * setting.rows, lambda setting: setting.rows * GB // 10)
    found = search(machine, tmp_path, is_cpu=False, room_bytes=4 * GB)
    assert found.values["data.batch_size"] == 32
    assert any(row.verdict.startswith("too much memory") for row in found.tried)


def test_rows_that_were_too_many_once_are_not_tried_again(tmp_path):
    MicroBatches(tmp_path, {}).note("training rows", Limit(20), "bf16")
    machine = Machine(lambda setting: 100.0 * setting.rows)
    found = search(machine, tmp_path)
    assert found.values["data.batch_size"] == 16


def test_what_was_asked_for_is_kept_and_said(tmp_path):
    machine = Machine(lambda setting: 9000.0 if setting.rows == 32 else 1000.0)
    settled = {
        "data.feed": "asked for",
        "precision": "asked for",
        "data.batch_size": "asked for",
        "compile": "asked for",
    }
    found = search(machine, tmp_path, settled=settled)
    assert found.values == {}
    assert chosen(found) == {
        "feed": "resident: kept: asked for",
        "precision": "bf16: kept: asked for",
        "micro-batch": "64: kept: asked for",
        "compile": "false: kept: asked for",
    }
    assert {each.rows for each in machine.tried} == {8, 64}


def test_where_tokens_decide_no_rows_are_tried_and_no_memory_is_predicted(tmp_path):
    settled = {"data.batch_size": "data.tokens_per_batch decides"}
    machine = Machine(bytes_of=lambda setting: 30 * GB)
    found = search(machine, tmp_path, settled=settled, is_capped=True, room_bytes=40 * GB)
    assert found.values["precision"] == "fp32"
    assert found.step_s
    assert {setting.rows for setting in machine.tried} == {64}


def test_other_feeds_are_tried_in_the_step_only_where_steps_wait(tmp_path):
    rate = {"resident": 1000.0, "threaded": 1500.0, "workers": 500.0}
    waiting = Machine(lambda setting: rate[setting.feed], wait_share=0.5)
    assert search(waiting, tmp_path).values["data.feed"] == "threaded"
    idle = Machine(lambda setting: rate[setting.feed], wait_share=0.01)
    assert search(idle, tmp_path).values["data.feed"] == "resident"
    assert {each.feed for each in idle.tried} == {FeedKind.resident}


def test_a_run_that_is_too_short_is_left_alone(tmp_path):
    machine = Machine(takes_s=0.01)
    found = search(machine, tmp_path, planned_steps=10)
    assert found.values == {}
    assert not found.is_complete
    assert (
        "the run takes about 1 s, 5% of it is too little to measure anything"
        in chosen(found)["tune"]
    )
    assert len(machine.tried) == 2


@pytest.mark.xdist_group("timing")
def test_the_budget_is_kept_and_what_it_was_too_short_for_is_said(tmp_path):
    began = time.monotonic()
    machine = Machine(lambda setting: 1000.0 * setting.rows, takes_s=0.1)
    start = replace(START, rows=8, accumulate=8)
    found = search(machine, tmp_path, {"budget_s": 0.5}, start=start)
    assert time.monotonic() - began < 1.0
    assert not found.is_complete
    assert any(row.verdict == "not run: the time was spent" for row in found.tried)
    assert "fastest of those that there was time for" in chosen(found)["micro-batch"]


def test_a_child_that_cannot_begin_leaves_everything_as_it_is(tmp_path):
    machine = Machine()
    machine.ask = lambda *asked, **more: NoAnswer("its process was ended by SIGKILL")
    machine.close()
    found = Search(
        OpenSettings(
            settings=TuneConfig(),
            start=START,
            feeds=[],
            precisions=[],
            step_rows=64,
            num_rows=1,
            planned_steps=1,
            room_bytes=1,
            is_cpu=True,
        ),
        machine,
        AnswerStore(tmp_path),
    ).decide()
    assert found.values == {}
    assert "nothing was measured: its process was ended by SIGKILL" in chosen(found)["tune"]


def faster_compiled(setting: ProbedSetting) -> float:
    return 1500.0 if setting.compile else 1000.0


def test_compiling_is_taken_where_it_pays_within_the_run(tmp_path):
    found = search(Machine(faster_compiled), tmp_path)
    assert found.values["compile"] is True
    slow = search(Machine(faster_compiled, compile_s=1e6), tmp_path)
    assert slow.values["compile"] is False
    assert "saves too little" in chosen(slow)["compile"]


@pytest.mark.parametrize(
    ("asked", "facts", "why"),
    [
        ({"planned_steps": 400}, {}, "a compile 20 s or more"),
        ({"compile_why_not": "no C++ compiler is here"}, {}, "no C++ compiler is here"),
        ({}, {"is_recurrent": True}, "recurrent layers"),
        ({"settings": TuneConfig(budget_s=10)}, {}, "a compile takes 20 s or more"),
    ],
)
def test_compiling_is_not_tried_where_it_cannot_pay(asked, facts, why, tmp_path):
    machine = Machine(faster_compiled, **facts)
    found = search(machine, tmp_path, counts_time=False, **asked)
    assert found.values["compile"] is False
    assert not any(each.compile for each in machine.tried)
    assert why in next(choice.evidence for choice in found.choices if choice.name == "compile")


def test_a_compile_that_fails_is_an_answer(tmp_path):
    broken = NoAnswer("InductorError: no such thing")
    machine = Machine(faster_compiled, breaks=lambda setting: broken if setting.compile else None)
    found = search(machine, tmp_path)
    assert found.values["compile"] is False
    assert "InductorError" in next(
        choice.evidence for choice in found.choices if choice.name == "compile"
    )


def test_a_rate_that_finds_no_fall_is_left_as_it_is(tmp_path):
    machine = Machine()
    found = search(machine, tmp_path, open_too="optim.lr")
    assert "optim.lr" not in found.values
    assert "does not fall" in chosen(found)["optim.lr"]
