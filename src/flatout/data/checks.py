"""What is done with rows that cannot be trained on as they are; each is counted and told once.

Rows are never lost in silence: read = kept + dropped. A row without a label is dropped everywhere. A row without a
text teaches nothing and is dropped from training, but stays in validation and test, as one unknown word, so that
scores stay comparable. A class that only occurs in validation or test stays a class: its rows are misses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.problem import Problem
from flatout.errors import UserError

_ROWS_NAMED = 5
_SENTENCES = {
    "null_label": "without a label dropped",
    "null_text_dropped": "without a text (null) dropped",
    "empty_text_dropped": "with an empty text dropped",
    "null_text_kept": "without a text (null) kept as one unknown word",
    "empty_text_kept": "with an empty text kept as one unknown word",
    "text_cast": "whose text is no text read as one",
}


@dataclass(slots=True)
class Finding:
    """How often something was found, and the first rows that have it, counted from 1."""

    count: int = 0
    rows: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Findings:
    """What was found in the rows of one source."""

    source: str
    rows_read: int = 0
    rows_kept: int = 0
    found: dict[str, Finding] = field(default_factory=dict)

    def add(self, name: str, rows: NDArray[np.int64]) -> None:
        if len(rows):
            finding = self.found.setdefault(name, Finding())
            finding.count += len(rows)
            finding.rows += (rows[: _ROWS_NAMED - len(finding.rows)] + 1).tolist()

    def lines(self) -> list[str]:
        """A sentence for each finding."""
        return [
            f"{self.source}: {finding.count:,} rows {_SENTENCES[name]} (rows {_named(finding)})"
            for name, finding in self.found.items()
        ]


@dataclass(frozen=True, slots=True)
class CleanBlock:
    """Rows that are used: their texts, labels and numbers in the source, and the block they came from."""

    texts: pa.Array
    labels: pa.Array
    rows: NDArray[np.int64]
    block: pa.RecordBatch


def clean_block(
    block: pa.RecordBatch,
    *,
    text: str,
    label: str,
    rows: NDArray[np.int64],
    problem: Problem,
    is_train: bool,
    findings: Findings,
) -> CleanBlock:
    """The rows of a block that are used; what happened to the others goes to `findings`."""
    texts = read_texts(block.column(text), text, rows, findings)
    labels = block.column(label)
    findings.rows_read += block.num_rows
    has_no_label = _mask(_is_missing(labels, problem))
    findings.add("null_label", rows[has_no_label])
    is_null = _mask(pc.is_null(texts)) & ~has_no_label
    is_empty = _mask(pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0)) & ~has_no_label
    outcome = "dropped" if is_train else "kept"
    findings.add(f"null_text_{outcome}", rows[is_null])
    findings.add(f"empty_text_{outcome}", rows[is_empty])
    used = ~has_no_label & ~(is_null | is_empty) if is_train else ~has_no_label
    if not used.all():
        keep = pa.array(used)
        texts, labels, block, rows = texts.filter(keep), labels.filter(keep), block.filter(keep), rows[used]
    findings.rows_kept += len(rows)
    return CleanBlock(pc.fill_null(texts, ""), labels, rows, block)


def read_texts(column: pa.Array, name: str, rows: NDArray[np.int64], findings: Findings) -> pa.Array:
    """A column as texts; numbers are written out and counted, lists and the like are refused."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
        return column.cast(pa.large_string())
    if pa.types.is_primitive(kind):
        findings.add("text_cast", rows)
        return column.cast(pa.large_string())
    raise UserError("data.text", f"column {name!r} of {findings.source} holds {kind}", allowed="texts")


def normalise_labels(
    labels: pa.Array, rows: NDArray[np.int64], *, problem: Problem, delimiter: str | None, source: str
) -> pa.Array:
    """Labels in one form: texts, lists of texts, or floats."""
    if problem is Problem.regression:
        return _numbers(labels, rows, source)
    if problem is Problem.multi:
        return _lists(labels, delimiter, source)
    if pa.types.is_list(labels.type) or pa.types.is_large_list(labels.type):
        mend = "Set data.problem=multi."
        raise UserError("data.label", f"{source} has a list of labels in each row", mend=mend)
    return _names(labels)


def _names(labels: pa.Array) -> pa.Array:
    if pa.types.is_floating(labels.type) and _mask(pc.equal(pc.floor(labels), labels)).all():
        labels = labels.cast(pa.int64())  # whole numbers that a missing value had turned into floats
    return labels.cast(pa.large_string())


def _lists(labels: pa.Array, delimiter: str | None, source: str) -> pa.Array:
    if pa.types.is_list(labels.type) or pa.types.is_large_list(labels.type):
        return labels.cast(pa.list_(pa.large_string()))
    if delimiter is None:
        mend = "Set data.label_delimiter, for example data.label_delimiter='|'."
        raise UserError("data.label", f"{source} has one text a row where several labels are asked for", mend=mend)
    texts = _names(labels)
    lists = pc.split_pattern(texts, delimiter).cast(pa.list_(pa.large_string()))
    trimmed = pc.utf8_trim_whitespace(lists.values)
    kept = _mask(pc.not_equal(trimmed, ""))
    row = np.repeat(np.arange(len(lists)), np.diff(lists.offsets.to_numpy()))[kept]
    offsets = np.append(0, np.cumsum(np.bincount(row, minlength=len(lists)))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), trimmed.filter(pa.array(kept)))


