"""What a climb found, rung by rung: plain values for `ladder.json` and the page, and the table in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from flatout.errors import printable
from flatout.ladder.climb import TOO_SHORT, Step, ratio, top_of
from flatout.ladder.compare_runs import Estimate
from flatout.ladder.rungs import STARTUP, Ladder

FILE = "ladder.json"
SCHEMA = 1
LEAST_GAIN = 1.02  # a rung below this ratio does not pay
MOST_SPREAD = 0.2  # rounds that differ by more are not those of a quiet machine
PAYS, UNSURE, COSTS = "pays", "unsure", "does not pay"


def results(ladder: Ladder, steps: Sequence[Step], *, rows: int, about: dict[str, Any]) -> dict[str, Any]:
    """All figures of a ladder; `rows`: of an epoch."""
    measured = [step for step in steps if step.found]
    rungs, below = list[dict[str, Any]](), list[Step]()
    for step in steps:
        rungs.append(_rung(step, below))
        below += [step] if step.found else []
    return {
        "schema": SCHEMA,
        **{name: getattr(ladder, name) for name in ("name", "title", "kind", "in_all")},
        "rows": rows,
        **about,
        "rungs": rungs,
        "whole": _whole(measured, rows),
        "skipped": [{"name": step.rung.name, "why": step.skipped} for step in steps if step.skipped],
        "is_complete": not any(step.skipped == TOO_SHORT for step in steps),
        "quality": None,
    }


def _rung(step: Step, below: Sequence[Step]) -> dict[str, Any]:
    """The figures of a rung; `below`: the rungs below it that were measured."""
    rung = step.rung
    found: dict[str, Any] = {
        **{name: getattr(rung, name) for name in ("name", "about", "promised")},
        "factor": list(rung.factor) if rung.factor else None,
        "measures": rung.measures,
        "program": "flatout" if rung.is_ours else "usual",
        "change": list(rung.words) if rung.is_ours else dict(rung.keywords or {}),
        "skipped": step.skipped if not step.found else "",
        **dict.fromkeys(("measured", "cumulative", "verdict")),
    }
    if not step.found:
        return found
    if below:
        gain = ratio(below[-1], step, rung.measures)
        found |= {"measured": asdict(gain), "verdict": judge(gain), "against": below[-1].rung.name}
    found["cumulative"] = asdict(ratio(below[0] if below else step, step))
    for name in ("rows_per_s", "tokens_per_s", "wait_share", "padding_share", "startup_s", "memory_gb", "device_share"):
        found[name] = step.middle(name)
    return found | {"rounds": len(step.found), "spread": step.spread}


def judge(gain: Estimate) -> str:
    """Whether a rung pays: its gain is worth a setting, and enough rounds show that it is no chance."""
    if gain.value < LEAST_GAIN:
        return COSTS
    return PAYS if gain.low is not None and gain.low > 1 else UNSURE


def _whole(measured: Sequence[Step], rows: int) -> dict[str, Any] | None:
    place = top_of([step.rung for step in measured])
    if not place:
        return None
    foot, top = measured[0], measured[place]
    minutes = [rows / (step.middle("rows_per_s") or 1e-9) / 60 for step in (foot, top)]
    return {
        "foot": foot.rung.name,
        "top": top.rung.name,
        "minutes_before": minutes[0],
        "minutes_after": minutes[1],
        "ratio": asdict(ratio(foot, top)),
        "startup_before_s": foot.middle("startup_s"),
        "startup_after_s": top.middle("startup_s"),
        "startup_ratio": asdict(ratio(foot, top, STARTUP)),
    }


def closing_lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{each['name']}: {each['why']}" for each in found["skipped"]]
    if lines:
        lines.insert(0, f"{len(lines)} of {len(found['rungs'])} rungs were not measured:")
    whole = found["whole"]
    quality = _quality_lines(found["quality"]) if found["quality"] else []
    if whole is None:
        none = "Fewer than two rungs were measured: no speed-up can be stated. Give more time with for=."
        return [*lines, none, *quality]
    lines.append(f"an epoch as usually written: {duration(whole['minutes_before'])} ({found['rows']:,} rows)")
    lines.append(f"an epoch of {whole['top']}: {duration(whole['minutes_after'])}")
    lines.append(f"speed-up: {written(whole['ratio'])}" + (f"; promised {found['in_all']}" if found["in_all"] else ""))
    lines.append(f"startup: {whole['startup_before_s']:.1f} s before, {whole['startup_after_s']:.1f} s after at most")
    return [*lines, *_disturbed(found["rungs"]), *quality]


def _disturbed(rungs: Sequence[dict[str, Any]]) -> list[str]:
    """A warning where rounds differ so much that other programs must have computed, too."""
    widest = max((rung for rung in rungs if rung.get("spread")), key=lambda rung: rung["spread"], default=None)
    if widest is None or widest["spread"] <= MOST_SPREAD:
        return []
    words = "Measure again while the machine does nothing else, or give more time with for=."
    return [f"rounds differ by ±{widest['spread']:.0%} at {widest['name']}: {words}"]


def _quality_lines(quality: Mapping[str, Any]) -> list[str]:
    groups = [f"{each['name']}: {mean_with_spread(each)}" for each in quality["groups"]]
    return [f"test {quality['metric']} in points, {quality['seeds']} seeds: {'; '.join(groups)}", quality["sentence"]]


def mean_with_spread(group: Mapping[str, Any]) -> str:
    """Mean and standard deviation of a group's points."""
    return f"{group['mean']:.2f}" + ("" if group["sd"] is None else f" ± {group['sd']:.2f}")


