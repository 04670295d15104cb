"""The text printed when a run ends: metrics, speed, the parts of a batch's time, the verdict, the
folders.
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

_MOST_CLASSES = 6  # of the best and of the worst; fewer than both together are all shown
EARLY_END = "early end of training"  # the choice that says that patience has ended training


def print_closing(
    summary: dict[str, Any],
    folder: Path,
    per_class: list[dict[str, Any]],
    console: Console | None = None,
) -> None:
    """Print the closing tables; the run folder and the command stay on one line each, so that you
    can copy them.
    """
    console = console or Console(highlight=False)
    if per_class:
        console.print(class_table(per_class))
    table = plain_table("", "", texts=2, show_header=False, title=Text(_title(summary)))
    table.columns[0].style = "bold"
    early = [("ended early", text)] if (text := early_end(summary)) else []
    for name, text in [*_metric_rows(summary), *early, *_speed_rows(summary)]:
        table.add_row(Text(name), Text(text))
    console.print(table)
    console.print(Text(f"run folder:  {folder}"), soft_wrap=True)
    if "tensorboard" in summary.get("loggers", ["tensorboard"]):
        console.print(
            Text(f"curves:      tensorboard --logdir {shlex.quote(str(folder))}"), soft_wrap=True
        )


def plain_table(*heads: str, texts: int = 1, **more: Any) -> Table:
    """A table without lines: columns of texts, then columns of numbers, which end at the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", **more)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < texts else "right")
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
        scores = (f"{row[name]:.3f}" for name in ("precision", "recall", "f1"))
        table.add_row(Text(printable(row["class"])), *scores, f"{row['support']:,}")
    return table


def early_end(summary: Mapping[str, Any]) -> str:
    """After which epoch patience has ended training, why, and which epoch is kept; empty where it
    has not.
    """
    end = next((each for each in summary["choices"] if each["name"] == EARLY_END), None)
    return f"{end['value']}: {end['why']}; {end['evidence']}" if end else ""


def _title(summary: dict[str, Any]) -> str:
    training, status = summary["training"], summary["status"]
    steps = "" if training["steps"] is None else f"{training['steps']:,} steps"
    seconds = "" if training["seconds"] is None else f"{training['seconds']:.1f} s"
    parts = (
        summary["model"]["name"] or "no model yet",
        steps,
        seconds,
        "" if status == "finished" else status,
    )
    return ", ".join(filter(None, parts))


def _metric_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    metrics = summary["metrics"]
    known = (summary["baseline"] or {}).get("metrics") or {}
    split = "test/" if any(name.startswith("test/") for name in metrics) else "val/"
    rows = []
    for name, value in metrics.items():
        if not name.startswith(split) or value is None:
            continue
        text = f"{value:.4f}{interval_text((summary.get('intervals') or {}).get(name))}"
        if best := known.get(name):
            rival = f"the {summary['baseline']['name']}"
            # a percentage of or by a negative score says nothing
            is_share = value >= 0 and best > 0
            text += (
                f"   {value / best:.1%} of {rival}, {best:.4f}"
                if is_share
                else f"   {rival}: {best:.4f}"
            )
        rows.append((name, text))
    others = [name for name in known if name.startswith(split) and name not in metrics]
    rows += [(name, f"{known[name]:.4f}   for comparison") for name in others]
    return rows + ([("rival", text)] if (text := rival_text(summary)) else [])


def rival_text(summary: Mapping[str, Any]) -> str:
    """What a simple model scores beside the run, and whether it wins; empty where there is none."""
    if not (rival := summary.get("rival")):
        return ""
    name, metric = rival["name"], rival["metric"]
    ends = f": it wins against {summary['metrics'][metric]:.4f}" if rival["wins"] else ""
    return f"{metric} {rival['metrics'][metric]:.4f} by the {name}{ends}"


def truncation_text(summary: Mapping[str, Any]) -> str:
    """What rows that were cut score beside whole ones; empty where that is not known."""
    if not (found := summary.get("truncation")):
        return ""
    cut, whole = (
        f"{found[each]:.4f} on {found[f'{each}_rows']:,} {each} rows" for each in ("cut", "whole")
    )
    equal = (
        f" (and {found['equal_rows']:,} whole ones of their length)" if found["equal_rows"] else ""
    )
    return f"{found['metric']} by length: {cut}{equal}, {whole}"


