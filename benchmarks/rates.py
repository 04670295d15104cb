"""One row of rates for the card of this machine, in the table of `docs/card_rates.md`.

A card that was measured before gets its row again; the rows of others stay. Without a card nothing
is written.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.card.place import ROOT
from benchmarks.card.rates import RATE_ROWS
from benchmarks.claim import Claim, Options
from benchmarks.gpu import part_claims

PAGE = ROOT / "docs" / "card_rates.md"
_NONE = "–"


def claims(options: Options) -> Iterator[Claim]:
    """The rates of this card; they are written when all are there."""
    found = list[Claim]()
    for claim in part_claims("rates", options):
        found.append(claim)
        yield claim
    if any(claim.applies for claim in found):
        when = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        made_with = f"torch {torch.__version__}, {when}"
        add_row(PAGE, torch.cuda.get_device_name(), rates_of(found), made_with)


def rates_of(found: Sequence[Claim]) -> list[str]:
    """The rates in the order of the table; a dash for one that was not measured."""
    by_row = {claim.claim: claim.ours for claim in found}
    rates = list[str]()
    for row in RATE_ROWS:
        rate = by_row[row]
        rates.append(_NONE if math.isnan(rate) else f"{rate:,.0f}")
    return rates


def add_row(page: Path, card: str, rates: Sequence[str], made_with: str) -> None:
    """Write the row of a card into the first table of a page, in place of its earlier one."""
    lines = page.read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("|---")) + 1
    end = begin
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    row = f"| {' | '.join([card, *rates, made_with])} |"
    others = [
        line for line in lines[begin:end] if not line.startswith((f"| {card} |", f"| {_NONE} |"))
    ]
    lines[begin:end] = sorted([*others, row])
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
