"""`python -m flatout tune …`: what `tune=auto` would decide for a run of these words, and what it
was read off.

Takes the words of `python -m train`, measures in processes that are thrown away, trains nothing,
and ends with the settings as words of a command line. A run of the same words with `tune=auto`
finds these answers and measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatout.cli.train import start_measuring
from flatout.distributed.processes import warm_start
from flatout.perf.tune.answers import Answers
from flatout.report.closing import plain_table
from flatout.run_log import decision_line, print_line

if TYPE_CHECKING:  # heavy modules are imported after the command line is read
    from flatout.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [+experiment=NAME] [key=value ...] [tune.budget_s=SECONDS] [tune.fresh=true]"
    )
    parser.add_argument(
        "words",
        metavar="WORD",
        nargs="*",
        help="+experiment=NAME and any key=value, as for training",
    )


def run(arguments: argparse.Namespace) -> None:
    warm_start()  # it imports beside us what the process that measures will need
    start_measuring(
        ["tune=auto", *(word for word in arguments.words if word.lstrip("+") != "tune=auto")],
        decide,
    )


def decide(config: RunConfig, overrides: Sequence[str]) -> None:
    from flatout.distributed.ranks import Ranks
    from flatout.run.answers import build_question
    from flatout.run.devices import choose_devices
    from flatout.run.parts import open_data, require_memory_for_model
    from flatout.run.resolve import share_processor
    from flatout.run.run_folder import unwritten_run
    from flatout.run.tuning import combine_answers, device_key, measure_answers, override_line

    numbers = choose_devices(config.trainer)
    alone = Ranks()
    ranks = Ranks(0, len(numbers), 0, len(numbers))
    with unwritten_run() as folder:
        each_device = (
            alone.device(str(config.trainer.get("accelerator", "auto")), number)
            for number in numbers
        )
        devices = {str(device_key(device)): device for device in each_device}
        share_processor(config.threads, ranks, next(iter(devices.values())), folder)
        data = open_data(config, alone, folder)
        for device in devices.values():
            require_memory_for_model(config, data, ranks, device)
    print(data.info.report.line(), flush=True)
    asked = (
        build_question(config, data, ranks, device, overrides, counts_time=False)
        for device in devices.values()
    )
    found = [measure_answers(each, print_line) for each in asked]
    for line in (line for each in found for line in each.lines):
        print(line)
    answers = combine_answers([each.answers for each in found])
    console = Console(highlight=False)
    console.width = max(console.width, 140)  # piped into a file it would be cut at 80
    console.print(table_of(answers))
    for choice in answers.choices:
        print(decision_line(choice.name, choice.value, choice.why, choice.evidence))
    words = override_line(answers.values, config.optim)
    print(words or "nothing was left open, or nothing could be measured: train with these settings")


def table_of(answers: Answers) -> Table:
    """Everything that was tried, a row each."""
    table = plain_table("what", "value", "rows/s", "tokens/s", "memory", texts=2)
    table.add_column("")
    for row in answers.tried:
        rates = map(_format_rate, (row.rows_per_s, row.tokens_per_s))
        memory = ""
        if row.memory_gb is not None:
            how = " predicted" if row.is_predicted else ""
            memory = f"{row.memory_gb:.2f} GB{how}"
        table.add_row(row.what, row.value, *rates, memory, Text(row.verdict))
    return table


def _format_rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f}"
