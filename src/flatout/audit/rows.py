"""The rows of an audit: texts and labels as a run reads them, of all splits, and the folds they are
dealt into.

Of tagged words a row is an entity with its type, or a word outside that is like one: one with a
capital inside a sentence, or part of an entity elsewhere. Each is read with the words around it,
which are marked, so that a linear model tells them from its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.cleaning import TextBlock, read_texts
from flatout.data.checks.findings import Findings
from flatout.data.checks.survey import TextSurvey
from flatout.data.checks.tags import TagCensus, as_bio, find_entities
from flatout.data.problem import Problem
from flatout.data.store.progress import Progress
from flatout.data.tables.roles import find_roles
from flatout.data.tables.sources import open_table
from flatout.data.tables.splits import hash_texts
from flatout.data.tables.table import Table, as_texts, decoded, require_columns
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import open_source, open_tables
from flatout.data.text_source import TagSource, TextSource
from flatout.errors import require

Objects = NDArray[np.object_]
Blocks = Sequence[tuple[str, TextBlock]]  # rows, each block with the split it goes to
# the class of words outside; how many words before and after one are read
NO_ENTITY = "no entity"
_AROUND = 2
_MOST_UNLABELLED = 200_000
LEAST_ROWS = 40  # rows below which no fold says anything


@dataclass(frozen=True, slots=True)
class Sentences:
    """Tagged sentences, whose parts are rows."""

    words: Objects
    tags: Objects
    groups: NDArray[np.int64]  # numbers as those of the rows

    def folds(self, rows: AuditRows, folds: NDArray[np.int64]) -> NDArray[np.int64]:
        """The fold of each, that of all rows of its group; -1 where none of these is looked at."""
        of_groups = np.full(max(rows.groups.max(), self.groups.max()) + 1, -1)
        of_groups[rows.groups] = folds
        return of_groups[self.groups]


@dataclass(frozen=True, slots=True)
class AuditRows:
    """Labelled texts, and where each of them stands: arrays with an entry for each row."""

    texts: Objects
    shown: Objects  # the same as a person reads them
    labels: NDArray[np.int64]
    files: Objects
    rows: NDArray[np.int64]  # numbers in their files, from 1
    splits: Objects
    # rows of one group stay in one fold: equal texts, or those of `data.group`
    groups: NDArray[np.int64]
    places: Objects  # file and row, as a person looks them up
    # what the rows have in the column by which scores are parted; empty texts without one
    column: Objects
    classes: list[str]
    conflicts: int = 0  # rows whose text has another label elsewhere
    is_tagged: bool = False  # whether they are entities, and words like them
    # rows of each split, before some were drawn
    of_splits: dict[str, int] = field(default_factory=dict)
    sentences: Sentences | None = None
    # `[N, 3]`: each row's sentence, its first word and the word after its last
    spans: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def of_spans(self, of_words: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of each row's words, of values of all words of all sentences."""
        assert self.sentences is not None and self.spans is not None
        begins = np.cumsum([0, *map(len, self.sentences.words)])[self.spans[:, :1]]
        sums = np.add.reduceat(
            np.pad(of_words, ((0, 1), (0, 0))), (begins + self.spans[:, 1:]).ravel()
        )[::2]
        return sums / np.diff(self.spans[:, 1:])


