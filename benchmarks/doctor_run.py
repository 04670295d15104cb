"""`doctor run` on ten scripts that know nothing of flatout, and its gate against slower trainings.

Each script has one planted bottleneck: five train with transformers' Trainer, five with Lightning's
(`doctor_scripts/`). Their rows say whether the cause is named first, whether the promised bounds
hold what the script without it gains, and whether weights change. The gate compares trainings that
are 20 % slower, and others that are not. All times leave out those in which other processes had the
core, so a busy machine can be measured on; where it was busy, the row says so.

Each row is kept in the cache folder (`bench/doctor_run.jsonl`) under the name of the machine. A
bench that was stopped begins where it ended; delete the file to measure all rows again.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import runpy
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.claim import Claim, Options, bounded, reaching
from benchmarks.verdict_cost import measure_in_lightning
from flatout.data.store.cache import default_cache_folder
from flatout.distributed.processes import wait_until_warm, warm_start
from flatout.errors import did_you_mean, require
from flatout.perf.measure import apart
from flatout.perf.measure.intervals import SpeedupInterval, speedup, take_turns
from flatout.perf.notes import machine_name
from flatout.perf.verdict.confirmation import promised_speedup

_SCRIPTS = Path(__file__).parent / "doctor_scripts"
_THREADS = 1  # a second one would wait for its core unseen
_TRIES = 20
_LIMIT = 0.9
_SLOWER = 1.25  # times as long: a slow-down of 20 %
_COST_STEPS = (100, 500)
_COST_ROUNDS = 6
_COST_MS = 20.0
_MOST_COST = 1.0  # %
# Words of a fix, and the script's own option for the same.
_OPTIONS = {
    r"num_workers=(\d+)": "--workers",
    r"batch_size=(\d+)": "--batch-size",
}


@dataclass(frozen=True, slots=True)
class PlantedScript:
    """A script with something that slows it, and without."""

    script: str
    causes: tuple[str, ...]
    words: str  # of both
    planted: str
    fixed: str = ""  # in the place of `planted`; numbers of the verdict's fix replace these


PLANTED = {
    "transformers: rows padded to 192 tokens": PlantedScript(
        "of_transformers.py",
        ("padding",),
        "--steps 250 --batch-size 8 --width 64",
        "--pad-to 192",
    ),
    "transformers: tokenising in the collate function": PlantedScript(
        "of_transformers.py",
        ("data",),
        "--steps 150 --tokenise-ms 1.5",
        "",
        "--workers 1",
    ),
    "transformers: an evaluation every second step": PlantedScript(
        "of_transformers.py", ("validation",), "--steps 200", "--eval-steps 2"
    ),
    "transformers: a checkpoint every second step": PlantedScript(
        "of_transformers.py", ("checkpoint",), "--steps 200", "--save-steps 2"
    ),
    "transformers: one row a batch": PlantedScript(
        "of_transformers.py",
        ("batch",),
        "--width 32",
        "--steps 2000 --batch-size 1",
        "--steps 100 --batch-size 16",
    ),
    "Lightning: rows from a slow disk, one worker": PlantedScript(
        "of_lightning.py",
        ("data",),
        "--steps 300 --batch-size 32 --disk-ms 0.4",
        "--workers 1",
        "--workers 6",
    ),
    "Lightning: a callback that reads a number of each row of weights": PlantedScript(
        "of_lightning.py", ("callbacks",), "--steps 400", "--reads-norms"
    ),
    "Lightning: a validation every third step": PlantedScript(
        "of_lightning.py", ("validation",), "--steps 500", "--check-every 3"
    ),
    "Lightning: a checkpoint every second step": PlantedScript(
        "of_lightning.py", ("checkpoint",), "--steps 400 --width 768", "--save-every 2"
    ),
    "Lightning: two rows a batch": PlantedScript(
        "of_lightning.py",
        ("batch",),
        "",
        "--steps 4000 --batch-size 2",
        "--steps 250 --batch-size 32",
    ),
}
GATE = "the gate"
COST = "the cost"
_GATE_WORDS = "--steps 150 --batch-size 8 --width 64"


def claims(options: Options) -> Iterator[Claim]:
    warm_start()
    wait_until_warm()
    kept = _KeptRows(default_cache_folder() / "bench" / "doctor_run.jsonl", machine_name())
    rounds = options.choose_rounds(2, 1, 1)
    names = chosen(options)
    rows = []
    for name in (name for name in names if name in PLANTED):
        rows.append(kept.of(name, partial(diagnose, PLANTED[name], rounds)))
        yield _claim_of(name, rows[-1])
    if rows:
        yield from _summary_of(rows)
    if GATE in names:
        yield from _gate_claims(kept, options.choose(_TRIES, 2, 1))
    if COST in names:
        for script in ("of_transformers.py", "of_lightning.py"):
            yield _cost_claim(script, kept.of(f"cost of {script}", partial(measure_cost, script)))
        hooks = kept.of("hooks of transformers", measure_hooks)
        yield _hooks_claim(hooks["us"])
        yield _verdict_claim(
            kept.of("Verdict in Lightning", partial(apart.run, measure_in_lightning))
        )


def chosen(options: Options) -> list[str]:
    """The names of the rows that were asked for."""
    names = [*PLANTED, GATE, COST]
    if options.only is not None:
        wanted = [name for name in names if options.only.lower() in name.lower()]
        hint = did_you_mean(options.only, names)
        require(bool(wanted), "--only", f"no row {options.only!r}", hint=hint)
        return wanted
    return [*names[:1], GATE] if options.quick else names


class _KeptRows:
    """Rows that were measured on this machine, in a file of JSON lines."""

    def __init__(self, file: Path, machine: str) -> None:
        self._file = file
        self._machine = machine
        self._rows: dict[str, dict[str, Any]] = {}
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        for line in lines:
            with suppress(ValueError):  # the last line of a bench that was killed
                row = json.loads(line)
                if row.get("machine") == machine:
                    self._rows[row["name"]] = row["found"]

    def of(self, name: str, measure: Any) -> dict[str, Any]:
        """The kept row of this name, else a new one."""
        if name not in self._rows:
            self._rows[name] = measure()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            row = {"machine": self._machine, "name": name, "found": self._rows[name]}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return self._rows[name]


# Scripts, each in a process of its own.


def run_script(script: str, words: Sequence[str], options: Sequence[str] | None) -> dict[str, Any]:
    """Run a script in a folder of its own; `options`: those of `doctor run`, None: without it.

    Returns what it printed of its rates and weights, the exit code, and the kept verdict.
    """
    from flatout.__main__ import main

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    _limit_threads()
    said = io.StringIO()
    code = 0
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(said):
        os.chdir(folder)
        try:
            if options is None:
                sys.argv = [script, *words]
                sys.path[0] = str(_SCRIPTS)
                runpy.run_path(str(_SCRIPTS / script), run_name="__main__")
            else:
                main(["doctor", "run", *options, str(_SCRIPTS / script), *words])
        except SystemExit as left:
            code = int(left.code or 0)
        file = Path("doctor/verdict.json")
        kept = file.read_text(encoding="utf-8") if file.is_file() else "{}"
        os.chdir("/")
    printed = said.getvalue()
    found = re.search(r"trained: ([\d.]+) rows/s, weights (\w+)", printed)
    require(found is not None, script, f"it did not train: {printed[-300:]}")
    assert found is not None
    return {
        "rate": float(found[1]),
        "weights": found[2],
        "code": code,
        "kept": json.loads(kept),
        "said": printed,
    }


def _limit_threads() -> None:
    import torch

    torch.set_num_threads(_THREADS)


def _run_apart(script: str, words: str, options: Sequence[str] | None = None) -> dict[str, Any]:
    return apart.run(partial(run_script, script, words.split(), options))


def diagnose(plant: PlantedScript, rounds: int) -> dict[str, Any]:
    """What the verdict says of a planted script, and what the script without it gains."""
    planted_words = f"{plant.words} {plant.planted}"
    judged = _run_apart(plant.script, planted_words, [])
    kept = judged["kept"]
    verdict = kept.get("verdict") or {
        "cause": "none",
        "sentence": kept.get("why_none"),
        "predicted_gain": None,
    }
    first, was_busy = _without_neighbours(verdict)
    fixed_words = f"{plant.words} {plant.fixed}"
    for pattern, option in _OPTIONS.items():
        number = re.search(pattern, first.get("override") or "")
        if number is not None and option in plant.fixed:
            fixed_words += f" {option} {number[1]}"
    weights = list[str]()

    def rate(words: str) -> float:
        found = _run_apart(plant.script, words)
        if words == planted_words:
            weights.append(found["weights"])
        return float(found["rate"])

    sides = [partial(rate, words) for words in (planted_words, fixed_words)]
    gained = speedup(*take_turns(sides, least=rounds))
    promised = promised_speedup(first)
    return {
        "cause": first["cause"],
        "is_named": first["cause"] in plant.causes,
        "fix": first.get("override") or first.get("fix"),
        "promised": None if promised is None else asdict(promised),
        "gained": asdict(gained),
        "changed_weights": any(each != judged["weights"] for each in weights),
        "was_busy": was_busy,
        "sentence": verdict["sentence"],
        "not_tried": (kept.get("evidence") or {}).get("not_tried", ""),
    }


def _without_neighbours(verdict: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The first finding that is about the script, and whether other processes came before it."""
    if verdict["cause"] != "cpu":
        return verdict, False
    others = verdict.get("others") or []
    if not others:
        return {"cause": "nothing", "predicted_gain": None}, True
    return others[0] | {"predicted_gain": others[0]["gain"]}, True


