"""What encoding has counted in the rows of a split: tokens, windows, and what was cut.

Blocks of rows are added while they are encoded; counts of a unit that was encoded before are merged
from its facts. Open this file to let a store's facts say more of a split.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from flatout.data.checks.lengths import Lengths
from flatout.data.tokens.long_texts import LongTexts
from flatout.data.tokens.vocabulary import EncodedBlock


@dataclass(slots=True)
class EncodedTotals:
    """What encoding has counted in the rows of one split."""

    counts: Counter[str] = field(default_factory=Counter)
    """Of tokens, unknown tokens, windows, rows and tokens cut; `clean`: rows of a sample whose
    label is the true one."""
    lengths: Lengths = field(default_factory=Lengths)  # lengths before anything is cut

    def add(self, block: EncodedBlock, long: LongTexts) -> None:
        self.counts.update(
            tokens=len(block.tokens),
            unknown=block.unknown,
            windows=long.count_windows(block.lengths),
            truncated_rows=block.truncated_rows,
            truncated_tokens=block.truncated_tokens,
        )
        self.lengths.add(block.whole_lengths)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as the facts of a unit keep them."""
        return {"counts": dict(self.counts), "lengths": self.lengths.noted()}

    def merge(self, other: dict[str, Any]) -> None:
        """Add the counts of other rows, as `as_dict` wrote them."""
        self.counts.update(other["counts"])
        self.lengths.take_in(other["lengths"])

    def facts(self) -> dict[str, Any]:
        """What the facts of a store say of a split."""
        counts = self.counts
        rows = max(1, self.lengths.rows)
        facts = {
            "rows": self.lengths.rows,
            "tokens": counts["tokens"],
            "mean_length": counts["tokens"] / rows,
            "unknown_share": counts["unknown"] / max(1, counts["tokens"]),
            "truncated_rows": counts["truncated_rows"],
            "truncated_tokens": counts["truncated_tokens"],
        }
        if "clean" in counts:
            facts["ceiling"] = counts["clean"] / rows
        return facts
