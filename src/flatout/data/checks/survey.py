"""The first pass over a table: every row read once, and its fate decided.

What a block's bytes show is worked out in threads while the next block is read. A row's fate is the split it belongs
to, or that it is dropped: one byte a row. All else that grows with the rows lies on disk (`twins`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.data.checks.characters import Characters, read_characters
from flatout.data.checks.cleaning import Alike, CleanBlock, RowRule, clean_block
from flatout.data.checks.findings import KINDS, Findings, Level, Remark
from flatout.data.checks.labels import LabelCensus, Rows, normalise_labels
from flatout.data.checks.lengths import Lengths
from flatout.data.checks.twins import RECORD, Mask, RecordFiles, Records, Twins, assigner, find_twins
from flatout.data.decisions import DecidedTable
from flatout.data.problem import Problem
from flatout.data.tables.splits import SPLITS, hash_texts, reseeded
from flatout.data.tables.table import are_numbers, as_texts, decoded
from flatout.errors import UserError, require

if TYPE_CHECKING:
    from flatout.data.text_source import TextSource

_DROPPED = -1
_COUNTS = ("rows_read", "rows_kept", "rows_repaired")
_THREADS, _WAITING, _ROWS_PER_BLOCK, _ROWS_SAMPLED = 2, 4, 32_768, 20_000
_ODD = ("control", "invisible", "replaced", "private", "mojibake")
_Cleaned = tuple[pa.RecordBatch, CleanBlock, NDArray[np.int64]]
"""A block, what is used of it, and where in the block these rows lie."""
Given = TypeVar("Given")
Made = TypeVar("Made")
_SPOKEN = ("training", "validation", "test")
_RULES = {"conflict": "conflicts", "leak": "leaks", "leak_alike": "leaks", "repeated": "duplicates"}
"""The setting that decides over each kind of finding."""


class TextSurvey:
    """One pass over all tables of a source, and what follows from it."""

    def __init__(self, source: TextSource) -> None:
        config = source.config
        self.tables, self.roles, self.splitting = source.tables, source.roles, source.splitting
        self.problem, self.label_delimiter, self.cleaning = config.problem, config.label_delimiter, config.clean
        self.fates: dict[str, NDArray[np.int8]] = {}
        """For each table, each row's split (0, 1, 2), or -1 for a row that is dropped."""
        self.findings = {name: Findings(table.name, locate=table.locate) for name, table in self.tables.items()}
        merges = config.clean.labels is Alike.merge
        self.census = LabelCensus(config.problem, merge=merges, max_classes=config.max_classes)
        self.words = {name: Lengths() for name in self.tables}  # words a row, by table
        self.samples: dict[str, list[CleanBlock]] = {name: [] for name in self.tables}  # the first rows of each table
        self.has_words = config.problem is Problem.tags
        """Whether a training text is more than a number; tagged words may be numbers."""
        self._is_changed: dict[str, NDArray[np.bool_]] = {}
        self._rows_by_code = np.zeros(0, np.int64)

    def run(self, advance: Callable[[int], None]) -> TextSurvey:
        """Read every row, assign the splits, compare the texts."""
        with closing(RecordFiles()) as files:
            for name in self.tables:
                self._read(name, files, advance)
            self._decide(files)
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
        counts = (sum(int((each == number).sum()) for each in self.fates.values()) for number in range(len(SPLITS)))
        return {split: count for split, count in zip(SPLITS, counts, strict=True) if count}

    def first_texts(self) -> dict[str, list[pa.Array]]:
        """Texts of the first rows, by the split they belong to; every split has some."""
        texts: dict[str, list[pa.Array]] = {split: [] for split in SPLITS}
        for name, blocks in self.samples.items():
            for block in blocks:
                fates = self.fates[name][block.rows]
                for number, split in enumerate(SPLITS):
                    if (mask := fates == number).any():
                        texts[split].append(block.texts.filter(pa.array(mask)))
        return {split: blocks for split, blocks in texts.items() if blocks}

    def account(self) -> list[Remark]:
        """What became of all rows; a table of its own where anything did."""
        tables = list(self.findings.values())
        total = Findings("all", *(sum(getattr(one, name) for one in tables) for name in _COUNTS))
        changed = [one for one in tables if one.rows_repaired or one.rows_dropped]
        parts = [Remark(Level.note, one.source, one.account()) for one in changed if len(tables) > 1]
        return [Remark(Level.note, "rows", total.account()), *parts]

    def _read(self, name: str, files: RecordFiles, advance: Callable[[int], None]) -> None:
        fates, changed = [np.empty(0, np.int8)], [np.empty(0, np.bool_)]
        for cleaned, characters in _ahead(self._cleaned(name), lambda each: read_characters(each[1].texts)):
            block, clean, places = cleaned
            fates.append(np.full(block.num_rows, _DROPPED, np.int8))
            changed.append(np.zeros(block.num_rows, np.bool_))
            fates[-1][places[self._take(name, cleaned, characters, files)]] = SPLITS.index(name)
            changed[-1][places] = clean.is_changed
            advance(block.num_rows)
        self.fates[name], self._is_changed[name] = np.concatenate(fates), np.concatenate(changed)

    def _take(self, name: str, cleaned: _Cleaned, characters: Characters, files: RecordFiles) -> Mask:
        """Number the labels of a block and leave a record of each row; which rows stay."""
        (_, clean, _), table = cleaned, self.tables[name]
        kept = self._admitted(name, clean, characters)
        how: dict[str, Any] = {"problem": self.problem, "delimiter": self.label_delimiter}
        labels = normalise_labels(clean.labels, clean.rows, **how, source=table.name, locate=table.locate)
        codes, words = self.census.code(labels), characters.words
        records = self._records(name, cleaned, characters, codes)
        if self.problem is Problem.regression:  # rows with other numbers differ
            records["code"] = labels.to_numpy(zero_copy_only=False).astype(np.float32).view(np.int32)
        if not kept.all():
            codes, words, records = codes[kept], words[kept], records[kept]
        counts = np.bincount(codes, minlength=len(self._rows_by_code)).astype(np.int64)
        counts[: len(self._rows_by_code)] += self._rows_by_code
        self._rows_by_code = counts
        self.words[name].add(words)
        self.has_words = self.has_words or (name == "train" and not are_numbers(clean.texts))
        files.add(records)
        if self.problem is Problem.multi:
            self.findings[name].add("no_labels", clean.rows[np.diff(labels.offsets.to_numpy()) == 0])
        if sum(len(block.rows) for block in self.samples[name]) < _ROWS_SAMPLED:
            self.samples[name].append(clean.first(_ROWS_SAMPLED))
        return kept

    def _cleaned(self, name: str) -> Iterator[_Cleaned]:
        group = [self.splitting.group] if name == "train" and self.splitting.group else []
        wanted = list(dict.fromkeys([*self.roles.columns, *group]))
        rules: dict[str, Any] = {"roles": self.roles, "problem": self.problem, "cleaning": self.cleaning}
        rules |= {"is_train": name == "train", "findings": self.findings[name]}
        for rows, block in self.tables[name].numbered(wanted, _ROWS_PER_BLOCK):
            clean = clean_block(block, rows=rows, **rules)
            yield block, clean, clean.rows - rows[0] if len(rows) else rows

    def _admitted(self, name: str, clean: CleanBlock, characters: Characters) -> Mask:
        """Which rows stay, as far as odd characters and decisions (`data.exclude`, `data.relabel`) go."""
        findings, table, kept = self.findings[name], self.tables[name], np.ones(len(clean.rows), np.bool_)
        for oddity, places in characters.odd.items():
            if oddity in _ODD and self.cleaning.odd is RowRule.refuse:
                place = table.locate(int(clean.rows[places[0]]) + 1)
                what = f"{table.name} row {place}: {KINDS[oddity].sentence.removesuffix(' kept as they are')}"
                raise UserError("data.clean.odd", what, hint="Correct the text, or set data.clean.odd=keep or drop.")
            if oddity in _ODD and self.cleaning.odd is RowRule.drop:
                kept[places] = False
            else:
                findings.add(oddity, clean.rows[places])
        findings.add("odd_dropped", clean.rows[~kept])
        if isinstance(table, DecidedTable):
            is_excluded = np.isin(clean.rows, table.excluded)
            findings.add("excluded", clean.rows[is_excluded])
            findings.add("relabelled", clean.rows[np.isin(clean.rows, table.relabelled) & ~is_excluded])
            kept &= ~is_excluded
        return kept

    def _records(self, name: str, cleaned: _Cleaned, characters: Characters, codes: NDArray[np.int32]) -> Records:
        block, clean, places = cleaned
        records = np.empty(len(clean.rows), RECORD)
        records["alike"], records["exact"] = characters.alike, characters.exact
        records["row"], records["code"], records["table"] = clean.rows, codes, SPLITS.index(name)
        records["group"] = self._groups(block, places, clean.rows) if self.splitting.group and name == "train" else 0
        return records

    def _groups(self, block: pa.RecordBatch, places: Rows, rows: Rows) -> NDArray[np.uint64]:
        """A hash of each row's group; a row without one is a group of its own."""
        group = decoded(block.column(self.splitting.group)).take(pa.array(places))
        what = f"column {self.splitting.group!r} holds {group.type}"
        require(not pa.types.is_nested(group.type), "data.group", what, allowed="texts or numbers")
        is_null = group.is_null().to_numpy(zero_copy_only=False)
        return np.where(is_null, reseeded(rows.astype(np.uint64), 1), hash_texts(as_texts(group)))

    def _decide(self, files: RecordFiles) -> None:
        """The split of every row, and what becomes of rows that have a twin."""
        stands_for = self.census.unify(self._rows_by_code)
        assign = assigner(self.splitting, files, self.census.strata(self._rows_by_code)[stands_for])
        has_classes = self.problem.has_classes
        rows_by_split = np.zeros((len(SPLITS) * has_classes, len(stands_for)), np.int64)
        in_all = ((records, records["code"], assign(records)) for records in files.parts())
        read = ((records, stands_for[codes] if has_classes else codes, splits) for records, codes, splits in in_all)
        for (records, codes, splits), twins in _ahead(read, lambda each: find_twins(*each)):
            is_merged = codes != records["code"]
            is_dropped = self._dropped(records, splits, twins)
            self._tell(records, is_merged & ~is_dropped, "merged_label")
            for name in self.tables:
                own = records["table"] == SPLITS.index(name)
                rows = records["row"][own]
                self.fates[name][rows] = np.where(is_dropped, _DROPPED, splits)[own]
                self._is_changed[name][rows] |= is_merged[own]
            for number, rows_by_code in enumerate(rows_by_split):
                rows_by_code += np.bincount(codes[~is_dropped & (splits == number)], minlength=len(rows_by_code))
        for split, rows_by_code in zip(SPLITS, rows_by_split, strict=False):
            if rows_by_code.any():
                self.census.settle(split, rows_by_code)

    def _dropped(self, records: Records, splits: NDArray[np.int8], twins: Twins) -> Mask:
        """Report what stands twice; which rows are dropped for it. Only rows of earlier splits ever are."""
        is_train, dropped = splits == 0, np.zeros(len(records), np.bool_)
        if self.problem.has_classes:
            dropped |= self._ruled(records, twins.conflict, "conflict", is_train)
        for split, other in ((0, 1), (0, 2), (1, 2)):  # which must not share a text; the first may lose it
            here = splits == other
            is_exact = here & (twins.exact_splits & (1 << split) > 0)
            is_alike = here & (twins.alike_splits & (1 << split) > 0) & ~is_exact
            for name, mask in (("leak", is_exact), ("leak_alike", is_alike)):
                if self.cleaning.leaks is RowRule.refuse:
                    self._refuse(records, mask, name, _SPOKEN[split])
                if self.cleaning.leaks is RowRule.keep:
                    self._tell(records, mask, name, _SPOKEN[split])
        if self.cleaning.leaks is RowRule.drop:
            is_judged = (twins.alike_splits & np.array([0b110, 0b100, 0], np.uint8)[splits] > 0) & ~dropped
            self._tell(records, is_judged, "leak_dropped")
            dropped |= is_judged
        dropped |= self._ruled(records, twins.repeated & ~dropped, "repeated", is_train)
        self._tell(records, twins.alike & ~dropped, "alike")
        return dropped

    def _tell(self, records: Records, mask: Mask, name: str, other: str = "") -> None:
        if mask.any():
            for table, findings in self.findings.items():
                findings.add(name, records["row"][mask & (records["table"] == SPLITS.index(table))], other)

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
        first, setting = records[mask][0], f"data.clean.{_RULES[name]}"
        table = self.tables[SPLITS[first["table"]]]
        sentence = KINDS[name].sentence.format(other=other).removesuffix("kept").rstrip(" ,")
        what = f"{table.name} row {table.locate(int(first['row']) + 1)}: one of the rows {sentence}"
        raise UserError(setting, what, hint=f"Correct such rows, or set {setting}=keep or drop.")


def _ahead(items: Iterable[Given], work: Callable[[Given], Made]) -> Iterator[tuple[Given, Made]]:
    """Items in their order, each with what a thread has made of it while the next ones are read."""
    waiting: deque[tuple[Given, Future[Made]]] = deque()
    with ThreadPoolExecutor(_THREADS) as threads:
        for item in items:
            waiting.append((item, threads.submit(work, item)))
            if len(waiting) >= _WAITING:
                first, made = waiting.popleft()
                yield first, made.result()
        for first, made in waiting:
            yield first, made.result()
