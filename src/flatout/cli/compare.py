"""`python -m flatout compare A B`: two groups of runs, paired by seed; or encodings side by side.

Two folders of runs are compared by their metric. One folder of many trials, of a sweep or of `-m`,
is listed. Two or more runs on bit strings are compared by what each encoding gives away, with a
column for each run and, on request, a page.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.bits.exposure_page import NUMBERS, read_exposure
from flatout.errors import UserError, printable, require
from flatout.files import values_of
from flatout.ladder.compare_runs import Comparison, compare_groups, summaries_in
from flatout.report.closing import plain_table
from flatout.report.figures import Curve, line_chart
from flatout.report.page import filled, render_text
from flatout.report.sweep_page import ROWS as TRIALS

# what is compared → its format, and the path to it in an exposure report
ROWS = {
    "encoding": ("{}", "encoding"),
    "known records": ("{:,}", "records", "train"),
    "judged on": ("{:,}", "records", "judged"),
    "Dice of the 2-grams": ("{:.4f}", "scores", "dice"),
    "Dice by ridge regression": ("{:.4f}", "methods", "ridge regression"),
    "sets exactly right": ("{:.1%}", "scores", "exact"),
    "rebuilt at the first try": ("{:.1%}", "reconstruction", "alone", "at_1"),
    "rebuilt within ten": ("{:.1%}", "reconstruction", "alone", "at_10"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = (
        "two folders of finished runs; one folder of a sweep, to list its trials; or folders of"
        " finished runs on bit strings"
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help=text)
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="also write the comparison of bit strings as a page",
    )


def run(arguments: argparse.Namespace) -> None:
    folders = [Path(run) for run in arguments.runs]
    if len(folders) == 1 and (folders[0] / TRIALS).is_file():
        show_trials(folders[0])
        return
    are_of_bits = all((folder / NUMBERS).is_file() for folder in folders)
    if all(map(_is_group, folders)) and not are_of_bits:
        require(
            len(folders) == 2,
            "compare",
            f"{', '.join(arguments.runs)}",
            allowed="two folders of runs, or one folder of a sweep",
        )
        require(
            arguments.html is None,
            "--html",
            "is for encodings of bit strings",
            hint="Leave it out: two groups have no page.",
        )
        show_groups(compare_groups(*folders), folders)
        return
    exposures = {run: read_exposure(Path(run)) for run in arguments.runs}
    for run, exposure in exposures.items():
        # one by one, so that a message names the file
        with values_of(Path(run) / NUMBERS):
            comparison({run: exposure})
            page({run: exposure})
    Console(highlight=False).print(comparison(exposures))
    if arguments.html is not None:
        try:
            arguments.html.write_text(page(exposures), encoding="utf-8")
        except OSError as error:
            raise UserError(
                "--html",
                f"cannot write {arguments.html}: {error.strerror}",
                hint="Name a file in a folder that you may write to.",
            ) from None


def _is_group(folder: Path) -> bool:
    return bool(summaries_in(folder)) or (folder / TRIALS).is_file()


def show_trials(folder: Path) -> None:
    """Print a row for each trial of a sweep: what was set, its metric, and why it failed."""
    # the folder may come from others, so cells may be missing or odd
    with (folder / TRIALS).open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        try:
            rows = list(reader)
            heads = reader.fieldnames or []
        except csv.Error:  # a cell that is far too long
            rows = []
            heads = []
    is_whole = {"number", "status"} <= set(heads) and bool(rows)
    require(
        is_whole,
        str(folder / TRIALS),
        "holds no trials",
        hint=f"It is damaged. python -m flatout sweep resume {folder} writes it again.",
    )
    # Columns without any cell are left out, and all metrics of many trials would be too wide. The
    # folder of a trial is named by its number.
    filled_heads = {head for row in rows for head, cell in row.items() if cell}
    shown = []
    for head in heads:
        if head in filled_heads and not head.startswith(("folder", "val/", "test/")):
            shown.append(head)
    table = plain_table(title=Text(f"trials of {folder}; value: what they are compared by"))
    for head in shown:
        table.add_column(Text(printable(head)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(_shorten(row[head] or ""))) for head in shown))
    console = Console(highlight=False)
    console.print(table)
    lines = [f"all metrics: {folder / TRIALS}"]
    if not summaries_in(folder):
        lines.append("The best of many trials is partly a lucky one: confirm=3 trains it again.")
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _shorten(cell: str) -> str:
    """A number in four digits; another text unchanged."""
    try:
        return f"{float(cell):.4g}"
    except ValueError:
        return cell


def show_groups(comparison: Comparison, folders: Sequence[Path]) -> None:
    """Print a row for each group, with a column for each seed, and the sentences below."""
    heads = ("runs", "mean ± sd", *(f"seed {seed}" for seed in comparison.seeds))
    title = f"{comparison.metric}, {comparison.unit or 'in its own unit'}"
    table = plain_table(*heads, title=title)
    table.columns[0].overflow = "fold"
    names = short_names(list(map(str, folders)))
    for name, group in zip(names, (comparison.first, comparison.second), strict=True):
        mean = f"{group.mean:.4g}" if group.sd is None else f"{group.mean:.4g} ± {group.sd:.2g}"
        table.add_row(Text(name), mean, *(f"{value:.4g}" for value in group.values))
    console = Console(highlight=False)
    console.print(table)
    for line in comparison.lines(*names):
        console.print(Text(printable(line)), soft_wrap=True)


def comparison(exposures: Mapping[str, Mapping[str, Any]]) -> Table:
    """The exposure reports of some runs, given by their names, with a column for each run."""
    table = plain_table("", show_header=False)
    table.columns[0].style = "bold"
    for _ in exposures:
        table.add_column(overflow="fold")
    table.add_row("run", *map(Text, short_names(list(exposures))))
    for name, *cells in _rows(exposures):
        table.add_row(name, *(Text(printable(cell)) for cell in cells))
    return table


def _rows(exposures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for name, (form, *path) in ROWS.items():
        cells = [filled(form, _value_at(exposure, path)) for exposure in exposures.values()]
        rows.append([name, *cells])
    return rows


def _value_at(exposure: Mapping[str, Any], path: Sequence[str]) -> object:
    """The value at a path of a report; None if the report lacks a part on the way."""
    value: Any = exposure
    for name in path:
        value = None if value is None else value[name]
    return value


def page(exposures: Mapping[str, Mapping[str, Any]]) -> str:
    """The comparison as an HTML page, which needs no network and no script."""
    names = short_names(list(exposures))
    curves = []
    conclusions = []
    for name, exposure in zip(names, exposures.values(), strict=True):
        learned = exposure["learning"]
        points = [(point["records"], point.get("model", point["ridge"])) for point in learned]
        curves.append(Curve(name, points))
        conclusions.append((name, exposure["conclusion"][0]))
    chart = line_chart("Dice over known records", curves, x_label="known records", doublings=True)
    return render_text(
        "compare.html",
        heads=["", *names],
        rows=_rows(exposures),
        curves=[chart] if chart else [],
        conclusions=conclusions,
    )


def short_names(runs: Sequence[str]) -> list[str]:
    """The last two parts of each run's folder, its experiment and date; more if these are equal."""
    parts = [Path(run).resolve().parts for run in runs]
    for count in range(2, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return list(runs)
