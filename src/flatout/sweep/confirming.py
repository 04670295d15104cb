"""The best settings of a sweep again, with other seeds: what they are worth when nothing was chosen for its result."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.report.summary import json_safe, write_atomically
from flatout.report.sweep_page import Confirmed
from flatout.sweep.searched import Searched
from flatout.sweep.trial import Ending, Status, Trial

_FILE = "confirmed.json"
Runner = Callable[[Callable[[], Trial | None], int], Iterator[tuple[Trial, Ending]]]
"""Runs what it is asked for, so many in all; trials as they end."""


@dataclass(slots=True)
class Confirmation:
    """What became of the confirming runs."""

    wanted: int = 0
    done: list[Confirmed] = field(default_factory=list)
    folders: dict[Path, dict[str, Any]] = field(default_factory=dict)
    """Of each run its folder, with its seed, how it ended and its metrics."""
    why_not: str = ""
    """What kept one of them from being complete."""

    def lines(self, metric: str) -> list[str]:
        """What there is to tell; nothing where none was asked for."""
        if not self.wanted:
            return []
        names = self.done[0].metrics if self.done else {}
        spreads = [_spread(name, self.done) for name in sorted(names) if name.endswith(f"/{metric}")]
        lines = [f"confirmed by {len(self.done)} of {self.wanted} seeds: {', '.join(spreads)}"] if self.done else []
        if len(self.done) < self.wanted:
            left = self.wanted - len(self.done)
            lines.append(f"not confirmed by {left} of {self.wanted} seeds: {self.why_not}")
        return lines


def confirm(searched: Searched, chosen: Mapping[str, str], number: int, run: Runner, is_over: bool) -> Confirmation:
    """Run settings again with other seeds, but for those that ran before an interruption."""
    count, path = searched.settings.confirm, searched.folder / _FILE
    first = searched.trial(number, chosen).job.seed + 1
    found = _known(path, chosen)
    seeds = {each: first + each for each in range(count)}
    missing = {each: seed for each, seed in seeds.items() if seed not in found}
    confirmation = Confirmation(count, why_not="the time was over" if missing else "")
    if missing and not is_over:
        print(f"confirming trial {number} with {len(missing)} other seeds")
        waiting = (searched.trial(each, chosen, f"confirm-{each}", f"seed={seed}") for each, seed in missing.items())
        for trial, ending in run(lambda: next(waiting, None), len(missing)):
            seed = seeds[trial.number]
            confirmation.folders[trial.folder] = {"seed": seed, "status": ending.status.value, **_told(ending)}
            if ending.status is Status.complete:
                found[seed] = ending.metrics
                kept = [{"settings": dict(chosen), "seed": each, "metrics": found[each]} for each in sorted(found)]
                write_atomically(path, json.dumps(json_safe(kept), indent=1))
            elif ending.status is Status.failed:
                confirmation.why_not = f"{trial.name}: {ending.note}"
    confirmation.done = [Confirmed(seed=seed, metrics=found[seed]) for seed in seeds.values() if seed in found]
    return confirmation


def _known(path: Path, chosen: Mapping[str, str]) -> dict[int, dict[str, float]]:
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return {each["seed"]: each["metrics"] for each in known if each["settings"] == chosen}


def _told(ending: Ending) -> dict[str, Any]:
    return {"value": ending.value, "metrics": ending.metrics}


def _spread(name: str, runs: Sequence[Confirmed]) -> str:
    values = [run.metrics[name] for run in runs if run.metrics.get(name) is not None]
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{name} {statistics.mean(values):.4f}{spread}" if values else f"{name} is not a number"
