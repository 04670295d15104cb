"""`python -m flatout compare A B`: two groups of runs, paired by seed; or what several encodings
give away.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.bits.exposure_page import NUMBERS, read_exposure
from flatout.errors import UserError, require
from flatout.ladder.compare_runs import Comparison, compare_groups, summaries_in
from flatout.report.closing import plain_table
from flatout.report.figures import Curve, line_chart
from flatout.report.page import filled, render_text

ROWS = {
    "encoding": ("{}", "encoding"),
    "known records": ("{:,}", "records", "train"),
    "judged on": ("{:,}", "records", "judged"),
    "Dice of the 2-grams": ("{:.4f}", "scores", "dice"),
    "Dice by ridge regression": ("{:.4f}", "methods", "ridge regression"),
    "sets exactly right": ("{:.1%}", "scores", "exact"),
    "rebuilt at the first try": ("{:.1%}", "reconstruction", "alone", "at_1"),
    "rebuilt within ten": ("{:.1%}", "reconstruction", "alone", "at_10"),
}  # what is compared, its form, and where an exposure report has it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "two folders of finished runs, or a sweep's; or folders of finished runs on bit strings"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=text)
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="also write the comparison of bit strings as a page",
    )


def run(arguments: argparse.Namespace) -> None:
    folders = [Path(run) for run in arguments.runs]
    are_groups = len(folders) == 2 and all(map(summaries_in, folders))
    if are_groups and not all((each / NUMBERS).is_file() for each in folders):
        require(
            arguments.html is None,
            "--html",
            "is for encodings of bit strings",
            hint="Leave it out: two groups have no page.",
        )
        show_groups(compare_groups(*folders), folders)
        return
    found = {run: read_exposure(Path(run)) for run in arguments.runs}
    Console(highlight=False).print(comparison(found))
    if arguments.html is not None:
        try:
            arguments.html.write_text(page(found), encoding="utf-8")
        except OSError as error:
            raise UserError(
                "--html",
                f"cannot write {arguments.html}: {error.strerror}",
                hint="Name a file in a folder that you may write to.",
            ) from None


def show_groups(found: Comparison, folders: Sequence[Path]) -> None:
    heads = ("runs", "mean ± sd", *(f"seed {seed}" for seed in found.seeds))
    shown = plain_table(*heads, title=f"{found.metric}, {found.unit or 'in its own unit'}")
    shown.columns[0].overflow = "fold"
    for folder, group in zip(
        short_names([str(each) for each in folders]), (found.first, found.second), strict=True
    ):
        mean = f"{group.mean:.4g}" if group.sd is None else f"{group.mean:.4g} ± {group.sd:.2g}"
        shown.add_row(Text(folder), mean, *(f"{value:.4g}" for value in group.values))
    console = Console(highlight=False)
    console.print(shown)
    for line in found.lines():
        console.print(Text(line), soft_wrap=True)


def comparison(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """A column for each run."""
    shown = plain_table("", show_header=False)
    shown.columns[0].style = "bold"
    for _ in found:
        shown.add_column(overflow="fold")
    shown.add_row("run", *(Text(name) for name in short_names(list(found))))
    for name, *cells in _rows(found):
        shown.add_row(name, *map(Text, cells))
    return shown


def _rows(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    return [
        [name, *(_read(exposure, *way) for exposure in found.values())]
        for name, way in ROWS.items()
    ]


def _read(exposure: Any, form: str, *path: str) -> str:
    """A figure of a report; empty where it has none."""
    value: Any = exposure
    for name in path:
        value = None if value is None else value[name]
    return filled(form, value)


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The comparison as HTML, without network or script."""
    names = short_names(list(found))
    curves = [
        Curve(
            name,
            [
                (point["records"], point.get("model", point["ridge"]))
                for point in exposure["learning"]
            ],
        )
        for name, exposure in zip(names, found.values(), strict=True)
    ]
    chart = line_chart("Dice over known records", curves, x_label="known records", doublings=True)
    charts = [chart] if chart else []
    sentences = (exposure["conclusion"][0] for exposure in found.values())
    conclusions = list(zip(names, sentences, strict=True))
    return render_text(
        "compare.html",
        heads=["", *names],
        rows=_rows(found),
        curves=charts,
        conclusions=conclusions,
    )


def short_names(runs: Sequence[str]) -> list[str]:
    """Experiment and date of each run's folder, and more of its path where that does not tell runs
    apart.
    """
    parts = [Path(run).resolve().parts for run in runs]
    for count in range(2, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return list(runs)
