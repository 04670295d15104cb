"""A sweep searches, prunes, survives a kill and accounts for every trial."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

import train
from flatout.bits.scores import NAMES
from flatout.bits.settings import BitsDataConfig
from flatout.checkpoints.settings import CheckpointConfig
from flatout.cli.words import in_full, quoted
from flatout.config import RunConfig
from flatout.data.problem import Problem
from flatout.data.text import TextDataConfig
from flatout.engine.optimizer import OptimConfig
from flatout.engine.run_length import validations
from flatout.errors import UserError
from flatout.run.job import RunJob
from flatout.run.kinds import kind_of
from flatout.sweep.many import alone_in
from flatout.sweep.searched import FILE, Searched
from flatout.sweep.settings import Pruner, Sampler, SweeperSettings
from flatout.sweep.space import Part, SettingInterval, SettingValues, grid
from flatout.sweep.study import ENDED, JOURNAL, Study, repair_journal
from flatout.sweep.sweep import confirm
from flatout.sweep.trial import Ending, Status, Trial
from flatout.tasks.tagging import Tagger, TaggingConfig, TagLabels
from tests.fitting import own_cache
from tests.params import at_once
from tests.run_files import read_csv
from tests.started import wait_for
from tests.verbs import verb
from tests.warm import Command, begin_warm

SPACE: dict[str, Part] = {
    "optim.lr": SettingInterval(1e-4, 1e-1, is_log=True),
    "model.hidden": SettingValues(("64", "128")),
    "model.layers": SettingInterval(1, 3, is_whole=True),
}


def study(folder: Path, space: dict[str, Part] = SPACE, **settings: Any) -> Study:
    most = settings.pop("validations", 9)
    given = SweeperSettings(
        **{"trials": 12, "sampler": Sampler.tpe, "pruner": Pruner.none, **settings}
    )
    return Study(folder, space, given, mode="max", validations=most)


def worth(settings: dict[str, str]) -> float:
    """Best at a rate of 0.01 and 128 hidden values."""
    return 1 - abs(float(settings["optim.lr"]) - 0.01) + int(settings["model.hidden"]) / 1000


def told(memory: Study, most: int = 100) -> list[dict[str, str]]:
    """Ask and tell until there is no more, or until so many."""
    seen = []
    while len(seen) < most and (asked := memory.ask()) is not None:
        number, settings = asked
        seen.append(settings)
        memory.tell(number, Ending(Status.complete, 1.0, worth(settings)))
    return seen


def test_a_study_that_was_closed_goes_on_as_if_it_had_not_been(tmp_path):
    (tmp_path / "whole").mkdir(), (tmp_path / "cut").mkdir()
    whole = told(study(tmp_path / "whole"))
    parts = [step for most in (5, 1, 100) for step in told(study(tmp_path / "cut"), most)]
    assert parts == whole and len(whole) == 12


def test_a_trial_that_ran_when_all_was_killed_is_run_again_under_its_number(tmp_path):
    first = study(tmp_path)
    told(first, 3)
    left = first.ask()
    assert left is not None and left[0] == 3
    again = study(tmp_path).ask()
    assert again == left


def test_a_kill_between_two_suggestions_changes_nothing(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    whole = told(study(tmp_path / "a"), 4)
    told(study(tmp_path / "b"), 3)
    journal = tmp_path / "b" / JOURNAL
    before = journal.read_bytes()
    study(tmp_path / "b").ask()
    lines = journal.read_bytes()[len(before) :].splitlines(keepends=True)
    assert len(lines) > 3
    for kept in range(len(lines)):
        # the last line is half written
        journal.write_bytes(before + b"".join(lines[:kept]) + lines[kept][:5])
        asked = study(tmp_path / "b").ask()
        assert asked == (3, whole[3])


def test_a_journal_that_is_damaged_is_named_with_its_line(tmp_path):
    told(study(tmp_path), 2)
    journal = tmp_path / JOURNAL
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[:2], "{half", *lines[3:]]) + "\n")
    with pytest.raises(UserError, match=rf"{JOURNAL}: line 3 is damaged"):
        study(tmp_path)


@pytest.mark.parametrize("has_moved", [False, True])
def test_a_lock_on_the_journal_that_a_killed_sweep_has_left_is_waited_for_by_nobody(
    tmp_path, has_moved
):
    told(study(tmp_path), 2)
    lock = tmp_path / f"{JOURNAL}.lock"
    lock.symlink_to("/nowhere/journal.log" if has_moved else tmp_path / JOURNAL)
    with ended_after(20):
        assert len(study(tmp_path).ended()) == 2
    assert not lock.is_symlink()


@contextmanager
def ended_after(seconds: int) -> Iterator[None]:
    """Raise in what has not ended after some seconds."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_the_half_line_of_a_journal_is_cut_off_on_a_disk_that_is_full(tmp_path):
    told(study(tmp_path), 3)
    journal = tmp_path / JOURNAL
    whole = journal.read_bytes()
    assert len(whole) > 1000
    journal.write_bytes(whole + b'{"op_code": 4, "wor')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # more than this no file can be given
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        repair_journal(journal)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert journal.read_bytes() == whole


