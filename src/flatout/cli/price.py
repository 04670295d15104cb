"""`python -m flatout price …`: what a run will take, before it begins.

The command takes the words of `python -m train`, several values of a key among them. It begins each
run in a process apart, ends it after a few seconds of steps, and multiplies what that took with the
plan. It trains nothing to the end, and leaves no run folder.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from flatout.cli.ladder import read_words
from flatout.cli.train import add_words, start_measuring
from flatout.cli.words import SHORT, expand_sweep_word, key_of, translate_word
from flatout.distributed.processes import warm_start
from flatout.errors import require
from flatout.price.cards import CARDS, describe_checks, require_card
from flatout.run_log import print_line

_MOST_CARDS = 100_000
_OF_A_SWEEP = {"sweep", "hydra/sweeper", *SHORT} - {"on"}
_TRIALS_TRIED = 3

if TYPE_CHECKING:  # heavy modules are imported after the command line is read
    from flatout.config import RunConfig
    from flatout.data.batches.store_data import StoreData
    from flatout.price.quote import Quote
    from flatout.run.closing import Result
    from flatout.sweep.settings import SweeperSettings
    from flatout.sweep.space import Space


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [+experiment=NAME] [key=value ...] [key=value,value ...]"
    parser.epilog = (
        "The words of a sweep, such as +sweep=NAME trials=20, price all of its trials, those of a"
        " ladder, such as +ladder=NAME for=8m, its climb."
    )
    add_words(parser)
    parser.add_argument(
        "--on",
        metavar="CARD",
        help=f"a card that is not here, by arithmetic alone: {', '.join(CARDS)}",
    )
    parser.add_argument("--devices", metavar="N", type=int, default=1, help="so many such cards")


def run(arguments: argparse.Namespace) -> None:
    is_count = 1 <= arguments.devices <= _MOST_CARDS
    require(is_count, "--devices", f"{arguments.devices:,}", allowed=f"1 to {_MOST_CARDS:,}")
    require(
        arguments.on is not None or arguments.devices == 1,
        "--devices",
        f"{arguments.devices} without a card that is not here",
        hint=f"Add --on CARD ({', '.join(CARDS)}); trainer.devices=N is of this machine.",
    )
    if arguments.on is not None:
        require_card(arguments.on)
        print_line(f"on {arguments.on}: by arithmetic from data sheets, not measured there")
    warm_start()  # it imports beside us what the tries will need
    if any(key_of(word) == "ladder" for word in arguments.words):
        price_ladder(arguments.words, arguments.on, arguments.devices)
        return
    typed = [word for word in arguments.words if word not in ("-m", "--multirun")]
    if any(key_of(word) in _OF_A_SWEEP for word in typed):
        price_sweep(typed, arguments.on, arguments.devices)
        return
    choices = read_choices(typed)
    varied = [choice for choice in choices if len(choice) > 1]
    quotes: list[tuple[str, Quote]] = []
    shown: set[str] = set()  # data whose rival is printed

    def measure(config: RunConfig, overrides: Sequence[str]) -> None:
        quote = quote_run(config, shown, arguments.on, arguments.devices)
        quotes.append((name, quote))
        if varied:
            print_line(f"{name}: {quote.expected}")

    # Hydra composes one run at a time, as `-m` would start them
    for words, named in zip(itertools.product(*choices), itertools.product(*varied), strict=False):
        name = " ".join(named)
        start_measuring(words, measure)
    if varied:
        print_table(quotes)
    else:
        print_lines(quotes[0][1].lines())


def price_sweep(words: Sequence[str], card: str | None, devices: int) -> None:
    """Price some trials of a sweep, and print what all of them take, pruned as it says."""
    from flatout.sweep.drawn import draw_trials
    from flatout.sweep.settings import Sampler
    from flatout.sweep.space import grid
    from flatout.sweep.space import words as words_of

    search, fixed, space = read_sweep([translate_word(expand_sweep_word(word)) for word in words])
    num_trials = len(grid(space)) if search.sampler == Sampler.grid else search.trials
    quotes: list[tuple[str, Quote]] = []
    shown: set[str] = set()

    def measure(config: RunConfig, overrides: Sequence[str]) -> None:
        quotes.append((name, quote_run(config, shown, card, devices)))

    for chosen in draw_trials(space, min(_TRIALS_TRIED, num_trials), search.seed):
        name = " ".join(words_of(chosen))
        start_measuring([*fixed, *words_of(chosen)], measure)
    print_table(quotes, sums_of_sweep([quote for _, quote in quotes], search, num_trials))


def price_ladder(words: Sequence[str], card: str | None, devices: int) -> None:
    """Print what a ladder takes: its climb, and with `seeds=` the runs of its top to their end."""
    from flatout.price.quote import scaled, spent_in

    said = read_words(words, config_dir=None)
    tops: list[Quote] = []
    climbs: list[Quote] = []

    def measure(config: RunConfig, overrides: Sequence[str]) -> None:
        config.require_ours("price", "a ladder has no parts of your own", hint="Leave them out.")
        top = quote_run(config, set(), card, devices)
        tops.append(top)
        climbs.append(spent_in(said.budget_s, top, config.price))

    start_measuring(said.settings, measure)
    quotes = [("the climb, at most", climbs[0])]
    if said.seeds:
        runs = scaled(tops[0], said.seeds, said.seeds, said.seeds)
        quotes.append((f"{said.seeds} runs of the top, to their end", runs))
    print_table(quotes)
    if said.seeds:
        print_line(
            f"The foot is trained {said.seeds} times, too. It takes longer than the top by what the"
            " climb measures, so nobody knows it before."
        )


def read_sweep(words: Sequence[str]) -> tuple[SweeperSettings, list[str], Space]:
    """The settings of a sweep, the words that all of its trials have, and what it searches."""
    from hydra.core.hydra_config import HydraConfig

    from flatout.sweep.settings import SweeperSettings
    from hydra_plugins.flatout_trials import fixed_and_searched

    fixed, typed = fixed_and_searched(["hydra/sweeper=flatout", *words])
    sweepers: list[SweeperSettings] = []

    def keep(config: RunConfig, overrides: Sequence[str]) -> None:
        sweepers.append(SweeperSettings(**HydraConfig.get().sweeper))

    start_measuring(fixed, keep)
    search = sweepers[0]
    _, space = fixed_and_searched([f"{key}={value}" for key, value in search.space.items()])
    space |= typed  # the command line wins
    require(bool(space), "sweep", "searches nothing", hint="Write key=choice(…) or +sweep=NAME.")
    return search, fixed, space


def sums_of_sweep(
    quotes: Sequence[Quote], search: SweeperSettings, num_trials: int
) -> list[tuple[str, Quote]]:
    """What all trials take: trained to their end, and with pruning and confirming runs."""
    from flatout.price.quote import add_quotes, scaled
    from flatout.sweep.drawn import share_trained
    from flatout.sweep.settings import Pruner

    part = 1 / len(quotes)
    one = scaled(add_quotes(quotes), part, part, part)
    to_the_end = scaled(one, num_trials, num_trials, num_trials)
    sums = [(f"all {num_trials} trials, trained to their end", to_the_end)]
    share = share_trained(Pruner(search.pruner), quotes[0].validations, num_trials)
    if share.median < 1 or search.confirm:
        shares = (share.median, share.least, share.most)
        median, least, most = (num_trials * trained + search.confirm for trained in shares)
        how = f"pruned by {search.pruner}, which leaves some {share.median:.0%}"
        confirmed = f", and {search.confirm} confirming runs" if search.confirm else ""
        sums.append((f"{how}{confirmed}", scaled(one, median, least, most)))
    return sums


def read_choices(words: Sequence[str]) -> list[list[str]]:
    """The values of each word: `model=bilstm,textcnn seed=1` are two words and one.

    A list in brackets is one value, as for `python -m train -m`.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    choices = []
    for word in words:
        try:
            override = parser.parse_override(translate_word(word))
        except HydraException:
            choices.append([word])  # composing explains it
            continue
        if not override.is_sweep_override():
            choices.append([word])
            continue
        require(
            override.is_discrete_sweep(),
            word.partition("=")[0],
            f"{word.partition('=')[2]} has no end of values",
            hint="Name some: key=value,value.",
        )
        key = word.partition("=")[0]
        choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    return choices


