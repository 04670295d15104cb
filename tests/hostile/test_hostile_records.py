"""Records that runs and sweeps leave for later ones, with odd values: each ends in a sentence.

Each value of a record is replaced by each of `ODD`, one at a time.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.cli import compare, doctor
from flatout.data.store.cache import Cache
from flatout.errors import UserError
from flatout.ladder.compare_runs import compare_groups
from flatout.perf.measure.intervals import SpeedupInterval
from flatout.perf.verdict import confirmation
from flatout.perf.verdict.evidence import Evidence, Tried
from flatout.perf.verdict.kept import KeptVerdict, compare_with, paces_to_compare, read_baseline
from flatout.plugins import installed
from flatout.price.costs import Costs, PlannedLengths, expect
from flatout.price.notes import PriceNotes
from flatout.price.pace import StepPace, Work
from flatout.report.summary import empty_summary, read_summary
from flatout.sweep.many import LOCK, alone_in
from flatout.sweep.searched import read_asked
from flatout.sweep.settings import SweeperSettings
from flatout.sweep.space import SettingInterval, SettingValues
from flatout.sweep.study import JOURNAL, Study
from flatout.sweep.trial import Ending, Status

ESCAPE = "\x1b[31mred"
ODD: list[Any] = [None, -1, 1e400, float("nan"), 10**400, "x", ESCAPE, [], ["x"], {}, {"a": 1}]


def odd_versions(record: Any, odds: Sequence[Any] = ODD) -> Iterator[Any]:
    """A record with one value replaced, or left out, in turn."""
    for path in _paths(record, ()):
        for odd in odds:
            changed = copy.deepcopy(record)
            _holder(changed, path)[path[-1]] = odd
            yield changed
        changed = copy.deepcopy(record)
        del _holder(changed, path)[path[-1]]
        yield changed


def _paths(record: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    items = enumerate(record) if isinstance(record, list) else record.items()
    for name, value in items:
        yield (*above, name)
        if isinstance(value, dict | list):
            yield from _paths(value, (*above, name))


def _holder(record: Any, path: tuple[Any, ...]) -> Any:
    for name in path[:-1]:
        record = record[name]
    return record


def refusals(file: Path, record: Any, use: Callable[[], object], odds: Sequence[Any] = ODD) -> int:
    """How many odd versions of a file are refused; any other error fails the test."""
    count = 0
    for changed in odd_versions(record, odds):
        file.write_text(json.dumps(changed), encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged file of notes is said so
            try:
                use()
            except UserError:
                count += 1
    return count


def summary_of(folder: Path) -> dict[str, Any]:
    values = empty_summary()
    values |= {"status": "finished", "seed": 1, "metric": "f1", "metrics": {"test/f1": 0.5}}
    values["data"] |= {"source": "t.csv", "rows": {"train": 9, "val": 3, "test": 3}}
    values["price"] = {"took_s": 1.0, "kwh": None, "money": 2.0, "currency": "EUR"}
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(values), encoding="utf-8")
    return {name: values[name] for name in ("schema", "status", "seed", "metric", "metrics")} | {
        "data": {"source": "t.csv", "rows": values["data"]["rows"]},
        "price": values["price"],
    }


def test_odd_values_of_a_summary_are_refused_by_compare(tmp_path):
    theirs = tmp_path / "theirs"
    values = summary_of(theirs)
    summary_of(tmp_path / "mine")
    use = lambda: compare_groups(theirs, tmp_path / "mine")  # noqa: E731  it is used once
    assert refusals(theirs / "summary.json", values, use) > 50


def test_a_summary_that_lacks_a_section_has_it_empty(tmp_path):
    (tmp_path / "summary.json").write_text('{"schema": 1, "data": null, "speed": {}}')
    values = read_summary(tmp_path)
    assert values["data"]["rows"] == {"train": None, "val": None, "test": None}
    assert values["speed"]["step_ms"]["wait"] is None


def test_odd_values_of_evidence_are_refused_by_doctor(tmp_path, capsys):
    values = summary_of(tmp_path / "run")
    tried = Tried(
        cause="cause",
        override="precision=bf16-mixed",
        rows_per_s=90.0,
        as_was=50.0,
        rows_per_batch=8.0,
        low=1.1,
        high=2.0,
    )
    evidence = Evidence(
        device="cpu", steps=60, batches=60, rows_per_batch=8.0, ms={"forward": 4.0}, tried=[tried]
    )
    record = {"schema": values["schema"], "evidence": asdict(evidence)}
    asked = argparse.Namespace(run=tmp_path / "run", confirm=False, words=[], json=False)
    file = tmp_path / "run" / "summary.json"
    assert refusals(file, record, lambda: doctor.run(asked), [ESCAPE]) > 9
    assert ESCAPE not in capsys.readouterr().out


def test_odd_values_of_a_kept_verdict_are_refused(tmp_path):
    pace = {"value": 1.0, "low": 0.9, "high": 1.1}
    record = {"steps_per_s": pace, "own_steps_per_s": pace, "machine": {"device": "cpu"}}
    interval = SpeedupInterval(1.0, 0.9, 1.1)
    kept = KeptVerdict(pace=interval, own_pace=interval)
    file = tmp_path / "verdict.json"

    def use() -> None:
        baseline = read_baseline(file)
        paces = paces_to_compare(kept, baseline)
        assert paces is not None
        str(compare_with(*paces, {"device": "cpu"}, baseline["machine"]))

    assert refusals(file, record, use) > 20


def test_odd_values_of_a_confirmation_are_passed_over(tmp_path):
    interval = SpeedupInterval(1.0, 0.9, 1.1)
    one = confirmation.OverrideConfirmation(
        override="precision=fp32",
        predicted=interval,
        measured=interval,
        steps=5,
        rates=((1.0, 2.0), (1.0, 2.0)),
        device="cpu",
        version="x",
    )
    record = {"schema": 1, "confirmations": [one.as_dict()]}

    def use() -> None:
        for kept in confirmation.read_confirmations(tmp_path):
            kept.sentence()

    assert refusals(tmp_path / confirmation.FILE, record, use) == 0


def test_odd_notes_of_prices_do_not_end_an_estimate(tmp_path):
    costs = Costs(
        start_s=1.0,
        pace=StepPace(0.1, 0.1, 0.1),
        validation_s=1.0,
        save_s=1.0,
        evaluation_s=1.0,
        watts=5.0,
    )
    notes = PriceNotes(tmp_path, {"same": 1}, {"like": 1})
    notes.note_costs(costs)
    notes.note_ratio(1.5)
    lengths = PlannedLengths(Work(10, np.array([0.0, 5.0])), 3)
    files = sorted((tmp_path / "prices").iterdir())
    assert len(files) == 2
    for file in files:
        record = json.loads(file.read_text())
        use = lambda: str(expect(notes.costs() or costs, lengths, notes.ratios()))  # noqa: E731
        assert refusals(file, record, use) == 0


def study_in(folder: Path, mode: str = "max") -> Study:
    space = {"data.source": SettingValues(("a", "b")), "optim.lr": SettingInterval(0.1, 1.0)}
    return Study(folder, space, SweeperSettings(trials=4), mode=mode, validations=3)


@pytest.mark.parametrize(
    "odd",
    [
        {"op_code": 0, "directions": []},
        {"op_code": 0, "directions": [1, 2]},
        {"op_code": 5, "distribution": "{}"},
        {"op_code": 6, "values": None},
        {"op_code": 6, "values": ["x"]},
        {"op_code": 7, "intermediate_value": "x"},
        {"op_code": 8, "user_attr": {"seconds": "x"}},
        {"op_code": 8, "user_attr": {"note": 5}},
        {"op_code": 8, "user_attr": {"metrics": {"val/f1": []}}},
        {"op_code": 9, "system_attr": {"completed_rung_0": None}},
        {"op_code": 99},
    ],
)
def test_odd_values_in_a_journal_are_refused(tmp_path, odd):
    study = study_in(tmp_path)
    number, _ = study.ask()
    study.should_end(number, 1, 0.5)
    study.tell(number, Ending(Status.complete, 1.0, value=0.5, metrics={"val/f1": 0.5}))
    study.ask()
    journal = tmp_path / JOURNAL
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    changed = next(
        (line for line in reversed(lines) if line["op_code"] == odd["op_code"]), lines[-1]
    )
    changed |= odd
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=JOURNAL):
        study_in(tmp_path)


def test_a_journal_that_is_a_pipe_a_link_or_of_the_other_direction_is_refused(tmp_path):
    outside = tmp_path / "outside"
    journal = tmp_path / "sweep" / JOURNAL
    journal.parent.mkdir()
    os.mkfifo(journal)
    with pytest.raises(UserError, match="pipe"):
        study_in(journal.parent)
    journal.unlink()
    journal.symlink_to(outside)
    with pytest.raises(UserError, match="link"):
        study_in(journal.parent)
    assert not outside.exists()
    journal.unlink()
    study_in(journal.parent)
    with pytest.raises(UserError, match="the other way"):
        study_in(journal.parent, "min")


def test_odd_values_of_what_a_sweep_was_asked_are_refused(tmp_path):
    record = {"schema": 1, "typed": ["a=1"], "fixed": [], "search": {}, "space": {}, "conf": None}
    use = lambda: ["".join(read_asked(tmp_path)[name]) for name in ("typed", "fixed")]  # noqa: E731
    file = tmp_path / "sweep.json"
    assert refusals(file, {**record, "place": str(tmp_path)}, use) > 30
    file.write_text(json.dumps({**record, "place": "a" * 5000}))
    with pytest.raises(UserError, match="which is gone"):
        use()


def test_a_lock_that_is_a_folder_or_a_link_is_refused(tmp_path):
    outside = tmp_path / "outside"
    makers = {"folder": Path.mkdir, "link": lambda lock: lock.symlink_to(outside)}
    for name, make in makers.items():
        folder = tmp_path / name
        folder.mkdir()
        make(folder / LOCK)
        with pytest.raises(UserError, match="should be a lock"), alone_in(folder):
            pass
        assert not outside.exists()


def test_a_cache_of_an_unknown_user_is_refused(monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", "~nobody-of-that-name/x")
    for folder in (None, "~nobody-of-that-name/x"):
        with pytest.raises(UserError, match="whole path"):
            Cache(folder)


def test_odd_values_of_an_exposure_are_refused_by_compare(tmp_path, capsys):
    record = {
        "encoding": ESCAPE,
        "records": {"train": 1, "judged": 1},
        "scores": {"dice": 0.1, "exact": 0.1},
        "methods": {"ridge regression": 0.1},
        "reconstruction": {"alone": {"at_1": 0.1, "at_10": 0.2}},
        "learning": [{"records": 1, "model": 0.1, "ridge": 0.1}],
        "conclusion": ["a sentence"],
    }
    file = tmp_path / "exposure.json"
    asked = argparse.Namespace(runs=[str(tmp_path)], html=None)
    assert refusals(file, record, lambda: compare.run(asked), ["x"]) > 9
    assert ESCAPE not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("exits_at_once", "raise SystemExit(3)"),
        ("panics_at_once", "class Panic(BaseException): pass\nraise Panic('odd')"),
    ],
)
def test_a_package_that_exits_or_panics_when_it_is_imported_is_named(
    module, code, tmp_path, monkeypatch
):
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint(name="x", value=f"{module}:Part", group="flatout.models")
    with pytest.raises(UserError, match="cannot be imported"):
        installed._load(point)