def _claim_of(name: str, row: dict[str, Any]) -> Claim:
    gained = SpeedupInterval(**row["gained"])
    promised = None if row["promised"] is None else SpeedupInterval(**row["promised"])
    parts = [row["sentence"]]
    if promised is None:
        parts.append("no promise")
    else:
        parts.append(f"promised {promised}")
    parts.append(f"came {gained}")
    if row["changed_weights"]:
        parts.append("WEIGHTS CHANGED")
    if row["was_busy"]:
        parts.append("other processes were named before it")
    is_within = promised is None or gained.value in promised
    holds = row["is_named"] and is_within and not row["changed_weights"]
    goal = "named" if promised is None else "in bounds"
    expected = None if promised is None else promised.value
    ratio = None if expected is None else gained.value / expected
    shown = name if row["is_named"] else f"{name}: NOT NAMED"
    note = "; ".join(parts)
    return Claim(shown, gained.value, expected, "× as fast", ratio, goal, holds, note)


def _summary_of(rows: list[dict[str, Any]]) -> Iterator[Claim]:
    named = sum(row["is_named"] for row in rows)
    least = 0.9 * len(rows)
    yield reaching(f"planted scripts named first, of {len(rows)}", named, "", least=least)
    promised = [row for row in rows if row["promised"] is not None]
    within = sum(row["gained"]["value"] in SpeedupInterval(**row["promised"]) for row in promised)
    least = 0.9 * len(promised)
    yield reaching(f"promised bounds that hold, of {len(promised)}", within, "", least=least)
    changed = sum(row["changed_weights"] for row in rows)
    yield bounded("scripts whose weights change", changed, "", most=0)
    busy = sum(row["was_busy"] for row in rows)
    yield reaching("rows measured on a busy machine", busy, "", least=None)


