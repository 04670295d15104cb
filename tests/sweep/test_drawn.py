"""What a sweep takes: which trials are priced, and how much of them a pruner leaves."""

from __future__ import annotations

import pytest

from flatout.sweep.drawn import draw_trials, share_trained
from flatout.sweep.settings import Pruner
from flatout.sweep.space import SettingInterval, SettingValues


def test_trials_are_drawn_from_the_space_each_once():
    space = {"optim.lr": SettingInterval(1e-4, 1e-2, is_log=True)}
    drawn = draw_trials(space, 3, seed=1)
    assert len(drawn) == 3
    assert all(space["optim.lr"].holds(float(trial["optim.lr"])) for trial in drawn)
    assert drawn == draw_trials(space, 3, seed=1)
    assert draw_trials({"seed": SettingValues(("7",))}, 3, seed=1) == [{"seed": "7"}]


@pytest.mark.parametrize("pruner", Pruner)
def test_a_trial_of_one_validation_is_trained_to_its_end(pruner):
    assert share_trained(pruner, 1, 20).median == 1


def test_without_pruning_all_of_each_trial_is_trained():
    share = share_trained(Pruner.none, 8, 20)
    assert (share.least, share.median, share.most) == (1, 1, 1)


def test_halving_leaves_about_a_third_of_many_validations_and_more_of_few():
    many = share_trained(Pruner.asha, 9, 30)
    few = share_trained(Pruner.asha, 3, 30)
    # of ten validations the best third reaches the third one, and a third of these the ninth
    assert 0.15 < many.least <= many.median <= many.most < 0.5
    assert many.most < few.least