def test_a_sweep_that_is_begun_in_the_folder_of_one_at_work_is_told_so(tmp_path, capsys):
    place = f"hydra.sweep.dir={tmp_path}"
    (tmp_path / FILE).write_text("{}")
    with alone_in(tmp_path):
        code, said = verbally(capsys, *SEARCHED, place)
    assert code == 2 and said.startswith(
        f"sweep: another process is at work in {tmp_path}. Wait for it"
    )
    code, said = verbally(capsys, *SEARCHED, place)
    assert code == 2 and said.startswith(f"sweep: {tmp_path} holds a sweep already. Resume it")


def test_a_grid_tries_every_combination_once_in_order(tmp_path):
    space: dict[str, Part] = {
        "a": SettingValues(("x", "[1,2]")),
        "b": SettingInterval(1, 5, is_whole=True, step=2),
    }
    assert grid(space) == [{"a": a, "b": b} for a in ("x", "[1,2]") for b in (1, 3, 5)]
    memory = study(tmp_path, space, sampler=Sampler.grid)
    seen = []
    while (asked := memory.ask()) is not None:
        seen.append(asked[1])
        memory.tell(asked[0], Ending(Status.complete, 1.0, 0.5))
        memory = study(tmp_path, space, sampler=Sampler.grid)
    assert seen == [{"a": a, "b": str(b)} for a in ("x", "[1,2]") for b in (1, 3, 5)]


def test_an_interval_has_no_place_in_a_grid(tmp_path):
    with pytest.raises(
        UserError, match=r"sweep: optim.lr: an interval has too many values for a grid"
    ):
        study(tmp_path, sampler=Sampler.grid)


def test_tpe_finds_better_settings_than_chance(tmp_path):
    found = {}
    for kind in (Sampler.tpe, Sampler.random):
        (tmp_path / kind).mkdir()
        values = [
            worth(settings) for settings in told(study(tmp_path / kind, sampler=kind, trials=40))
        ]
        found[kind] = sum(values[-10:]) / 10
    assert found[Sampler.tpe] > found[Sampler.random]


def test_poor_trials_are_pruned_and_the_best_is_not(tmp_path):
    memory = study(tmp_path, pruner=Pruner.asha, trials=9)
    pruned = []
    for number in range(9):
        asked = memory.ask()
        assert asked is not None
        quality = (number * 5 % 9) / 10
        if any(memory.should_end(number, count, quality + count / 100) for count in range(1, 10)):
            pruned.append(quality)
            memory.tell(number, Ending(Status.pruned, 1.0, quality, note="after 1 validations"))
        else:
            memory.tell(number, Ending(Status.complete, 1.0, quality))
    best = memory.best()
    assert best is not None and best.value == 0.8
    assert 3 <= len(pruned) <= 7 and 0.8 not in pruned