# The gate


def try_gate(number: int) -> dict[str, Any]:
    """A training, the same again, and one that takes 1.25 times as long, as the gate sees them.

    Every second try waits longer in each step; the others compute more.
    """
    script = "of_transformers.py"
    with tempfile.TemporaryDirectory() as folder:
        options = ["--output", folder]
        before = Path(folder) / "verdict.json"
        first = _run_apart(script, _GATE_WORDS, options)
        kept = json.loads(before.read_text(encoding="utf-8"))
        gate = ["--against", str(before), "--fail-below", str(_LIMIT)]
        step_ms = 1000 / kept["own_steps_per_s"]["value"]
        slower = f"--sleep-ms {(_SLOWER - 1) * step_ms:.2f}"
        if number % 2:
            # A forward pass without gradients is about a quarter of a step.
            ms = kept["evidence"]["ms"]
            passes = ms["forward"] / sum(ms.values())
            slower = f"--repeats {1 + (_SLOWER - 1) / passes:.3f}"
        order = [("same", ""), ("slower", slower)]
        codes = dict[str, int]()
        said = dict[str, str]()
        for name, more in order if number % 4 < 2 else reversed(order):
            found = _run_apart(script, f"{_GATE_WORDS} {more}", gate)
            codes[name] = found["code"]
            lines = found["said"].splitlines()
            said[name] = next(
                (line for line in lines if "as fast" in line and "before" in line), ""
            )
        busy = 1 - kept["steps_per_s"]["value"] / kept["own_steps_per_s"]["value"]
    return {"codes": codes, "said": said, "waited_share": busy, "weights": first["weights"]}


