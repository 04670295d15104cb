"""The text printed when a run ends: metrics, speed, the parts of a batch's time, the verdict.

Everything is read off `summary.json`. The functions that end in `_text` each write one line;
`report.html` and TensorBoard show the same lines. Open it to change how a result is worded.
"""

from __future__ import annotations

import html
import operator
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.data.checks.findings import counted
from flatout.errors import printable
from flatout.price.words import describe_money, describe_seconds, describe_span

_MOST_CLASSES = 6  # of the best and of the worst; up to twice as many classes are all shown
EARLY_END = "early end of training"  # name of the choice that records that patience ended training


def print_closing(
    summary: dict[str, Any],
    folder: Path,
    per_class: list[dict[str, Any]],
    console: Console | None = None,
) -> None:
    """Print the closing tables, the run folder and the command that shows the curves."""
    console = console or Console(highlight=False)
    if per_class:
        console.print(class_table(per_class))
    table = plain_table("", "", texts=2, show_header=False, title=Text(_title(summary)))
    table.columns[0].style = "bold"
    rows = [
        *_metric_rows(summary, per_class),
        ("best epoch", best_epoch_text(summary)),
        ("ended early", early_end(summary)),
        *finding_rows(summary),
        *_speed_rows(summary),
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
        scores = (f"{row[name]:.3f}" for name in ("precision", "recall", "f1"))
        table.add_row(Text(printable(row["class"])), *scores, f"{row['support']:,}")
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


def early_end(summary: Mapping[str, Any]) -> str:
    """After which epoch patience ended training, why, and which epoch is kept; else empty."""
    for choice in summary["choices"]:
        if choice["name"] == EARLY_END:
            return f"{choice['value']}: {choice['why']}; {choice['evidence']}"
    return ""


def best_epoch_text(summary: Mapping[str, Any]) -> str:
    """Which epoch's weights answer, and by which metric; empty where none was chosen."""
    training = summary["training"]
    best = training.get("best_epoch")
    if best is None or summary["metric"] is None:
        return ""
    return f"{best} of {training['epochs']}, by val/{summary['metric']}"


def finding_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the result says against itself, as a name and a sentence each."""
    return [(finding["name"], finding["text"]) for finding in summary.get("findings") or []]


def _title(summary: dict[str, Any]) -> str:
    training = summary["training"]
    parts = [summary["model"]["name"] or "no model yet"]
    if training["steps"] is not None:
        parts.append(counted(training["steps"], "step"))
    if training["seconds"] is not None:
        parts.append(f"{training['seconds']:.1f} s")
    if summary["status"] != "finished":
        parts.append(summary["status"])
    return ", ".join(parts)


def _metric_rows(
    summary: dict[str, Any], per_class: Sequence[Mapping[str, Any]] = ()
) -> list[tuple[str, str]]:
    metrics = summary["metrics"]
    baseline = (summary["baseline"] or {}).get("metrics") or {}
    intervals = summary.get("intervals") or {}
    is_tested = any(name.startswith("test/") for name in metrics)
    split = "test/" if is_tested else "val/"
    rows = []
    for name, value in metrics.items():
        if not name.startswith(split) or value is None:
            continue
        text = f"{value:.4f}{interval_text(intervals.get(name))}"
        if best := baseline.get(name):
            share = share_text(value, best)
            baseline_name = f"the {summary['baseline']['name']}"
            text += f"   {share} of {baseline_name}, " if share else f"   {baseline_name}: "
            text += f"{best:.4f}"
        if name == f"{split}accuracy":
            text += commonest_class_text(per_class)
        rows.append((name, text))
    others = [name for name in baseline if name.startswith(split) and name not in metrics]
    rows += [(name, f"{baseline[name]:.4f}   for comparison") for name in others]
    return [*rows, ("rival", rival_text(summary))]


def share_text(value: float, best: float) -> str:
    """A score as a percentage of another one; empty where one is negative: that has no meaning."""
    return f"{value / best:.1%}" if value >= 0 and best > 0 else ""


def commonest_class_text(per_class: Sequence[Mapping[str, Any]]) -> str:
    """The accuracy of always answering the commonest class; empty if most rows have another one."""
    num_rows = sum(row["support"] for row in per_class)
    commonest = max(per_class, key=operator.itemgetter("support"), default=None)
    if commonest is None or 2 * commonest["support"] < num_rows or num_rows == 0:
        return ""
    share = commonest["support"] / num_rows
    return f"   {share:.4f} by always answering {printable(commonest['class'])!r}"


def rival_text(summary: Mapping[str, Any]) -> str:
    """A simple model's score on the same data, and whether it beats the run; empty if none."""
    if not (rival := summary.get("rival")):
        return ""
    metric = rival["metric"]
    text = f"{metric} {rival['metrics'][metric]:.4f} by the {rival['name']}"
    if not rival["wins"]:
        return text
    text += f": it wins against {summary['metrics'][metric]:.4f}"
    # runs of older versions have no such key
    if rival.get("kept"):
        text += "; python -m flatout predict RUN FILE --with rival answers with it"
    return text


def truncation_text(summary: Mapping[str, Any]) -> str:
    """The score on rows that were cut to the longest length, and on whole ones; else empty."""
    if not (scores := summary.get("truncation")):
        return ""
    cut = f"{scores['cut']:.4f} on {scores['cut_rows']:,} cut rows"
    if scores["equal_rows"]:
        cut += f" (and {scores['equal_rows']:,} whole ones of their length)"
    whole = f"{scores['whole']:.4f} on {scores['whole_rows']:,} whole rows"
    return f"{scores['metric']} by length: {cut}, {whole}"


def interval_text(interval: Sequence[float] | None) -> str:
    """An interval behind its score: (0.83, 0.86) gives " (0.830–0.860)"; empty for None."""
    if interval is None:
        return ""
    low, high = interval
    digits = 3 if max(abs(low), abs(high)) >= 0.1 else 4
    return f" ({low:.{digits}f}–{high:.{digits}f})"


def _speed_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    speed = summary["speed"]
    forms = {
        "rows_per_s": "{:,.0f} rows/s",
        "tokens_per_s": "{:,.0f} tokens/s",
        "padding_share": "padding {:.1%}",
        "mfu": "MFU {:.1%}",
    }
    rows = [("speed", ", ".join(format_known(speed, forms)))]
    if parts := parts_of_step(speed["step_ms"]):
        shares = ", ".join(f"{name} {share:.1%}" for name, _, share in parts if share >= 0.001)
        rows.append(("each batch", f"{sum(ms for _, ms, _ in parts):.1f} ms: {shares}"))
    rows.append(("card", gpu_text(speed["gpu"])))
    price = summary.get("price") or {}
    rows.append(("time", time_text(price)))
    rows.append(("cost", cost_text(price)))
    first, *others = verdict_lines(summary["verdict"]) or [""]
    return [*rows, ("verdict", first), *(("", line) for line in others)]


def format_known(values: Mapping[str, Any], forms: Mapping[str, str]) -> list[str]:
    """The values that have a form and are known, each formatted: "MFU {:.1%}" for `mfu`."""
    return [
        form.format(values[name]) for name, form in forms.items() if values.get(name) is not None
    ]


def parts_of_step(step_ms: Mapping[str, float | None]) -> list[tuple[str, float, float]]:
    """The known parts of a batch's time as (name, milliseconds, share); empty if all are zero."""
    known = {name: ms for name, ms in step_ms.items() if ms is not None}
    total = sum(known.values())
    if total == 0:
        return []
    return [(name, ms, ms / total) for name, ms in known.items()]


def closing_markdown(summary: dict[str, Any]) -> str:
    """Verdict, result, speed and each automatic choice with its evidence, as markdown."""
    parts = [f"**{_cell(_title(summary))}**"]
    if text := verdict_text(summary["verdict"]):
        parts.append(f"**Verdict:** {_cell(text)}")
    best_epoch = ("best epoch", best_epoch_text(summary))
    rows = [
        *_metric_rows(summary),
        best_epoch,
        *finding_rows(summary),
        *_speed_rows(summary),
    ]
    shown = [(name, text) for name, text in rows if text and name not in ("verdict", "")]
    if shown:
        parts.append(_markdown_table(["result and speed", ""], shown))
    if choices := choice_rows(summary):
        parts.append("**Automatic choices**")
        parts.append(_markdown_table(["choice", "value", "why", "evidence"], choices))
    return "\n\n".join(parts)


def choice_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Each automatic choice as a row: its name, the value, why, and the evidence."""
    columns = operator.itemgetter("name", "value", "why", "evidence")
    return [list(columns(choice)) for choice in summary["choices"]]


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    """A value as plain text: signs of markdown and HTML in it are escaped, `|` too."""
    return re.sub(r"([\\|*_`\[])", r"\\\1", html.escape(printable(str(value)), quote=False))


def gpu_text(gpu: dict[str, Any]) -> str:
    """Load, memory, power, temperature and throttling of the GPU; empty without samples."""
    forms = {
        "utilisation": "busy {:.0%}",
        "memory_gb": "{:.1f} GB",
        "power_w": "{:.0f} W",
        "temperature_c": "{:.0f} °C",
    }
    texts = format_known(gpu, forms)
    for reason, share in (gpu.get("throttled") or {}).items():
        texts.append(f"throttled {share:.0%} of the time by {reason}")
    if others := gpu.get("others"):
        texts.append(
            f"shared {others['share']:.0%} of the time (other processes: {others['processes']})"
        )
    return ", ".join(texts)


def time_text(price: Mapping[str, Any]) -> str:
    """`expected 4.1 min (3.6–4.8), took 4.3 min`; empty where nothing was expected."""
    if price.get("expected_s") is None:
        return ""
    took = describe_seconds(price["took_s"])
    return f"expected {describe_span(price['expected_s'], *price['interval_s'])}, took {took}"


def cost_text(price: Mapping[str, Any]) -> str:
    """`0.0124 kWh (card), 0.31 EUR`; empty where neither is known."""
    texts = []
    if price.get("kwh") is not None:
        texts.append(f"{price['kwh']:.3g} kWh ({', '.join(price['counted'])})")
    if price.get("kwh_per_million_tokens") is not None:
        texts.append(f"{price['kwh_per_million_tokens']:.2g} kWh per million tokens")
    if price.get("money") is not None:
        texts.append(describe_money(price["money"], price["currency"]))
    return ", ".join(texts)


def verdict_lines(verdict: dict[str, Any] | None) -> list[str]:
    """A verdict, what a ladder has measured of its fix, and the other causes; empty without one."""
    text = verdict_text(verdict)
    if not verdict or not text:
        return []
    others = [f"also {other['sentence']}" for other in verdict.get("others") or []]
    return [line for line in (text, verdict.get("ladder"), *others) if line]


def verdict_text(verdict: dict[str, Any] | None) -> str:
    """A verdict in one line: what limited the run, by how much, and the fix."""
    if not verdict or not verdict.get("limit"):
        return ""
    if sentence := verdict.get("sentence"):
        return str(sentence)
    # a summary of an older version has no sentence
    text = str(verdict["limit"])
    if verdict.get("share") is not None:
        text += f" {verdict['share']:.1%}"
    if fix := verdict.get("fix", verdict.get("mend")):
        text += f": {fix}"
    return text
