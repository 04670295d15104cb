"""The text printed when a run ends: metrics, speed, the parts of a batch's time, the verdict.

TensorBoard gets the same rows as markdown. What they say is worded in `run_report.py`, which reads
the summary. Open this file to change which rows are shown, and how.
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.errors import printable
from flatout.report.run_report import RunReport, class_cells, format_known, parts_of_step

_MOST_CLASSES = 6  # of the best and of the worst; up to twice as many classes are all shown


def print_closing(
    summary: dict[str, Any],
    folder: Path,
    per_class: list[dict[str, Any]],
    console: Console | None = None,
) -> None:
    """Print the closing tables, the run folder and the command that shows the curves."""
    console = console or Console(highlight=False)
    report = RunReport(summary, per_class)
    if per_class:
        console.print(class_table(per_class))
    table = plain_table("", "", texts=2, show_header=False, title=Text(report.title))
    table.columns[0].style = "bold"
    first, *others = report.verdict or [""]
    rows = [
        *_score_rows(report),
        ("best epoch", report.best_epoch),
        ("ended early", report.early_end),
        *report.findings,
        *_speed_rows(report),
        ("verdict", first),
        *(("", line) for line in others),
    ]
    for name, text in rows:
        if text:
            table.add_row(Text(name), Text(text))
    console.print(table)
    # soft_wrap: the folder and the command stay on one line each, so that you can copy them
    console.print(Text(f"run folder:  {folder}"), soft_wrap=True)
    if "tensorboard" in summary.get("loggers", ["tensorboard"]):
        console.print(
            Text(f"curves:      tensorboard --logdir {shlex.quote(str(folder))}"), soft_wrap=True
        )


def plain_table(*heads: str, texts: int = 1, **more: Any) -> Table:
    """A table without lines: columns of texts, then columns of numbers, which end at the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", **more)
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < texts else "right")
    return table


def class_table(per_class: list[dict[str, Any]]) -> Table:
    """Precision, recall and F1 of each class; of many classes, the six best and the six worst."""
    table = plain_table(
        "class", "precision", "recall", "f1", "rows", title="classes, commonest first"
    )
    if len(per_class) > 2 * _MOST_CLASSES:
        table.title = (
            f"the {_MOST_CLASSES} best and the {_MOST_CLASSES} worst of {len(per_class)} classes"
        )
        by_f1 = sorted(per_class, key=lambda row: -row["f1"])
        per_class = by_f1[:_MOST_CLASSES] + by_f1[-_MOST_CLASSES:]
    for row in per_class:
        name, *cells = class_cells(row)
        table.add_row(Text(printable(name)), *cells)
    return table


def share_table(cuts: Sequence[Mapping[str, float]]) -> Table:
    """The error of the surest answers, by their share."""
    title = "error of the surest answers, and what it is at most on other rows like these"
    table = plain_table("answered", "surer than", "error", "at most", texts=0, title=title)
    for cut in cuts:
        shares = (f"{cut[name]:.1%}" for name in ("error", "at_most"))
        # all rows are answered, however unsure
        above = "any" if cut["share"] == 1 else f"{cut['above']:.4f}"
        table.add_row(f"{cut['share']:.0%}", above, *shares)
    return table


def _score_rows(report: RunReport) -> list[tuple[str, str]]:
    rows = []
    for score in report.scores:
        text = f"{score.value:.4f}{score.interval}"
        if best := score.of_baseline:
            if share := score.share_of_baseline:
                text += f"   {share} of the {report.baseline}, {best:.4f}"
            else:
                text += f"   the {report.baseline}: {best:.4f}"
        rows.append((score.name, text + score.of_commonest))
    rows += [(name, f"{value:.4f}   for comparison") for name, value in report.comparisons]
    return [*rows, ("rival", report.rival)]


def _speed_rows(report: RunReport) -> list[tuple[str, str]]:
    forms = {
        "rows_per_s": "{:,.0f} rows/s",
        "tokens_per_s": "{:,.0f} tokens/s",
        "padding_share": "padding {:.1%}",
        "mfu": "MFU {:.1%}",
    }
    speed = report.summary["speed"]
    each_batch = ""
    if parts := parts_of_step(speed["step_ms"]):
        shares = ", ".join(f"{name} {share:.1%}" for name, _, share in parts if share >= 0.001)
        each_batch = f"{sum(ms for _, ms, _ in parts):.1f} ms: {shares}"
    return [
        ("speed", ", ".join(format_known(speed, forms))),
        ("each batch", each_batch),
        ("card", report.card),
        ("time", report.time),
        ("cost", report.cost),
    ]


def closing_markdown(summary: dict[str, Any]) -> str:
    """Verdict, result, speed and each automatic choice with its evidence, as markdown."""
    report = RunReport(summary)
    parts = [f"**{_cell(report.title)}**"]
    parts += [f"**Verdict:** {_cell(text)}" for text in report.verdict[:1]]
    rows = [
        *_score_rows(report),
        ("best epoch", report.best_epoch),
        *report.findings,
        *_speed_rows(report),
    ]
    shown = [(name, text) for name, text in rows if text]
    if shown:
        parts.append(_markdown_table(["result and speed", ""], shown))
    if report.choices:
        parts.append("**Automatic choices**")
        parts.append(_markdown_table(["choice", "value", "why", "evidence"], report.choices))
    return "\n\n".join(parts)


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    """A value as plain text: signs of markdown and HTML in it are escaped, `|` too."""
    return re.sub(r"([\\|*_`\[])", r"\\\1", html.escape(printable(str(value)), quote=False))
