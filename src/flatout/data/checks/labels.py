"""Labels in one form and one order: texts, lists of texts, or numbers.

A label is the text that is written: `007` is not `7`, `NA` is a label. Labels that differ in
nothing but case, blanks around them or a zero after the point are reported, and merged only when
asked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.findings import Level, Remark, counted
from flatout.data.problem import Problem
from flatout.data.tables.splits import hash_bytes
from flatout.data.tables.table import (
    Rows,
    as_texts,
    decoded,
    is_list,
    is_missing,
    is_plain,
    is_text,
    mask_of,
)
from flatout.errors import UserError, require

Locate = Callable[[int], str]
_CLASSES_NAMED = 6
_SEEN_NAMED = 5
_LONGEST_WHOLE = 18
_NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"
_FEW_ROWS = 5
_UNEVEN = 50
_IDS_FROM = 50
_MOST_CLASSES = 20_000
_NAME = "Name the column of the labels: data.label=COLUMN."


def normalise_labels(
    labels: pa.Array,
    rows: Rows,
    *,
    problem: Problem,
    delimiter: str | None,
    source: str,
    locate: Locate = str,
) -> pa.Array:
    """Labels in one form: texts, lists of texts, or floats."""
    labels = decoded(labels)
    if problem is Problem.none:
        return labels
    if problem is Problem.regression:
        return _numbers(labels, rows, source, locate)
    if problem is Problem.multi:
        return _lists(labels, delimiter, source)
    require(
        not is_list(labels.type),
        "data.label",
        f"{source} has a list of labels in each row",
        hint="Set data.problem=multi.",
    )
    return _names(labels, source)


def _names(labels: pa.Array, source: str) -> pa.Array:
    has_names = is_text(labels.type) or is_plain(labels.type) or pa.types.is_null(labels.type)
    require(
        has_names,
        "data.label",
        f"the labels of {source} are of type {labels.type}",
        allowed="texts, whole numbers, true and false",
    )
    return as_texts(labels)


def _lists(labels: pa.Array, delimiter: str | None, source: str) -> pa.Array:
    """Every label once a row; nulls and empty texts in a list are no labels."""
    has_lists = is_list(labels.type)
    if not has_lists:
        require(
            bool(delimiter),
            "data.label",
            f"{source} has one text a row where several labels are asked for",
            hint="Set data.label_delimiter, for example data.label_delimiter='|'.",
        )
        labels = pc.split_pattern(_names(labels, source), delimiter)
    values = decoded(pc.list_flatten(labels))
    row = pc.list_parent_indices(labels).to_numpy(zero_copy_only=False)
    values = values if has_lists else pc.utf8_trim_whitespace(values)
    kept = ~mask_of(is_missing(values, Problem.single))
    names = _names(values.filter(pa.array(kept)), source)
    row = row[kept]
    codes = pc.dictionary_encode(names).indices.to_numpy(zero_copy_only=False)
    _, first = np.unique(row * (len(names) + 1) + codes, return_index=True)
    first.sort()
    offsets = np.append(0, np.cumsum(np.bincount(row[first], minlength=len(labels)))).astype(
        np.int32
    )
    return pa.ListArray.from_arrays(pa.array(offsets), names.take(pa.array(first)))


def _numbers(labels: pa.Array, rows: Rows, source: str, locate: Locate) -> pa.Array:
    values = labels
    if is_text(labels.type):
        values = pc.utf8_trim_whitespace(labels)
        # null: named below
        values = pc.if_else(pc.match_substring_regex(values, _NUMBER), values, None)
    elif not (is_plain(labels.type) or pa.types.is_null(labels.type)) or pa.types.is_temporal(
        labels.type
    ):
        raise UserError(
            "data.label", f"the labels of {source} are of type {labels.type}", allowed="numbers"
        )
    numbers = pc.cast(values, pa.float64())
    is_wrong = ~mask_of(pc.is_finite(numbers))
    if not is_wrong.any():
        return numbers
    wrong = int(np.flatnonzero(is_wrong)[0])
    what = (
        f"{source} row {locate(int(rows[wrong]) + 1)}: {str(labels[wrong].as_py())[:60]!r} is no"
        " number"
    )
    has_comma = re.fullmatch(r"\s*-?\d+,\d+\s*", str(labels[wrong].as_py()))
    hint = "Correct the row; or set data.problem=single, if labels are classes."
    raise UserError("data.label", what, hint="Write decimals with a point." if has_comma else hint)


class LabelCensus:
    """Numbers the labels of all splits as they are met, counts them, and then turns them into
    targets.
    """

    def __init__(
        self, problem: Problem, *, merge: bool = False, max_classes: int | None = None
    ) -> None:
        self.problem = problem
        self._merge = merge
        self._max_classes = max_classes
        self.counts: dict[str, Counter[str]] = {}  # rows of each class, by split
        self.rows: Counter[str] = (
            Counter()
        )  # rows by split, those without any of several labels too
        self._codes: dict[str, int] = {}
        # labels of a row: one, or several where there may be more
        self._sets: dict[tuple[int, ...], int] = {}
        self._others: dict[str, str] = {}  # other ways of writing a class, and the one that is kept
        self._number = 0
        self._mean = 0.0
        self._squares = 0.0

    def code(self, labels: pa.Array) -> NDArray[np.int32]:
        """A number for each row's label, or set of labels: equal labels get equal numbers.

        Zeros without classes.
        """
        if not self.problem.has_classes:
            return np.zeros(len(labels), np.int32)
        if self.problem is Problem.multi:
            return self._code_sets(labels)
        found = self._numbered(labels)
        self._sets |= {(code,): code for code in range(len(self._sets), len(self._codes))}
        return found

    def numbers(self) -> tuple[list[str], list[list[int]]]:
        """The labels by their numbers, and for each number that `code` gives its labels."""
        return list(self._codes), [list(labels) for labels in self._sets]

    def take_in(self, names: list[str], sets: list[list[int]]) -> NDArray[np.int32]:
        """For each number that another census gives, the number here."""
        own = [self._codes.setdefault(name, len(self._codes)) for name in names]
        labels = [tuple(sorted(own[label] for label in each)) for each in sets]
        return np.array(
            [self._sets.setdefault(each, len(self._sets)) for each in labels] or [0], np.int32
        )

    def settle(self, split: str, rows_by_code: NDArray[np.integer]) -> None:
        """Take in how many rows of a split have each number that `code` gave."""
        self.rows[split] += int(rows_by_code.sum())
        counts = self.counts.setdefault(split, Counter())
        names = list(self._codes)
        sets = list(self._sets)
        for code in np.flatnonzero(rows_by_code):
            for label in sets[code]:
                counts[self._others.get(names[label], names[label])] += int(rows_by_code[code])

    def add_numbers(self, values: NDArray[np.float64]) -> None:
        """Merge means and squared distances from them (Chan, Golub and LeVeque 1979): exact for
        large numbers too.
        """
        if len(values):
            total = self._number + len(values)
            mean = float(values.mean())
            apart = mean - self._mean
            self._squares += (
                float(((values - mean) ** 2).sum()) + apart**2 * self._number * len(values) / total
            )
            self._mean += apart * len(values) / total
            self._number = total

    def unify(self, rows_by_code: NDArray[np.integer]) -> NDArray[np.int64]:
        """For each number of `code` the one that stands for it: another where classes written alike
        are made one.
        """
        if self._merge:
            total = self._by_label(rows_by_code)
            for group in self._alike():
                common = max(group, key=lambda name: (total[self._codes[name]], -self._codes[name]))
                self._others |= {name: common for name in group if name != common}
        codes = [self._codes[self._others.get(name, name)] for name in self._codes]
        kept = [tuple(sorted({codes[label] for label in labels})) for labels in self._sets]
        return np.array(
            [self._sets.setdefault(each, len(self._sets)) for each in kept] or [0], np.int64
        )

    def strata(self, rows_by_code: NDArray[np.integer]) -> NDArray[np.int64]:
        """For each number of `code`, the class by which its rows are dealt out: the rarest, hardest
        to share.
        """
        total = self._by_label(rows_by_code)
        names = list(self._codes)
        rank = {
            label: place
            for place, label in enumerate(sorted(range(len(names)), key=names.__getitem__))
        }
        rarest = [
            min(((total[each], rank[each]) for each in labels), default=(0, -1))[1]
            for labels in self._sets
        ]
        return np.array(rarest or [-1], np.int64) + 1  # by name: in whatever order rows come

    def classes(self) -> list[str]:
        """Every class of any split: by number where all are whole numbers, else by spelling."""
        if not self.problem.has_classes:
            return ["value"] if self.problem is Problem.regression else []
        names = {name for counts in self.counts.values() for name in counts}
        all_whole = all(
            name.removeprefix("-").isdecimal() and len(name) <= _LONGEST_WHOLE for name in names
        )
        return sorted(names, key=(lambda name: (int(name), name)) if all_whole else None)

    def train_counts(self) -> list[int]:
        counts = self.counts.get("train", Counter[str]())
        return [
            self._number if self.problem is Problem.regression else counts[name]
            for name in self.classes()
        ]

    def scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the training numbers; 0 and 1 for classes."""
        if self.problem is not Problem.regression or not self._number:
            return 0.0, 1.0
        is_alike = self._number > 1 and not self._squares
        require(
            not is_alike,
            "data.label",
            f"each training row has the number {self._mean:g}",
            hint=_NAME,
        )
        return self._mean, (self._squares / self._number) ** 0.5 or 1.0

    def has_a_class_for_most_rows(self) -> bool:
        """Whether there are more classes than half the rows, and no setting allows so many."""
        if self.problem is not Problem.single or self._max_classes is not None:
            return False
        names = {name for counts in self.counts.values() for name in counts}
        return 2 * len(names) > self.rows.total()

    def require_classes(self, where: str) -> None:
        """One class cannot be learnt, and neither can none, nor one for each row, nor others than
        those in training.
        """
        if not self.problem.has_classes:
            return
        train = self.counts.get("train", Counter[str]())
        named = f"the training rows have only one class: {', '.join(map(repr, train))}"
        what = named if train else "no training row has one"
        require(len(train) > 1, where, what, allowed="two or more", hint=_NAME)
        rows = sum(train.values())
        most = self._max_classes or min(_MOST_CLASSES, max(_IDS_FROM, rows // 2))
        what = f"{len(train):,} classes in {rows:,} training rows, such as {_few(train)}"
        are_numbers = all(re.fullmatch(_NUMBER, name.strip()) for name in train)
        hint = "Are they numbers to predict? Set data.problem=regression. " if are_numbers else ""
        hint += (
            "Is that a column of ids? Set data.label=COLUMN. If not, set"
            f" data.max_classes={len(train)}."
        )
        require(len(train) <= most, where, what, allowed=f"{most:,} or fewer", hint=hint)
        for split, counts in self.counts.items():
            what = (
                f"no label of the {split} rows is one of the training rows: {_few(counts)}, but"
                f" there {_few(train)}"
            )
            is_known = not counts or bool(counts.keys() & train.keys())
            require(is_known, where, what, hint="Write the labels of all splits in one way.")

    def targets(
        self, labels: pa.Array
    ) -> NDArray[np.generic] | tuple[NDArray[np.generic], NDArray[np.generic]]:
        """Labels as the arrays that the store keeps."""
        if not self.problem.has_classes:
            return labels.to_numpy(zero_copy_only=False)
        values = pc.list_flatten(labels) if self.problem is Problem.multi else labels
        ids = pc.index_in(values, pa.array(self._codes, pa.large_string()))
        assert ids.null_count == 0, "a label that was never counted"
        found = self.targets_of(self._codes)[ids.to_numpy(zero_copy_only=False)]
        if self.problem is Problem.single:
            return found
        return found, pc.list_value_length(labels).to_numpy(zero_copy_only=False)

    def targets_of(self, names: Iterable[str]) -> NDArray[np.int32]:
        """The target that each label means; -1 for one that no row has, or has no longer."""
        place = {name: number for number, name in enumerate(self.classes())}
        return np.array([place.get(self._others.get(name, name), -1) for name in names], np.int32)

    def remarks(self, source: str, decided: Mapping[str, int] | None = None) -> list[Remark]:
        """What stands out of the classes; `decided`: rows whose label somebody gave, by it."""
        if not self.problem.has_classes:
            return []
        train = self.counts.get("train", Counter[str]())
        remarks = [Remark(Level.note, source, self._list_classes())]
        commonest = max(train.values(), default=0)
        rarest = min(train.values(), default=0)
        if few := {name: count for name, count in train.items() if count < _FEW_ROWS}:
            rare = counted(len(few), "class")
            what = f"{rare} with fewer than {_FEW_ROWS} training rows: {_few(few, with_rows=True)}"
            remarks.append(Remark(Level.warning, source, what, "task.class_weights=auto"))
        elif rarest and commonest >= _UNEVEN * rarest:
            what = f"the commonest class has {commonest / rarest:,.0f} times the rows of the rarest"
            remarks.append(Remark(Level.warning, source, what, "task.class_weights=auto"))
        total = sum(self.counts.values(), Counter[str]())
        if alone := {
            name: count for name, count in (decided or {}).items() if count >= total[name] > 0
        }:
            what = f"labels that no row has but by data.relabel: {_few(alone, with_rows=True)}"
            remarks.append(
                Remark(Level.warning, source, what, "correct its file, if they are mistyped")
            )
        for group in [] if self._merge else self._alike()[:_SEEN_NAMED]:
            named = ", ".join(f"{name!r} ({total[name]:,} rows)" for name in group)
            what = (
                "labels that differ in case, blanks or a zero after the point, each a class:"
                f" {named}"
            )
            remarks.append(Remark(Level.warning, source, what, "data.clean.labels=merge"))
        for split, counts in self.counts.items():
            if unseen := {name: count for name, count in counts.items() if name not in train}:
                named = _few(unseen, with_rows=True)
                what = (
                    f"{counted(len(unseen), 'class')} that no training row has, scored as misses:"
                    f" {named}"
                )
                remarks.append(
                    Remark(
                        Level.warning, split, what, "data.split_by=stratified where splits are made"
                    )
                )
        return remarks

    def _list_classes(self) -> str:
        """The classes of the training rows, each with its rows and their share of all rows."""
        train = self.counts.get("train", Counter[str]())
        rows = max(1, self.rows["train"])
        named = [f"{name!r} {count:,} ({count / rows:.1%})" for name, count in train.most_common()]
        if len(named) > _CLASSES_NAMED:
            named = [*named[:4], "…", *named[-2:]]
        several = f" in {counted(rows, 'row')}" if self.problem is Problem.multi else ""
        return f"{len(train):,} classes{several}: {', '.join(named)}"

    def _alike(self) -> list[list[str]]:
        groups: dict[str, list[str]] = {}
        for name in self._codes:
            groups.setdefault(plainly(name), []).append(name)
        return [group for group in groups.values() if len(group) > 1]

    def _by_label(self, rows_by_code: NDArray[np.integer]) -> NDArray[np.int64]:
        """Rows of each label, from the rows of each set of labels."""
        total = np.zeros(len(self._codes), np.int64)
        for labels, rows in zip(self._sets, rows_by_code, strict=False):
            total[list(labels)] += rows
        return total

    def _numbered(self, names: pa.Array) -> NDArray[np.int32]:
        found = pc.dictionary_encode(names)
        codes = self._codes
        of_found = [codes.setdefault(name, len(codes)) for name in found.dictionary.to_pylist()]
        return np.array(of_found or [0], np.int32)[found.indices.to_numpy(zero_copy_only=False)]

    def _code_sets(self, labels: pa.Array) -> NDArray[np.int32]:
        counts = pc.list_value_length(labels).to_numpy(zero_copy_only=False)
        flat = self._numbered(pc.list_flatten(labels))
        row = np.repeat(np.arange(len(labels)), counts)
        flat = flat[np.lexsort((flat, row))]  # one order of labels, so that one set has one number
        offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
        hashes = hash_bytes(flat.view(np.uint8), offsets.astype(np.int64) * flat.itemsize)
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        sets = [tuple(flat[offsets[i] : offsets[i + 1]].tolist()) for i in first]
        return np.array([self._sets.setdefault(each, len(self._sets)) for each in sets], np.int32)[
            inverse
        ]


def plainly(name: str) -> str:
    """A class without case, blanks around it and the zeros of a whole number."""
    plain = name.strip().casefold()
    whole, point, zeros = plain.partition(".")
    return (
        whole if point and whole.removeprefix("-").isdecimal() and not zeros.strip("0") else plain
    )


def _few(classes: dict[str, int], *, with_rows: bool = False) -> str:
    first = list(classes.items())[:_SEEN_NAMED]
    named = [
        f"{name[:40]!r} ({counted(count, 'row')})" if with_rows else f"{name[:40]!r}"
        for name, count in first
    ]
    return ", ".join(named) + (", …" if len(classes) > len(first) else "")
