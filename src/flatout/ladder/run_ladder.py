"""Run a ladder: write its rows, climb, train to the end if seeds are asked for, and report."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil

from flatout.data.store.cache import Cache
from flatout.distributed.processes import wait_until_warm, warm_start
from flatout.engine.run_length import EPOCHS
from flatout.errors import UserError, did_you_mean, require
from flatout.files import write_atomically
from flatout.ladder.case import describe, encoder_folder, program_of, require_followed
from flatout.ladder.chart import write_figure
from flatout.ladder.climb import (
    TOO_SHORT,
    ClimbedRung,
    Program,
    climb,
    measure_apart,
    measure_run,
    measure_usual,
    top_of,
)
from flatout.ladder.compare_runs import Group, paired_difference, quality_sentence
from flatout.ladder.page import write_ladder_page
from flatout.ladder.results import FILE, results
from flatout.ladder.rows import WAYS, quoted, way_of, write_rows
from flatout.ladder.rungs import OF_ENCODERS, Ladder, Rung
from flatout.ladder.usual.program import Case
from flatout.models.contract import ModelConfig, asks_for_ngrams
from flatout.models.encoder.transformer import TransformerConfig
from flatout.models.words import Ngrams
from flatout.perf.measure.apart import Failed
from flatout.perf.notes import machine_name, note_ladder
from flatout.report.summary import json_safe, versions
from flatout.run.resolve import clip_of

if TYPE_CHECKING:
    from flatout.run.job import RunJob

_QUIET = (
    "monitor.progress=false monitor.rival=false logger=none resume=null checkpoint.patience=null"
    " tune=off".split()
)
_WATCHED_S = 0.5  # for how long the machine is watched before and after the climb
Compose = Callable[[Sequence[str]], "RunJob"]  # a run of the shared settings and more words


def run_ladder(
    ladder: Ladder,
    top: RunJob,
    compose: Compose,
    folder: Path,
    *,
    command: str,
    budget_s: float,
    seeds: int,
) -> dict[str, Any]:
    """Climb from a usual program to the run `top`, and write the page and `ladder.json`.

    Returns what the file holds. `seeds`: how many trainings to the end compare the quality.
    """
    require_fitting(ladder, top.config.data, top.config.model)
    require_followed(top.config.model)
    require_keywords(ladder)
    # All mistakes are found above, before rows are written; the server warms up meanwhile.
    ladder = with_cut(ladder, top.config.model)
    warm_start()
    began = time.monotonic()
    rungs = _Rungs(ladder, top, compose, folder)
    wait_until_warm()
    count = rungs.count
    spent = time.monotonic() - began
    say(f"{ladder.title}: {count:,} rows, {len(ladder.rungs)} rungs, rows written in {spent:.1f} s")
    before = busy_cores()
    steps = climb(ladder, rungs.make, folder, budget_s=budget_s, say=say)
    rows_at_once, _ = top.config.data.batches(1)
    about = {
        "command": command,
        "folder": str(folder),
        "date": time.strftime("%Y-%m-%d"),
        "budget_s": budget_s,
        "others": {"cores": max(before, busy_cores()), "of": cpu_count()},
        "batch": rows_at_once,
        "device": machine_name(),
        "versions": versions(),
    }
    values: dict[str, Any] = json_safe(results(ladder, steps, rows=count, about=about))
    # Written now as well: trainings to the end may take hours, and the climb is done.
    write(values, folder)
    if seeds:
        values["quality"] = json_safe(compare_quality(rungs, steps, seeds))
    values["seconds"] = time.monotonic() - began
    write(values, folder)
    write_ladder_page(folder, values)
    write_figure(folder, values["rungs"])
    try:
        note_ladder(Cache(None).folder, values, {rung.name: rung.setting for rung in ladder.rungs})
    except OSError as error:
        say(f"the gains are not noted for later verdicts: {error}")
    return values


def busy_cores() -> float:
    """How many cores other programs keep busy now; none of ours computes meanwhile."""
    share: float = psutil.cpu_percent(interval=_WATCHED_S) / 100
    return share * cpu_count()


def cpu_count() -> int:
    return psutil.cpu_count() or 1


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def write(found: dict[str, Any], folder: Path) -> None:
    write_atomically(folder / FILE, json.dumps(found, indent=1, ensure_ascii=False))


def require_fitting(ladder: Ladder, data: object, model: object) -> None:
    """Refuse a ladder for another kind of data, or for another model."""
    way = way_of(data)
    program = program_of(model)
    hint = "Leave +ladder out: rungs for your data are then chosen."
    needed = next(each.title for each in WAYS.values() if each.kind == ladder.kind)
    require(
        way.kind == ladder.kind,
        "+ladder",
        f"{ladder.name} needs {needed}, and these are {way.title}",
        hint=hint,
    )
    require(
        program == ladder.program,
        "+ladder",
        f"{ladder.name} has no rungs for {type(model).__name__}",
        hint=hint,
    )


def with_cut(ladder: Ladder, model: ModelConfig) -> Ladder:
    """The ladder with two thirds of its encoder's layers in the place of `{cut}`."""
    if ladder.program != OF_ENCODERS:
        return ladder
    layers = cast(TransformerConfig, model).read_description().num_hidden_layers
    cut = f"{max(1, 2 * layers // 3)}"
    rungs = list[Rung]()
    for rung in ladder.rungs:
        # `model.freeze_layers={cut}` is 8 for an encoder of 12 layers
        words = tuple(word.replace("{cut}", cut) for word in rung.words)
        rungs.append(replace(rung, words=words))
    return replace(ladder, rungs=tuple(rungs))


