"""Publish measured ladders: their tables in docs/ladder.md, and pictures of their pages.

`python -m docs.pictures.ladders FOLDER...` takes folders of ladders, or folders above them. Of each
ladder the newest run with a comparison of quality is shown, else the newest; the other runs are its
repeats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.ladder.closing import closing_lines, figures, written
from flatout.ladder.page import PAGE, write_ladder_page
from flatout.ladder.results import FILE

FOLDER = Path(__file__).parent
DOCUMENT = FOLDER.parent / "ladder.md"
BEGIN = "<!-- measured ladders: python -m docs.pictures.ladders -->"
END = "<!-- end of measured ladders -->"
ORDER = ("headlines", "tweets", "bloom", "lyrics", "battery")
PICTURED = ("headlines", "tweets")
"""Ladders whose pages are shown."""
HEIGHT = 1400
Found = dict[str, Any]

REASONS = {
    "tokenise once": (
        "on a CPU the model itself is the time: tokenising is a few per cent of a step"
    ),
    "batch size found": "a CPU is busy with eight rows already; a larger batch fills a GPU",
    "8 workers": "workers and model share the cores",
    "persistent workers": "starting workers is paid once an epoch, and little beside it",
    "no workers": (
        "a worker sends each batch through memory that both must map; small rows cost less to make"
    ),
    "batch 32": "a CPU is busy with sixteen rows already; a larger batch fills a GPU",
    "parallel loading": (
        "the loader only cuts rows that are numbers already; workers and model share the cores"
    ),
    "dynamic padding": "a CPU computes each padded token at its full price",
    "checkpointing": "the forward pass is computed twice",
    "sixteen bits": (
        "embeddings, softmax and the optimizer stay fp32; of a small model they are much"
    ),
    "bf16": "embeddings, softmax and the optimizer stay fp32; of a small model they are much",
    "one read": "reading a number waits for a GPU; on a CPU there is nothing to wait for",
    "log each 100": "small batches make a log line a large fraction of a step",
    "state kept": "two small tensors of zeros cost a CPU next to nothing",
    "accumulation": "the optimizer's pass over all weights is most of a step of eight rows",
    "compile": "one process compiles few operations; products of matrices stay what they are",
}
"""Why a promise of a guide and a measurement differ, by the name of the rung."""


def main() -> None:
    runs = read_runs(Path(word) for word in sys.argv[1:])
    if not runs:
        raise SystemExit(
            "ladders: no ladder.json in these folders. Climb first: python -m flatout ladder"
            " +ladder=NAME"
        )
    DOCUMENT.write_text(published(DOCUMENT.read_text(encoding="utf-8"), runs), encoding="utf-8")
    print(DOCUMENT)
    for name in PICTURED:
        if name in runs:
            take_page(runs[name][0], FOLDER / f"ladder_{name}.png")


def read_runs(folders: Iterable[Path]) -> dict[str, list[Found]]:
    """The runs of each ladder, the one to show first."""
    paths = sorted({path.resolve() for folder in folders for path in folder.rglob(FILE)})
    found: dict[str, list[Found]] = {}
    for path in paths:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["whole"] and values.get("seconds"):  # one that was ended midway has no total
            command = " ".join(
                word for word in values["command"].split() if not word.startswith("output=")
            )
            found.setdefault(values["name"], []).append(
                values | {"folder": str(path.parent), "command": command}
            )
    for runs in found.values():
        runs.sort(key=lambda run: (run["quality"] is not None, run["folder"]), reverse=True)
    names = sorted(
        found, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)
    )
    return {name: found[name] for name in names}


def take_page(found: Found, path: Path) -> None:
    """The page of a ladder as PNG."""
    from docs.pictures.make import take_picture

    folder = Path(found["folder"])
    write_ladder_page(folder, found)
    take_picture(folder / PAGE, path, height=HEIGHT)


def published(text: str, runs: Mapping[str, Sequence[Found]]) -> str:
    """The document with the tables between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(
            f"{DOCUMENT.name}: no lines {BEGIN!r} and {END!r}. Put them where the tables belong."
        )
    return "\n".join([before + BEGIN, "", *document_lines(runs), "", END + after])


def document_lines(runs: Mapping[str, Sequence[Found]]) -> list[str]:
    """Machine, summary, what the promises got wrong, and a table for each ladder."""
    shown = [each[0] for each in runs.values()]
    first = shown[0]
    torch = first["versions"]["torch"].partition("+")[0]
    lines = [f"Measured on {first['device']}, {first['date']}, with torch {torch}.", ""]
    lines += [*summary_table(runs), ""]
    lines += ["### What the promises got wrong", "", *promise_lines(shown), ""]
    for found in shown:
        lines += [*ladder_lines(found), ""]
    return lines[:-1]