def _numbers(labels: pa.Array, rows: NDArray[np.int64], source: str) -> pa.Array:
    try:
        numbers = pc.cast(labels, pa.float64())
    except pa.ArrowInvalid:
        is_number = _mask(pc.match_substring_regex(_names(labels), r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"))
        wrong = int(np.flatnonzero(~is_number)[0]) if not is_number.all() else 0
        mend = "Leave data.problem=single for classes."
        what = f"{source} row {rows[wrong] + 1}: {labels[wrong].as_py()!r} is no number"
        raise UserError("data.label", what, mend=mend) from None
    return numbers


class LabelCensus:
    """Counts labels over all splits; then turns them into targets."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.counts: dict[str, dict[str, int]] = {}
        self._sum = self._squares = 0.0
        self._number = 0
        self._classes: list[str] | None = None

    def add(self, split: str, labels: pa.Array) -> None:
        counts = self.counts.setdefault(split, {})
        if self.problem is Problem.regression:
            if split == "train":
                values = labels.to_numpy(zero_copy_only=False)
                self._sum, self._squares = self._sum + values.sum(), self._squares + (values**2).sum()
                self._number += len(values)
            return
        found = pc.value_counts(pc.list_flatten(labels) if self.problem is Problem.multi else labels)
        for name, count in zip(found.field(0).to_pylist(), found.field(1).to_pylist(), strict=True):
            counts[name] = counts.get(name, 0) + count

    def classes(self) -> list[str]:
        """Every class of any split: by number where all are whole numbers, else by spelling."""
        if self.problem is Problem.regression:
            return ["value"]
        if self._classes is None:
            names = {name for counts in self.counts.values() for name in counts}
            all_whole = all(name.removeprefix("-").isdecimal() for name in names)
            self._classes = sorted(names, key=(lambda name: (int(name), name)) if all_whole else None)
        return self._classes

    def train_counts(self) -> list[int]:
        counts = self.counts.get("train", {})
        return [self._number if self.problem is Problem.regression else counts.get(name, 0) for name in self.classes()]

    def scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the training numbers; 0 and 1 for classes."""
        if self.problem is not Problem.regression or not self._number:
            return 0.0, 1.0
        mean = self._sum / self._number
        spread = max(0.0, self._squares / self._number - mean**2) ** 0.5
        return mean, spread or 1.0

    def require_classes(self, where: str) -> None:
        """One class cannot be learnt, and neither can none."""
        if self.problem is not Problem.regression and len(self.counts.get("train", {})) < 2:
            names = ", ".join(map(repr, self.counts.get("train", {}))) or "none"
            raise UserError(where, f"the training rows have only one class: {names}", allowed="two or more")

    def lines(self) -> list[str]:
        """What a person should know of the classes."""
        train = self.counts.get("train", {})
        lines = []
        for split, counts in self.counts.items():
            if unseen := {name: count for name, count in counts.items() if name not in train}:
                named = ", ".join(f"{name!r} ({count:,} rows)" for name, count in list(unseen.items())[:_ROWS_NAMED])
                lines.append(f"{split}: {len(unseen)} classes that no training row has, scored as misses: {named}")
        return lines

    def targets(self, labels: pa.Array) -> NDArray[np.generic] | tuple[NDArray[np.generic], NDArray[np.generic]]:
        """Labels as the arrays that the store keeps."""
        if self.problem is Problem.regression:
            return labels.to_numpy(zero_copy_only=False)
        values = pc.list_flatten(labels) if self.problem is Problem.multi else labels
        ids = pc.index_in(values, pa.array(self.classes(), pa.large_string())).to_numpy(zero_copy_only=False)
        if self.problem is Problem.single:
            return ids
        return ids, pc.list_value_length(labels).to_numpy(zero_copy_only=False)


def _is_missing(labels: pa.Array, problem: Problem) -> pa.Array:
    if pa.types.is_floating(labels.type):
        return pc.is_null(labels, nan_is_null=True)
    is_text = pa.types.is_string(labels.type) or pa.types.is_large_string(labels.type)
    if is_text and problem is not Problem.multi:  # an empty text is no label, but a fine list of several
        return pc.fill_null(pc.equal(labels, ""), True)
    return pc.is_null(labels)


def _mask(values: pa.Array) -> NDArray[np.bool_]:
    return pc.fill_null(values, False).to_numpy(zero_copy_only=False)


def _named(finding: Finding) -> str:
    more = ", …" if finding.count > len(finding.rows) else ""
    return ", ".join(map(str, finding.rows)) + more


def all_lines(findings: Iterable[Findings]) -> list[str]:
    return [line for one in findings for line in one.lines()]
