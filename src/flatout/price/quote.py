"""The price of a run that has not begun, from the summary of a short try of it.

`Quote` says how long the run will take, what memory, energy and money, and in which parts. Open
this file to change what is printed of it, or how quotes are added up. `close_price` in
`run/pricing.py` wrote the facts that a quote is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.distributed.limits import free_bytes
from flatout.errors import require
from flatout.price.costs import Costs, Expected, PlannedLengths, expect
from flatout.price.elsewhere import move_costs
from flatout.price.expected_end import BUSY
from flatout.price.settings import PriceConfig, as_kwh
from flatout.price.words import describe_money, describe_seconds

_SHOWN_S = 0.05  # parts of the time from so many seconds on are printed
_SHOWN_PADDING = 0.0005  # padding from this share on is printed: it is 0.1 % when rounded


@dataclass(frozen=True, slots=True)
class Quote:
    """What a run is expected to take."""

    expected: Expected
    kwh: float | None
    counted: list[str]  # what the energy was counted on, such as the processor and the card
    money: float | None
    currency: str
    host_peak_gb: float | None = None
    card_peak_gb: float | None = None
    free_gb: float | None = None  # memory of this machine that is free now
    length: str = ""  # steps, epochs and tokens
    busy: float = 0.0  # fraction of the machine that other processes took in the try
    validations: int = 0
    card_free_gb: float | None = None  # memory of the card that this run could have

    @property
    def fits(self) -> bool:
        """Whether it needs no more memory than is free, as far as both are known."""
        pairs = ((self.host_peak_gb, self.free_gb), (self.card_peak_gb, self.card_free_gb))
        return all(peak is None or free is None or peak <= free for peak, free in pairs)

    def lines(self) -> list[tuple[str, str]]:
        """What to print of one run, as a name and a text each."""
        parts = [
            f"{name} {describe_seconds(seconds)}"
            for name, seconds in self.expected.parts_s.items()
            if seconds >= _SHOWN_S
        ]
        energy = "not known: no counter can be read here; price.watts=WATTS sets it"
        if self.kwh is not None:
            energy = f"{self.kwh:.3g} kWh ({', '.join(self.counted)})"
        _, memory, _, money = self.cells()
        free = []
        if self.free_gb is not None:
            free.append(f"{self.free_gb:.1f} GB are free here")
        if self.card_free_gb is not None:
            free.append(f"{self.card_free_gb:.1f} GB on the card")
        if memory and free:
            memory += f"; {' and '.join(free)}"
        if not self.fits:
            memory += "; a smaller data.batch_size or model takes less"
        others = ""
        if self.busy >= BUSY:
            others = f"other processes take {self.busy:.0%} of this machine"
        rows = [
            ("steps", self.length),
            ("time", f"{self.expected}, 90 % interval{self.expected.correction}"),
            ("parts", ", ".join(parts)),
            ("other load", others),
            ("memory", memory),
            ("energy", energy),
            ("money", money),
        ]
        return [(name, text) for name, text in rows if text]

    def cells(self) -> tuple[str, str, str, str]:
        """Time, memory, kWh and money; empty where unknown."""
        memory = "" if self.host_peak_gb is None else f"{self.host_peak_gb:.2f} GB"
        if self.card_peak_gb is not None:
            memory += f", on the card {self.card_peak_gb:.2f} GB"
        if not self.fits:
            memory += ": does not fit"
        kwh = "" if self.kwh is None else f"{self.kwh:.3g}"
        money = "" if self.money is None else describe_money(self.money, self.currency)
        return str(self.expected), memory, kwh, money


def add_quotes(quotes: Sequence[Quote]) -> Quote:
    """The quote of several runs on one machine, one after the other.

    Energy or money is unknown where that of one run is. Memory and length are left out.
    """
    # errors of runs on one machine go together, so bounds are added
    value_s = sum(quote.expected.value_s for quote in quotes)
    low_s = sum(quote.expected.low_s for quote in quotes)
    high_s = sum(quote.expected.high_s for quote in quotes)
    sources = [source for quote in quotes for source in quote.counted]
    return Quote(
        Expected(value_s, low_s, high_s, value_s, {}),
        _sum_of_known([quote.kwh for quote in quotes]),
        list(dict.fromkeys(sources)),
        _sum_of_known([quote.money for quote in quotes]),
        quotes[0].currency,
    )


def _sum_of_known(values: Sequence[float | None]) -> float | None:
    """The sum; None where a value is unknown, as a sum without it would be too low."""
    known_values = [value for value in values if value is not None]
    return sum(known_values) if len(known_values) == len(values) else None


def scaled(quote: Quote, value: float, low: float, high: float) -> Quote:
    """The quote of several runs like this one: `value` of them, at least `low`, at most `high`."""
    expected = quote.expected
    value_s = value * expected.value_s
    return replace(
        quote,
        expected=Expected(value_s, low * expected.low_s, high * expected.high_s, value_s, {}),
        kwh=None if quote.kwh is None else value * quote.kwh,
        money=None if quote.money is None else value * quote.money,
    )


def spent_in(seconds: float, like: Quote, price: PriceConfig) -> Quote:
    """What so many seconds take, of runs that draw as much power as `like`."""
    kwh = None if like.kwh is None else like.kwh * seconds / like.expected.value_s
    return replace(
        like,
        expected=Expected(seconds, seconds, seconds, seconds, {}),
        kwh=kwh,
        money=price.money(seconds, kwh),
    )


def quote_of(
    summary: Mapping[str, Any], price: PriceConfig, *, card: str | None = None, devices: int = 1
) -> Quote:
    """The quote of the run of which `summary` is a short try.

    `card`, `devices`: a card that is not here, and how many of it; by arithmetic.
    """
    facts = summary["price"]  # as `close_price` wrote them
    require(
        "plan" in facts,
        "price",
        "the length of this run is not known: its data are a stream",
        hint="Set +trainer.max_steps=STEPS.",
    )
    plan = facts["plan"]
    steps = plan["steps"]
    require(
        "costs" in facts,
        "price",
        f"steps of this run: {steps}, too few to measure their pace",
        hint="python -m train takes some seconds for them.",
    )
    costs = Costs.of(facts["costs"])
    counted = facts["counted"]
    if card is not None:
        costs = move_costs(costs, card, devices, facts)
        counted = ["data sheet"]
    lengths = PlannedLengths.of_plan(plan)
    if card is None:
        expected = expect(costs, lengths, facts["ratios"], busy=facts["busy"])
    else:
        expected = expect(costs, lengths)
    watts = costs.watts
    kwh = as_kwh(None if watts is None else watts * expected.value_s)
    length = f"{steps:,} in {steps / plan['steps_an_epoch']:g} epochs"
    padding_share = plan["padding_share"]
    if summary["data"].get("tokens") is not None:
        length += f", {plan['computed_tokens'] * (1 - padding_share):,.0f} tokens"
    if padding_share >= _SHOWN_PADDING:
        length += f", padding {padding_share:.1%}"
    return Quote(
        expected,
        kwh,
        counted,
        price.money(expected.value_s, kwh),
        price.currency,
        host_peak_gb=facts.get("host_peak_gb") if card is None else None,
        card_peak_gb=facts.get("card_peak_gb") if card is None else None,
        free_gb=free_bytes() / 1e9 if card is None else None,
        card_free_gb=facts.get("card_free_gb") if card is None else None,
        length=length,
        busy=facts["busy"] if card is None else 0.0,
        validations=lengths.validations,
    )