def quote_run(config: RunConfig, shown: set[str], card: str | None, devices: int) -> Quote:
    """Try a run, and return its quote. Prints the store and the rival of data that are new."""
    from flatout.price.quote import quote_of
    from flatout.run.short_try import bytes_before_data, try_run

    bytes_before_data()
    # the store first: a run that is tried must find it
    data = None if config.has_own_parts else open_store(config)
    began = time.monotonic()
    summary = try_run(config, begin, counts=card is not None)
    if data is not None and data.info.key not in shown:
        shown.add(data.info.key)
        print_line(data.info.report.line())
        show_rival(config, data, summary, ESTIMATE_S - (time.monotonic() - began))
    network = summary["model"]["name"]
    if card is not None and network not in shown:
        shown.add(network)
        print_line(describe_checks(network))
    return quote_of(summary, config.price, card=card, devices=devices)


def begin(config: RunConfig, folder: Path) -> Result:
    """Begin a run, on as many devices as its settings say."""
    from flatout.run.launch import start

    return start(config, folder=folder)


def open_store(config: RunConfig) -> StoreData[Any, Any]:
    from flatout.distributed.ranks import Ranks
    from flatout.run.parts import open_data
    from flatout.run.run_folder import unwritten_run

    with unwritten_run() as folder:
        data: StoreData[Any, Any] = open_data(config, Ranks(), folder)
    return data


