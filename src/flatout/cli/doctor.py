"""`python -m flatout doctor RUN`: what limited a run, and what would fix it; `--confirm` runs the fix."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.callbacks.step_timer import PARTS
from flatout.cli import confirm
from flatout.errors import UserError
from flatout.perf.notes import measured_before
from flatout.perf.verdict.confirmation import read_confirmations
from flatout.perf.verdict.evidence import Evidence
from flatout.perf.verdict.findings import gain_of
from flatout.perf.verdict.judge import evidence_in
from flatout.perf.verdict.rules import findings, verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder, finished or not")
    parser.add_argument("--json", action="store_true", help="the verdict and its evidence as JSON")
    what = "run the verdict's override and the original in turn, a few hundred steps each, and compare"
    parser.add_argument("--confirm", action="store_true", help=what)
    words = "with --confirm: words for both, such as +allow_targets=[mypackage]"
    parser.add_argument("words", metavar="WORD", nargs="*", help=words)


def run(arguments: argparse.Namespace) -> None:
    if arguments.confirm:
        confirm.run(arguments.run, arguments.words)
        return
    if arguments.words:
        raise UserError("doctor", f"{arguments.words[0]!r}: words belong to --confirm", hint="Add --confirm.")
    evidence = evidence_in(arguments.run)
    if arguments.json:
        print(json.dumps({"verdict": verdict(evidence), "evidence": evidence.as_dict()}, indent=1))
        return
    console = Console(highlight=False)
    rows = f"{evidence.rows_per_batch:,.0f} rows a batch, {evidence.batches:,} batches"
    console.print(Text(f"where the time went: {rows}", style="bold"))
    console.print(_time_table(evidence))
    if evidence.tried:
        console.print(Text("\nwhat was tried at its end", style="bold"))
        console.print(_tried_table(evidence))
    found = findings(evidence)
    console.print(Text("\nverdict", style="bold"))
    words = verdict(evidence)
    console.print(Text(words["sentence"]))
    if known := measured_before(words["override"]):
        console.print(Text(known))
    for other in found[1:]:
        console.print(Text(f"also {other.sentence()}"))
    for confirmed in read_confirmations(arguments.run):
        console.print(Text(f"confirmed {confirmed.sentence()}"))


def _time_table(evidence: Evidence) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("part", "ms a batch", "share"):
        table.add_column(head, justify="left" if head == "part" else "right")
    for part in PARTS:
        if ms := evidence.ms.get(part):
            table.add_row(part, f"{ms:.2f}", f"{evidence.share(part):.1%}")
    table.add_row("all", f"{evidence.total_ms:.2f}", "")
    return table


def _tried_table(evidence: Evidence) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("override", "rows/s of the model", "as it was", "the run would be"):
        table.add_column(head, justify="left" if head == "override" else "right")
    for tried in evidence.tried:
        rates = (f"{tried.rows_per_s:,.0f}", f"{tried.as_was:,.0f}")
        table.add_row(Text(tried.override), *rates, str(gain_of(evidence, tried)))
    return table
