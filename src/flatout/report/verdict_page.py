"""`verdict.html`: what limited a training of a user's script, on one page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.files import write_atomically
from flatout.report.page import render_text, tile, time_bar


def write_verdict_page(path: Path, command: str, judged: Mapping[str, Any]) -> Path:
    """Write the page of a verdict.

    `command`: the script and its arguments; `judged`: what `verdict.json` has.
    """
    verdict = judged["verdict"]
    evidence = judged["evidence"] or {"ms": {}, "ranks": []}
    findings = []
    if verdict is not None:
        findings = [[verdict["cause"], verdict["sentence"]]]
        findings += [[other["cause"], other["sentence"]] for other in verdict["others"]]
    page = render_text(
        "verdict.html",
        command=command,
        why_none=judged["why_none"] or "",
        figures=_tiles(judged),
        times=_parts(evidence["ms"]),
        findings=findings,
        ranks=[[str(rank), _split(ms)] for rank, ms in enumerate(evidence["ranks"])],
        machine=[[name, str(value)] for name, value in judged["machine"].items()],
    )
    write_atomically(path, page)
    return path


def _tiles(judged: Mapping[str, Any]) -> list[dict[str, str]]:
    tiles = []
    if (pace := judged["steps_per_s"]) is not None:
        bounds = f"{pace['low']:,.2f} to {pace['high']:,.2f}"
        tiles.append(tile(f"{pace['value']:,.2f}", "steps/s", bounds))
    if (evidence := judged["evidence"]) is not None:
        tiles.append(tile(f"{evidence['steps']:,}", "steps", "without the first few"))
        tiles.append(tile(f"{evidence['rows_per_batch']:,.0f}", "rows a batch"))
        if evidence["padding_share"]:
            tiles.append(tile(f"{evidence['padding_share']:.0%}", "padding", "of the tokens"))
        if evidence["workers"] is not None:
            tiles.append(tile(f"{evidence['workers']}", "workers", "that read batches"))
        reads = sum([*evidence["reads"].values(), *evidence["reads_by_line"].values()])
        if reads:
            tiles.append(tile(f"{reads:g}", "reads a step", "for which the host waits"))
    return tiles


def _parts(ms: Mapping[str, float]) -> list[dict[str, object]]:
    """The parts of a batch's time, the longest first, as a bar of a page shows them."""
    total = max(sum(ms.values()), 1e-9)
    longest_first = sorted(ms.items(), key=lambda part: part[1], reverse=True)
    shares = [(name, spent, spent / total) for name, spent in longest_first]
    return time_bar(part for part in shares if part[2] >= 0.005)


def _split(ms: Mapping[str, float]) -> str:
    return ", ".join(str(part["text"]) for part in _parts(ms))
