"""`python -m flatout tune …`: show what `tune=auto` would decide for a run, and the measurements.

The command takes the words of `python -m train`. It measures in processes that are thrown away,
trains nothing, and ends with the settings as words of a command line. A run of the same words with
`tune=auto` finds these answers and measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.cli.train import add_words, start_measuring
from flatout.distributed.processes import warm_start
from flatout.perf.tune.answers import Answers
from flatout.report.closing import plain_table
from flatout.run_log import decision_line, print_line

if TYPE_CHECKING:  # heavy modules are imported after the command line is read
    import torch

    from flatout.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [+experiment=NAME] [key=value ...] [tune.budget_s=SECONDS] [tune.fresh=true]"
    )
    add_words(parser)


def run(arguments: argparse.Namespace) -> None:
    warm_start()  # it imports beside us what the process that measures will need
    words = [word for word in arguments.words if word.lstrip("+") != "tune=auto"]
    start_measuring(["tune=auto", *words], measure)


def measure(config: RunConfig, overrides: Sequence[str]) -> None:
    """Measure for each kind of device that the run would use, and print what would be decided."""
    from flatout.distributed.ranks import Ranks
    from flatout.run.answers import build_question
    from flatout.run.devices import choose_devices
    from flatout.run.length import settle_length
    from flatout.run.parts import open_data, require_memory_for_model
    from flatout.run.resolve import share_processor
    from flatout.run.run_folder import unwritten_run
    from flatout.run.tuning import combine_answers, device_key, measure_answers, override_line

    numbers = choose_devices(config.trainer)
    alone = Ranks()
    ranks = Ranks(0, len(numbers), 0, len(numbers))
    with unwritten_run() as folder:
        accelerator = str(config.trainer.get("accelerator", "auto"))
        # Two cards of one kind give the same answers, so one of each kind is measured.
        devices: dict[str, torch.device] = {}
        for number in numbers:
            device = alone.device(accelerator, number)
            devices[str(device_key(device))] = device
        share_processor(config.threads, ranks, next(iter(devices.values())), folder)
        data = open_data(config, alone, folder)
        for device in devices.values():
            require_memory_for_model(config, data, ranks, device)
        config = settle_length(config, data, ranks, folder)  # as the run does before it is tuned
    print(data.info.report.line(), flush=True)
    measured = []
    for device in devices.values():
        question = build_question(config, data, ranks, device, overrides)
        # Who asks for a search alone has said how long it may take.
        question = replace(question, counts_time=False)
        measured.append(measure_answers(question, print_line))
    for measurement in measured:
        for line in measurement.lines:
            print(line)
    answers = combine_answers([measurement.answers for measurement in measured])
    console = Console(highlight=False)
    console.width = max(console.width, 140)  # piped into a file it would be cut at 80
    console.print(build_table(answers))
    for choice in answers.choices:
        print(decision_line(choice.name, choice.value, choice.why, choice.evidence))
    words = override_line(answers.values, config.optim)
    print(words or "nothing was left open, or nothing could be measured: train with these settings")


def build_table(answers: Answers) -> Table:
    """Everything that was tried, a row each; what was not measured is left blank."""
    table = plain_table("what", "value", "rows/s", "tokens/s", "memory", texts=2)
    table.add_column("")
    for row in answers.tried:
        memory = ""
        if row.memory_gb is not None:
            memory = f"{row.memory_gb:.2f} GB{' predicted' if row.is_predicted else ''}"
        rates = (_format_rate(row.rows_per_s), _format_rate(row.tokens_per_s))
        table.add_row(row.what, row.value, *rates, memory, Text(row.verdict))
    return table


def _format_rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f}"
