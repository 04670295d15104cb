"""Scores on published data sets, at the settings kept in `conf/experiment/`: from scratch, or of a pretrained encoder.

Each data set is a run of `python -m train` of its own, as a person would start it; the published systems' scores are
in the data's own pages. `--data` names the folder that holds one folder a data set.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claim import Claim, Options
from flatout.errors import UserError


@dataclass(frozen=True, slots=True)
class Task:
    """One data set: its folder, the experiment that trains on it, its official metric and our goal."""

    folder: str
    experiment: str
    metric: str
    goal: float
    suffix: str = ".csv"


TASKS = (
    Task("tweeteval_emotion", "tweets_emotion_scratch", "macro_f1", 55),
    Task("tweeteval_irony", "tweets_irony_scratch", "f1", 60),
    Task("tweeteval_sentiment", "tweets_sentiment_scratch", "macro_recall", 58, ".parquet"),
    Task("huffpost41", "huffpost41", "accuracy", 45, ".parquet"),
)

ENCODER_TASKS = (
    Task("wnut17", "tweets_ner", "f1", 38, ".jsonl"),
    Task("tweeteval_emotion", "tweets_emotion", "macro_f1", 72),
    Task("tweeteval_irony", "tweets_irony", "f1", 63),
    Task("tweeteval_sentiment", "tweets_sentiment", "macro_recall", 68, ".parquet"),
)
_MOST_MINUTES = 15


def claims(options: Options) -> Iterator[Claim]:
    """Each data set's official metric on its test rows, times 100, as mean over seeds."""
    if options.data is None or not (options.data / TASKS[0].folder).is_dir():
        hint = f"Set --data to a folder that holds {', '.join(task.folder for task in TASKS)}."
        raise UserError("bench quality", "needs published data sets", hint=hint)
    if options.pretrained is not None:
        yield from encoder_claims(options.data, options.pretrained)
        return
    seeds = 1 if options.quick else 3
    with tempfile.TemporaryDirectory() as runs:
        for task in TASKS:
            scores = [100 * score(task, options.data, Path(runs), seed) for seed in range(seeds)]
            mean = statistics.mean(scores)
            spread = statistics.stdev(scores) if seeds > 1 else 0.0
            note = (
                f"seeds {' '.join(f'{value:.1f}' for value in scores)}, sd {spread:.1f}; +experiment={task.experiment}"
            )
            claim = f"{task.folder}, test {task.metric}"
            yield Claim(claim, mean, None, "", None, f"≥ {task.goal:g}", mean >= task.goal, note)


def encoder_claims(data: Path, pretrained: str) -> Iterator[Claim]:
    """The same of an encoder that starts from pretrained weights, one run each, with the time that it took."""
    with tempfile.TemporaryDirectory() as runs:
        for task in ENCODER_TASKS:
            started = time.perf_counter()
            found = 100 * score(task, data, Path(runs), 0, f"model.pretrained={Path(pretrained).resolve()}")
            minutes = (time.perf_counter() - started) / 60
            note = f"{minutes:.1f} minutes of at most {_MOST_MINUTES}; +experiment={task.experiment}"
            holds = found >= task.goal and minutes <= _MOST_MINUTES
            yield Claim(f"{task.folder}, test {task.metric}", found, None, "", None, f"≥ {task.goal:g}", holds, note)


def score(task: Task, data: Path, runs: Path, seed: int, *more: str) -> float:
    """The test metric of one whole run."""
    place = data.resolve() / task.folder
    files = {"train": "train", "validation": "validation", "test": "test"}
    splits = [f"data.{split}={place / (name + task.suffix)}" for split, name in files.items()]
    folder = runs / f"{task.folder}-{seed}"
    settings = [f"+experiment={task.experiment}", *splits, f"seed={seed}", f"hydra.run.dir={folder}", *more]
    command = [sys.executable, "-m", "train", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"bench quality: {task.folder}", done.stderr.strip().splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return float(summary["metrics"][f"test/{task.metric}"])