def require_keywords(ladder: Ladder) -> None:
    """Refuse a change of a keyword that the usual program does not have."""
    program = ladder.program
    names = [
        each.name
        for each in fields(importlib.import_module(f"flatout.ladder.usual.{program}").OPTIONS)
    ]
    for rung in ladder.rungs:
        for name in rung.keywords or {}:
            require(
                name in names,
                f"{ladder.name}: {rung.name}",
                f"the usual program {program} has no keyword {name}",
                allowed=", ".join(names),
                hint=did_you_mean(name, names),
            )


class _Rungs:
    """What makes the program of each rung, for rows that are written once."""

    def __init__(self, ladder: Ladder, top: RunJob, compose: Compose, folder: Path) -> None:
        self.ladder = ladder
        self.config = top.config
        self.compose = compose
        self.folder = folder
        data = top.config.data
        model = top.config.model
        seed = top.config.seed
        reading = dict(ladder.reading)
        rows_at = folder / "rows"
        words, read, self.count = write_rows(data, rows_at, joined=reading.pop("joined", None))
        self.words = [*words, *_QUIET, f"data.cache={quoted(str((folder / 'cache').absolute()))}"]
        if ladder.program == OF_ENCODERS:
            encoder = encoder_folder(
                model, data, rows_at / "train.csv", folder / "encoder", seed
            ).absolute()
            reading["pretrained"] = str(encoder)
            self.words.append(f"model.pretrained={quoted(str(encoder))}")
        epochs = int(top.config.trainer.get("max_epochs") or EPOCHS)
        # The usual program takes so many steps, and answers by its network alone.
        rows_at_once, _ = data.batches(1)
        self.words += [f"data.batch_size={rows_at_once}", f"trainer.max_epochs={epochs}"]
        if asks_for_ngrams(model) != Ngrams.off:
            self.words.append("model.ngrams=off")
        self.case: Case = describe(
            data,
            model,
            top.config.optim,
            reading={**read, **reading},
            folder=rows_at,
            clip=clip_of(top.config),
            epochs=epochs,
            seed=seed,
        )
        # A mistake in a rung's words shows here, before anything is measured.
        for rung in ladder.rungs:
            if rung.is_ours:
                compose([*self.words, *rung.words])

    def make(self, rung: Rung, seconds: float) -> Program:
        """The program of a rung, that trains for some seconds."""
        limit = f"{int(seconds // 60):02d}:{seconds % 60:02.0f}"
        short = [
            f"+trainer.max_time='00:00:{limit}'",
            "+trainer.limit_val_batches=1",
            "+trainer.limit_test_batches=1",
        ]
        return self._program(rung, short, self.case)

    def whole(self, rung: Rung, seed: int) -> Program:
        """The program of a rung that trains all epochs."""
        return self._program(rung, [f"seed={seed}"], replace(self.case, seed=seed))

    def _program(self, rung: Rung, more: Sequence[str], case: Case) -> Program:
        if rung.keywords is not None:
            return partial(measure_usual, self.ladder.program, case, dict(rung.keywords))
        words = [*self.words, *rung.words, *more]
        return partial(measure_run, self.compose(words), words)


def compare_quality(
    rungs: _Rungs, steps: Sequence[ClimbedRung], seeds: int
) -> dict[str, Any] | None:
    """Compare the test metric of trainings to the end, with several seeds; None without a top.

    The foot, the top and rungs that learn something else are trained.
    """
    can_be = [step for step in steps if step.rounds or step.skipped == TOO_SHORT]
    if not (top := top_of([step.rung for step in can_be])):
        return None
    # Rungs between the foot and the top learn what the top learns, so their quality is its own.
    compared = [can_be[0], *can_be[top:]]
    names = [step.rung.name for step in compared]
    rates = [step.middle("rows_per_s") for step in compared]
    if all(rates):
        minutes = sum(rungs.count * rungs.case.epochs * seeds / rate / 60 for rate in rates if rate)
        say(
            f"{', '.join(names[:-1])} and {names[-1]} train to their end: some {minutes:.0f} min"
            " with all seeds"
        )
    metric = way_of(rungs.config.data).metric
    values: list[list[float]] = [[] for _ in compared]
    for seed in range(rungs.case.seed, rungs.case.seed + seeds):
        for step, points in zip(compared, values, strict=True):
            points.append(100 * _train(rungs, step.rung, seed)[metric])
            say(f"seed {seed}, {step.rung.name}: test {metric} {points[-1]:.2f}")
    # The top is compared with the foot; what learns something else, with the top.
    difference = paired_difference(values[0], values[1])
    groups = [
        {"name": name, **asdict(Group.of(points))}
        for name, points in zip(names, values, strict=True)
    ]
    others = {
        name: paired_difference(values[1], points)
        for name, points in zip(names[2:], values[2:], strict=True)
    }
    sentences = [
        f"{name} against {names[1]}: {quality_sentence(each)}" for name, each in others.items()
    ]
    found = {"metric": metric, "seeds": seeds, "epochs": rungs.case.epochs, "groups": groups}
    return found | {
        "difference": asdict(difference),
        "sentence": "; ".join([quality_sentence(difference), *sentences]),
    }


def _train(rungs: _Rungs, rung: Rung, seed: int) -> dict[str, float]:
    at = rungs.folder / "quality" / f"{rung.name.replace(' ', '-')}-seed-{seed}"
    try:
        return measure_apart(rungs.whole(rung, seed), None, at).metrics or {}
    except Failed as failed:
        raise UserError(
            "ladder", f"{rung.name} could not be trained to the end: {failed}"
        ) from None
