"""`python -m flatout bench NAME`: measure our claims on this machine, each beside its rival.

The benches lie in `benchmarks/` of a checkout. Each yields claims: our figure, the rival's, their
ratio, and the goal that the ratio should reach.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import flatout
from flatout.errors import did_you_mean, require

if TYPE_CHECKING:
    from benchmarks.claim import Claim


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="its name; --list shows all")
    parser.add_argument("--list", action="store_true", help="name all benches")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds and rows, under two minutes"
    )
    parser.add_argument(
        "--data", metavar="FOLDER", type=Path, help="folder of published data sets, for quality"
    )
    parser.add_argument(
        "--pretrained", metavar="FOLDER", help="a pretrained encoder, for bert and quality"
    )
    parser.add_argument(
        "--rounds", dest="asked_rounds", metavar="N", type=int, help="rounds of each measurement"
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help="bert, doctor, doctor_run, price, quality, reuse: the parts whose names hold this",
    )
    parser.add_argument(
        "--plain", action="store_true", help="doctor: foreign modules and loaders in plain Trainers"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows there")


def run(arguments: argparse.Namespace) -> None:
    add_checkout_to_path()
    from benchmarks import BENCHES
    from benchmarks.claim import Options

    if arguments.list or arguments.name is None:
        for name, about in BENCHES.items():
            print(f"{name:<12} {about}")
        return
    require(
        arguments.name in BENCHES,
        "bench",
        f"no bench {arguments.name!r}",
        allowed=", ".join(BENCHES),
        hint=did_you_mean(arguments.name, BENCHES),
    )
    rounds = arguments.asked_rounds
    require(rounds is None or rounds > 0, "--rounds", f"{rounds} rounds", allowed="1 or more")
    parted = ("bert", "defaults", "doctor", "doctor_run", "price", "quality", "reuse")
    is_parted = arguments.only is None or arguments.name in parted
    require(
        is_parted,
        "--only",
        f"bench {arguments.name} cannot leave rows out",
        allowed=", ".join(parted),
    )
    is_plain = not arguments.plain or arguments.name == "doctor"
    require(
        is_plain,
        "--plain",
        f"bench {arguments.name} has no rows in plain Trainers",
        allowed="doctor",
    )
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    claims = []
    print(f"{'claim':<58} {'ours':>12} {'theirs':>12} {'ratio':>7}  {'goal':<12} holds")
    names = ("quick", "data", "pretrained", "asked_rounds", "only", "plain")
    options = Options(**{name: getattr(arguments, name) for name in names})
    for claim in importlib.import_module(f"benchmarks.{arguments.name}").claims(options):
        claims.append(claim)
        print(line(claim), flush=True)
    if arguments.json is not None:
        rows = [claim.as_dict() for claim in claims]
        arguments.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")


def add_checkout_to_path() -> None:
    """Make `benchmarks` importable: it lies beside `src/` of a checkout and is not installed."""
    root = Path(flatout.__file__).parents[2]
    is_checkout = (root / "benchmarks" / "__init__.py").is_file()
    require(
        is_checkout,
        "bench",
        "the benchmarks are not part of the installed package",
        hint="Run it in a checkout of the project, installed with pip install -e .",
    )
    if str(root) not in sys.path:
        sys.path.append(str(root))


def line(claim: Claim) -> str:
    """A claim as a row of the printed table, and its note on a second line."""
    ours = "" if math.isnan(claim.ours) else f"{claim.ours:,.4g}"
    theirs = "" if claim.theirs is None else f"{claim.theirs:,.4g}"
    ratio = "" if claim.ratio is None else f"{claim.ratio:.2f}×"
    name = f"{claim.claim} [{claim.unit}]" if claim.unit else claim.claim
    holds = "yes" if claim.holds else "NO"
    if not claim.applies:
        holds = "n/a"
    row = f"{name:<58} {ours:>12} {theirs:>12} {ratio:>7}  {claim.goal:<12} {holds}"
    return f"{row}\n    {claim.note}" if claim.note else row