def summary_table(runs: Mapping[str, Sequence[Found]]) -> list[str]:
    """A row for each ladder: speed-up, its repeat, quality before and after."""
    lines = [
        "| ladder | promised in all | measured | again | an epoch before | after | quality |"
        " difference in points |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, each in runs.items():
        found, whole = each[0], each[0]["whole"]
        again = ", ".join(
            _repeat(whole["ratio"]["value"], run["whole"]["ratio"]["value"]) for run in each[1:]
        )
        cells = [f"`{name}`", found["in_all"] or "none", written(whole["ratio"]), again or "–"]
        cells += [
            _time(whole["minutes_before"]),
            _time(whole["minutes_after"]),
            *_quality(found["quality"]),
        ]
        lines.append(_row(cells))
    return lines


def _repeat(first: float, second: float) -> str:
    """A repeated speed-up, and how far it lies from the first."""
    return f"{_times(second)} ({max(first, second) / min(first, second) - 1:.0%} apart)"


def _quality(quality: Mapping[str, Any] | None) -> list[str]:
    if quality is None:
        return ["not compared", "–"]
    before, after = (f"{group['mean']:.2f}" for group in quality["groups"])
    found = quality["difference"]
    sure = "" if found["low"] is None else f" ({found['low']:+.2f} to {found['high']:+.2f})"
    return [
        f"{quality['metric']} {before} → {after}, {quality['seeds']} seeds",
        f"{found['value']:+.2f}{sure}",
    ]


def promise_lines(shown: Sequence[Found]) -> list[str]:
    """Every rung that a guide promised a factor for, the worst kept promise first."""
    promised = [(found, rung) for found in shown for rung in found["rungs"] if rung["factor"]]
    measured = [(found["name"], rung) for found, rung in promised if rung["measured"]]
    counts = [judge(rung) for _, rung in measured]
    missing = [
        f"{rung['name']} (`{found['name']}`)" for found, rung in promised if not rung["measured"]
    ]
    counted = ", ".join(
        f"{counts.count(word)} {about}" for word, about in ABOUT.items() if word in counts
    )
    lines = [
        f"Of {len(measured)} promises that could be measured here: {counted}."
        + (f" Not measurable here: {', '.join(missing)}." if missing else ""),
        "",
        "| ladder | rung | promised | measured | | why |",
        "|---|---|---|---|---|---|",
    ]
    for name, rung in sorted(
        measured, key=lambda each: each[1]["measured"]["value"] / each[1]["factor"][0]
    ):
        word = judge(rung)
        why = "" if word in (KEPT, OPEN) else REASONS.get(rung["name"], "")
        lines.append(
            _row([f"`{name}`", rung["name"], rung["promised"], _measured(rung), word, why])
        )
    return lines


LESS = "less"
KEPT = "kept"
MORE = "more"
OPEN = "open"
ABOUT = {
    LESS: "brought less",
    KEPT: "brought what was promised",
    MORE: "brought more",
    OPEN: "left open, as rounds differ",
}


def judge(rung: Mapping[str, Any]) -> str:
    """Whether a promise was kept; open where the value misses the promised range, and some round
    does not.
    """
    found, (least, most) = rung["measured"], rung["factor"]
    low, high = found["low"] or found["value"], found["high"] or found["value"]
    if least <= found["value"] <= most:
        return KEPT
    return LESS if high < least else MORE if low > most else OPEN


def ladder_lines(found: Found) -> list[str]:
    """The table of a ladder with its closing sentences."""
    heads, cells = figures(found)
    lines = [f"### `{found['name']}`: {found['title']}", "", f"`{found['command']}`", ""]
    lines += [_row(["rung", "promised", *heads, ""]), _row(["---"] * (len(heads) + 3))]
    for rung, row in zip(found["rungs"], cells, strict=True):
        verdict = "" if rung["verdict"] in (None, "pays") else f"**{rung['verdict']}**"
        lines.append(_row([rung["name"], rung["promised"], *row, rung["skipped"] or verdict]))
    lines += ["", *(f"- {line}" for line in closing_lines(found) if not _is_of_table(line, found))]
    if found["name"] in PICTURED:
        lines += [
            "",
            f"![The page of the ladder {found['name']}](pictures/ladder_{found['name']}.png)",
        ]
    return lines


def _is_of_table(line: str, found: Found) -> bool:
    """Whether a closing line repeats what the table says of a rung."""
    return any(
        line == f"{each['name']}: {each['why']}" for each in found["skipped"]
    ) or line.endswith("not measured:")


def _measured(rung: Mapping[str, Any]) -> str:
    return ("startup " if rung["measures"] == "startup" else "") + written(rung["measured"])


def _times(value: float) -> str:
    return written({"value": value, "low": None})


def _time(minutes: float) -> str:
    return f"{minutes:.1f} min" if minutes >= 1 else f"{60 * minutes:.1f} s"


def _row(cells: Sequence[str]) -> str:
    return "|" + "|".join(cell.replace("|", "\\|") for cell in cells) + "|"


if __name__ == "__main__":
    main()
