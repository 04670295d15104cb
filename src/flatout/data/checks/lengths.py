"""How long the texts are, and what a longest length would cut off."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import Level, Remark, counted

_LONGEST_BAR = 40
_LONGEST_TOLD = 1 << 16
_FINE_SHARE = 0.01
_MANY_UNKNOWN = 0.1


@dataclass(slots=True)
class Lengths:
    """How many rows have each length.

    Lengths beyond 65,536 count as that, but for the longest and the sum of all.
    """

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    tokens: int = 0
    longest: int = 0

    def add(self, lengths: NDArray[np.integer]) -> None:
        found = np.bincount(np.minimum(lengths, _LONGEST_TOLD), minlength=len(self.counts))
        found[: len(self.counts)] += self.counts
        self.counts = found.astype(np.int64)
        self.tokens += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max(initial=0)))

    def noted(self) -> list[Any]:
        """Plain values that `take_in` knows."""
        there = np.flatnonzero(self.counts)
        return [self.tokens, self.longest, there.tolist(), self.counts[there].tolist()]

    def take_in(self, noted: list[Any]) -> None:
        """Add the rows of another."""
        tokens, longest, there, counts = noted
        found = np.bincount(there, counts, minlength=len(self.counts)).astype(np.int64)
        found[: len(self.counts)] += self.counts
        self.counts = found
        self.tokens = self.tokens + tokens
        self.longest = max(self.longest, longest)

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    def at(self, share: float) -> int:
        """The least length that so many rows do not exceed."""
        return int(np.searchsorted(np.cumsum(self.counts), share * self.rows)) if self.rows else 0

    def cut_rows(self, longest: int) -> int:
        return int(self.counts[longest + 1 :].sum())

    def cut_tokens(self, longest: int) -> int:
        return self.tokens - int(
            (self.counts * np.minimum(np.arange(len(self.counts)), longest)).sum()
        )

    def fine_length(self) -> int:
        """The least length that cuts under one row in a hundred."""
        return self.at(1 - _FINE_SHARE)

    def line(self) -> str:
        """Where the lengths lie."""
        mean = self.tokens / max(1, self.rows)
        shares = ", ".join(f"{share:.0%} up to {self.at(share):,}" for share in (0.5, 0.9, 0.99))
        return f"tokens a row: mean {mean:,.1f}, {shares}, longest {self.longest:,}"

    def truncation(self, longest: int) -> str:
        """What cutting at a length loses, and what would not; empty where nothing is cut."""
        if not (rows := self.cut_rows(longest)):
            return ""
        tokens = self.cut_tokens(longest)
        of_rows = f"{counted(rows, 'row')} ({rows / self.rows:.2%})"
        lost = (
            f"cut at {longest}: {of_rows}, {counted(tokens, 'token')} ({tokens / self.tokens:.2%})"
            " lost"
        )
        return lost + (
            f"; {self.fine_length()} would cut under 1%" if self.is_cut_much(longest) else ""
        )

    def is_cut_much(self, longest: int) -> bool:
        return self.cut_rows(longest) >= _FINE_SHARE * max(1, self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they go into a run's summary."""
        edges = pairwise([0, *(1 << power for power in range(17)), _LONGEST_TOLD + 1])
        bars = [
            {"from": low, "to": high - 1, "rows": int(self.counts[low:high].sum())}
            for low, high in edges
        ]
        quantiles = {f"p{share * 100:g}": self.at(share) for share in (0.5, 0.9, 0.95, 0.99, 0.999)}
        filled = [bar for bar in bars if bar["rows"]]
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "longest": self.longest,
            **quantiles,
            "histogram": filled,
        }

    def bars(self) -> list[str]:
        """A bar for each doubling of the length."""
        spans = {
            f"{bar['from']:,}–{bar['to']:,}": bar["rows"] for bar in self.as_dict()["histogram"]
        }
        width, most = max(map(len, spans), default=0), max(spans.values(), default=1)
        bars = {
            span: "█" * max(1, round(_LONGEST_BAR * rows / most)) for span, rows in spans.items()
        }
        return [f"{span.rjust(width)}  {bars[span]} {rows:,}" for span, rows in spans.items()]


def unknown_remarks(
    words: dict[str, tuple[int, int]], where: str = "", *, are_given: bool = False
) -> list[Remark]:
    """Shares of words that are not in the vocabulary, which may be given, from their number and
    that of all words.
    """
    shares = {split: unknown / max(1, total) for split, (unknown, total) in words.items()}
    what = ", ".join(f"{split} {share:.1%}" for split, share in shares.items())
    are_many = any(share > _MANY_UNKNOWN for share in shares.values())
    remedy = (
        "data.tokenizer=FOLDER, of one that knows them" if are_given else "data.vocabulary.kind=bpe"
    )
    level, hint = (Level.warning, remedy) if are_many else (Level.note, "")
    return [Remark(level, f"unknown words{where}", what, hint)]


def loss_remarks(
    splits: dict[str, tuple[int, Lengths]], max_length: int, *, are_given: bool = False
) -> list[Remark]:
    """What encoding loses: words that are not in the vocabulary, and rows that are cut."""
    words = {split: (unknown, lengths.tokens) for split, (unknown, lengths) in splits.items()}
    remarks = unknown_remarks(words, are_given=are_given)
    for split, (_, lengths) in splits.items():
        if cut := lengths.truncation(max_length):
            is_much = lengths.is_cut_much(max_length)
            hint = f"data.max_length={lengths.fine_length()}" if is_much else ""
            remarks.append(Remark(Level.warning if is_much else Level.note, split, cut, hint))
    return remarks
