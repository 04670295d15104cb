"""What is printed when a run ends: what it reached, how fast it was, where the time went, where everything lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_MOST_CLASSES = 12


def print_closing(
    summary: dict[str, Any], folder: Path, per_class: list[dict[str, Any]], console: Console | None = None
) -> None:
    """Print the closing tables to the terminal or to the console given."""
    console = console or Console(soft_wrap=True, highlight=False)
    if per_class:
        console.print(class_table(per_class))
    console.print(closing_table(summary))
    console.print(f"run folder:  {escape(str(folder))}")
    console.print(f"curves:      tensorboard --logdir {escape(_quoted(str(folder)))}")


def closing_table(summary: dict[str, Any]) -> Table:
    """Metrics, speed and time split of one run."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=_title(summary), title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, text in [*_metric_rows(summary), *_speed_rows(summary)]:
        table.add_row(escape(name), escape(text))
    return table


def class_table(per_class: list[dict[str, Any]]) -> Table:
    """Precision, recall and F1 of each class; of many, the six best and the six worst."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="classes, commonest first", title_justify="left")
    table.add_column("class")
    for name in ("precision", "recall", "f1", "rows"):
        table.add_column(name, justify="right")
    shown = per_class
    if len(per_class) > _MOST_CLASSES:
        by_f1 = sorted(per_class, key=lambda row: -row["f1"])
        shown = by_f1[: _MOST_CLASSES // 2] + by_f1[-_MOST_CLASSES // 2 :]
        table.title = f"the {_MOST_CLASSES // 2} best and the {_MOST_CLASSES // 2} worst of {len(per_class)} classes"
    for row in shown:
        scores = (f"{row[name]:.3f}" for name in ("precision", "recall", "f1"))
        table.add_row(escape(row["class"]), *scores, f"{row['support']:,}")
    return table


def _title(summary: dict[str, Any]) -> str:
    training, model = summary["training"], summary["model"]
    seconds = training["seconds"] or 0
    return f"{model['name']}, {training['steps']:,} steps, {seconds:.1f} s"


def _metric_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    metrics = summary["metrics"]
    split = "test" if any(name.startswith("test/") for name in metrics) else "val"
    known = (summary["baseline"] or {}).get("metrics", {})
    rows = []
    for name, value in metrics.items():
        if not name.startswith(f"{split}/") or value is None:
            continue
        text = f"{value:.4f}"
        if (best := known.get(name)) is not None:
            text += f"   {value / best:.1%} of the {summary['baseline']['name']}, {best:.4f}"
        rows.append((name, text))
    return rows


def _speed_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    speed = summary["speed"]
    if speed["rows_per_s"] is None:
        return []
    padding = speed["padding_share"] or 0.0
    rows = [
        ("speed", f"{speed['rows_per_s']:,.0f} rows/s, {speed['tokens_per_s']:,.0f} tokens/s, padding {padding:.1%}")
    ]
    steps = {name: value for name, value in speed["step_ms"].items() if value is not None}
    total = sum(steps.values())
    if total:
        parts = ", ".join(f"{name} {value / total:.1%}" for name, value in steps.items())
        rows.append(("each step", f"{total:.1f} ms: {parts}"))
    if summary["verdict"]:
        rows.append(("verdict", str(summary["verdict"].get("mend", ""))))
    return rows


def _quoted(text: str) -> str:
    return f"'{text}'" if " " in text else text