def word_of(rung: Mapping[str, Any]) -> str:
    """Why a rung was skipped, or that it does not pay for sure; empty for one that pays."""
    return str(rung["skipped"] or ("" if rung["verdict"] in (None, PAYS) else rung["verdict"]))


def written(interval: Mapping[str, Any] | None) -> str:
    if interval is None:
        return "–"
    digits = 2 if interval["value"] < 10 else 1
    sure = "" if interval["low"] is None else f" ({interval['low']:.{digits}f}–{interval['high']:.{digits}f})"
    return f"{interval['value']:.{digits}f}×{sure}"


def duration(value: float) -> str:
    """Minutes in words."""
    return f"{value:.1f} min" if value >= 1 else f"{60 * value:.1f} s"


def figures(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Names of the columns of figures, and the figures of each rung as texts."""
    rungs = found["rungs"]
    left_out = {"tokens/s"} if not any(rung.get("tokens_per_s") for rung in rungs) else set[str]()
    left_out |= {"GPU"} if all(rung.get("device_share") is None for rung in rungs) else set()
    heads = [name for name in _COLUMNS if name not in left_out]
    return heads, [[_COLUMNS[name](rung) if rung["cumulative"] else "" for name in heads] for rung in rungs]


def ladder_table(found: Mapping[str, Any]) -> Table:
    names, rows = figures(found)
    table = Table(box=None, padding=(0, 2, 0, 0), title=Text(found["title"]), title_justify="left")
    table.add_column("rung")
    table.add_column("promised")
    for head in (*names, ""):
        table.add_column(head, justify="right" if head else "left")
    for rung, cells in zip(found["rungs"], rows, strict=True):
        style = "bright_black" if rung["skipped"] else {COSTS: "red", UNSURE: "yellow"}.get(rung["verdict"] or "", "")
        texts = [printable(rung["name"]), printable(rung["promised"]), *cells, printable(word_of(rung))]
        table.add_row(*(Text(text, style=style) for text in texts))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "measured": lambda rung: (
        ("startup " if rung["measures"] == STARTUP and rung["measured"] else "") + written(rung["measured"])
    ),
    "in all": lambda rung: written({**rung["cumulative"], "low": None}),
    "rows/s": lambda rung: _number(rung["rows_per_s"]),
    "tokens/s": lambda rung: _number(rung["tokens_per_s"]),
    "±": lambda rung: _share(rung["spread"]),
    "wait": lambda rung: _share(rung["wait_share"]),
    "padding": lambda rung: _share(rung["padding_share"]),
    "memory": lambda rung: "" if rung["memory_gb"] is None else f"{rung['memory_gb']:.2f} GB",
    "startup": lambda rung: f"{rung['startup_s']:.1f} s",
    "GPU": lambda rung: _share(rung["device_share"]),
}
