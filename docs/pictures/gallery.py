"""The gallery of results, from summaries of runs. `python -m docs.pictures.gallery FOLDER` writes
`docs/results.md`.

FOLDER holds runs of experiments of `conf/experiment/`. Each finished run is a row; experiments
without one are named.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"
EXPERIMENTS = ROOT / "conf" / "experiment"
HEAD = """# Results

What the experiments of `conf/experiment/` score, so that you know what to expect before you start
one.

```sh
python -m docs.pictures.gallery outputs
```

writes this page from the runs in a folder. A row is a run, read from its `summary.json`. A score
stands with its 95 % interval over the test rows. Beside it stands what a simple model reaches on
the same rows, or for made-up data the best score that their noise allows. Seconds are those of
training, and longer where other work shares the cores. Kilowatt-hours are those of the whole run,
where a counter can be read ([energy](price.md#energy-and-money)). One seed is no mean: repeat a run
with `seed=1` before you compare. Files are public: ETTh1 (electricity transformers), HuffPost's 41
categories, TweetEval's emotion, irony and sentiment. The commands find each in a folder of its
name.

"""
HEADS = (
    "experiment",
    "data: training / test",
    "network",
    "score",
    "beside it",
    "seconds",
    "kWh",
    "cores",
)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.pictures.gallery", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where the runs are")
    parser.add_argument(
        "--commit", default="", help="what the runs were made with, where it is not checked out now"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    given = parser.parse_args(words)
    runs = list(finished(given.folder))
    given.page.write_text(page(runs, given.commit or checked_out()), encoding="utf-8")
    print(f"{given.page}: {len(runs)} runs")


def page(runs: Sequence[dict[str, Any]], commit: str) -> str:
    versions = sorted({f"torch {run['versions']['torch']}" for run in runs})
    devices = sorted({run["hardware"]["device"] for run in runs})
    numbers = sorted({str(run["hardware"]["precision"]) for run in runs})
    source = (
        f"Measured on {', '.join([*devices, *versions])}, in {' and '.join(numbers)}, at commit"
        f" {commit}."
    )
    table = [f"| {' | '.join(HEADS)} |", "|---|---|---|---|---|---:|---:|---:|", *map(row, runs)]
    commands = ["## Repeat a row", "", "```sh", *(str(run["command"]) for run in runs), "```"]
    return "\n".join([HEAD + source, "", *table, "", *commands, "", *without(runs)]) + "\n"


def finished(folder: Path) -> Iterator[dict[str, Any]]:
    """Summaries of finished runs, by the name of their experiment."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.rglob("summary.json")]
    yield from sorted(
        (run for run in found if run["status"] == "finished"),
        key=lambda run: str(run["experiment"]),
    )


def row(run: dict[str, Any]) -> str:
    model = run["model"]
    size = f"{model['name']}, {model['parameters']:,} weights"
    cells = (
        run["experiment"],
        data(run),
        size,
        score(run),
        beside(run),
        f"{run['training']['seconds']:,.0f}",
        energy(run),
        cores(run),
    )
    return f"| {' | '.join(map(str, cells))} |"


def data(run: dict[str, Any]) -> str:
    """What is read, and how much of it; a sequence is counted by its recordings."""
    of_sequences = run["data"]["sequences"] or {}
    rows = of_sequences.get("recordings") or run["data"]["rows"]
    thing = "recordings" if of_sequences else "rows"
    path = Path(run["data"]["source"].removeprefix("sample:"))
    name = path.parent.name if path.stem == "train" and path.parent.name else path.name
    return f"{name}: {rows['train']:,} / {rows['test'] or 0:,} {thing}"


def score(run: dict[str, Any]) -> str:
    """The metric that decides, on the test split; on validation where there is no test."""
    split = "test" if f"test/{run['metric']}" in run["metrics"] else "val"
    name = f"{split}/{run['metric']}"
    bounds = (
        " ({:.4g} to {:.4g})".format(*run["intervals"][name]) if name in run["intervals"] else ""
    )
    return f"{name} {run['metrics'][name]:.4g}{bounds}"


def beside(run: dict[str, Any]) -> str:
    """What the rival reaches, or the ridge regression of bits and recordings, or what is known of
    made-up data.
    """
    other = run["rival"] or run["baseline"] or {}
    value = other.get("metrics", {}).get(f"test/{run['metric']}")
    return "–" if value is None else f"{re.split(' (?:on|of) ', other['name'])[0]} {value:.4g}"


def energy(run: dict[str, Any]) -> str:
    """Kilowatt-hours of the whole run; a dash where no counter could be read."""
    kwh = (run["price"] or {}).get("kwh")
    return "–" if kwh is None else f"{kwh:.3g}"


def cores(run: dict[str, Any]) -> str:
    return f"{run['hardware']['cores_allowed'] or run['hardware']['cores']:g}"


def without(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What no row shows: searches, and experiments without their files or time."""
    missing = sorted(
        {path.stem for path in EXPERIMENTS.glob("*.yaml")}
        - {str(run["experiment"]) for run in runs}
    )
    names = ", ".join(f"`{name}`" for name in missing)
    left = textwrap.wrap(f"They are searches, need files, or take longer: {names}.", 120)
    return (
        ["## What is not here", "", *left, "`python -m train +experiment=NAME` runs each."]
        if missing
        else []
    )


def checked_out() -> str:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
