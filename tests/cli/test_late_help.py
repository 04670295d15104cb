"""Hydra's options on every Python: one of their helps is no text until it is printed."""

from __future__ import annotations

import argparse
import sys

import pytest
from hydra._internal.utils import get_args_parser

from flatout.cli.late_help import allow_late_help


def test_hydra_reads_its_options_on_every_python():
    allow_late_help()
    allow_late_help()
    known = get_args_parser().parse_args(["--multirun", "optim.lr=0.1"])
    assert known.multirun
    assert known.overrides == ["optim.lr=0.1"]


# Below 3.14 argparse reads a help when it prints it: there is nothing that could raise.
@pytest.mark.skipif(sys.version_info < (3, 14), reason="no Python before 3.14 checks a help")
def test_a_help_that_is_a_text_is_still_checked():
    allow_late_help()
    with pytest.raises(ValueError, match="badly formed help string"):
        argparse.ArgumentParser().add_argument("--share", help="5 % of all")
