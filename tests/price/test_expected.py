"""What a run will take: from its plan and some of its steps, corrected by earlier runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flatout.callbacks.clock import Clock
from flatout.callbacks.gpu import Card
from flatout.callbacks.progress_line import ProgressLine
from flatout.price.costs import Costs, Done, PlannedLengths, correction, expect
from flatout.price.energy import EnergyMeter
from flatout.price.expected_end import ExpectedEnd
from flatout.price.notes import PriceNotes
from flatout.price.pace import Moment, StepPace, Work, fit_pace
from flatout.price.words import describe_seconds, describe_span
from tests.callbacks.recorded_nvml import Record, RecordedNvml

TOKENS = np.array([100, 300, 200, 400], np.float64)
WORK = Work(8, np.concatenate(([0.0], TOKENS.cumsum())))  # two epochs of four steps
COSTS = Costs(
    start_s=5.0,
    pace=StepPace(step_s=1.0, token_s=0.01, spread=0.02),
    validation_s=3.0,
    save_s=0.5,
    evaluation_s=4.0,
)
LENGTHS = PlannedLengths(WORK, validations=2, tries_share=0.0)


def test_the_first_epoch_stands_for_all():
    assert WORK.up_to(3) == 600
    assert WORK.up_to(6) == 1_000 + 400
    assert WORK.total == 2_000


def test_a_pace_has_a_constant_and_a_part_for_each_token():
    seconds = np.concatenate(([0.0], (0.5 + 0.01 * np.tile(TOKENS, 2)).cumsum()))
    pace = fit_pace(WORK, [Moment(step, seconds[step]) for step in range(9)])
    assert pace is not None
    assert pace.step_s == pytest.approx(0.5)
    assert pace.token_s == pytest.approx(0.01)
    assert pace.spread == pytest.approx(0.0, abs=1e-9)


def test_a_constant_below_zero_has_no_meaning_and_the_sum_stays_what_was_measured():
    seconds = np.concatenate(([0.0], (0.001 * TOKENS**2).cumsum()))
    pace = fit_pace(WORK, [Moment(step, seconds[step]) for step in range(5)])
    assert pace is not None
    assert min(pace.step_s, pace.token_s) >= 0
    assert pace.seconds(4, 1_000) == pytest.approx(seconds[-1])


def test_uneven_steps_have_a_spread_and_a_single_moment_has_no_pace():
    seconds = np.concatenate(([0.0], np.tile([1.0, 3.0], 4).cumsum()))
    pace = fit_pace(WORK, [Moment(step, seconds[step]) for step in range(9)])
    assert pace is not None
    assert pace.spread > 0.1
    assert fit_pace(WORK, [Moment(3, 1.0)]) is None


def test_the_time_of_a_run_is_the_sum_of_its_parts():
    expected = expect(COSTS, LENGTHS)
    assert expected.parts_s == {
        "start": 5.0,
        "training": 8 + 20.0,
        "validation": 6.0,
        "checkpoints": 1.0,
        "evaluation": 4.0,
    }
    assert expected.value_s == expected.raw_s == 44.0
    assert expected.low_s < 44.0 < expected.high_s


def test_the_interval_narrows_with_what_is_done_and_widens_beside_other_processes():
    def width(**more):
        expected = expect(COSTS, LENGTHS, **more)
        return expected.high_s - expected.low_s

    whole = width()
    assert width(done=Done(steps=6, validations=1, is_started=True)) < whole / 2
    assert width(busy=0.8) > 1.5 * whole


def test_earlier_runs_correct_the_estimate_and_the_raw_one_is_kept():
    expected = expect(COSTS, LENGTHS, [1.2] * 8)
    assert expected.raw_s == 44.0
    assert expected.value_s == pytest.approx(44.0 * 1.2**0.8)
    assert correction([], 0.2) == (1.0, pytest.approx(0.2))
    assert correction([0.5, 2.0], 0.2)[1] > 0.3


def test_the_interval_is_narrower_where_other_processes_have_cores_of_their_own():
    beside = expect(replace(COSTS, leaves_cores=True), LENGTHS)
    alone = expect(COSTS, LENGTHS)
    assert beside.value_s == alone.value_s
    assert beside.high_s - beside.low_s < 0.7 * (alone.high_s - alone.low_s)


def test_notes_are_of_equal_steps_and_of_one_kind_and_a_damaged_one_is_ignored(tmp_path):
    notes = PriceNotes(tmp_path, {"network": "A", "rows": 1}, {"network": "A"})
    assert notes.costs() is None
    notes.note_costs(COSTS)
    notes.note_ratio(1.1)
    other = PriceNotes(tmp_path, {"network": "A", "rows": 2}, {"network": "A"})
    assert notes.costs() == COSTS
    assert other.costs() is None
    assert other.ratios() == [1.1]
    for path in (tmp_path / "prices").iterdir():
        path.write_text("{", encoding="utf-8")
    assert (notes.costs(), notes.ratios()) == (None, [])


def test_a_counter_of_energy_that_starts_again_is_added_up(tmp_path):
    domain = tmp_path / "sys/class/powercap/intel-rapl:0"
    domain.mkdir(parents=True)
    (domain / "max_energy_range_uj").write_text("100000000", encoding="ascii")
    counter = domain / "energy_uj"
    counter.write_text("90000000", encoding="ascii")
    meter = EnergyMeter(None, root=tmp_path)
    assert meter.sources == ["processor"]
    counter.write_text("10000000", encoding="ascii")
    assert meter.joules(1.0) == 20.0
    of_two_machines = EnergyMeter(None, root=tmp_path, cards=8, machines=2)
    counter.write_text("15000000", encoding="ascii")
    assert meter.joules(2.0) == 25.0
    assert of_two_machines.joules(1.0) == 10.0


def test_without_a_counter_watts_that_were_set_count_or_nothing_is_known(tmp_path):
    assert EnergyMeter(None, 60.0, tmp_path).joules(10.0) == 600.0
    assert EnergyMeter(None, 60.0, tmp_path, machines=2).joules(10.0) == 1200.0
    assert EnergyMeter(None, root=tmp_path).joules(10.0) is None


def test_a_run_says_its_end_by_the_notes_at_once_and_else_by_its_first_steps(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("flatout.price.expected_end.time.perf_counter", lambda: now[0])

    def end_of(known):
        said = []
        end = ExpectedEnd(
            measure_lengths=lambda: LENGTHS,
            clock=Clock(),
            meter=EnergyMeter(None, root=tmp_path),
            began=now[0] - 5,
            noted=known,
            say=said.append,
            busy=lambda: 0.4,
        )
        for step in range(1, 4):
            end.note(step)
            now[0] += 1.5
        return end, said

    noted, said = end_of(COSTS)
    assert noted.first.raw_s == 44.0
    assert said[0].startswith("expected: 44.0 s (")
    assert "by the last run" in said[0]
    assert "other processes take 40%" in said[0]
    fresh, said = end_of(None)
    assert len(said) == 1
    assert "by its first steps" in said[0]
    assert noted.ratio(55.0) == 1.25
    assert fresh.ratio(55.0) is None, "what was guessed says nothing of the pace"
    assert fresh.first.parts_s["training"] == pytest.approx(8 * 1.5, rel=0.3)
    assert fresh.time_left().endswith(" left")


def test_a_run_that_earlier_runs_correct_says_its_time_without_the_correction(tmp_path):
    said = []
    end = ExpectedEnd(
        measure_lengths=lambda: LENGTHS,
        clock=Clock(),
        meter=EnergyMeter(None, root=tmp_path),
        began=0.0,
        noted=COSTS,
        ratios=[1.5] * 20,
        say=said.append,
    )
    end.note(1)
    raw = describe_seconds(end.first.raw_s)
    assert f"; {raw} without what earlier runs correct" in said[0]
    assert raw != describe_seconds(end.first.value_s)


def test_the_counter_of_one_card_stands_for_all_of_them(tmp_path):
    record = Record("GPU-1", energy_mj=5_000)
    nvml = RecordedNvml([record])
    meter = EnergyMeter(Card(nvml, record), root=tmp_path, cards=4)
    assert meter.sources == ["card"]
    record.energy_mj = 65_000
    assert meter.joules(1.0) == 4 * 60.0
    record.is_lost = True
    assert meter.joules(2.0) == 4 * 60.0, "what was counted stays"


def test_a_card_that_counts_no_energy_is_no_source(tmp_path):
    record = Record("GPU-1", energy_mj=None)
    meter = EnergyMeter(Card(RecordedNvml([record]), record), 300.0, tmp_path)
    assert meter.sources == ["price.watts"]
    assert meter.joules(2.0) == 600.0


def test_a_run_without_an_end_expects_nothing(tmp_path):
    end = ExpectedEnd(
        measure_lengths=lambda: None,
        clock=Clock(),
        meter=EnergyMeter(None, root=tmp_path),
        began=0.0,
    )
    end.note(1)
    end.note(2)
    assert end.first is None
    assert end.time_left() == ""
    assert "expected_s" not in end.facts()


def test_durations_have_the_largest_unit_of_which_there_are_two():
    assert describe_span(246, 216, 288) == "4.1 min (3.6–4.8)"
    assert describe_span(90, 80, 100) == "90.0 s (80.0–100.0)"
    assert describe_span(7_200, 7_000, 8_000) == "2.0 h (1.9–2.2)"


def test_the_progress_line_shows_the_time_that_is_left():
    line = ProgressLine(total_steps=10, say=str)
    line.time_left = lambda: "3.7 min (3.4–4.1) left"
    progress = line._open()
    column = progress.columns[-1]
    assert str(column.render(progress.tasks[0])) == "3.7 min (3.4–4.1) left"
    line.close()
