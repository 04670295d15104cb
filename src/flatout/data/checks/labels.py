"""Read labels into one form, number the classes of all splits, and report what stands out.

`normalise_labels` gives the labels of a block one type: texts, lists of texts, or numbers. A
`LabelCensus` numbers and counts them in the first pass over a table; in the second pass it turns
them into targets. A label is the text that is written: `007` is not `7`, and `NA` is a label.
Labels that differ only in case, blanks around them or a zero after the point are reported. They
become one class only with `data.clean.labels=merge`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.findings import Findings, Level, Remark, counted, name_few
from flatout.data.problem import Problem
from flatout.data.ragged import row_bounds
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

_CLASSES_NAMED = 6  # classes that the note on the training rows lists
_EXAMPLES_NAMED = 5  # classes that a warning or an error lists
_LONGEST_WHOLE = 18  # characters; longer whole numbers are ids, sorted by their spelling
_NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"
_FEW_ROWS = 5  # training rows; a class with fewer is hardly learnt
_UNEVEN = 10  # times the rows of the rarest class: then accuracy hides how the rarest fares
# More classes than that, and than half of the training rows, look like a column of ids.
_IDS_FROM = 50
_MOST_CLASSES = 20_000  # allowed without data.max_classes, however many rows there are
_MARKS = "|;,/+&"  # that may part the labels of a row
_NAME = "Name the column of the labels: data.label=COLUMN."


def normalise_labels(
    labels: pa.Array, rows: Rows, findings: Findings, *, problem: Problem, delimiter: str | None
) -> pa.Array:
    """Convert the labels of a block to texts, lists of texts, or floats, as `problem` needs them.

    `rows` are the row numbers in the table, counted from 0. `delimiter` parts the labels of a row
    where the column has one text a row. `findings` name the file and the row in an error.
    """
    source = findings.source
    labels = decoded(labels)
    if problem is Problem.none:
        return labels
    if problem is Problem.regression:
        return _numbers(labels, rows, findings)
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
    # Three rows going through, "a|b|a", "" and "c" with the delimiter "|":
    #
    #     values   a  b  a  ""  c     flattened
    #     names    a  b  a  c         without empty ones
    #     row      0  0  0  2         the row of each name
    #     first    0  1  3            places of the first of each label in its row
    #     offsets  0  2  2  3         → [a, b], [], [c]
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
    if not has_lists:
        values = pc.utf8_trim_whitespace(values)
    is_label = ~mask_of(is_missing(values, Problem.single))
    names = _names(values.filter(pa.array(is_label)), source)
    row = pc.list_parent_indices(labels).to_numpy(zero_copy_only=False)[is_label]
    codes = pc.dictionary_encode(names).indices.to_numpy(zero_copy_only=False)
    # One number for a row and a label, so that equal pairs are found on the whole block at once.
    _, first = np.unique(row * (len(names) + 1) + codes, return_index=True)
    first.sort()
    counts = np.bincount(row[first], minlength=len(labels))
    offsets = row_bounds(counts).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), names.take(pa.array(first)))


def _numbers(labels: pa.Array, rows: Rows, findings: Findings) -> pa.Array:
    source = findings.source
    values = labels
    if is_text(labels.type):
        values = pc.utf8_trim_whitespace(labels)
        # A text that is no number becomes null here, and is named in the error below.
        values = pc.if_else(pc.match_substring_regex(values, _NUMBER), values, None)
    else:
        are_plain = is_plain(labels.type) or pa.types.is_null(labels.type)
        require(
            are_plain and not pa.types.is_temporal(labels.type),
            "data.label",
            f"the labels of {source} are of type {labels.type}",
            allowed="numbers",
        )
    numbers = pc.cast(values, pa.float64())
    is_wrong = ~mask_of(pc.is_finite(numbers))
    if not is_wrong.any():
        return numbers
    wrong = int(np.argmax(is_wrong))
    written = str(labels[wrong].as_py())
    hint = "Correct the row; or set data.problem=single, if labels are classes."
    if re.fullmatch(r"\s*-?\d+,\d+\s*", written):
        hint = "Write decimals with a point."
    raise UserError(
        "data.label",
        f"{source} row {findings.locate(int(rows[wrong]) + 1)}: {written[:60]!r} is no number",
        hint=hint,
    )


class LabelCensus:
    """Numbers the labels of all splits, counts them, and then turns them into targets.

    A label gets the next free number when it is met first. A *set* is what one row has: one label,
    or several with `data.problem=multi`; sets are numbered too. After the first pass `unify`
    merges labels, and `settle` counts the rows that each split keeps.
    """

    def __init__(
        self, problem: Problem, *, merge: bool = False, max_classes: int | None = None
    ) -> None:
        self.problem = problem
        self._merge = merge
        self._max_classes = max_classes
        # rows of each class, by split
        self.counts: dict[str, Counter[str]] = {}
        # rows by split, with those that have none of several labels
        self.rows: Counter[str] = Counter()
        # the number of each label
        self._codes: dict[str, int] = {}
        # the number of each set of labels, by the numbers of its labels
        self._sets: dict[tuple[int, ...], int] = {}
        # spellings that were merged, each with the spelling that stands for it
        self._others: dict[str, str] = {}
        # Of numbers to predict: how many, their mean, and the sum of squared distances from it.
        self._number = 0
        self._mean = 0.0
        self._squares = 0.0

    @property
    def _train(self) -> Counter[str]:
        """Training rows of each class."""
        return self.counts.get("train", Counter())

    def code(self, labels: pa.Array) -> NDArray[np.int32]:
        """Number the set of labels of each row: equal sets get equal numbers.

        All rows get 0 where there are no classes.
        """
        if not self.problem.has_classes:
            return np.zeros(len(labels), np.int32)
        if self.problem is Problem.multi:
            return self._code_sets(labels)
        codes = self._code_names(labels)
        self._sets |= {(code,): code for code in range(len(self._sets), len(self._codes))}
        return codes

    def numbers(self) -> tuple[list[str], list[list[int]]]:
        """All labels in the order of their numbers, and the labels of each set, as numbers."""
        return list(self._codes), [list(labels) for labels in self._sets]

    def take_in(self, names: list[str], sets: list[list[int]]) -> NDArray[np.int32]:
        """Add what `numbers` of another census returned.

        Returns the number that each of its sets has here.
        """
        # The other has the labels b = 0, a = 1 and the set [0]. Here a is 0, and b becomes 1. So
        # its set is (1,) here, and gets the number that this set has here.
        numbers_here = [self._codes.setdefault(name, len(self._codes)) for name in names]
        return self._number_sets(sets, numbers_here)

    def _number_sets(
        self, sets: Iterable[Iterable[int]], new_labels: Sequence[int]
    ) -> NDArray[np.int32]:
        """The number of each set, once its labels are replaced: label 3 by `new_labels[3]`."""
        numbers = []
        for labels in sets:
            replaced = tuple(sorted({new_labels[label] for label in labels}))
            numbers.append(self._sets.setdefault(replaced, len(self._sets)))
        # Without rows there is no set: a zero for arrays that are indexed by codes all the same.
        return np.array(numbers or [0], np.int32)

    def settle(self, split: str, rows_by_code: NDArray[np.integer]) -> None:
        """Count the rows that a split keeps: `rows_by_code` has their count for each set."""
        self.rows[split] += int(rows_by_code.sum())
        counts = self.counts.setdefault(split, Counter())
        names = list(self._codes)
        sets = list(self._sets)
        for code in np.flatnonzero(rows_by_code):
            for label in sets[code]:
                counts[self._others.get(names[label], names[label])] += int(rows_by_code[code])

    def add_numbers(self, values: NDArray[np.float64]) -> None:
        """Add numbers to predict to the mean and the standard deviation of all of them."""
        # Chan, Golub and LeVeque (1979) merge means, and squared distances from them. A sum of
        # plain squares would lose all digits of numbers that are large and close to each other.
        if len(values):
            total = self._number + len(values)
            mean = float(values.mean())
            apart = mean - self._mean
            self._squares += (
                float(((values - mean) ** 2).sum()) + apart**2 * self._number * len(values) / total
            )
            self._mean += apart * len(values) / total
            self._number = total

    def unify(self, rows_by_code: NDArray[np.integer]) -> NDArray[np.int32]:
        """The number of the set that stands for each set: another one where labels are merged.

        With labels "Yes" = 0, "no" = 1 and "yes" = 2, and most rows with "yes": sets 0, 1, 2 → 2,
        1, 2. Without `data.clean.labels=merge` each set stands for itself.
        """
        if self._merge:
            total = self._count_labels(rows_by_code)
            for group in self._groups_alike():
                # the one with most rows; of equals the one that was met first
                common = max(group, key=lambda name: total[self._codes[name]])
                self._others |= {name: common for name in group if name != common}
        codes = [self._codes[self._others.get(name, name)] for name in self._codes]
        # A copy: new sets are added while these are read.
        return self._number_sets(list(self._sets), codes)

    def strata(self, rows_by_code: NDArray[np.integer]) -> NDArray[np.int64]:
        """The stratum of each set, for stratified splits: that of its rarest label, counted from 1.

        The rarest label is the hardest to share out. A set without labels is in stratum 0.
        """
        total = self._count_labels(rows_by_code)
        # By name, so that the order in which rows come changes no split.
        stratum = {self._codes[name]: place for place, name in enumerate(sorted(self._codes), 1)}
        strata = []
        for labels in self._sets:
            by_rarity = sorted((total[label], stratum[label]) for label in labels)
            strata.append(by_rarity[0][1] if labels else 0)
        return np.array(strata or [0], np.int64)

    def classes(self) -> list[str]:
        """Every class of any split: by number where all are whole numbers, else by spelling."""
        if not self.problem.has_classes:
            return ["value"] if self.problem is Problem.regression else []
        names = set[str]().union(*self.counts.values())
        all_whole = all(
            name.removeprefix("-").isdecimal() and len(name) <= _LONGEST_WHOLE for name in names
        )
        return sorted(names, key=(lambda name: (int(name), name)) if all_whole else None)

    def train_counts(self) -> list[int]:
        """Training rows of each of `classes`; of numbers to predict, how many there are."""
        if self.problem is Problem.regression:
            return [self._number]
        return [self._train[name] for name in self.classes()]

    def scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the training numbers; 0 and 1 for classes."""
        if self.problem is not Problem.regression or not self._number:
            return 0.0, 1.0
        require(
            self._number == 1 or self._squares != 0,
            "data.label",
            f"each training row has the number {self._mean:g}",
            hint=_NAME,
        )
        return self._mean, (self._squares / self._number) ** 0.5 or 1.0

    def has_a_class_for_most_rows(self) -> bool:
        """Whether there are more classes than half the rows, and no setting allows so many."""
        if self.problem is not Problem.single or self._max_classes is not None:
            return False
        return 2 * len(self.classes()) > self.rows.total()

    def require_classes(self, where: str) -> None:
        """Refuse labels that cannot be learnt; the error names the setting `where`.

        Those are fewer than two classes in training, a class for about every second row, and a
        split that shares no class with the training rows.
        """
        if not self.problem.has_classes:
            return
        train = self._train
        named = f"the training rows have only one class: {', '.join(map(repr, train))}"
        problem = named if train else "no training row has one"
        require(len(train) > 1, where, problem, allowed="two or more", hint=_NAME)
        rows = train.total()
        most = self._max_classes or min(_MOST_CLASSES, max(_IDS_FROM, rows // 2))
        problem = f"{len(train):,} classes in {rows:,} training rows, such as {_name_few(train)}"
        hint = (
            "Is that a column of ids? Set data.label=COLUMN. If not, set"
            f" data.max_classes={len(train)}."
        )
        if all(re.fullmatch(_NUMBER, name.strip()) for name in train):
            hint = f"Are they numbers to predict? Set data.problem=regression. {hint}"
        require(len(train) <= most, where, problem, allowed=f"{most:,} or fewer", hint=hint)
        for split, counts in self.counts.items():
            problem = (
                f"no label of the {split} rows is one of the training rows: {_name_few(counts)},"
                f" but there {_name_few(train)}"
            )
            shares_a_class = not counts or bool(counts.keys() & train.keys())
            require(
                shares_a_class, where, problem, hint="Write the labels of all splits in one way."
            )

    def targets(
        self, labels: pa.Array
    ) -> NDArray[np.generic] | tuple[NDArray[np.generic], NDArray[np.generic]]:
        """Labels as the arrays that the store keeps.

        With one label a row that is its target. With several it is all targets, row after row, and
        the count of each row: [a, c], [], [b] → [0, 2, 1] and [2, 0, 1]. Numbers to predict stay.
        """
        if not self.problem.has_classes:
            return labels.to_numpy(zero_copy_only=False)
        values = pc.list_flatten(labels) if self.problem is Problem.multi else labels
        ids = pc.index_in(values, pa.array(self._codes, pa.large_string()))
        assert ids.null_count == 0, "a label that was never counted"
        targets = self.targets_of(self._codes)[ids.to_numpy(zero_copy_only=False)]
        if self.problem is Problem.single:
            return targets
        return targets, pc.list_value_length(labels).to_numpy()

    def targets_of(self, names: Iterable[str]) -> NDArray[np.int32]:
        """The target of each label: its place in `classes`, or -1 if no row has it any more."""
        targets = {name: number for number, name in enumerate(self.classes())}
        common = [self._others.get(name, name) for name in names]
        return np.array([targets.get(name, -1) for name in common], np.int32)

    def remarks(self, source: str, decided: Mapping[str, int] | None = None) -> list[Remark]:
        """Remarks about the classes: how many rows each has, and what looks like a mistake.

        `decided` has, for each label that data.relabel gives, how many rows get it.
        """
        if not self.problem.has_classes:
            return []
        train = self._train
        remarks = [Remark(Level.note, source, self._list_classes())]

        def warn(about: str, text: str, hint: str) -> None:
            remarks.append(Remark(Level.warning, about, text, hint))

        commonest = max(train.values(), default=0)
        rarest = min(train.values(), default=0)
        if few := {name: count for name, count in train.items() if count < _FEW_ROWS}:
            classes = counted(len(few), "class")
            named = _name_few(few, with_rows=True)
            text = f"{classes} with fewer than {_FEW_ROWS} training rows: {named}"
            warn(source, text, "task.class_weights=auto")
        elif rarest and commonest >= _UNEVEN * rarest:
            text = f"the commonest class has {commonest / rarest:,.0f} times the rows of the rarest"
            warn(source, text, "task.class_weights=auto checkpoint.metric=macro_f1")
        if several := self._find_several():
            warn(source, *several)
        total = sum(self.counts.values(), Counter[str]())
        # A label that only data.relabel gives may be a slip of the pen in its file.
        if alone := {
            name: count for name, count in (decided or {}).items() if count >= total[name] > 0
        }:
            text = f"labels that only data.relabel gives: {_name_few(alone, with_rows=True)}"
            warn(source, text, "correct its file, if they are mistyped")
        for group in [] if self._merge else self._groups_alike()[:_EXAMPLES_NAMED]:
            named = ", ".join(f"{name!r} ({counted(total[name], 'row')})" for name in group)
            text = (
                "labels that differ in case, blanks or a zero after the point, each a class:"
                f" {named}"
            )
            warn(source, text, "data.clean.labels=merge")
        for split, counts in self.counts.items():
            if unseen := {name: count for name, count in counts.items() if name not in train}:
                named = _name_few(unseen, with_rows=True)
                text = (
                    f"{counted(len(unseen), 'class')} that no training row has, scored as misses:"
                    f" {named}"
                )
                warn(split, text, "data.split_by=stratified where splits are made")
        return remarks

    def _find_several(self) -> tuple[str, str] | None:
        """What says that a label is really several, and the settings that part them.

        None where none is: `a|b` beside `a` and `b` is several, `rock, pop` alone is a name.
        """
        names = self._train
        written = [name for name in names if name.startswith("['") or name.endswith("']")]
        if 2 * len(written) > len(names):
            text = f"labels such as {written[0][:40]!r} are lists that were written as text"
            return text, "write JSON lines; of pandas: to_json(orient='records', lines=True)"
        for mark in _MARKS:
            joined = [name for name in names if mark in name]
            known = [name for name in joined if {*map(str.strip, name.split(mark))} <= names.keys()]
            if len(joined) > 1 and 2 * len(known) > len(joined):
                text = f"labels such as {known[0][:40]!r} look like several labels a row"
                return text, f"data.problem=multi data.label_delimiter='{mark}'"
        return None

    def _list_classes(self) -> str:
        """The classes of the training rows, each with its rows and their share of all rows."""
        rows = max(1, self.rows["train"])
        named = [
            f"{name!r} {count:,} ({count / rows:.1%})" for name, count in self._train.most_common()
        ]
        several = f" in {counted(rows, 'row')}" if self.problem is Problem.multi else ""
        classes = f"{len(named):,} classes{several}"
        if len(named) > _CLASSES_NAMED:
            named = [*named[:4], "…", *named[-2:]]
        return f"{classes}: {', '.join(named)}"

    def _groups_alike(self) -> list[list[str]]:
        """Labels that differ only in how they are written: [["Yes", "yes "], ["1", "1.0"]]."""
        groups: dict[str, list[str]] = {}
        for name in self._codes:
            groups.setdefault(simplify_label(name), []).append(name)
        return [group for group in groups.values() if len(group) > 1]

    def _count_labels(self, rows_by_code: NDArray[np.integer]) -> NDArray[np.int64]:
        """Rows of each label, from the rows of each set of labels."""
        total = np.zeros(len(self._codes), np.int64)
        for labels, rows in zip(self._sets, rows_by_code, strict=False):
            total[list(labels)] += rows
        return total

    def _code_names(self, names: pa.Array) -> NDArray[np.int32]:
        """The number of each label; a new one gets the next free number."""
        distinct = pc.dictionary_encode(names)
        codes = self._codes
        numbers = [codes.setdefault(name, len(codes)) for name in distinct.dictionary.to_pylist()]
        return np.array(numbers or [0], np.int32)[distinct.indices.to_numpy(zero_copy_only=False)]

    def _code_sets(self, labels: pa.Array) -> NDArray[np.int32]:
        """The number of the set of labels that each row has."""
        # Rows [b, a], [a, b] and [a] with a = 0 and b = 1: sorted in each row, 0 1 · 0 1 · 0. The
        # hashes of the first two are equal: the sets are (0, 1) and (0,), the rows get 0, 0, 1.
        counts = pc.list_value_length(labels).to_numpy()
        flat = self._code_names(pc.list_flatten(labels))
        row = np.repeat(np.arange(len(labels)), counts)
        flat = flat[np.lexsort((flat, row))]
        offsets = row_bounds(counts)
        # A hash of each row's labels, so that the few distinct sets are found without a loop.
        hashes = hash_bytes(flat.view(np.uint8), offsets * flat.itemsize)
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        sets = (flat[offsets[row] : offsets[row + 1]].tolist() for row in first)
        return self._number_sets(sets, range(len(self._codes)))[inverse]


def simplify_label(name: str) -> str:
    """A label without case, blanks around it and the zeros of a whole number: " 1.0" → "1"."""
    plain = name.strip().casefold()
    whole, point, decimals = plain.partition(".")
    if point and whole.removeprefix("-").isdecimal() and not decimals.strip("0"):
        return whole
    return plain


def _name_few(classes: dict[str, int], *, with_rows: bool = False) -> str:
    """The first few classes, quoted and shortened, with their rows where wanted."""
    named = []
    for name, count in classes.items():
        rows = f" ({counted(count, 'row')})" if with_rows else ""
        named.append(f"{name[:40]!r}{rows}")
    return name_few(named, _EXAMPLES_NAMED)
