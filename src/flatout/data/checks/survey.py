"""The first pass over a table: every row read once, and its fate decided.

What rows show before they are compared is worked out in `seen`, while the next ones are read. A
row's fate is the split it belongs to, or that it is dropped: one byte a row. All else that grows
with the rows lies on disk (`twins`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.characters import ODDITIES
from flatout.data.checks.cleaning import Alike, RowRule
from flatout.data.checks.findings import KINDS, Findings, Level, Remark, counted
from flatout.data.checks.labels import LabelCensus
from flatout.data.checks.lengths import Lengths
from flatout.data.checks.seen import WHOLE, BuildPart, KeptFiles, Rules, Seen, ahead
from flatout.data.checks.twins import (
    RECORD,
    Mask,
    RecordFiles,
    Records,
    Twins,
    assigner,
    find_twins,
)
from flatout.data.decisions import DecidedTable
from flatout.data.problem import Problem
from flatout.data.store.cache import Cache
from flatout.data.tables.prints import prints_of
from flatout.data.tables.splits import SPLITS, reseeded
from flatout.data.tables.table import ManyFiles
from flatout.errors import UserError

if TYPE_CHECKING:
    from flatout.data.text_source import TextSource

_DROPPED = -1
_LEAST_ROWS = 20
_ROWS_A_TEXT = 10
"""Columns look swapped where so many rows at least have a text, and most have a class of their
own."""
_COUNTS = ("rows_read", "rows_kept", "rows_repaired")
KEPT_FROM_BYTES = 1 << 21
"""What files of so many bytes show, on the average of several, is kept for the next survey of
them."""
_ODD = ("control", "invisible", "replaced", "private", "mojibake")
_SPOKEN = ("training", "validation", "test")
_RULES = {"conflict": "conflicts", "leak": "leaks", "leak_alike": "leaks", "repeated": "duplicates"}
"""The setting that decides over each kind of finding."""


class TextSurvey:
    """One pass over all tables of a source, and what follows from it."""

    def __init__(
        self, source: TextSource, cache: Cache | None = None, part: BuildPart = WHOLE
    ) -> None:
        """`cache` keeps what single files show, for the next survey; None keeps nothing."""
        config = source.config
        self.cache = cache
        self.part = part
        self.reading = asdict(config.read)
        self.tables = source.tables
        self.roles = source.roles
        self.splitting = source.splitting
        self.problem = config.problem
        self.label_delimiter = config.label_delimiter
        self.cleaning = config.clean
        self.fates: dict[str, NDArray[np.int8]] = {}
        """For each table, each row's split (0, 1, 2), or -1 for a row that is dropped."""
        self.findings = {
            name: Findings(table.name, locate=table.locate) for name, table in self.tables.items()
        }
        merges = config.clean.labels is Alike.merge
        self.census = LabelCensus(config.problem, merge=merges, max_classes=config.max_classes)
        self.words = {name: Lengths() for name in self.tables}  # words a row, by table
        self.has_words = config.problem is Problem.tags
        """Whether a training text is more than a number; tagged words may be numbers."""
        self._is_changed: dict[str, NDArray[np.bool_]] = {}
        self._rows_by_code = np.zeros(0, np.int64)
        self.num_texts: int | None = None
        """Texts that differ in letters or digits; counted only where most rows have a class of
        their own."""

    def run(self, advance: Callable[[int], None]) -> TextSurvey:
        """Read every row, assign the splits, compare the texts."""
        with closing(RecordFiles()) as files:
            for name in self.tables:
                self._read(name, files, advance)
            self._decide(files)
            if self.census.has_a_class_for_most_rows():
                self.num_texts = sum(len(np.unique(part["alike"])) for part in files.parts())
        if not self.has_words:
            self.findings["train"].add("numbers", np.flatnonzero(self.fates["train"] >= 0))
        for name, findings in self.findings.items():
            is_kept = self.fates[name] >= 0
            findings.rows_kept = int(is_kept.sum())
            findings.rows_repaired = int((is_kept & self._is_changed[name]).sum())
        return self

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each split that has any."""
        counts = (
            sum(int((each == number).sum()) for each in self.fates.values())
            for number in range(len(SPLITS))
        )
        return {split: count for split, count in zip(SPLITS, counts, strict=True) if count}

    def require_columns_as_named(self) -> None:
        """Refuse few texts with a class for most rows: the columns are swapped."""
        rows = sum(self.rows.values())
        texts, label = self.roles.texts, self.roles.label
        if self.num_texts is None or rows < _LEAST_ROWS or rows < _ROWS_A_TEXT * self.num_texts:
            return
        classes = len(self.census.classes())
        raise UserError(
            "data.text and data.label",
            f"{counted(self.num_texts, 'text')} in {rows:,} rows, {classes:,} classes",
            hint=f"Are the columns swapped? Set data.text={label} data.label={texts[0]}.",
        )

    def account(self) -> list[Remark]:
        """What became of all rows; a table of its own where anything did."""
        tables = list(self.findings.values())
        total = Findings("all", *(sum(getattr(one, name) for one in tables) for name in _COUNTS))
        changed = [one for one in tables if one.rows_repaired or one.rows_dropped]
        parts = [
            Remark(Level.note, one.source, one.account()) for one in changed if len(tables) > 1
        ]
        return [Remark(Level.note, "rows", total.account()), *parts]

    def _read(self, name: str, files: RecordFiles, advance: Callable[[int], None]) -> None:
        fates, changed = [np.empty(0, np.int8)], [np.empty(0, np.bool_)]
        for seen in self._seen(name, advance):
            places = seen.rows["row"] - seen.begin
            fates.append(np.full(seen.num_rows, _DROPPED, np.int8))
            changed.append(np.zeros(seen.num_rows, np.bool_))
            fates[-1][places[self._take(name, seen, files)]] = SPLITS.index(name)
            changed[-1][places] = seen.rows["is_changed"]
        self.fates[name], self._is_changed[name] = np.concatenate(fates), np.concatenate(changed)

    def _seen(self, name: str, advance: Callable[[int], None]) -> Iterator[Seen]:
        table = self.tables[name]
        is_train = name == "train"
        group = self.splitting.group if is_train else None
        rules = Rules(
            self.roles, self.problem, self.label_delimiter, self.cleaning, group, is_train
        )
        num_bytes = sum(int(size) for _, size, *_ in table.entries() or ())
        is_small = num_bytes < KEPT_FROM_BYTES * len(table.tables) or any(
            each.tables for each in table.tables
        )
        if self.cache is None or not isinstance(table, ManyFiles) or is_small:
            return rules.look(table, self.census, self.findings[name], advance)
        prints = prints_of(table, self.cache.folder)
        kept = KeptFiles(self.cache.of_surveys(), rules, self.reading, prints, self.part)
        return kept.look(table, self.census, self.findings[name], advance)

    def _take(self, name: str, seen: Seen, files: RecordFiles) -> Mask:
        """Leave a record of each row of a block; which rows stay."""
        rows = seen.rows
        kept = self._admitted(name, seen.rows)
        records = np.empty(len(rows), RECORD)
        for column in ("alike", "exact", "row", "code"):
            records[column] = rows[column]
        # a row without a group is a group of its own
        alone = reseeded(rows["row"].astype(np.uint64), 1)
        records["group"] = np.where(rows["is_alone"], alone, rows["group"])
        records["table"] = SPLITS.index(name)
        codes = rows["code"] if self.problem.has_classes else np.zeros(len(rows), np.int32)
        words = rows["words"]
        if not kept.all():
            codes = codes[kept]
            words = words[kept]
            records = records[kept]
        counts = np.bincount(codes, minlength=len(self._rows_by_code)).astype(np.int64)
        counts[: len(self._rows_by_code)] += self._rows_by_code
        self._rows_by_code = counts
        self.words[name].add(words)
        self.has_words = self.has_words or (name == "train" and seen.has_words)
        files.add(records)
        return kept

    def _admitted(self, name: str, rows: NDArray[np.void]) -> Mask:
        """Which rows stay, as far as odd characters and decisions (`data.exclude`, `data.relabel`)
        go.
        """
        findings = self.findings[name]
        table = self.tables[name]
        numbers = rows["row"]
        kept = np.ones(len(rows), np.bool_)
        for number, oddity in enumerate(ODDITIES):
            if not len(places := np.flatnonzero(rows["odd"] & (1 << number))):
                continue
            if oddity in _ODD and self.cleaning.odd is RowRule.refuse:
                place = table.locate(int(numbers[places[0]]) + 1)
                raise UserError(
                    "data.clean.odd",
                    (
                        f"{table.name} row {place}:"
                        f" {KINDS[oddity].sentence.removesuffix(' kept as they are')}"
                    ),
                    hint="Correct the text, or set data.clean.odd=keep or drop.",
                )
            if oddity in _ODD and self.cleaning.odd is RowRule.drop:
                kept[places] = False
            else:
                findings.add(oddity, numbers[places])
        findings.add("odd_dropped", numbers[~kept])
        if isinstance(table, DecidedTable):
            is_excluded = np.isin(numbers, table.excluded)
            findings.add("excluded", numbers[is_excluded])
            findings.add("relabelled", numbers[np.isin(numbers, table.relabelled) & ~is_excluded])
            kept &= ~is_excluded
        return kept

    def _decide(self, files: RecordFiles) -> None:
        """The split of every row, and what becomes of rows that have a twin."""
        stands_for = self.census.unify(self._rows_by_code)
        assign = assigner(self.splitting, files, self.census.strata(self._rows_by_code)[stands_for])
        has_classes = self.problem.has_classes
        rows_by_split = np.zeros((len(SPLITS) * has_classes, len(stands_for)), np.int64)
        in_all = ((records, records["code"], assign(records)) for records in files.parts())
        read = (
            (records, stands_for[codes] if has_classes else codes, splits)
            for records, codes, splits in in_all
        )
        for (records, codes, splits), twins in ahead(read, lambda each: find_twins(*each)):
            is_merged = codes != records["code"]
            is_dropped = self._dropped(records, splits, twins)
            self._tell(records, is_merged & ~is_dropped, "merged_label")
            for name in self.tables:
                own = records["table"] == SPLITS.index(name)
                rows = records["row"][own]
                self.fates[name][rows] = np.where(is_dropped, _DROPPED, splits)[own]
                self._is_changed[name][rows] |= is_merged[own]
            for number, rows_by_code in enumerate(rows_by_split):
                rows_by_code += np.bincount(
                    codes[~is_dropped & (splits == number)], minlength=len(rows_by_code)
                )
        for split, rows_by_code in zip(SPLITS, rows_by_split, strict=False):
            if rows_by_code.any():
                self.census.settle(split, rows_by_code)

    def _dropped(self, records: Records, splits: NDArray[np.int8], twins: Twins) -> Mask:
        """Report what stands twice; which rows are dropped for it.

        Only rows of earlier splits ever are.
        """
        is_train = splits == 0
        dropped = np.zeros(len(records), np.bool_)
        if self.problem.has_classes:
            dropped |= self._ruled(records, twins.conflict, "conflict", is_train)
        # which must not share a text; the first may lose it
        for split, other in ((0, 1), (0, 2), (1, 2)):
            here = splits == other
            is_exact = here & (twins.exact_splits & (1 << split) > 0)
            is_alike = here & (twins.alike_splits & (1 << split) > 0) & ~is_exact
            for name, mask in (("leak", is_exact), ("leak_alike", is_alike)):
                if self.cleaning.leaks is RowRule.refuse:
                    self._refuse(records, mask, name, _SPOKEN[split])
                if self.cleaning.leaks is RowRule.keep:
                    self._tell(records, mask, name, _SPOKEN[split])
        if self.cleaning.leaks is RowRule.drop:
            is_judged = (
                twins.alike_splits & np.array([0b110, 0b100, 0], np.uint8)[splits] > 0
            ) & ~dropped
            self._tell(records, is_judged, "leak_dropped")
            dropped |= is_judged
        dropped |= self._ruled(records, twins.repeated & ~dropped, "repeated", is_train)
        self._tell(records, twins.alike & ~dropped, "alike")
        return dropped

    def _tell(self, records: Records, mask: Mask, name: str, other: str = "") -> None:
        if mask.any():
            for table, findings in self.findings.items():
                findings.add(
                    name, records["row"][mask & (records["table"] == SPLITS.index(table))], other
                )

    def _ruled(self, records: Records, mask: Mask, name: str, may_go: Mask) -> Mask:
        """Keep, drop or refuse rows of a kind; which are dropped."""
        rule = getattr(self.cleaning, _RULES[name])
        if rule is RowRule.refuse:
            self._refuse(records, mask, name)
        gone = mask & may_go if rule is RowRule.drop else np.zeros_like(mask)
        self._tell(records, gone, f"{name}_dropped")
        self._tell(records, mask & ~gone, name)
        return gone

    def _refuse(self, records: Records, mask: Mask, name: str, other: str = "") -> None:
        if not mask.any():
            return
        first = records[mask][0]
        setting = f"data.clean.{_RULES[name]}"
        table = self.tables[SPLITS[first["table"]]]
        sentence = KINDS[name].sentence.format(other=other).removesuffix("kept").rstrip(" ,")
        raise UserError(
            setting,
            f"{table.name} row {table.locate(int(first['row']) + 1)}: one of the rows {sentence}",
            hint=f"Correct such rows, or set {setting}=keep or drop.",
        )
