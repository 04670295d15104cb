"""What `tune=auto` chooses against what is the default, side by side, and what measuring it took.

Both sides run in one throw-away process, in turn, by the probe that also chose: whole optimizer
steps of the run's own task on the same number of rows a step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.claim import Claim, Options, at_least, bounded, in_turn
from flatout.bits.settings import BitsDataConfig
from flatout.config import RunConfig
from flatout.data.texts.settings import TextDataConfig
from flatout.distributed.ranks import Ranks
from flatout.models.encoder.transformer import TransformerConfig
from flatout.perf.tune.probe import Child, ProbedSetting, SettingMeasurement
from flatout.perf.tune.settings import TuneConfig
from flatout.run.answers import apply_answers, build_question
from flatout.run.kinds import kind_of
from flatout.run.parts import build_parts
from flatout.run.tuning import list_open_settings, measure_answers
from flatout.run_log import RunLog

_LEAST = 0.95
"""Nothing is taken that is not faster, so what was chosen may be slower by noise alone."""
_STEPS = 12


def claims(options: Options) -> Iterator[Claim]:
    """A BiLSTM, an encoder and bit strings: with the defaults, and in steps of many
    small batches.
    """
    tune = TuneConfig(enabled=True, compile=False, fresh=True, budget_s=10 if options.quick else 60)
    encoder = TransformerConfig(hidden=128, layers=2, heads=4)
    cases: dict[str, Callable[[str], RunConfig]] = {
        "BiLSTM, defaults": lambda cache: RunConfig(data=TextDataConfig(cache=cache), tune=tune),
        "small encoder, defaults": lambda cache: RunConfig(
            data=TextDataConfig(cache=cache), model=encoder, tune=tune
        ),
        "bit strings, defaults": lambda cache: RunConfig(
            data=BitsDataConfig(cache=cache), tune=tune
        ),
        # Typed on a command line, not set in Python, so that they are open.
        "BiLSTM, 128 rows as 8 × 16": lambda cache: RunConfig(
            data=TextDataConfig(cache=cache, batch_size=8, accumulate=16), tune=tune
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, make in cases.items():
            yield from of_case(name, make(str(Path(folder) / "cache")), options)


def of_case(name: str, config: RunConfig, options: Options) -> Iterator[Claim]:
    """One choice, what it brings, and what it took."""
    device = Ranks().device(config.trainer.get("accelerator", "auto"))
    ranks = Ranks()
    data = kind_of(config.data).data.of(config.data, seed=config.seed, log=RunLog())
    data.prepare_data()
    data.setup()
    asked = build_question(config, data, ranks, device, ["tune=auto"])
    asked = replace(asked, counts_time=False)
    found = measure_answers(asked, lambda line: None).answers
    chosen = list_open_settings(replace(asked, config=apply_answers(config, found.values))).start
    start = list_open_settings(asked).start
    measured = replace(config, callbacks={}, tune=TuneConfig(), compile=False)
    child = Child(partial(build_parts, measured, ranks, device), torch.get_num_threads())
    try:
        # Where nothing was found to be faster both sides are one, and measured once.
        sides = [partial(rate, child, setting) for setting in dict.fromkeys((chosen, start))]
        rates = in_turn(sides, options.rounds)
        ours, theirs = rates[0], rates[-1]
    finally:
        child.close()
    note = (
        f"{told(chosen)}; was {told(start)}; the same was {found.unrest:.1f}× as fast at its best"
        " while choosing"
    )
    yield at_least(f"{name}: chosen against as set", ours, theirs, "rows/s", _LEAST, note)
    yield bounded(f"{name}: time to choose", found.seconds, "s", most=config.tune.budget_s)


def rate(child: Child, setting: ProbedSetting) -> float:
    """Rows a second of some steps."""
    until = time.time() + 120
    found = child.ask("measure", until, setting=setting, steps=_STEPS, until=until)
    assert isinstance(found, SettingMeasurement), found
    return found.rows_per_s


def told(setting: ProbedSetting) -> str:
    return f"{setting.feed}, {setting.precision}, {setting.rows} × {setting.accumulate}"
