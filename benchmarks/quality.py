"""Scores on published data sets, at the settings kept in `conf/experiment/`: from scratch, or of a
pretrained encoder.

Each data set is a run of `python -m train` of its own, as a person would start it; the published
systems' scores are in the data's own pages. `--data` names the folder that holds one folder a data
set. Long articles are read in windows and cut, at settings that stand here.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.claim import Claim, Options
from flatout.errors import UserError


@dataclass(frozen=True, slots=True)
class Task:
    """One data set: its folder, the experiment that trains on it, its official metric
    and our goal.
    """

    folder: str
    experiment: str
    metric: str
    goal: float
    suffix: str = ".csv"

    @property
    def claim(self) -> str:
        return f"{self.folder}, test {self.metric}"


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
_ARTICLES = "newsgroups20, windows against cut, test accuracy"
_LONG_TEXTS = (
    "model=transformer model.hidden=128 model.layers=2 model.heads=4 optim.lr=1e-3 data=text"
    " data.vocabulary.size=8000 data.batch_size=32 monitor.progress=false monitor.rival=false"
    " checkpoint.patience=null"
).split()
_CUT = ("data.max_length=128",)
_WINDOWS = (
    "data.long=windows",
    "data.window=128",
    "data.overlap=0",
    "data.max_length=1024",
    "model.windows=attention",
)


def claims(options: Options) -> Iterator[Claim]:
    """Each data set's official metric on its test rows, times 100, as mean over seeds; then windows
    against cut.
    """
    tasks = TASKS if options.pretrained is None else ENCODER_TASKS
    folders = {task.claim: task.folder for task in tasks}
    if options.pretrained is None:
        folders[_ARTICLES] = "newsgroups20"
    if options.quick and options.only is None and options.pretrained is None:
        # they have most rows, and the longest ones
        del folders[TASKS[-1].claim], folders[_ARTICLES]
    wanted = {claim: folder for claim, folder in folders.items() if (options.only or "") in claim}
    if not wanted:
        raise UserError("--only", f"no row with {options.only!r}", allowed=", ".join(folders))
    missing = [
        each
        for each in wanted.values()
        if options.data is None or not (options.data / each).is_dir()
    ]
    if missing:
        hint = (
            f"Set --data to a folder that holds {', '.join(missing)}, or name other rows by --only."
        )
        raise UserError("bench quality", "needs published data sets", hint=hint)
    with tempfile.TemporaryDirectory() as runs:
        for task in (task for task in tasks if task.claim in wanted):
            yield (scratch_claim if tasks is TASKS else encoder_claim)(task, options, Path(runs))
        if _ARTICLES in wanted:
            yield windows_claim(options, Path(runs))


def scratch_claim(task: Task, options: Options, runs: Path) -> Claim:
    scores = scored(task, options, runs)
    return claim_of(task, scores, f"{told(scores)}; +experiment={task.experiment}")


def encoder_claim(task: Task, options: Options, runs: Path) -> Claim:
    """The same of an encoder that starts from pretrained weights, with the time that a run took."""
    started = time.perf_counter()
    scores = scored(
        task, options, runs, f"model.pretrained={Path(str(options.pretrained)).resolve()}"
    )
    minutes = (time.perf_counter() - started) / 60 / len(scores)
    note = (
        f"{told(scores)}; {minutes:.1f} minutes a run of at most {_MOST_MINUTES};"
        f" +experiment={task.experiment}"
    )
    return claim_of(task, scores, note, in_time=minutes <= _MOST_MINUTES)


def windows_claim(options: Options, runs: Path) -> Claim:
    """Long articles in windows against the same cut at the length of one window: a small encoder,
    from scratch.
    """
    assert options.data is not None, "checked before the first run"
    splits = _write_parts(
        options.data / "newsgroups20", runs, rows=options.choose(4_000, 1_000, 200)
    )
    epochs = options.choose(8, 2, 1)
    shared = [*_LONG_TEXTS, *splits, f"trainer.max_epochs={epochs}"]
    seeds = range(1 if options.quick else 3)
    cut, windows = (
        [
            100 * _run(f"newsgroups20-{seed}", [*shared, *how, f"seed={seed}"], "accuracy", runs)
            for seed in seeds
        ]
        for how in (_CUT, _WINDOWS)
    )
    note = (
        f"windows: {told(windows)}; cut: {told(cut)}; {' '.join(_WINDOWS)} against {' '.join(_CUT)}"
    )
    ours, theirs = statistics.mean(windows), statistics.mean(cut)
    return Claim(_ARTICLES, ours, theirs, "", ours / theirs, "≥ 1×", ours >= theirs, note)


def _write_parts(place: Path, runs: Path, rows: int) -> list[str]:
    """Settings that name the parts of the articles, drawn with one seed."""
    draw = np.random.default_rng(1)
    train, test = (pq.read_table(place / f"{split}.parquet") for split in ("train", "test"))
    order = draw.permutation(len(train))
    rows = min(rows, len(train) * 3 // 4)
    parts = {
        "train": train.take(order[:rows]),
        "validation": train.take(order[rows : rows + rows // 8]),
    }
    parts["test"] = test.take(draw.permutation(len(test))[: rows // 2])
    for split, part in parts.items():
        pq.write_table(part, runs / f"newsgroups20-{split}.parquet")
    return [f"data.{split}={runs / f'newsgroups20-{split}.parquet'}" for split in parts]


def scored(task: Task, options: Options, runs: Path, *more: str) -> list[float]:
    """The score of each seed: of three, or of one with `--quick`."""
    assert options.data is not None, "checked before the first run"
    return [
        100 * score(task, options.data, runs, seed, *more)
        for seed in range(1 if options.quick else 3)
    ]


def told(scores: Sequence[float]) -> str:
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return f"seeds {' '.join(f'{value:.1f}' for value in scores)}, sd {spread:.1f}"


def claim_of(task: Task, scores: Sequence[float], note: str, *, in_time: bool = True) -> Claim:
    mean = statistics.mean(scores)
    holds = mean >= task.goal and in_time
    return Claim(task.claim, mean, None, "", None, f"≥ {task.goal:g}", holds, note)


def score(task: Task, data: Path, runs: Path, seed: int, *more: str) -> float:
    """The test metric of one whole run."""
    place = data.resolve() / task.folder
    files = {"train": "train", "validation": "validation", "test": "test"}
    splits = [f"data.{split}={place / (name + task.suffix)}" for split, name in files.items()]
    settings = [f"+experiment={task.experiment}", *splits, f"seed={seed}", *more]
    return _run(f"{task.folder}-{seed}", settings, task.metric, runs)


def _run(name: str, settings: Sequence[str], metric: str, runs: Path) -> float:
    folder = Path(tempfile.mkdtemp(prefix=name, dir=runs))
    command = [sys.executable, "-m", "train", *settings, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"bench quality: {name}", done.stderr.strip().splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return float(summary["metrics"][f"test/{metric}"])