def _gate_claims(kept: _KeptRows, tries: int) -> Iterator[Claim]:
    found = [kept.of(f"gate {number}", partial(try_gate, number)) for number in range(tries)]
    caught = sum(each["codes"]["slower"] == 1 for each in found)
    failed = sum(each["codes"]["same"] == 1 for each in found)
    busy = statistics.median(each["waited_share"] for each in found)
    note = f"others had the core for {busy:.0%} of the time (median)"
    ratios = {"slower": list[str](), "same": list[str]()}
    for each in found:
        for name, texts in ratios.items():
            shown = re.search(r"before: (\S+ \S+)", each["said"][name])
            texts.append("?" if shown is None else shown[1])
    least = 0.95 * tries
    shown_notes = {name: f"{note}: {', '.join(texts)}" for name, texts in ratios.items()}
    name = f"a planted slow-down of 20 % caught, of {tries}"
    yield reaching(name, caught, "", least=least, note=shown_notes["slower"])
    name = f"runs without one that fail, of {tries}"
    yield bounded(name, failed, "", most=0.05 * tries, note=shown_notes["same"])


# The cost


def measure_cost(script: str) -> dict[str, Any]:
    """Processor seconds of a step with and without `doctor run`, in microseconds.

    Two lengths of a training are compared, so that what is taken once is not counted.
    """
    words = "--batch-size 2 --width 16 --sleep-ms 5"
    sides = {(judges, steps): None for judges in (False, True) for steps in _COST_STEPS}
    turns = []
    for judges, steps in sides:
        function = partial(_processor_s, script, f"{words} --steps {steps}".split(), judges)
        turns.append(partial(apart.run, function))
    # The fastest of some rounds: neighbours on the processor only slow a round down.
    fastest = [min(seconds) for seconds in take_turns(turns, least=_COST_ROUNDS)]
    spent = dict(zip(sides, fastest, strict=True))
    fewer, more = _COST_STEPS
    step_us = {}
    for judges in (False, True):
        step_us[judges] = 1e6 * (spent[judges, more] - spent[judges, fewer]) / (more - fewer)
    return {"without_us": step_us[False], "with_us": step_us[True]}


def _processor_s(script: str, words: list[str], judges: bool) -> float:
    import time

    from flatout.perf.verdict import experiments

    experiments.SHARE = 0.0  # what is raced at the end is no cost of a step
    began = time.process_time()
    run_script(script, words, [] if judges else None)
    return time.process_time() - began


# Those that the Trainer or the model calls in each step.
_HOOKS = (
    "on_step_begin",
    "_enter_model",
    "_leave_model",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
)


def measure_hooks() -> dict[str, Any]:
    """Processor time that `HFVerdict` takes of a step, in microseconds: the sum over its hooks.

    It is steadier than the difference of two trainings, and leaves out the Trainer's own calls.
    """
    # The fastest of some rounds, as above.
    rounds = [apart.run(_spent_in_hooks_us) for _ in range(_COST_ROUNDS)]
    return {"us": min(rounds)}


def _spent_in_hooks_us() -> float:
    import time

    from flatout.perf.verdict.transformers_trainer import HFVerdict

    spent_s = [0.0]

    def timed(hook: Any) -> Any:
        def run(*arguments: Any, **others: Any) -> Any:
            began_s = time.thread_time()
            try:
                return hook(*arguments, **others)
            finally:
                spent_s[0] += time.thread_time() - began_s

        return run

    for name in _HOOKS:
        setattr(HFVerdict, name, timed(getattr(HFVerdict, name)))
    steps = max(_COST_STEPS)
    words = f"--batch-size 2 --width 16 --sleep-ms 5 --steps {steps}"
    _processor_s("of_transformers.py", words.split(), judges=True)
    return 1e6 * spent_s[0] / steps


def _hooks_claim(us: float) -> Claim:
    share = us / 10 / _COST_MS
    name = f"cost of a step of {_COST_MS:g} ms, hooks of HFVerdict alone"
    return bounded(name, share, "%", most=_MOST_COST, note=f"{us:.0f} µs of the processor a step")


def _verdict_claim(row: dict[str, Any]) -> Claim:
    share = row["more_us"] / 10 / _COST_MS
    low, high = row["spread_us"]
    note = (
        f"µs of the processor a step: {row['without_us']:.0f} without, {row['with_us']:.0f} with;"
        f" half of the differences are {low:.0f} to {high:.0f}"
    )
    name = f"cost of a step of {_COST_MS:g} ms, Verdict() in a Trainer of Lightning"
    return bounded(name, share, "%", most=_MOST_COST, note=note)


def _cost_claim(script: str, row: dict[str, Any]) -> Claim:
    share = 100 * (row["with_us"] - row["without_us"]) / 1000 / _COST_MS
    note = f"µs of the processor a step: {row['without_us']:.0f} without, {row['with_us']:.0f} with"
    name = f"cost of a step of {_COST_MS:g} ms, {script}"
    return bounded(name, share, "%", most=_MOST_COST, note=note)