def test_of_few_trials_the_better_ones_see_more_than_the_first_validation(tmp_path):
    memory = study(tmp_path, pruner=Pruner.asha, trials=4, validations=4)
    lived = []
    for quality in (0.5, 0.7, 0.6, 0.8):
        asked = memory.ask()
        assert asked is not None
        assert not memory.should_end(asked[0], 1, quality)
        is_out = any(memory.should_end(asked[0], count, quality) for count in (2, 3))
        lived += [] if is_out else [quality]
        memory.tell(asked[0], Ending(Status.pruned if is_out else Status.complete, 1.0, quality))
    assert lived == [0.5, 0.7, 0.8]


def test_failed_trials_are_counted_and_stopped_ones_are_not(tmp_path):
    memory = study(tmp_path, trials=3)
    for status in (Status.failed, Status.stopped, Status.complete):
        asked = memory.ask()
        assert asked is not None
        memory.tell(asked[0], Ending(status, 1.0, 0.5, note="why"))
    assert [ENDED[trial.state] for trial in memory.ended()] == ["failed", "complete"]
    assert memory.ended()[0].user_attrs["note"] == "why"
    assert memory.ask() is None
    again = study(tmp_path, trials=3).ask()
    assert again is not None and again[0] == 1


def test_the_settings_that_matter_are_found_to_matter(tmp_path):
    memory = study(tmp_path, trials=40, sampler=Sampler.random)
    assert memory.importance() == {}
    told(memory)
    share = memory.importance()
    assert sum(share.values()) == pytest.approx(1)
    assert share["optim.lr"] > 0.6


@pytest.mark.parametrize(
    ("trainer", "count"),
    [
        ({}, 8),
        ({"max_epochs": 3}, 3),
        ({"max_epochs": 3, "val_check_interval": 0.25}, 12),
        ({"max_epochs": 1, "val_check_interval": 50}, None),
        ({"max_epochs": -1}, None),
        ({"max_steps": 8}, None),
        ({"max_epochs": 3, "max_steps": -1}, 3),
    ],
)
def test_the_last_validation_of_a_run_is_known_where_its_batches_do_not_decide(trainer, count):
    assert validations(trainer) == count


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e6), st.floats(0, 1))
def test_a_number_that_is_tried_lies_between_the_ends_however_near_they_are(low, width, share):
    part = SettingInterval(low, low + width)
    written = part.text(low + share * (part.high - low))
    assert part.low <= float(written) <= part.high
    assert abs(float(written) - (low + share * (part.high - low))) <= 0.001 * (
        part.high - low
    ) + 1e-9 * abs(part.high)


def test_numbers_that_need_no_more_have_four_digits():
    assert SettingInterval(1e-4, 1e-1, is_log=True).text(0.0123456) == "0.01235"
    assert SettingInterval(0.9999, 0.99999).text(0.99993456) == "0.99993456"


@pytest.mark.parametrize("pruner", [Pruner.asha, Pruner.hyperband])
def test_trials_are_pruned_where_nobody_knows_how_often_they_validate(tmp_path, pruner):
    memory = study(tmp_path, pruner=pruner, trials=12, validations=None)
    ended = 0
    for quality in [0.9] * 4 + [0.1] * 8:
        number, _ = memory.ask()
        place = next(
            (count for count in range(1, 31) if memory.should_end(number, count, quality)), None
        )
        ended += place is not None
        status = Status.complete if place is None else Status.pruned
        memory.tell(number, Ending(status, 1.0, quality))
    assert ended >= 4


def metrics_of(data):
    return kind_of(data).metrics(data)


def test_the_metric_of_a_run_is_known_before_there_is_data():
    assert kind_of(data := RunConfig().data).usual_metric(data) == "accuracy"
    assert metrics_of(TextDataConfig(problem=Problem.regression)) == [
        "mae",
        "rmse",
        "r2",
        "pearson",
        "loss",
    ]
    assert set(metrics_of(BitsDataConfig())) - {"loss"} == set(NAMES)