def interval_text(interval: Sequence[float] | None) -> str:
    """An interval as it follows its score; empty where there is none."""
    if interval is None:
        return ""
    digits = 3 if max(map(abs, interval)) >= 0.1 else 4
    return f" ({interval[0]:.{digits}f}–{interval[1]:.{digits}f})"


def _speed_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    speed = summary["speed"]
    forms = {"rows_per_s": "{:,.0f} rows/s", "tokens_per_s": "{:,.0f} tokens/s"}
    forms |= {"padding_share": "padding {:.1%}", "mfu": "MFU {:.1%}"}
    known = [form.format(speed[name]) for name, form in forms.items() if speed[name] is not None]
    rows = [("speed", ", ".join(known))] if known else []
    if parts := parts_of_step(speed["step_ms"]):
        shares = ", ".join(f"{name} {share:.1%}" for name, _, share in parts if share >= 0.001)
        rows.append(("each batch", f"{sum(ms for _, ms, _ in parts):.1f} ms: {shares}"))
    if text := gpu_text(speed["gpu"]):
        rows.append(("card", text))
    if text := verdict_text(summary["verdict"]):
        rows.append(("verdict", text))
        if known := summary["verdict"].get("ladder"):
            rows.append(("", known))
        rows += [
            ("", f"also {each['sentence']}") for each in summary["verdict"].get("others") or []
        ]
    return rows


def parts_of_step(step_ms: Mapping[str, float | None]) -> list[tuple[str, float, float]]:
    """The parts of a batch's time that are known, each with its milliseconds and its share; none
    where all are zero.
    """
    known = {name: ms for name, ms in step_ms.items() if ms is not None}
    total = sum(known.values())
    return [(name, ms, ms / total) for name, ms in known.items()] if total > 0 else []


def closing_markdown(summary: dict[str, Any]) -> str:
    """Verdict, result, speed and each automatic choice with its evidence, as markdown."""
    parts = [f"**{_cell(_title(summary))}**"]
    if text := verdict_text(summary["verdict"]):
        parts.append(f"**Verdict:** {_cell(text)}")
    if rows := [
        row
        for row in [*_metric_rows(summary), *_speed_rows(summary)]
        if row[0] not in ("verdict", "")
    ]:
        parts.append(_markdown_table(["result and speed", ""], rows))
    if choices := [
        [each[name] for name in ("name", "value", "why", "evidence")] for each in summary["choices"]
    ]:
        parts += [
            "**Automatic choices**",
            _markdown_table(["choice", "value", "why", "evidence"], choices),
        ]
    return "\n\n".join(parts)


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join(
        f"| {' | '.join(map(_cell, line))} |" for line in [heads, ["---"] * len(heads), *rows]
    )


def _cell(value: object) -> str:
    """A value as plain text: it cannot end its cell, and no sign of markdown or HTML acts."""
    return re.sub(r"([\\|*_`\[])", r"\\\1", html.escape(printable(str(value)), quote=False))


def gpu_text(gpu: dict[str, Any]) -> str:
    """Load, memory, power, temperature and throttling of the card in one line; empty without
    samples.
    """
    says = {
        "utilisation": "busy {:.0%}",
        "memory_gb": "{:.1f} GB",
        "power_w": "{:.0f} W",
        "temperature_c": "{:.0f} °C",
    }
    known = [form.format(gpu[name]) for name, form in says.items() if gpu.get(name) is not None]
    throttled = gpu.get("throttled") or {}
    known += [
        f"throttled {share:.0%} of the time by {reason}" for reason, share in throttled.items()
    ]
    if others := gpu.get("others"):
        known.append(
            f"shared {others['share']:.0%} of the time (other processes: {others['processes']})"
        )
    return ", ".join(known)


def verdict_text(verdict: dict[str, Any] | None) -> str:
    """A verdict in one line: what limited the run, by how much, and the fix."""
    if not verdict or not verdict.get("limit"):
        return ""
    if sentence := verdict.get("sentence"):
        return str(sentence)
    share, fix = verdict.get("share"), verdict.get("fix", verdict.get("mend"))
    return (
        verdict["limit"] + ("" if share is None else f" {share:.1%}") + (f": {fix}" if fix else "")
    )
