"""`python -m flatout settings` explains every setting."""

from __future__ import annotations

import re

import pytest

from flatout.cli.composing import known_keys
from flatout.cli.settings import all_settings
from tests.verbs import verb


@pytest.fixture(scope="module")
def known():
    return list(all_settings())


def test_every_setting_says_what_it_does_and_what_it_may_be_and_has_an_example(known):
    assert [each.key for each in known if not (each.does and each.allowed and each.example)] == []


def test_no_setting_may_be_just_anything(known):
    assert [each.key for each in known if "any value" in each.allowed] == []


def test_every_number_and_every_mapping_has_a_range(known):
    bare = re.compile(r"(a whole number|a number|a mapping)(, null|, or null)?")
    # as free as their type
    seeds = {"seed", "hydra.sweeper.seed", "hydra.sweeper.space", "model.settings"}
    assert [
        each.key for each in known if bare.fullmatch(each.allowed) and each.key not in seeds
    ] == []


def test_every_key_of_the_settings_classes_is_explained(known):
    groups = {key.rpartition(".")[0] for key in known_keys()}
    mappings = {
        "data",
        "data.sample",
        "model",
        "task",
        "optim",
        "checkpoint",
        "monitor",
        "tune",
        "trainer",
    }
    assert set(known_keys()) - groups - mappings <= {each.key for each in known}


def test_a_key_is_explained_for_each_option_that_has_it(capsys):
    assert verb("settings", "data.batch_size") == 0
    assert capsys.readouterr().out.splitlines() == [
        "data.batch_size  (data=text)",
        "  does     Rows one device computes at once; null: 128, and fewer where a run",
        "           has few rows.",
        "  allowed  a whole number, 1 or more, or null",
        "  default  null",
        "  example  data.batch_size=64",
        "data.batch_size  (data=bits)",
        "  does     Records one device computes at once.",
        "  allowed  a whole number, 1 or more",
        "  default  256",
        "  example  data.batch_size=512",
        "data.batch_size  (data=sequence)",
        "  does     Recordings, windows or chunks one device computes at once; null: 64,",
        "           and fewer where a run has few recordings or chunks.",
        "  allowed  a whole number, 1 or more, or null",
        "  default  null",
        "  example  data.batch_size=64",
    ]


@pytest.mark.parametrize(
    ("key", "allowed", "default"),
    [
        ("optim.schedule", "linear, cosine, constant", "linear"),
        ("data.sample.classes", "a whole number, 2 to 64", "12"),
        ("data.clean.leaks", "keep, drop, refuse", "keep"),
        ("monitor.profile.warmup", "a whole number, 1 or more", "3"),
        ("precision", "auto, fp32, tf32, bf16, fp16", "auto"),
        ("optim.lr", "a number, above 0, or null", "null"),
        ("resume", "auto, the path of a run folder, null", "null"),
        ("trainer.max_epochs", "as in Lightning's Trainer", "null"),
        ("trainer.gradient_clip_val", "set optim.clip instead", "null"),
        ("trials", "a whole number, 1 or more", "20"),
        ("launcher.limit", "a time such as 90s or 20m, or null", "null"),
    ],
)
def test_a_setting_names_its_values_and_its_default(key, allowed, default, known):
    found = next(each for each in known if each.key == key)
    assert (found.allowed, found.default) == (allowed, default)


def test_a_group_and_an_option_are_listed(capsys):
    assert verb("settings", "model") == 0
    listed = capsys.readouterr().out
    assert {"model=bilstm", "model=transformer", "model=bitmlp"} <= set(listed.splitlines())
    assert "model.hidden=128" in listed
    assert "optim.lr" not in listed
    assert verb("settings", "model=textcnn") == 0
    listed = capsys.readouterr().out
    assert "model.filters=" in listed
    assert "model.heads=" not in listed


def test_without_a_key_all_are_listed(capsys, known):
    assert verb("settings") == 0
    listed = capsys.readouterr().out
    assert all(f"  {each.key}={each.default}" in listed for each in known)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("lr", "optim.lr"),
        ("flush", "monitor.flush_every"),
        ("learning rate", "optim.schedule"),
        ("rows of metrics", "monitor.flush_every"),
    ],
)
def test_a_part_of_a_name_or_of_a_sentence_finds_settings(words, key, capsys):
    assert verb("settings", words) == 0
    listed = capsys.readouterr().out
    assert f"  {key}=" in listed
    assert "model.hidden=" not in listed


def test_an_unknown_key_ends_with_the_nearest_names(capsys):
    assert verb("settings", "data.batchsize") == 2
    assert (
        "settings data.batchsize: no such key. Did you mean data.batch_size"
        in capsys.readouterr().err
    )
