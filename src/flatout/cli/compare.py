"""`python -m flatout compare RUN RUN …`: what several encodings give away, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.bits.exposure_page import read_exposure
from flatout.errors import UserError
from flatout.report.curves import Curve, line_chart
from flatout.report.render import render_page

Exposure = Mapping[str, Any]


def _share(*path: str) -> Callable[[Exposure], str]:
    def read(exposure: Exposure) -> str:
        value: Any = exposure
        for name in path:
            value = None if value is None else value[name]
        return "" if value is None else f"{value:.1%}"

    return read


ROWS: dict[str, Callable[[Exposure], str]] = {
    "encoding": lambda exposure: exposure["encoding"],
    "known records": lambda exposure: f"{exposure['records']['train']:,}",
    "judged on": lambda exposure: f"{exposure['records']['judged']:,}",
    "Dice of the 2-grams": lambda exposure: f"{exposure['scores']['dice']:.4f}",
    "Dice by ridge regression": lambda exposure: f"{exposure['methods']['ridge regression']:.4f}",
    "sets exactly right": _share("scores", "exact"),
    "rebuilt at the first try": _share("reconstruction", "alone", "at_1"),
    "rebuilt within ten": _share("reconstruction", "alone", "at_10"),
    "with names, first try": _share("reconstruction", "with_names", "at_1"),
    "with names, within ten": _share("reconstruction", "with_names", "at_10"),
}
"""What is compared, and how it is read off an exposure report."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folders of finished runs on bit strings")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write the comparison as a page")


def run(arguments: argparse.Namespace) -> None:
    found = {str(run): read_exposure(Path(run)) for run in arguments.runs}
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


def comparison(found: Mapping[str, Exposure]) -> Table:
    """A column for each run."""
    shown = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    shown.add_column(style="bold")
    for _ in found:
        shown.add_column(overflow="fold")
    shown.add_row("run", *(Text(name) for name in short_names(list(found))))
    for name, read in ROWS.items():
        shown.add_row(name, *(Text(read(exposure)) for exposure in found.values()))
    return shown


def page(found: Mapping[str, Exposure]) -> str:
    """The comparison as HTML, without network or script."""
    names = short_names(list(found))
    cells = [[name, *(read(exposure) for exposure in found.values())] for name, read in ROWS.items()]
    curves = [
        Curve(name, [(point["records"], point.get("model", point["ridge"])) for point in exposure["learning"]])
        for name, exposure in zip(names, found.values(), strict=True)
    ]
    chart = line_chart("Dice over known records", curves, x_label="known records", doublings=True)
    sentences = [exposure["conclusion"][0] for exposure in found.values()]
    return render_page(
        "compare",
        heads=["", *names],
        rows=cells,
        curves=[chart] if chart else [],
        conclusions=list(zip(names, sentences, strict=True)),
    )


def short_names(runs: Sequence[str]) -> list[str]:
    """Experiment and date of each run's folder, and more of its path where that does not tell runs apart."""
    parts = [Path(run).resolve().parts for run in runs]
    for count in range(2, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return list(runs)
