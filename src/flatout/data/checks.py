"""What is done with rows that cannot be trained on as they are; each is counted and told once.

Rows are never lost in silence: read = kept + dropped. A row without a label is dropped everywhere. A row without a
text teaches nothing and is dropped from training, but stays in validation and test, as one unknown word, so that
scores stay comparable. A class that only occurs in validation or test stays a class: its rows are misses. All of it
is arithmetic over whole blocks; a row is looked at by itself only to name it in an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.problem import Problem
from flatout.errors import UserError

_ROWS_NAMED = 5
_LONGEST_WHOLE = 18
_NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"
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

    @property
    def rows_dropped(self) -> int:
        return self.rows_read - self.rows_kept

    def add(self, name: str, rows: NDArray[np.int64]) -> None:
        """Count rows, given by their numbers from 0 in any order; the first few are remembered."""
        if len(rows):
            finding = self.found.setdefault(name, Finding())
            finding.count += len(rows)
            first = np.sort(rows)[:_ROWS_NAMED] + 1
            finding.rows = sorted([*finding.rows, *first.tolist()])[:_ROWS_NAMED]

    def lines(self) -> list[str]:
        """A sentence for each finding."""
        return [
            f"{self.source}: {finding.count:,} rows {_SENTENCES[name]} (rows {_named(finding)})"
            for name, finding in self.found.items()
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they go into a run's summary."""
        return asdict(self) | {"rows_dropped": self.rows_dropped}


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
    labels = _decoded(block.column(label))
    findings.rows_read += block.num_rows
    has_no_label = _mask(_is_missing(labels, problem))
    findings.add("null_label", rows[has_no_label])
    is_null = _mask(pc.is_null(texts)) & ~has_no_label
    is_empty = _mask(_is_blank(texts)) & ~has_no_label
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
    """A column as texts; numbers and dates are written out and counted, lists and the like are refused."""
    column = _decoded(column)
    if _is_text(column.type) or pa.types.is_null(column.type):
        return column.cast(pa.large_string())
    if not _is_plain(column.type):
        raise UserError("data.text", f"column {name!r} of {findings.source} holds {column.type}", allowed="texts")
    findings.add("text_cast", rows)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    return _written(column)


def normalise_labels(
    labels: pa.Array, rows: NDArray[np.int64], *, problem: Problem, delimiter: str | None, source: str
) -> pa.Array:
    """Labels in one form: texts, lists of texts, or floats."""
    labels = _decoded(labels)
    if problem is Problem.regression:
        return _numbers(labels, rows, source)
    if problem is Problem.multi:
        return _lists(labels, delimiter, source)
    if _is_list(labels.type):
        mend = "Set data.problem=multi."
        raise UserError("data.label", f"{source} has a list of labels in each row", mend=mend)
    return _names(labels, source)


def _names(labels: pa.Array, source: str) -> pa.Array:
    if not (_is_text(labels.type) or _is_plain(labels.type) or pa.types.is_null(labels.type)):
        allowed = "texts, whole numbers, true and false"
        raise UserError("data.label", f"the labels of {source} are of type {labels.type}", allowed=allowed)
    return _written(labels)


def _written(values: pa.Array) -> pa.Array:
    """Values as texts. A float that is whole is written as one: a missing value had turned the column into floats."""
    texts = values.cast(pa.large_string())
    if not pa.types.is_floating(values.type):
        return texts
    is_whole = pc.and_(pc.equal(pc.floor(values), values), pc.less(pc.abs(values), 2.0**53))
    whole = pc.if_else(is_whole, values, pa.scalar(0, values.type)).cast(pa.int64())
    return pc.if_else(is_whole, whole.cast(pa.large_string()), texts)


def _lists(labels: pa.Array, delimiter: str | None, source: str) -> pa.Array:
    """Every label once a row; nulls and empty texts in a list are no labels."""
    is_list = _is_list(labels.type)
    if not is_list:
        if not delimiter:
            mend = "Set data.label_delimiter, for example data.label_delimiter='|'."
            raise UserError("data.label", f"{source} has one text a row where several labels are asked for", mend=mend)
        labels = pc.split_pattern(_names(labels, source), delimiter)
    values, row = _decoded(pc.list_flatten(labels)), pc.list_parent_indices(labels).to_numpy(zero_copy_only=False)
    values = values if is_list else pc.utf8_trim_whitespace(values)
    kept = ~_mask(_is_missing(values, Problem.single))
    names, row = _names(values.filter(pa.array(kept)), source), row[kept]
    codes = pc.dictionary_encode(names).indices.to_numpy(zero_copy_only=False)
    _, first = np.unique(row * (len(names) + 1) + codes, return_index=True)
    first.sort()
    offsets = np.append(0, np.cumsum(np.bincount(row[first], minlength=len(labels)))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), names.take(pa.array(first)))


