"""The first pass over the tables of a source: read every row once, and decide its fate.

A row's fate is the split it belongs to, or that it is dropped: one byte a row. `seen` measures each
row by itself (words, odd characters, hashes, label) and leaves a record of it. `twins` keeps the
records on disk and compares them. Here the rules of `data.clean` decide over rows that are odd or
occur twice, and everything is counted in `Findings`. Open this file to change what is done with
such rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.characters import ODDITIES
from flatout.data.checks.cleaning import Alike, RowRule
from flatout.data.checks.findings import KINDS, Findings, Level, Remark, counted
from flatout.data.checks.labels import LabelCensus
from flatout.data.checks.lengths import Lengths
from flatout.data.checks.record_files import RECORD, RecordFiles, Records
from flatout.data.checks.record_splits import choose_assigner
from flatout.data.checks.seen import WHOLE, BuildPart, KeptFiles, Rules, Seen, ahead
from flatout.data.checks.twins import Mask, Twins, find_twins
from flatout.data.problem import Problem
from flatout.data.store.cache import Cache
from flatout.data.tables.prints import prints_of
from flatout.data.tables.splits import SPLITS, reseeded
from flatout.data.tables.table import ManyFiles
from flatout.data.texts.decisions import DecidedTable
from flatout.errors import UserError

if TYPE_CHECKING:
    from flatout.data.texts.source import TextSource

_DROPPED = -1  # the fate of a row that is in no split
# Text and label look swapped where most rows have a class that no other row has. There must be at
# least so many rows, and at least so many for each distinct text.
_LEAST_ROWS = 20
_ROWS_A_TEXT = 10
# Average bytes of a source's files from which each file's findings are cached. To read a smaller
# file again takes less time than to look for its findings.
KEPT_FROM_BYTES = 1 << 21
# Oddities that `data.clean.odd` decides over; the others belong to `data.clean.escapes`.
_BROKEN = ("control", "invisible", "replaced", "private", "mojibake")
_SPLIT_WORDS = ("training", "validation", "test")
# The setting in `data.clean` that decides over each kind of finding.
_RULES = {"conflict": "conflicts", "leak": "leaks", "leak_alike": "leaks", "repeated": "duplicates"}


class TextSurvey:
    """One pass over all tables of a source: the fate of each row, findings, and counted labels."""

    def __init__(
        self, source: TextSource, cache: Cache | None = None, part: BuildPart = WHOLE
    ) -> None:
        """`cache` keeps what single files show, for the next survey; None keeps nothing."""
        config = source.config
        self.cache = cache
        self.part = part
        self.reading = config.read.facts()
        self.tables = source.tables
        self.roles = source.roles
        self.splitting = source.splitting
        self.problem = config.problem
        self.label_delimiter = config.label_delimiter
        self.cleaning = config.clean
        # For each table, each row's split (0, 1, 2), or -1 for a row that is dropped.
        self.fates: dict[str, NDArray[np.int8]] = {}
        self.findings = {
            name: Findings(table.name, locate=table.locate) for name, table in self.tables.items()
        }
        merges = config.clean.labels is Alike.merge
        self.census = LabelCensus(config.problem, merge=merges, max_classes=config.max_classes)
        self.words = {name: Lengths() for name in self.tables}  # words a row, by table
        # Whether a training text is more than a number; tagged words may be numbers.
        self.has_words = config.problem is Problem.tags
        self._is_changed: dict[str, NDArray[np.bool_]] = {}  # rows repaired, by table
        self._rows_by_code = np.zeros(0, np.int64)  # rows of each number of the census
        # Texts that differ in letters or digits; counted only where most rows have a class of
        # their own.
        self.num_texts: int | None = None

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
            is_used = self.fates[name] >= 0
            findings.rows_kept = int(is_used.sum())
            findings.rows_repaired = int((is_used & self._is_changed[name]).sum())
        return self

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each split that has any."""
        counts = {}
        for number, split in enumerate(SPLITS):
            count = sum(int((fates == number).sum()) for fates in self.fates.values())
            if count:
                counts[split] = count
        return counts

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
        """How many rows were kept, repaired and dropped: in all, and in each table that changed."""
        total = Findings("all")
        parts = []
        for findings in self.findings.values():
            total.rows_read += findings.rows_read
            total.rows_kept += findings.rows_kept
            total.rows_repaired += findings.rows_repaired
            if len(self.findings) > 1 and (findings.rows_repaired or findings.rows_dropped):
                parts.append(Remark(Level.note, findings.source, findings.account()))
        return [Remark(Level.note, "rows", total.account()), *parts]

    def _read(self, name: str, files: RecordFiles, advance: Callable[[int], None]) -> None:
        """Read a table once. The fate of its rows is preliminary: the table's split, or dropped.

        `seen.rows` are the rows of a block that can be used. Of rows 100 to 104 with one text
        missing, 102, they are 100, 101, 103, 104 at the places 0, 1, 3, 4 of the block.
        """
        fates = [np.empty(0, np.int8)]
        changed = [np.empty(0, np.bool_)]
        for seen in self._seen(name, advance):
            places = seen.rows["row"] - seen.begin
            stays = self._record_rows(name, seen, files)
            fate = np.full(seen.num_rows, _DROPPED, np.int8)
            fate[places[stays]] = SPLITS.index(name)
            fates.append(fate)
            is_changed = np.zeros(seen.num_rows, np.bool_)
            is_changed[places] = seen.rows["is_changed"]
            changed.append(is_changed)
        self.fates[name] = np.concatenate(fates)
        self._is_changed[name] = np.concatenate(changed)

    def _seen(self, name: str, advance: Callable[[int], None]) -> Iterator[Seen]:
        """The rows of a table, measured by the block; from the cache where that saves time."""
        table = self.tables[name]
        is_train = name == "train"
        group = self.splitting.group if is_train else None
        rules = Rules(
            self.roles, self.problem, self.label_delimiter, self.cleaning, group, is_train
        )
        num_bytes = sum(int(size) for _, size, *_ in table.entries() or ())
        is_small = num_bytes < KEPT_FROM_BYTES * len(table.tables)
        is_nested = any(file.tables for file in table.tables)
        if self.cache is None or not isinstance(table, ManyFiles) or is_small or is_nested:
            return rules.look(table, self.census, self.findings[name], advance)
        prints = prints_of(table, self.cache.folder)
        kept = KeptFiles(self.cache.of_surveys(), rules, self.reading, prints, self.part)
        return kept.look(table, self.census, self.findings[name], advance)

    def _record_rows(self, name: str, seen: Seen, files: RecordFiles) -> Mask:
        """Leave a record of each row of a block that stays, and count it; returns which stay."""
        rows = seen.rows
        stays = self._judge_single_rows(name, rows)
        if not stays.all():
            rows = rows[stays]
        records = np.empty(len(rows), RECORD)
        for column in ("alike", "exact", "row", "code"):
            records[column] = rows[column]
        # a row without a group is a group of its own
        alone = reseeded(rows["row"].astype(np.uint64), 1)
        records["group"] = np.where(rows["is_alone"], alone, rows["group"])
        records["table"] = SPLITS.index(name)
        codes = rows["code"] if self.problem.has_classes else np.zeros(len(rows), np.int32)
        # The census may have met new labels in this block, so the counts may have grown longer.
        counts = np.bincount(codes, minlength=len(self._rows_by_code)).astype(np.int64)
        counts[: len(self._rows_by_code)] += self._rows_by_code
        self._rows_by_code = counts
        self.words[name].add(rows["words"])
        self.has_words = self.has_words or (name == "train" and seen.has_words)
        files.add(records)
        return stays

    def _judge_single_rows(self, name: str, rows: NDArray[np.void]) -> Mask:
        """Which rows stay, by `data.clean.odd` and `data.exclude`; reports them, by kind."""
        findings = self.findings[name]
        table = self.tables[name]
        numbers = rows["row"]
        stays = np.ones(len(rows), np.bool_)
        # Each oddity has a bit in `odd`: 0b101 is a row with control characters and entities.
        for bit, oddity in enumerate(ODDITIES):
            odd_rows = np.flatnonzero(rows["odd"] & (1 << bit))
            rule = self.cleaning.odd if oddity in _BROKEN else RowRule.keep
            if rule is RowRule.refuse and len(odd_rows):
                sentence = KINDS[oddity].sentence.removesuffix(", kept unchanged")
                location = table.locate(int(numbers[odd_rows[0]]) + 1)
                raise UserError(
                    "data.clean.odd",
                    f"{table.name} row {location}: {sentence}",
                    hint="Correct the text, or set data.clean.odd=keep or drop.",
                )
            if rule is RowRule.drop:
                stays[odd_rows] = False
            else:
                findings.add(oddity, numbers[odd_rows])
        findings.add("odd_dropped", numbers[~stays])
        if isinstance(table, DecidedTable):
            is_excluded = np.isin(numbers, table.excluded)
            findings.add("excluded", numbers[is_excluded])
            findings.add("relabelled", numbers[np.isin(numbers, table.relabelled) & ~is_excluded])
            stays &= ~is_excluded
        return stays

    def _decide(self, files: RecordFiles) -> None:
        """Decide the split of every row, and the fate of rows that have a twin.

        Equal texts lie in the same file of records, so one file after the other is enough.
        """
        stands_for = self.census.unify(self._rows_by_code)
        strata = self.census.strata(self._rows_by_code)
        assign = choose_assigner(self.splitting, files, strata[stands_for])
        # Without classes there is nothing to count for the census: a table without rows.
        has_classes = self.problem.has_classes
        rows_by_split = np.zeros((len(SPLITS) * has_classes, len(stands_for)), np.int64)

        def assigned_parts() -> Iterator[tuple[Records, NDArray[np.integer], NDArray[np.int8]]]:
            for records in files.parts():
                codes = records["code"]
                yield records, stands_for[codes] if has_classes else codes, assign(records)

        for (records, codes, splits), twins in ahead(
            assigned_parts(), lambda part: find_twins(*part)
        ):
            is_merged = codes != records["code"]
            is_dropped = self._judge_twins(records, splits, twins)
            self._report(records, is_merged & ~is_dropped, "merged_label")
            for name in self.tables:
                of_table = records["table"] == SPLITS.index(name)
                rows = records["row"][of_table]
                self.fates[name][rows] = np.where(is_dropped, _DROPPED, splits)[of_table]
                self._is_changed[name][rows] |= is_merged[of_table]
            for number, rows_by_code in enumerate(rows_by_split):
                is_of_split = ~is_dropped & (splits == number)
                rows_by_code += np.bincount(codes[is_of_split], minlength=len(rows_by_code))
        for split, rows_by_code in zip(SPLITS, rows_by_split, strict=False):
            if rows_by_code.any():
                self.census.settle(split, rows_by_code)

    def _judge_twins(self, records: Records, splits: NDArray[np.int8], twins: Twins) -> Mask:
        """Report texts that occur twice; returns the rows that are dropped for it.

        Only the row of the earlier split is ever dropped. So training loses what validation or test
        has too, and validation loses what test has too.
        """
        is_train = splits == 0
        dropped = np.zeros(len(records), np.bool_)
        if self.problem.has_classes:
            dropped |= self._apply_rule(records, twins.conflict, "conflict", is_train)
        # Pairs of splits that must not share a text; the first of a pair may lose it.
        for split, other in ((0, 1), (0, 2), (1, 2)):
            here = splits == other
            is_exact = here & (twins.exact_splits & (1 << split) > 0)
            is_alike = here & (twins.alike_splits & (1 << split) > 0) & ~is_exact
            for kind, mask in (("leak", is_exact), ("leak_alike", is_alike)):
                if self.cleaning.leaks is RowRule.refuse:
                    self._refuse(records, mask, kind, _SPLIT_WORDS[split])
                if self.cleaning.leaks is RowRule.keep:
                    self._report(records, mask, kind, _SPLIT_WORDS[split])
        if self.cleaning.leaks is RowRule.drop:
            # Bits of the later splits: for training validation and test, for validation test.
            later_splits = np.array([0b110, 0b100, 0], np.uint8)[splits]
            is_leak = (twins.alike_splits & later_splits > 0) & ~dropped
            self._report(records, is_leak, "leak_dropped")
            dropped |= is_leak
        dropped |= self._apply_rule(records, twins.repeated & ~dropped, "repeated", is_train)
        self._report(records, twins.alike & ~dropped, "alike")
        return dropped

    def _report(self, records: Records, mask: Mask, kind: str, other: str = "") -> None:
        """Add the masked rows to the findings of their tables; `other` is the other split."""
        if mask.any():
            for table, findings in self.findings.items():
                of_table = mask & (records["table"] == SPLITS.index(table))
                findings.add(kind, records["row"][of_table], other)

    def _apply_rule(self, records: Records, mask: Mask, kind: str, may_drop: Mask) -> Mask:
        """Keep, drop or refuse the masked rows as the kind's rule says; returns the dropped."""
        rule = getattr(self.cleaning, _RULES[kind])
        if rule is RowRule.refuse:
            self._refuse(records, mask, kind)
        dropped = mask & may_drop if rule is RowRule.drop else np.zeros_like(mask)
        self._report(records, dropped, f"{kind}_dropped")
        self._report(records, mask & ~dropped, kind)
        return dropped

    def _refuse(self, records: Records, mask: Mask, kind: str, other: str = "") -> None:
        """Raise an error that names the first of the masked rows, if there is one."""
        if not mask.any():
            return
        first = records[mask][0]
        setting = f"data.clean.{_RULES[kind]}"
        table = self.tables[SPLITS[first["table"]]]
        sentence = KINDS[kind].sentence.format(other=other).removesuffix("kept").rstrip(" ,")
        raise UserError(
            setting,
            f"{table.name} row {table.locate(int(first['row']) + 1)}: one of the rows {sentence}",
            hint=f"Correct such rows, or set {setting}=keep or drop.",
        )