def show_rival(
    config: RunConfig, data: StoreData[Any, Any], summary: Mapping[str, Any], seconds: float
) -> None:
    """Print what can be had for nothing: what a simple model scores on the data.

    For texts and tags it is trained here, unless it would take more than these seconds. That of
    bits and recordings the try has solved.
    """
    from flatout.run.kinds import kind_of
    from flatout.run.rival import scores_within
    from flatout.run_log import RunLog

    if not config.monitor.rival or "test" not in data.store.splits:
        return
    kind = kind_of(config.data)
    if kind.rival is not None:
        name = kind.rival.name
        scores = scores_within(kind.rival, data, max(LEAST_RIVAL_S, seconds), RunLog())
    else:
        solved = summary["baseline"] or {"name": "", "metrics": {}}
        name = solved["name"]
        metric = f"test/{summary['metric']}"
        scores = {each: value for each, value in solved["metrics"].items() if each == metric}
        if not scores:
            print_line(f"for nothing: no simple model of {kind.rows} is known here")
    if scores:
        listed = ", ".join(f"{metric} {value:.4f}" for metric, value in scores.items())
        print_line(f"for nothing: the {name} has {listed}")


ESTIMATE_S = 30.0  # of the try and the rival together
LEAST_RIVAL_S = 5.0


def print_lines(lines: Sequence[tuple[str, str]]) -> None:
    from flatout.report.closing import plain_table

    table = plain_table("", "", texts=2, show_header=False)
    for name, text in lines:
        table.add_row(Text(name, style="bold"), Text(text))
    Console(highlight=False).print(table)


def print_table(
    quotes: Sequence[tuple[str, Quote]], sums: Sequence[tuple[str, Quote]] = ()
) -> None:
    """A row for each run, the cheapest first, and their sum, or the sums that are given."""
    from flatout.price.quote import add_quotes
    from flatout.report.closing import plain_table

    table = plain_table("settings", "time", "memory", "kWh", "money", title="cheapest first")
    for name, quote in sorted(quotes, key=lambda pair: pair[1].expected.value_s):
        table.add_row(Text(name), *quote.cells())
    of_all = [(f"all {len(quotes)}", add_quotes([quote for _, quote in quotes]))]
    for name, quote in sums or of_all:
        table.add_row(name, *quote.cells())
    console = Console(highlight=False)
    console.width = max(console.width, 100)
    console.print(table)
