"""Compute the figures of a measured ladder, rung by rung, as plain values for `ladder.json`.

`results` turns the measurements of a climb into one mapping. It has the gain of each rung over the
rung below it, the gain over the foot, and the whole ladder from foot to top:

    rung            rows/s    measured    cumulative
    foot            100                   1.0
    batch padding   150       1.5         1.5
    bf16            300       2.0         3.0

Open this file to add a key to `ladder.json`, or to change when a rung counts as worth its setting.
`closing.py` puts the mapping into words, `page.py` and `chart.py` draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flatout.ladder.climb import TOO_SHORT, ClimbedRung, ratio, top_of
from flatout.ladder.compare_runs import Estimate
from flatout.ladder.rungs import STARTUP, Ladder

FILE = "ladder.json"
SCHEMA = 1
LEAST_GAIN = 1.02  # a rung below this ratio does not pay
PAYS = "pays"
UNSURE = "unsure"
COSTS = "does not pay"
# of the measurements of a rung, the figures whose median over its rounds is kept
_MEDIANS = (
    "rows_per_s",
    "tokens_per_s",
    "wait_share",
    "padding_share",
    "startup_s",
    "memory_gb",
    "device_share",
)


def results(
    ladder: Ladder, steps: Sequence[ClimbedRung], *, rows: int, about: dict[str, Any]
) -> dict[str, Any]:
    """All figures of a ladder, as `ladder.json` holds them.

    `rows`: of an epoch. `about`: further keys of the file (device, date, command).
    """
    rungs = list[dict[str, Any]]()
    measured = list[ClimbedRung]()
    skipped = list[dict[str, str]]()
    for step in steps:
        rungs.append(_rung(step, measured))
        if step.rounds:
            measured.append(step)
        elif step.skipped:
            skipped.append({"name": step.rung.name, "why": step.skipped})
    return {
        "schema": SCHEMA,
        "name": ladder.name,
        "title": ladder.title,
        "kind": ladder.kind,
        "in_all": ladder.in_all,
        "rows": rows,
        **about,
        "rungs": rungs,
        "whole": _whole(measured, rows),
        "skipped": skipped,
        "is_complete": not any(step.skipped == TOO_SHORT for step in steps),
        "quality": None,
    }


def _rung(step: ClimbedRung, below: Sequence[ClimbedRung]) -> dict[str, Any]:
    """The figures of a rung; `below`: the rungs below it that were measured.

    `measured` is its gain over the next rung below, `cumulative` its gain over the foot. Both are
    None where it was not measured; the foot has no `measured`.
    """
    rung = step.rung
    figures: dict[str, Any] = {
        "name": rung.name,
        "about": rung.about,
        "promised": rung.promised,
        "factor": list(rung.factor) if rung.factor else None,
        "measures": rung.measures,
        "program": "flatout" if rung.is_ours else "usual",
        "change": list(rung.words) if rung.is_ours else dict(rung.keywords or {}),
        "skipped": "" if step.rounds else step.skipped,
        "measured": None,
        "cumulative": None,
        "verdict": None,
    }
    if not step.rounds:
        return figures
    if below:
        gain = ratio(below[-1], step, rung.measures)
        figures["measured"] = asdict(gain)
        figures["verdict"] = judge(gain)
        figures["against"] = below[-1].rung.name
    foot = below[0] if below else step
    figures["cumulative"] = asdict(ratio(foot, step))
    for name in _MEDIANS:
        figures[name] = step.middle(name)
    figures["rounds"] = len(step.rounds)
    figures["spread"] = step.spread
    return figures


def judge(gain: Estimate) -> str:
    """Whether a rung pays: its gain is worth a setting, and its interval lies above 1."""
    if gain.value < LEAST_GAIN:
        return COSTS
    return PAYS if gain.low is not None and gain.low > 1 else UNSURE


def _whole(measured: Sequence[ClimbedRung], rows: int) -> dict[str, Any] | None:
    """The ladder from its foot to its top; None where fewer than two rungs were measured."""
    top_place = top_of([step.rung for step in measured])
    if not top_place:
        return None
    foot = measured[0]
    top = measured[top_place]
    return {
        "foot": foot.rung.name,
        "top": top.rung.name,
        "minutes_before": _epoch_minutes(foot, rows),
        "minutes_after": _epoch_minutes(top, rows),
        "ratio": asdict(ratio(foot, top)),
        "rounds": len(foot.rounds.keys() & top.rounds.keys()),
        "startup_before_s": foot.middle("startup_s"),
        "startup_after_s": top.middle("startup_s"),
        "startup_ratio": asdict(ratio(foot, top, STARTUP)),
    }


def _epoch_minutes(step: ClimbedRung, rows: int) -> float:
    rows_per_s = step.middle("rows_per_s") or 1e-9
    return rows / rows_per_s / 60
