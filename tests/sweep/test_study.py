"""A study suggests, prunes and counts trials, and its journal survives a kill."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.errors import UserError
from flatout.sweep.many import alone_in
from flatout.sweep.searched import FILE
from flatout.sweep.settings import Pruner, Sampler
from flatout.sweep.space import Part, SettingInterval, SettingValues, grid
from flatout.sweep.study import ENDED, JOURNAL, Study, repair_journal
from flatout.sweep.trial import Ending, Status
from tests.refusals import refused
from tests.sweep.commands import SEARCHED, verbally
from tests.sweep.studies import study, worth


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
    assert parts == whole
    assert len(whole) == 12


FINITE: dict[str, Part] = {
    "model.hidden": SettingValues(("16", "32")),
    "seed": SettingValues(("1",)),
    "model.layers": SettingInterval(1, 3, is_whole=True),
    "model.dropout": SettingInterval(0.1, 0.1),
}


@pytest.mark.parametrize("sampler", [Sampler.random, Sampler.tpe])
@pytest.mark.parametrize("pruner", [Pruner.none, Pruner.hyperband])
def test_no_settings_are_tried_twice_while_others_are_untried(tmp_path, sampler, pruner):
    memory = study(tmp_path, FINITE, sampler=sampler, pruner=pruner, trials=9)
    seen = []
    while (asked := memory.ask()) is not None:
        number, settings = asked
        seen.append((settings["model.hidden"], settings["model.layers"]))
        worth_of = int(settings["model.layers"]) + int(settings["model.hidden"]) / 100
        memory.tell(number, Ending(Status.complete, 1.0, worth_of))
    assert len(set(seen[:6])) == 6
    assert len(seen) == 9


def test_two_trials_of_two_values_try_both(tmp_path):
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        memory = study(folder, {"model.hidden": FINITE["model.hidden"]}, trials=2, seed=seed)
        first, second = (memory.ask() for _ in range(2))
        assert first[1] != second[1]


def test_a_trial_that_ran_when_all_was_killed_is_run_again_under_its_number(tmp_path):
    first = study(tmp_path)
    told(first, 3)
    left = first.ask()
    assert left is not None
    assert left[0] == 3
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
    assert code == 2
    assert said.startswith(f"sweep: another process is at work in {tmp_path}. Wait for it")
    code, said = verbally(capsys, *SEARCHED, place)
    assert code == 2
    assert said.startswith(f"sweep: {tmp_path} holds a sweep already. Resume it")


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
    with refused("sweep: optim.lr", "grid"):
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
    assert best is not None
    assert best.value == 0.8
    assert 3 <= len(pruned) <= 7
    assert 0.8 not in pruned


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
    assert again is not None
    assert again[0] == 1


def test_the_settings_that_matter_are_found_to_matter(tmp_path):
    memory = study(tmp_path, trials=40, sampler=Sampler.random)
    assert memory.importance() == {}
    told(memory)
    share = memory.importance()
    assert sum(share.values()) == pytest.approx(1)
    assert share["optim.lr"] > 0.6


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
