"""A sweep by its command line survives a kill and accounts for every trial."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import train
from flatout.sweep.searched import FILE
from tests.fitting import own_cache
from tests.params import at_once
from tests.refusals import require_printed
from tests.run_files import read_csv
from tests.sweep.commands import SEARCHED, SMALL, TRUST, command, swept, verbally, wait_for_trial
from tests.verbs import verb
from tests.warm import Command


@pytest.fixture
def begun(started: list[Any]) -> list[Command]:
    return started


def kept(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    return [row | {"seconds": ""} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder of a sweep of three trials that nothing happened to, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    printed = io.StringIO()
    before = list(sys.argv)
    with own_cache(folder), redirect_stdout(printed):
        assert (
            verb("sweep", *SEARCHED, "trials=3", "confirm=2", f"hydra.sweep.dir={folder}/sweep")
            == 0
        )
    sys.argv[:] = before
    yield folder / "sweep", printed.getvalue()


@pytest.mark.soak(seconds=20)
def test_a_sweep_that_is_killed_and_taken_up_gives_what_one_gives_that_was_not(
    whole, tmp_path, begun, capfd
):
    cut = tmp_path / "cut"
    begun.append(command(*SEARCHED, "trials=3", f"hydra.sweep.dir={cut}"))
    wait_for_trial(cut, 1, begun[0])
    begun[0].kill()
    begun[0].communicate()
    assert read_csv(cut / "sweep.csv")
    assert (cut / "sweep.html").is_file()
    code, again = swept(capfd, "resume", str(cut))
    assert code == 0, again
    assert re.search(r"resumed: [123] of 3 trials have ended", again)
    assert kept(read_csv(cut / "sweep.csv")) == kept(read_csv(whole[0] / "sweep.csv"))
    assert best_again(whole[1]) == best_again(again)
    assert (cut / "sweep.html").stat().st_size > 10_000
    # what is finished is said to be, and nothing is trained again
    code, third = swept(capfd, "resume", str(cut))
    assert code == 0
    assert "3 of 3 trials have ended" in third
    assert "trial 0: " not in third


def best_again(said: str) -> str:
    """The command that trains the best settings again."""
    (line,) = (line for line in said.splitlines() if line.startswith("again: "))
    return line


def test_one_store_serves_all_trials_and_the_best_is_confirmed(whole):
    folder, said = whole
    summaries = [
        json.loads((folder / f"{number}" / "summary.json").read_text()) for number in range(3)
    ]
    assert [summary["data"]["cache"]["hit"] for summary in summaries] == [False, True, True]
    assert all(summary["data"]["cache"]["seconds"] < 1 for summary in summaries[1:])
    assert re.search(
        r"confirmed by 2 of 2 seeds: test/accuracy 0\.\d+ ± 0\.\d+, val/accuracy 0\.\d+ ± ", said
    )
    assert re.findall(r"^(\S+): complete", said, re.MULTILINE) == ["confirm-0", "confirm-1"]
    seeds = {
        json.loads((folder / f"confirm-{number}" / "summary.json").read_text())["seed"]
        for number in (0, 1)
    }
    assert seeds == {1, 2}
    for name in ("0", "1", "2"):
        assert set(compared(folder / name)) == {"status", "model.hidden", "optim.lr"}
    assert set(compared(folder / "confirm-1")) == {"status", "model.hidden", "optim.lr", "seed"}


@pytest.mark.parametrize(
    "name",
    at_once(
        "0/notes.txt", of=["0/notes.txt", "confirm-1/summary.json", "multirun.json"], seconds=2
    ),
)
def test_a_sweep_takes_nothing_away_that_lies_where_its_trials_would(tmp_path, capsys, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    (tmp_path / "2026-01-01_00-00-00").mkdir()  # no trial's
    code, said = verbally(capsys, *SEARCHED, f"hydra.sweep.dir={tmp_path}")
    assert code == 2
    assert said.startswith(
        f"hydra.sweep.dir: {tmp_path / name.partition('/')[0]} is there already. Choose"
    )
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "sweep.json").exists()


@pytest.mark.soak(seconds=10)
def test_a_sweep_that_is_begun_twice_or_taken_up_with_another_space_is_refused(
    tmp_path, begun, capsys
):
    folder = tmp_path / "sweep"
    place = f"hydra.sweep.dir={folder}"
    slow = [
        "+callbacks.planted._target_=tests.sweep.planted.Planted",
        "+callbacks.planted.what=slow",
    ]
    begun.append(
        command(
            *SEARCHED, *slow, TRUST, "trainer.max_epochs=1000", "checkpoint.patience=null", place
        )
    )
    wait_for_trial(folder, 0, begun[0])
    assert verbally(capsys, *SEARCHED, place)[1].startswith(
        f"sweep: another process is at work in {folder}"
    )
    assert "another process is at work in" in verbally(capsys, "resume", str(folder), TRUST)[1]
    os.killpg(begun[0].pid, signal.SIGTERM)
    said, _ = begun[0].communicate(timeout=60)
    assert begun[0].returncode == 143
    assert f"to resume: python -m flatout sweep resume {folder}" in said
    summaries = [json.loads(path.read_text())["status"] for path in folder.glob("*/summary.json")]
    assert "running" not in summaries
    assert "interrupted" in summaries
    assert (folder / "sweep.csv").is_file()
    assert (folder / "sweep.html").is_file()
    code, said = verbally(capsys, "resume", str(folder), TRUST, "model.hidden=choice(8,32)")
    assert code == 2
    require_printed(said, "begun with model.hidden: ", "8, 16, 24", "8, 32")
    code, said = verbally(capsys, "resume", str(folder), TRUST, "trainer.max_epochs=9")
    assert code == 2
    assert "was begun with other settings: " in said
    assert "trainer.max_epochs=9" in said


def test_a_sweep_whose_settings_are_damaged_is_refused(tmp_path, capsys):
    file = tmp_path / FILE
    file.write_text('{"schema": 1, "wor')
    code, said = verbally(capsys, "resume", str(tmp_path))
    assert code == 2
    assert f"{file}: cannot be read" in said
    file.write_text("{}")
    code, said = verbally(capsys, "resume", str(tmp_path))
    assert code == 2
    (line,) = said.splitlines()
    require_printed(line, f"{file}: ", "a sweep")


@pytest.mark.soak(seconds=15)
def test_every_trial_of_a_sweep_that_meets_a_crash_and_a_hang_is_accounted_for(tmp_path, capfd):
    folder = tmp_path / "sweep"
    planted = [
        "+callbacks.planted._target_=tests.sweep.planted.Planted",
        "+callbacks.planted.what=choice(nothing,die,hang)",
        TRUST,
    ]
    words = [
        *planted,
        *SMALL,
        "sampler=grid",
        "trial_for=7s",
        "pruner=none",
        f"hydra.sweep.dir={folder}",
    ]
    code, said = swept(capfd, *words)
    assert code == 0, said
    assert [row["status"] for row in read_csv(folder / "sweep.csv")].count("failed") == 2
    notes = {row["+callbacks.planted.what"].lstrip("'"): row["note"] for row in csv_plain(folder)}
    assert "1 complete, 2 failed (1 of them ran longer than trial_for allows)" in said
    assert [compared(folder / name)["status"] for name in ("0", "1", "2")] == [
        "complete",
        "failed",
        "failed",
    ]
    assert notes["die"].startswith("was ended by SIGKILL")
    assert notes["hang"] == "ran longer than 7 s and was stopped"


def compared(folder: Path) -> dict[str, Any]:
    """The settings of a run on TensorBoard's HPARAMS page."""
    (file,) = folder.glob("events.*.hparams")
    content = (
        EventAccumulator(str(file))
        .Reload()
        .SummaryMetadata("_hparams_/session_start_info")
        .plugin_data.content
    )
    info = HParamsPluginData.FromString(content).session_start_info
    return {name: value.string_value or value.number_value for name, value in info.hparams.items()}


