"""Count the lengths of texts, and report what a longest length would cut off.

`Lengths` keeps how many rows have each length, so quantiles and losses at any length are sums over
at most 65,537 counts. Open this file to change the histogram of `check`, or the warning that
`data.max_length` cuts too much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import Level, Remark, counted

_LONGEST_BAR = 40  # characters of the histogram's longest bar
_LONGEST_COUNTED = 1 << 16  # tokens; longer rows count as that long
_FINE_SHARE = 0.01  # fraction of rows that a good longest length may cut
_MANY_UNKNOWN = 0.1  # fraction of unknown words from which a warning is given


@dataclass(slots=True)
class Lengths:
    """How many rows have each length.

    Lengths beyond 65,536 count as that, but for the longest and the sum of all.
    """

    # counts[3]: rows of three tokens
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    tokens: int = 0
    longest: int = 0

    def add(self, lengths: NDArray[np.integer]) -> None:
        """Count rows of these lengths."""
        counts = np.bincount(np.minimum(lengths, _LONGEST_COUNTED))
        self._add_counts(counts, int(lengths.sum()), int(lengths.max(initial=0)))

    def noted(self) -> list[Any]:
        """All of it as plain values, for JSON: lengths that no row has are left out."""
        lengths = np.flatnonzero(self.counts)
        return [self.tokens, self.longest, lengths.tolist(), self.counts[lengths].tolist()]

    def take_in(self, noted: list[Any]) -> None:
        """Add the rows that `noted` of another object returned."""
        tokens, longest, lengths, counts = noted
        self._add_counts(np.bincount(lengths, counts), tokens, longest)

    def _add_counts(self, counts: NDArray[np.generic], tokens: int, longest: int) -> None:
        # One of the two arrays may be longer: [1, 2] and [0, 0, 5] → [1, 2, 5].
        total = np.zeros(max(len(counts), len(self.counts)), np.int64)
        total[: len(counts)] = counts
        total[: len(self.counts)] += self.counts
        self.counts = total
        self.tokens += tokens
        self.longest = max(self.longest, longest)

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    def at(self, share: float) -> int:
        """The least length that this fraction of the rows does not exceed."""
        return int(np.searchsorted(np.cumsum(self.counts), share * self.rows)) if self.rows else 0

    def cut_rows(self, longest: int) -> int:
        """Rows that are longer than `longest`."""
        return int(self.counts[longest + 1 :].sum())

    def cut_tokens(self, longest: int) -> int:
        """Tokens that are lost if rows are cut at `longest`."""
        kept = self.counts * np.minimum(np.arange(len(self.counts)), longest)
        return self.tokens - int(kept.sum())

    def fine_length(self) -> int:
        """The least length that cuts under one row in a hundred."""
        return self.at(1 - _FINE_SHARE)

    def line(self) -> str:
        """Mean, quantiles and maximum of the lengths, as one line."""
        mean = self.tokens / max(1, self.rows)
        shares = ", ".join(f"{share:.0%} up to {self.at(share):,}" for share in (0.5, 0.9, 0.99))
        return f"tokens a row: mean {mean:,.1f}, {shares}, longest {self.longest:,}"

    def truncation(self, longest: int) -> str:
        """A line about what a cut at `longest` loses, and a length that loses little; or ""."""
        rows = self.cut_rows(longest)
        if not rows:
            return ""
        tokens = self.cut_tokens(longest)
        of_rows = f"{counted(rows, 'row')} ({rows / self.rows:.2%})"
        of_tokens = f"{counted(tokens, 'token')} ({tokens / self.tokens:.2%})"
        lost = f"cut at {longest}: {of_rows}, {of_tokens} lost"
        if self.is_cut_much(longest):
            lost += f"; {self.fine_length()} would cut under 1%"
        return lost

    def is_cut_much(self, longest: int) -> bool:
        """Whether `longest` cuts one row in a hundred or more."""
        return self.cut_rows(longest) >= _FINE_SHARE * max(1, self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they go into a run's summary.

        The histogram has a bar for each doubling of the length: 0, 1, 2–3, 4–7, …
        """
        edges = [0, *(1 << power for power in range(17)), _LONGEST_COUNTED + 1]
        bars = [
            {"from": low, "to": high - 1, "rows": int(self.counts[low:high].sum())}
            for low, high in pairwise(edges)
        ]
        quantiles = {f"p{share * 100:g}": self.at(share) for share in (0.5, 0.9, 0.95, 0.99, 0.999)}
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "longest": self.longest,
            **quantiles,
            "histogram": [bar for bar in bars if bar["rows"]],
        }

    def bars(self) -> list[str]:
        """The histogram as lines of text, one for each doubling of the length."""
        spans = {
            f"{bar['from']:,}–{bar['to']:,}": bar["rows"] for bar in self.as_dict()["histogram"]
        }
        width = max(map(len, spans), default=0)
        most = max(spans.values(), default=1)
        lines = []
        for span, rows in spans.items():
            bar = "█" * max(1, round(_LONGEST_BAR * rows / most))
            lines.append(f"{span.rjust(width)}  {bar} {rows:,}")
        return lines


def unknown_remarks(
    words: dict[str, tuple[int, int]], where: str = "", *, are_given: bool = False
) -> list[Remark]:
    """Report the fraction of each split's words that the vocabulary does not have.

    `words` has the number of unknown words and of all words of each split. `are_given` says that
    the vocabulary is the user's own, so that another one is the remedy.
    """
    shares = {split: unknown / max(1, total) for split, (unknown, total) in words.items()}
    text = ", ".join(f"{split} {share:.1%}" for split, share in shares.items())
    source = f"unknown words{where}"
    if max(shares.values(), default=0) <= _MANY_UNKNOWN:
        return [Remark(Level.note, source, text)]
    own = "data.tokenizer=FOLDER, of one that knows them"
    hint = own if are_given else "data.vocabulary.kind=bpe"
    return [Remark(Level.warning, source, text, hint)]


def loss_remarks(
    splits: dict[str, tuple[int, Lengths]], max_length: int, *, are_given: bool = False
) -> list[Remark]:
    """Report what encoding loses: words that are not in the vocabulary, and rows that are cut.

    `splits` has the number of unknown words and the lengths in tokens of each split.
    """
    words = {split: (unknown, lengths.tokens) for split, (unknown, lengths) in splits.items()}
    remarks = unknown_remarks(words, are_given=are_given)
    for split, (_, lengths) in splits.items():
        cut = lengths.truncation(max_length)
        if lengths.is_cut_much(max_length):
            hint = f"data.max_length={lengths.fine_length()}"
            remarks.append(Remark(Level.warning, split, cut, hint))
        elif cut:
            remarks.append(Remark(Level.note, split, cut))
    return remarks