def _numbers(labels: pa.Array, rows: NDArray[np.int64], source: str) -> pa.Array:
    """Labels as finite floats; the first row that is none is named."""
    is_wrong = np.zeros(len(labels), dtype=np.bool_)
    values = labels
    if _is_text(labels.type):
        values = pc.utf8_trim_whitespace(labels)
        is_wrong = ~_mask(pc.match_substring_regex(values, _NUMBER))
    elif not (_is_plain(labels.type) or pa.types.is_null(labels.type)) or pa.types.is_temporal(labels.type):
        raise UserError("data.label", f"the labels of {source} are of type {labels.type}", allowed="numbers")
    if not is_wrong.any():
        numbers = pc.cast(values, pa.float64())
        is_wrong = ~_mask(pc.is_finite(numbers))
    if not is_wrong.any():
        return numbers
    wrong = int(np.flatnonzero(is_wrong)[0])
    what = f"{source} row {rows[wrong] + 1}: {str(labels[wrong].as_py())[:60]!r} is no number"
    raise UserError("data.label", what, mend="Leave data.problem=single for classes.")


class LabelCensus:
    """Counts labels over all splits; then turns them into targets."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.counts: dict[str, dict[str, int]] = {}
        self._number, self._mean, self._squares = 0, 0.0, 0.0
        self._classes: list[str] | None = None

    def add(self, split: str, labels: pa.Array) -> None:
        counts = self.counts.setdefault(split, {})
        if self.problem is Problem.regression:
            if split == "train":
                self._add_numbers(labels.to_numpy(zero_copy_only=False))
            return
        found = pc.value_counts(pc.list_flatten(labels) if self.problem is Problem.multi else labels)
        for name, count in zip(found.field(0).to_pylist(), found.field(1).to_pylist(), strict=True):
            counts[name] = counts.get(name, 0) + count

    def _add_numbers(self, values: NDArray[np.float64]) -> None:
        """Merge means and squared distances from them (Chan, Golub and LeVeque 1979): exact for large numbers too."""
        if len(values):
            total = self._number + len(values)
            mean = float(values.mean())
            apart = mean - self._mean
            self._squares += float(((values - mean) ** 2).sum()) + apart**2 * self._number * len(values) / total
            self._mean += apart * len(values) / total
            self._number = total

    def classes(self) -> list[str]:
        """Every class of any split: by number where all are whole numbers, else by spelling."""
        if self.problem is Problem.regression:
            return ["value"]
        if self._classes is None:
            names = {name for counts in self.counts.values() for name in counts}
            all_whole = all(name.removeprefix("-").isdecimal() and len(name) <= _LONGEST_WHOLE for name in names)
            self._classes = sorted(names, key=(lambda name: (int(name), name)) if all_whole else None)
        return self._classes

    def train_counts(self) -> list[int]:
        counts = self.counts.get("train", {})
        return [self._number if self.problem is Problem.regression else counts.get(name, 0) for name in self.classes()]

    def scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the training numbers; 0 and 1 for classes."""
        if self.problem is not Problem.regression or not self._number:
            return 0.0, 1.0
        spread = (self._squares / self._number) ** 0.5
        return self._mean, spread or 1.0

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
                first = list(unseen.items())[:_ROWS_NAMED]
                named = ", ".join(f"{name!r} ({count:,} rows)" for name, count in first)
                more = ", …" if len(unseen) > len(first) else ""
                lines.append(
                    f"{split}: {len(unseen)} classes that no training row has, scored as misses: {named}{more}"
                )
        return lines

    def targets(self, labels: pa.Array) -> NDArray[np.generic] | tuple[NDArray[np.generic], NDArray[np.generic]]:
        """Labels as the arrays that the store keeps."""
        if self.problem is Problem.regression:
            return labels.to_numpy(zero_copy_only=False)
        values = pc.list_flatten(labels) if self.problem is Problem.multi else labels
        ids = pc.index_in(values, pa.array(self.classes(), pa.large_string()))
        assert ids.null_count == 0, "a label that was never counted"
        ids = ids.to_numpy(zero_copy_only=False)
        if self.problem is Problem.single:
            return ids
        return ids, pc.list_value_length(labels).to_numpy(zero_copy_only=False)


def _is_missing(labels: pa.Array, problem: Problem) -> pa.Array:
    if pa.types.is_floating(labels.type):
        return pc.is_null(labels, nan_is_null=True)
    if _is_text(labels.type) and problem is not Problem.multi:  # no text is no label, but a fine list of several
        return pc.fill_null(_is_blank(labels), True)
    return pc.is_null(labels)


def _is_blank(texts: pa.Array) -> pa.Array:
    """Empty, or nothing but white space of any alphabet."""
    return pc.or_(pc.equal(pc.binary_length(texts), 0), pc.utf8_is_space(texts))


def _decoded(values: pa.Array) -> pa.Array:
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_plain(kind: pa.DataType) -> bool:
    """Numbers, dates, true and false: what has one way of being written."""
    return pa.types.is_primitive(kind) or pa.types.is_decimal(kind)


def _mask(values: pa.Array) -> NDArray[np.bool_]:
    return pc.fill_null(values, False).to_numpy(zero_copy_only=False)


def _named(finding: Finding) -> str:
    more = ", …" if finding.count > len(finding.rows) else ""
    return ", ".join(map(str, finding.rows)) + more


def all_lines(findings: Iterable[Findings]) -> list[str]:
    return [line for one in findings for line in one.lines()]
