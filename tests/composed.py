"""`python -m train` inside the process of a test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import train
from flatout.cli import words as words_of
from flatout.cli.boundary import read_config
from flatout.cli.hydra_internals import guard_hydra
from flatout.cli.train import register_schemas
from flatout.cli.words import conf_folder
from flatout.config import RunConfig

CONF = conf_folder()


def compose_run(words: list[str]) -> RunConfig:
    """The settings of a run, from words of the command line."""
    guard_hydra()
    register_schemas()
    words = words_of.debug_last(map(words_of.translate_word, words))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return read_config(compose("train", words), words)


def run_train(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `python -m train`; its exit code."""
    monkeypatch.setattr(sys, "argv", ["train", *words])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    try:
        train.main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def options_of(group: str) -> list[str]:
    """The options that `conf/` has for a group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def only_folder(parent: Path) -> Path:
    """The folder of the only run below a folder."""
    (folder,) = parent.iterdir()
    return folder