def csv_plain(folder: Path) -> list[dict[str, str]]:
    """Rows with the heads as they were before they were defused for spreadsheets."""
    rows = []
    for row in read_csv(folder / "sweep.csv"):
        rows.append({name.lstrip("'"): value for name, value in row.items()})
    return rows


@pytest.mark.soak(seconds=4)
def test_a_sweep_of_which_every_trial_fails_alike_ends_early(tmp_path, capfd):
    folder = tmp_path / "s"
    code, said = swept(
        capfd, "model.hidden=choice(8,16)", "data.train=nothing.csv", f"hydra.sweep.dir={folder}"
    )
    assert code == 2
    last = said.splitlines()[-1]
    assert last.startswith("sweep: the first 3 trials failed alike: ")
    assert "no such file" in last
    assert last.endswith(f"The output of the first is in {folder}/0/output.txt.")
    assert [row["status"] for row in read_csv(folder / "sweep.csv")] == ["failed"] * 3
    assert (folder / "sweep.html").is_file()


@pytest.mark.soak(seconds=3)
def test_a_metric_that_only_other_data_has_ends_a_sweep_and_leaves_its_folder_free(
    tmp_path, capsys
):
    folder = tmp_path / "s"
    code, said = verbally(
        capsys, "model.hidden=choice(8,16)", "metric=f1", f"hydra.sweep.dir={folder}", *SMALL
    )
    assert code == 2
    assert said.startswith("metric: no metric 'f1' (accuracy, macro_f1, ")
    assert not folder.exists()


