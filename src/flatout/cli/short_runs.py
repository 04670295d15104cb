"""Time command lines of `python -m train`: short runs in processes of their own, in turn."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flatout.cli.train import main
from flatout.distributed.processes import OUTPUT, end_with_parent, redirect_output
from flatout.errors import EXIT_CODE, RunBroke, UserError
from flatout.perf.measure.rounds import take_turns
from flatout.perf.verdict.evidence import Evidence


def with_override(words: Sequence[str], override: str) -> list[str]:
    """A command line with an override; `~callbacks.NAME` takes away the words that add that callback."""
    if override.startswith("~"):
        kept = [word for word in words if not word.startswith(f"+{override[1:]}.")]
        return kept if len(kept) < len(words) else [*words, override]  # a file may have added it
    changed = {_key(part) for part in override.split()}
    return [*(word for word in words if _key(word) not in changed), *override.split()]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def train_apart(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """The summary of a run in a process of its own; a mistake there is a mistake here."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    output = folder.with_suffix(".txt")
    given = [*words, f"hydra.run.dir={folder}"]
    process = context.Process(target=_train, args=(given, str(output), dict(os.environ)))
    process.start()
    process.join()
    if process.exitcode:
        printed = output.read_text(encoding="utf-8", errors="replace").strip() if output.is_file() else ""
        last = printed.splitlines()[-1] if printed else f"it ended with {process.exitcode}"
        if process.exitcode == EXIT_CODE:
            raise UserError("", last)
        raise RunBroke(f"python -m train {' '.join(words)}: ended with {process.exitcode}: {last}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def _train(words: list[str], output: str, environment: dict[str, str]) -> None:
    os.environ |= {**environment, OUTPUT: output}
    end_with_parent()
    redirect_output()
    main(words)


def rows_per_s(summary: dict[str, Any]) -> float:
    """Rows a second of a run, everything counted but its first few steps."""
    evidence = Evidence.from_dict(summary["evidence"])
    return 1000 * evidence.rows_per_batch / evidence.total_ms


def time_in_turn(
    sides: Sequence[Sequence[str]],
    place: Path,
    rounds: int,
    check: Callable[[Path], None] = lambda folder: None,
) -> list[list[float]]:
    """Rows a second of each command line in each round; `check` sees the folder of each run."""
    count = 0

    def side(words: Sequence[str]) -> Callable[[], float]:
        def rate() -> float:
            nonlocal count
            count += 1
            folder = place / f"run-{count}"
            found = rows_per_s(train_apart(words, folder))
            check(folder)
            return found

        return rate

    return take_turns([side(words) for words in sides], least=rounds)