def read_audit_rows(
    config: TextDataConfig, num_folds: int, most_rows: int, column: str | None = None
) -> AuditRows:
    """Every row that a run would use; of more than `most_rows`, so many drawn at random."""
    is_known = config.problem in (Problem.single, Problem.tags)
    require(is_known, "audit", "looks at texts with one class a row, and at tags, in this version")
    is_tagged = config.problem is Problem.tags
    source = TagSource(config, open_tables(config)) if is_tagged else open_source(config)
    if column is not None:
        require_columns(source.tables["train"], {"column": column})
    surveyed, blocks = _read(source)
    rows = np.concatenate([block.rows for _, block in blocks])
    splits = np.concatenate([np.full(len(block.rows), split, object) for split, block in blocks])
    tables = np.array([split if split in source.tables else "train" for split in splits], object)
    read = [text for _, block in blocks for text in block.texts.to_pylist()]
    shown = np.array([" ".join(text) for text in read] if is_tagged else read, object)
    texts = shown
    groups = (
        _column(source, config.group, tables, rows)
        if config.group
        else [text.lower() for text in texts]
    )
    numbers = np.unique(hash_texts(pa.array(groups, pa.large_string())), return_inverse=True)[1]
    places = np.arange(len(rows))
    parts = dict[str, Any]()
    if isinstance(source, TagSource):
        classes = [NO_ENTITY, *source.census.types]
        spans = list(entities_and_like(source.census, blocks))
        require(
            len(spans) >= LEAST_ROWS and len(classes) > 1,
            "data.label",
            f"{len(spans)} entities and words like them, of {len(classes) - 1} types, are too few"
            " to be audited",
            allowed=f"{LEAST_ROWS} or more",
        )
        texts, shown = (np.array([each[nth] for each in spans], object) for nth in range(2))
        labels, places = np.array([each[2:4] for each in spans], np.int64).T
        words, tags = (
            _lists([getattr(block, side) for _, block in blocks]) for side in ("texts", "labels")
        )
        parts = {
            "sentences": Sentences(words, tags, numbers),
            "spans": np.array([each[3:] for each in spans]),
        }
    else:
        surveyed.census.require_classes("data.label")
        classes = surveyed.census.classes()
        labels = np.concatenate([surveyed.census.targets(block.labels) for _, block in blocks])
    of_kind = [each.found.get("conflict") for each in surveyed.findings.values()]
    found = AuditRows(
        texts=texts,
        shown=shown,
        labels=labels,
        files=np.array([source.tables[table].name for table in tables], object)[places],
        rows=rows[places] + 1,
        splits=splits[places],
        groups=numbers[places],
        places=tables[places],
        of_splits=dict(Counter(splits[places].tolist())),
        column=_column(source, column, tables, rows)[places],
        classes=classes,
        conflicts=0 if is_tagged else sum(each.count for each in of_kind if each is not None),
        is_tagged=is_tagged,
        **parts,
    )
    drawn = np.sort(np.random.default_rng(0).permutation(len(found))[:most_rows])
    chosen = replace(choose(found, drawn), conflicts=found.conflicts * len(drawn) // len(found))
    _require_groups(chosen, config, num_folds)
    of_rows = zip(chosen.places, chosen.rows.tolist(), strict=True)
    return replace(
        chosen,
        places=np.array([_located(source.tables[table], row) for table, row in of_rows], object),
    )


def _located(table: Table, row: int) -> str:
    place = table.locate(row)
    # of several files it names the one
    return f"{table.name}:{place}" if place.isdecimal() else place


def _require_groups(found: AuditRows, config: TextDataConfig, num_folds: int) -> None:
    is_by_text = not (config.group or found.is_tagged)
    num_groups = len(np.unique(found.groups))
    where = f"data.group={config.group}" if config.group else "folds"
    require(
        num_groups >= LEAST_ROWS or not is_by_text,
        "data.source",
        f"{num_groups} different texts are too few to be audited",
        allowed=f"{LEAST_ROWS} or more",
    )
    require(
        num_groups >= num_folds,
        where,
        f"{num_groups} groups for {num_folds} folds",
        hint="Set folds to fewer, or leave data.group out.",
    )


def _read(source: TextSource) -> tuple[TextSurvey, Blocks]:
    """What is known of all rows, and those that a run would use."""
    with Progress() as progress:
        surveyed = TextSurvey(source).run(progress.task("checking"))
        source.require_words(surveyed.has_words)
        num_rows = sum(surveyed.rows.values())
        require(
            num_rows >= LEAST_ROWS,
            "data.source",
            f"{num_rows} rows are too few to be audited",
            allowed=f"{LEAST_ROWS} or more",
        )
        return surveyed, list(source.texts_and_labels(surveyed.fates, progress.task("reading")))


def read_unlabelled(config: TextDataConfig, file: str) -> list[str]:
    """The texts of a file, read as those of the data are."""
    table = open_table(file, where="unlabelled", reading=config.read)
    roles = find_roles(table, text=config.text, join=config.join, is_labelled=False)
    require_columns(table, dict(zip(("data.text", "data.text[1]"), roles.texts, strict=False)))
    texts: list[str] = []
    for rows, block in table.numbered(roles.texts):
        found, _ = read_texts(block, roles, rows, Findings(table.name))
        texts += [text or "" for text in found.to_pylist()]
        require(
            len(texts) <= _MOST_UNLABELLED,
            "unlabelled",
            f"{file} has more than {_MOST_UNLABELLED:,} rows",
            hint="Take a part of it.",
        )
    require(bool(texts), "unlabelled", f"{file} has no rows")
    return texts


def _column(
    source: TextSource, name: str | None, tables: Objects, rows: NDArray[np.int64]
) -> Objects:
    """A column's values as texts; empty in tables that lack it."""
    found = np.full(len(rows), "", object)
    for split, table in source.tables.items():
        if name is not None and name in table.columns:
            blocks = (
                as_texts(decoded(block.column(name))).to_pylist() for block in table.blocks([name])
            )
            values = np.array([value or "" for block in blocks for value in block], object)
            found[tables == split] = values[rows[tables == split]]
    return found


def entities_and_like(
    census: TagCensus, blocks: Blocks
) -> Iterator[tuple[str, str, int, int, int, int]]:
    """What is read and shown of each; the number of its type, 0 for none, and of its sentence;
    where in it, and to.
    """
    tagged = [census.numbered(block.labels, block.rows) for _, block in blocks]
    words = [np.array(pc.list_flatten(block.texts).to_pylist(), object) for _, block in blocks]
    known = {
        word.lower()
        for tags, each in zip(tagged, words, strict=True)
        for word in each[tags.types > 0]
    }
    sentence = 0
    for tags, each in zip(tagged, words, strict=True):
        begin = tags.offsets[:-1]
        end = tags.offsets[1:]
        found = find_entities(as_bio(tags), tags.offsets)
        starts, stops = (within + begin[found.row] for within in (found.start, found.stop))
        spans = list(zip(found.row, starts, stops, found.kind + 1, strict=True))
        for row, place in zip(tags.row_of(), range(len(each)), strict=True):
            is_like = each[place].lower() in known or (
                place > begin[row] and each[place][:1].isupper()
            )
            spans += [(row, place, place + 1, 0)] if is_like and not tags.types[place] else []
        for row, start, stop, kind in spans:
            before, after = (
                each[max(begin[row], start - _AROUND) : start],
                each[stop : min(end[row], stop + _AROUND)],
            )
            inside = " ".join(each[start:stop])
            read = [
                *(f"{word}_" for word in before),
                inside,
                *(f"_{word}" for word in after),
                _shape(inside),
            ]
            shown = " ".join([*before, f"[{inside}]", *after])
            yield " ".join(read), shown, kind, sentence + row, start - begin[row], stop - begin[row]
        sentence += len(begin)


def _shape(words: str) -> str:
    """Its capitals, small letters, digits and marks as a word, runs of them once: "uldu" for "Room
    2B".
    """
    kinds = (
        "u" if each.isupper() else "l" if each.islower() else "d" if each.isdigit() else ""
        for each in words
    )
    return "_" + "".join(kind for kind, _ in groupby(filter(None, kinds))) + "_"


def _lists(columns: Sequence[pa.Array]) -> Objects:
    return np.array(
        [*(values for column in columns for values in column.to_pylist()), None], object
    )[:-1]


def choose(rows: AuditRows, places: NDArray[np.int64]) -> AuditRows:
    """The rows at some places."""
    values = {each.name: getattr(rows, each.name) for each in fields(rows)}
    chosen: dict[str, Any] = {
        name: each[places] for name, each in values.items() if isinstance(each, np.ndarray)
    }
    return replace(rows, **chosen)


def small_classes(rows: AuditRows, num_folds: int) -> list[str]:
    """Classes with fewer rows than folds: some fold learns or judges them from nothing."""
    counts = np.bincount(rows.labels, minlength=len(rows.classes))
    return [name for name, count in zip(rows.classes, counts, strict=True) if count < num_folds]


def deal(rows: AuditRows, num_folds: int, seed: int = 0) -> NDArray[np.int64]:
    """The fold of each row: whole groups, class by class, so that each fold has its
    share of each.
    """
    random = np.random.default_rng(seed)
    groups, first, inverse = np.unique(rows.groups, return_index=True, return_inverse=True)
    order = np.lexsort((random.random(len(groups)), rows.labels[first]))
    folds = np.empty(len(groups), np.int64)
    folds[order] = np.arange(len(groups)) % num_folds
    return folds[inverse]
