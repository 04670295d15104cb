"""A sweep's command is shown as a person types it, and means the same."""

from __future__ import annotations

import shlex

import pytest

from flatout.cli.words import SHORT, command_of_sweep, expand_sweep_word, shorten_sweep_word


def test_hydra_s_words_come_back_as_those_of_the_command_and_are_quoted():
    typed = [
        "hydra/sweeper=flatout",
        "hydra.sweeper.trials=8",
        "hydra.launcher.limit=5m",
        "+experiment=bert_tiny",
    ]
    typed += ["model.hidden=choice(8,16)", "hydra.searchpath=[file://a b]"]
    line = command_of_sweep(typed)
    assert (
        line == "python -m flatout sweep +experiment=bert_tiny 'model.hidden=choice(8,16)'"
        " 'hydra.searchpath=[file://a b]' trials=8 trial_for=5m"
    )
    assert sorted(map(expand_sweep_word, shlex.split(line)[4:])) == sorted(typed[1:])


def test_a_folder_of_settings_is_named_before_them():
    assert (
        command_of_sweep(["+sweep=one"], "/my conf")
        == "python -m flatout sweep --config-dir '/my conf' +sweep=one"
    )


@pytest.mark.parametrize("word", SHORT)
def test_each_short_word_goes_there_and_back(word):
    assert shorten_sweep_word(expand_sweep_word(f"{word}=a=b")) == f"{word}=a=b"
