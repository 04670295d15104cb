"""The gallery of results, from summaries of runs. `python -m docs.pictures.gallery FOLDER` writes `docs/results.md`.

FOLDER holds runs of the experiments in `conf/experiment/`; each finished run is a row, and nothing is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "results.md"
HEAD = """# Results

A row is a run, read from its `summary.json`; `python -m docs.pictures.gallery FOLDER` writes this page from the runs in
a folder. A score stands with its 95 % interval over the rows of the test split. The *rival* is a cheap linear model on
the same rows. Seconds are of the whole run, from its first line to its last.

"""
HEADS = ("experiment", "rows: train / test", "network", "score", "rival", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.pictures.gallery", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where the runs are")
    runs = list(finished(parser.parse_args().folder))
    lines = [f"| {' | '.join(HEADS)} |", "|---|---|---|---|---|---:|", *(row(run) for run in runs)]
    commands = ["## The commands", "", "```text", *(run["command"] for run in runs), "```"]
    devices = ", ".join(sorted({device(run) for run in runs}))
    source = f"flatout {runs[0]['versions']['flatout']} at {commit()}, {devices}."
    PAGE.write_text("\n".join([HEAD + source, "", *lines, "", *commands, ""]), encoding="utf-8")
    print(f"{PAGE}: {len(runs)} runs")


def finished(folder: Path) -> Iterator[dict[str, Any]]:
    """Summaries of finished runs, by the name of their experiment."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.rglob("summary.json")]
    yield from sorted((run for run in found if run["status"] == "finished"), key=lambda run: str(run["experiment"]))


def row(run: dict[str, Any]) -> str:
    rows, model = run["data"]["rows"], run["model"]
    size = f"{model['name']}, {model['parameters'] / 1e6:.1f} M weights"
    counts = f"{rows['train']:,} / {rows['test'] or 0:,}"
    cells = (run["experiment"], counts, size, score(run), rival(run), f"{run['training']['seconds']:,.0f}")
    return f"| {' | '.join(cells)} |"


def score(run: dict[str, Any]) -> str:
    """The metric that decides, on the test split; on validation where there is no test."""
    split = "test" if f"test/{run['metric']}" in run["metrics"] else "val"
    name = f"{split}/{run['metric']}"
    value, interval = run["metrics"].get(name), run["intervals"].get(name)
    bounds = f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
    return "–" if value is None else f"{name} {value:.3f}{bounds}"


def rival(run: dict[str, Any]) -> str:
    """What the linear model beside it reaches: of texts the rival, of bits and recordings the ridge regression."""
    beside = run.get("rival") or run.get("baseline") or {}
    value = (beside.get("metrics") or {}).get(f"test/{run['metric']}")
    return "–" if value is None else f"{value:.3f}"


def device(run: dict[str, Any]) -> str:
    hardware = run["hardware"]
    return f"{hardware['cores']} cores of {hardware['device']}"


def commit() -> str:
    asked = ["git", "-C", str(PAGE.parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