def test_a_metric_may_be_named_with_its_split_and_an_own_module_gets_the_name_as_it_was_typed(
    tmp_path,
):
    assert (
        RunConfig(checkpoint=CheckpointConfig(metric="val/macro_f1")).checkpoint.metric
        == "macro_f1"
    )
    searched = Searched(SweeperSettings(metric="val/acc"), {}, [], lambda *_: None, tmp_path)
    assert searched.typed({}) == ["checkpoint.metric=val/acc"]
    assert searched.settings.of_the_search() == SweeperSettings(metric="acc").of_the_search()


def test_what_a_tagger_is_judged_by_is_known_before_there_is_one():
    labels = TagLabels(["O", "B-a", "I-a"], 1.0, {})
    task = Tagger(nn.Linear(1, 3), TaggingConfig(), OptimConfig(), labels=labels, total_steps=1)
    assert metrics_of(TextDataConfig(problem=Problem.tags)) == [*task.metric_names, "loss"]


def test_short_words_stand_for_hydra_s_and_any_folder_can_be_named():
    assert in_full("for=30m") == "hydra.sweeper.time=30m"
    assert in_full("optim.lr=1e-3") == "optim.lr=1e-3"
    assert quoted("a b's=1") == r"'a b\'s=1'"


def test_what_kept_a_seed_from_confirming_is_said_and_known_seeds_are_not_run_again(tmp_path):
    space: dict[str, Part] = {"model.hidden": SettingValues(("8",))}
    searched = Searched(
        SweeperSettings(confirm=3), space, [], lambda words, number: RunJob(RunConfig()), tmp_path
    )
    given = [
        Ending(Status.complete, 1.0, 0.9, {"val/accuracy": 0.9}),
        Ending(Status.failed, 1.0, note="no memory"),
    ]
    given.append(Ending(Status.complete, 1.0, 0.8, {"val/accuracy": 0.8}))
    asked: list[str] = []

    def run(ask: Callable[[], Trial | None], total: int) -> Iterator[tuple[Trial, Ending]]:
        assert total == len(given)
        for ending in given:
            trial = ask()
            assert trial is not None
            asked.append(trial.name)
            yield trial, ending

    first = confirm(searched, {"model.hidden": "8"}, 5, run, is_over=False)
    assert asked == ["confirm-0", "confirm-1", "confirm-2"] and list(first.done) == [1, 3]
    assert first.lines("accuracy") == [
        "confirmed by 2 of 3 seeds: val/accuracy 0.8500 ± 0.0707",
        "not confirmed by 1 of 3 seeds: confirm-1: no memory",
    ]
    over = confirm(searched, {"model.hidden": "8"}, 5, run, is_over=True)
    assert over.done == first.done and over.lines("accuracy")[1].endswith(
        "of 3 seeds: the time was over"
    )
    given[:] = [Ending(Status.complete, 1.0, 0.7, {"val/accuracy": 0.7})]
    again = confirm(searched, {"model.hidden": "8"}, 5, run, is_over=False)
    assert asked[3:] == ["confirm-1"]
    assert again.lines("accuracy") == ["confirmed by 3 of 3 seeds: val/accuracy 0.8000 ± 0.1000"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("resume",),
            "sweep resume: no folder is named. Name its folder: python -m flatout sweep resume",
        ),
        (("model.hiden=choice(8,16)",), "model.hiden: no such key"),
        (
            ("model.hidden=choice(8,16)", "resume=auto"),
            "resume: is of runs, and this is a sweep. Resume it by: ",
        ),
        (("model.hidden=choice(8,16)", "trials=0"), "trials: 0 (1 or more)"),
        ((), "sweep: nothing to search"),
        (
            ("+sweep=blom",),
            "sweep: no option 'blom' (battery, bloom, headlines). Did you mean 'bloom'?",
        ),
        *at_once(
            of=[
                (("resume", "nowhere"), "no sweep.json there"),
                (("model.hidden=choice(8,16)", "for=soon"), "for: 'soon' is no duration"),
                (
                    ("model.hidden=choice(8,16)", "sampler=bayes"),
                    "sampler: 'bayes' (tpe, random, grid)",
                ),
                (
                    ("optim.lr=interval(1e-1,1e-3)",),
                    "(the least number first). Write interval(0.001,0.1).",
                ),
                (
                    ("optim.lr=tag(log,interval(0,1e-3))",),
                    "by factors (numbers above 0). Raise the least number above 0",
                ),
                (
                    ("optim.lr=interval(1e-3,1e-1)", "sampler=grid"),
                    "an interval has too many values for a grid",
                ),
                (("model.hidden=interval(8,16)",), "model.hidden: '10.5"),
                (
                    ("data.batch_size=range(3,1)",),
                    "sweep: data.batch_size: a range without numbers",
                ),
            ],
            seconds=1,
        ),
        *at_once(
            of=[
                (
                    ("model.hidden=choice(8,16,frog)",),
                    "model.hidden: 'frog' does not fit (a whole number)",
                ),
                (
                    ("model.hidden=choice(8,16)", "metric=acuracy", "trials=3"),
                    "metric: no metric 'acuracy' (accuracy, ",
                ),
                (
                    ("model.hidden=choice(frog,8,16)",),
                    "model.hidden: 'frog' does not fit (a whole number)",
                ),
                (("model.dropout=choice(0.1,1.5)",), "model.dropout: 1.5"),
                (
                    (
                        "+experiment=bert_tiny",
                        "model.hidden=choice(32,64)",
                        "model.heads=choice(4,3)",
                    ),
                    "a multiple of 3 heads",
                ),
                (
                    ("model.hidden=choice(8,16)", "metric=rmse"),
                    "metric: no metric 'rmse' (accuracy, macro_f1, ",
                ),
                (("model.hidden=choice(8,16)", "parallel=99"), "launcher.parallel: 99 (1 to"),
            ],
            seconds=3,
        ),
    ],
)
def test_what_is_wrong_with_a_sweep_is_said_before_it_begins(
    words, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code, said = verbally(capsys, *words, "data.sample.rows=200")
    assert code == 2 and message in said, said
    assert not list(tmp_path.iterdir())


def verbally(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """A sweep in this process: its exit code, and what it complained of."""
    before = list(sys.argv)
    try:
        return verb("sweep", *words), capsys.readouterr().err
    finally:
        sys.argv[:] = before


def swept(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """A sweep in this process, whose warm server is up: its exit code, and all that it printed."""
    before = list(sys.argv)
    try:
        code = verb("sweep", *words)
    finally:
        sys.argv[:] = before
    said = capfd.readouterr()
    return code, said.out + said.err


@pytest.fixture
def begun(started: list[Any]) -> list[Command]:
    return started


SMALL = [
    "data.sample.rows=300",
    "data.sample.eval_rows=60",
    "trainer.max_epochs=3",
    "precision=fp32",
    "logger=none",
]
TRUST = "+allow_targets=[tests]"
SEARCHED = ["model.hidden=choice(8,16,24)", "optim.lr=tag(log,interval(1e-4,1e-1))", *SMALL]


def command(*words: str) -> Command:
    return begin_warm(["flatout", "sweep", *words])


def kept(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    return [row | {"seconds": ""} for row in rows]


def wait_for_trial(folder: Path, number: int, process: Command) -> None:
    wait_for(folder / str(number) / "metrics.csv", process)


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
    assert read_csv(cut / "sweep.csv") and (cut / "sweep.html").is_file()
    code, again = swept(capfd, "resume", str(cut))
    assert code == 0, again
    assert re.search(r"resumed: [123] of 3 trials have ended", again)
    assert kept(read_csv(cut / "sweep.csv")) == kept(read_csv(whole[0] / "sweep.csv"))
    assert best_again(whole[1]) == best_again(again)
    assert (cut / "sweep.html").stat().st_size > 10_000
    # what is finished is said to be, and nothing is trained again
    code, third = swept(capfd, "resume", str(cut))
    assert code == 0 and "3 of 3 trials have ended" in third and "trial 0: " not in third


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
    assert code == 2 and said.startswith(
        f"hydra.sweep.dir: {tmp_path / name.partition('/')[0]} is there already. Choose"
    )
    assert (tmp_path / name).read_text() == "mine" and not (tmp_path / "sweep.json").exists()


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
    assert "running" not in summaries and "interrupted" in summaries
    assert (folder / "sweep.csv").is_file() and (folder / "sweep.html").is_file()
    code, said = verbally(capsys, "resume", str(folder), TRUST, "model.hidden=choice(8,32)")
    assert code == 2 and "was begun with model.hidden: 8, 16, 24, and now it is 8, 32" in said
    code, said = verbally(capsys, "resume", str(folder), TRUST, "trainer.max_epochs=9")
    assert (
        code == 2 and "was begun with other settings: " in said and "trainer.max_epochs=9" in said
    )


def test_a_sweep_whose_settings_are_damaged_is_refused(tmp_path, capsys):
    file = tmp_path / FILE
    file.write_text('{"schema": 1, "wor')
    code, said = verbally(capsys, "resume", str(tmp_path))
    assert code == 2 and f"{file}: cannot be read" in said
    file.write_text("{}")
    code, said = verbally(capsys, "resume", str(tmp_path))
    assert code == 2 and said == f"{file}: is not what a sweep writes there. Start a new sweep.\n"


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
    assert (
        notes["die"].startswith("was ended by SIGKILL")
        and notes["hang"] == "ran longer than 7 s and was stopped"
    )


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
    rows = read_csv(folder / "sweep.csv")
    return [{name.lstrip("'"): value for name, value in row.items()} for row in rows]


@pytest.mark.soak(seconds=4)
def test_a_sweep_of_which_every_trial_fails_alike_ends_early(tmp_path, capfd):
    folder = tmp_path / "s"
    code, said = swept(
        capfd, "model.hidden=choice(8,16)", "data.train=nothing.csv", f"hydra.sweep.dir={folder}"
    )
    assert code == 2
    last = said.splitlines()[-1]
    assert last.startswith("sweep: the first 3 trials failed alike: ") and "no such file" in last
    assert last.endswith(f"The output of the first is in {folder}/0/output.txt.")
    assert [row["status"] for row in read_csv(folder / "sweep.csv")] == ["failed"] * 3 and (
        folder / "sweep.html"
    ).is_file()


@pytest.mark.soak(seconds=3)
def test_a_metric_that_only_other_data_has_ends_a_sweep_and_leaves_its_folder_free(
    tmp_path, capsys
):
    folder = tmp_path / "s"
    code, said = verbally(
        capsys, "model.hidden=choice(8,16)", "metric=f1", f"hydra.sweep.dir={folder}", *SMALL
    )
    assert code == 2 and said.startswith("metric: no metric 'f1' (accuracy, macro_f1, ")
    assert not folder.exists()


@pytest.mark.soak(seconds=3)
def test_an_interval_of_fractions_for_a_whole_number_is_refused_before_the_sweep_has_a_folder(
    tmp_path, capsys
):
    folder = tmp_path / "s"
    code, said = verbally(
        capsys, "model.hidden=interval(8,16.5)", "trials=2", f"hydra.sweep.dir={folder}", *SMALL
    )
    assert code == 2 and not folder.exists()
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
    assert (
        "the time is over; to resume: python -m flatout sweep resume" in said
        and "best: trial" in said
    )
    assert 0 < len(read_csv(folder / "sweep.csv")) < 400
