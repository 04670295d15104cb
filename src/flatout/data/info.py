"""What is known of data whose store is open: labels, vocabulary, columns, counts.

A task builds its network from it, a predictor answers with it, and a report prints it. Open this
file to add a fact of texts or tags that a task needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.data.problem import NO_TAG, Problem, are_plain, types_of_tags
from flatout.data.tokens.long_texts import CUT, LongTexts
from flatout.errors import require

if TYPE_CHECKING:
    from flatout.data.checks.cleaning import Escapes
    from flatout.data.store.cache import CacheReport
    from flatout.data.store.store import Store
    from flatout.data.tables.roles import Roles
    from flatout.data.tokens.subwords import Encoder

_TOKENS_A_PIECE = 1 << 22  # tokens that are counted at once, so that memory stays flat
# Of the spread of regression targets: rounding to fp32 may change them by so much.
_MOST_LOST = 1e-3


@dataclass(frozen=True, slots=True)
class Labels:
    """What the model's outputs mean: the kind of label, the classes, and what the training rows
    hold of them.
    """

    problem: Problem
    classes: list[str]  # in the order of the outputs; one name for a number
    counts: list[int]  # training rows of each class; their number for a number
    num_rows: int  # training rows
    mean: float = 0.0  # mean of the training targets of a regression
    spread: float = 1.0  # their standard deviation

    def __post_init__(self) -> None:
        # fp32 has 24 bits: numbers around a million that differ by 0.01 become equal.
        lost = abs(self.mean) * 2**-24
        is_kept = not self.num_rows or lost <= _MOST_LOST * self.spread
        require(
            is_kept,
            "data.label",
            f"numbers around {self.mean:.6g} that differ by {self.spread:.3g}, which fp32 keeps to"
            f" {lost:.2g}",
            hint="Take a constant off all of them.",
        )

    @property
    def num_outputs(self) -> int:
        return len(self.classes)


@dataclass(frozen=True, slots=True)
class TagLabels:
    """What the outputs of a tagger mean, and which words of each split it never sees."""

    names: list[str]  # plain tags; or O, then B and I of each type
    words_per_row: float  # mean of the training rows, by which the loss is divided
    # words and entities of each split that were cut off with the ends of long rows
    lost: dict[str, dict[str, Any]]
    counts: list[int] = field(default_factory=list)
    """Training words of each tag that the model sees; empty until they are counted."""

    @property
    def types(self) -> list[str]:
        return types_of_tags(self.names)

    @property
    def are_plain(self) -> bool:
        """Whether each word counts by itself, as it does for parts of speech."""
        return are_plain(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataInfo:
    """What every kind of data knows of its store."""

    store: Store
    report: CacheReport
    source: str  # name of the table of the training rows

    @property
    def facts(self) -> dict[str, Any]:
        """What the store keeps of its data, as plain JSON values."""
        return self.store.facts

    @property
    def key(self) -> str:
        """The store's key: equal keys mean equal data."""
        return self.report.key

    @property
    def lines(self) -> list[str]:
        """What is printed of the data."""
        return [self.report.line(), *self.facts["lines"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo(DataInfo):
    """What texts and tagged words have in common."""

    vocabulary: Encoder
    roles: Roles  # the columns of the source that hold texts and labels
    max_length: int  # longest row in tokens
    long_texts: LongTexts = CUT  # how texts longer than that, or than a window, become rows

    @property
    def classes(self) -> list[str]:
        return list(self.facts["classes"])

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds of the data."""
        splits = self.facts["splits"]
        return {
            "rows": {split: counts["rows"] for split, counts in splits.items()},
            "classes": len(self.classes),
            "tokens": splits["train"]["tokens"],
            "mean_length": splits["train"]["mean_length"],
            "truncated_rows": sum(counts["truncated_rows"] for counts in splits.values()),
            "columns": self.facts["columns"],
            "lengths": self.facts["lengths"],
            "checks": self.facts["remarks"],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInfo(TokenInfo):
    """Texts with classes or numbers."""

    labels: Labels
    escapes: Escapes  # how escapes in texts are read (`data.clean.escapes`)
    label_delimiter: str | None  # what separates the labels of a row
    group: str | None = None  # the column whose equal values belong together

    @property
    def problem(self) -> Problem:
        return self.labels.problem

    @property
    def ceilings(self) -> dict[str, float]:
        """The best accuracy possible on each split of a built-in sample; empty for other data."""
        return {
            split: counts["ceiling"]
            for split, counts in self.facts["splits"].items()
            if "ceiling" in counts
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TagInfo(TokenInfo):
    """Words with tags."""

    labels: TagLabels

    @property
    def problem(self) -> Problem:
        return Problem.tags

    def count_tags(self) -> list[int]:
        """Training words of each tag, counted piece by piece."""
        targets = self.store.splits["train"].ragged("targets").values
        counts = np.zeros(len(self.labels.names), np.int64)
        for start in range(0, len(targets), _TOKENS_A_PIECE):
            piece = targets[start : start + _TOKENS_A_PIECE]
            counts += np.bincount(piece[piece != NO_TAG], minlength=len(counts))
        return counts.tolist()
