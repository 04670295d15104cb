"""Facts about records whose store is open: their grams, their encodings, their texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.bits.grams import LABELS
from flatout.data.info import DataInfo


@dataclass(frozen=True, slots=True)
class GramLabels:
    """What the model's outputs mean."""

    names: tuple[str, ...]  # the grams that are answered, in the order of the outputs
    # the grams that were hashed, as far as training texts tell; outputs after the answers
    hashed: list[str]
    counts: list[int]  # training records that hold each answer
    num_rows: int  # training records

    @property
    def num_outputs(self) -> int:
        return len(self.names)

    @property
    def num_targets(self) -> int:
        """Answers and hashed grams together, as targets number them."""
        return len(self.names) + len(self.hashed)

    @property
    def parts(self) -> tuple[slice, slice]:
        """Where the answers, and where the hashed grams stand among the targets."""
        return slice(0, self.num_outputs), slice(self.num_outputs, self.num_targets)

    def network_sizes(self) -> dict[str, Any]:
        """The arguments that size a network.

        For the answers an, nn and hashed grams " a", an: hashed_of_label [1, -1], num_hashed 2.
        """
        places = {name: number for number, name in enumerate(self.hashed)}
        return {
            "hashed_of_label": [places.get(name, -1) for name in self.names],
            "num_hashed": len(self.hashed),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BitInfo(DataInfo):
    """Records with encodings."""

    @property
    def labels(self) -> GramLabels:
        facts = self.facts
        return GramLabels(
            LABELS, facts["hashed"], facts["class_counts"], facts["splits"]["train"]["rows"]
        )

    @property
    def is_set(self) -> bool:
        """Whether an encoding is a set of numbers rather than bits."""
        return bool(self.facts["is_set"])

    @property
    def num_inputs(self) -> int:
        """Bits of a record, or numbers that have an input each."""
        return int(self.facts["num_inputs"])

    @property
    def numbers(self) -> NDArray[np.int64] | None:
        """The numbers of a two-step hash that have an input each; None for bits."""
        return np.array(self.facts["numbers"], dtype=np.int64) if self.is_set else None

    @property
    def text_columns(self) -> list[str]:
        """Columns of plain text, in the order in which they were encoded."""
        return list(self.facts["columns"])

    def texts(self, split: str) -> pa.Array:
        """Raw texts of a split, fields parted by FIELD_END."""
        rows = self.store.splits[split]
        column = rows.ragged("texts")
        buffers = [
            None,
            pa.py_buffer(np.ascontiguousarray(column.offsets)),
            pa.py_buffer(column.values),
        ]
        return pa.Array.from_buffers(pa.large_string(), rows.num_rows, buffers)

    def summary(self) -> dict[str, Any]:
        splits = self.facts["splits"]
        rows = {name: counts["rows"] for name, counts in splits.items()}
        tokens = splits["train"]["tokens"]
        sizes = {"tokens": tokens, "mean_length": tokens / max(1, rows["train"])}
        return {"rows": rows, "classes": len(LABELS), **sizes, "truncated_rows": 0}