@pytest.mark.soak(seconds=3)
def test_an_interval_of_fractions_for_a_whole_number_is_refused_before_the_sweep_has_a_folder(
    tmp_path, capsys
):
    folder = tmp_path / "s"
    code, said = verbally(
        capsys, "model.hidden=interval(8,16.5)", "trials=2", f"hydra.sweep.dir={folder}", *SMALL
    )
    assert code == 2
    assert not folder.exists()
    assert re.fullmatch(r"model\.hidden: '[\d.]+' does not fit \(a whole number\)\n", said)


@pytest.mark.soak(seconds=3)
def test_time_that_is_over_before_the_first_trial_is_said_in_a_line(tmp_path, capsys):
    words = ("model.hidden=choice(8,16)", "for=0.01s", f"hydra.sweep.dir={tmp_path}/s", *SMALL)
    assert verbally(capsys, *words) == (
        1,
        "sweep: no trial was completed. Give it more time: for=, trial_for=.\n",
    )


@pytest.mark.soak(seconds=6)
def test_settings_of_ones_own_are_searched_and_trusted_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "sweep").mkdir(parents=True)
    space = (
        "defaults: [override /hydra/sweeper: flatout]\nhydra: {sweeper: {space: {model.hidden:"
        " 'choice(8,16)'}}}\n"
    )
    (tmp_path / "conf" / "sweep" / "mine.yaml").write_text(f"# @package _global_\n{space}")
    words = ["+sweep=mine", "trials=1", "hydra.sweep.dir=s", f"output={tmp_path}/out", *SMALL]
    before = list(sys.argv)
    try:
        assert verb("sweep", "--config-dir", "conf", *words) == 0
        said = capsys.readouterr().out
        assert verb("sweep", "resume", "s") == 2
        assert (
            f"type it again: python -m flatout sweep resume {tmp_path}/s --config-dir"
            f" {tmp_path}/conf" in capsys.readouterr().err
        )
        assert verb("sweep", "resume", "s", "--config-dir", "conf") == 0
        assert "1 of 1 trials have ended" in capsys.readouterr().out
        again = next(line for line in said.splitlines() if line.startswith("again: "))
        program = shlex.split(again.removeprefix("again: "))
        assert program[:4] == ["python", "-m", "train", f"--config-dir={tmp_path}/conf"]
        train.main(program[3:])
    finally:
        sys.argv[:] = before
    (alone,) = (tmp_path / "out").rglob("summary.json")
    summary = json.loads(alone.read_text())
    row = read_csv(tmp_path / "s" / "sweep.csv")[0]
    assert float(row["value"]) == summary["metrics"]["val/accuracy"]
    assert shlex.split(summary["command"])[:4] == program[:4]


@pytest.mark.soak(seconds=9)
def test_settings_that_do_not_go_together_are_one_failed_trial(tmp_path, capfd):
    folder = tmp_path / "sweep"
    space = ["model.hidden=choice(32,48)", "model.heads=choice(4,3)"]
    words = [
        "+experiment=bert_tiny",
        *space,
        "sampler=grid",
        *SMALL,
        "trainer.max_epochs=1",
        "logger=none",
    ]
    code, said = swept(capfd, *words, "pruner=none", f"hydra.sweep.dir={folder}")
    assert code == 0, said
    rows = sorted(read_csv(folder / "sweep.csv"), key=lambda row: row["number"])
    assert [row["status"] for row in rows] == [
        "complete",
        "failed",
        "complete",
        "complete",
    ]
    assert "multiple of 3 heads" in said


@pytest.mark.soak(seconds=8)
def test_time_ends_a_sweep_and_it_can_be_taken_up(tmp_path, capfd):
    short = ["trainer.max_epochs=1", "logger=none", "pruner=none"]
    folder = tmp_path / "sweep"
    code, said = swept(
        capfd, *SEARCHED, *short, "trials=400", "for=8s", f"hydra.sweep.dir={folder}"
    )
    if "no trial was completed" in said:  # on a busy machine
        code, said = swept(capfd, "resume", str(folder), "for=9s")
    assert code == 0, said
    assert "the time is over; to resume: python -m flatout sweep resume" in said
    assert "best: trial" in said
    assert 0 < len(read_csv(folder / "sweep.csv")) < 400
