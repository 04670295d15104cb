"""Compute the figures of a measured ladder, rung by rung, as plain values for `ladder.json`.

`results` turns the measurements of a climb into one mapping: the gain of each rung over the rung
below it, the gain over the foot, and the whole ladder from foot to top. Open this file to add a
key to `ladder.json`, or to change when a rung counts as worth its setting. `closing.py` puts the
mapping into words, `page.py` and `chart.py` draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flatout.ladder.climb import TOO_SHORT, Step, ratio, top_of
from flatout.ladder.compare_runs import Estimate
from flatout.ladder.rungs import STARTUP, Ladder

FILE = "ladder.json"
SCHEMA = 1
LEAST_GAIN = 1.02  # a rung below this ratio does not pay
PAYS = "pays"
UNSURE = "unsure"
COSTS = "does not pay"


def results(
    ladder: Ladder, steps: Sequence[Step], *, rows: int, about: dict[str, Any]
) -> dict[str, Any]:
    """All figures of a ladder; `rows`: of an epoch."""
    rungs = list[dict[str, Any]]()
    below = list[Step]()
    for step in steps:
        rungs.append(_rung(step, below))
        below += [step] if step.found else []
    return {
        "schema": SCHEMA,
        **{name: getattr(ladder, name) for name in ("name", "title", "kind", "in_all")},
        "rows": rows,
        **about,
        "rungs": rungs,
        "whole": _whole([step for step in steps if step.found], rows),
        "skipped": [
            {"name": step.rung.name, "why": step.skipped}
            for step in steps
            if step.skipped and not step.found
        ],
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
    for name in (
        "rows_per_s",
        "tokens_per_s",
        "wait_share",
        "padding_share",
        "startup_s",
        "memory_gb",
        "device_share",
    ):
        found[name] = step.middle(name)
    return found | {"rounds": len(step.found), "spread": step.spread}


def judge(gain: Estimate) -> str:
    """Whether a rung pays: its gain is worth a setting, and enough rounds show that it is no
    chance.
    """
    if gain.value < LEAST_GAIN:
        return COSTS
    return PAYS if gain.low is not None and gain.low > 1 else UNSURE


def _whole(measured: Sequence[Step], rows: int) -> dict[str, Any] | None:
    if not (place := top_of([step.rung for step in measured])):
        return None
    foot, top = measured[0], measured[place]
    minutes = [rows / (step.middle("rows_per_s") or 1e-9) / 60 for step in (foot, top)]
    found = {
        "foot": foot.rung.name,
        "top": top.rung.name,
        "minutes_before": minutes[0],
        "minutes_after": minutes[1],
    }
    found |= {"ratio": asdict(ratio(foot, top)), "startup_before_s": foot.middle("startup_s")}
    return found | {
        "startup_after_s": top.middle("startup_s"),
        "startup_ratio": asdict(ratio(foot, top, STARTUP)),
    }
