"""From a table of texts to a store: rows are read, checked, split, labelled and encoded once.

Three passes over the source, each block by block. The first looks at every row and decides its
fate: its split, or none. The second trains the vocabulary. The third encodes. Remarks and counts go
into the facts of the store. Sources of many rows are encoded by units (see `encoded_units`), so
that several processes can share the third pass and a killed one continues. Open this file to change
what happens between a source and its store; `TagPreparation` is the same for tagged words.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from flatout.data.checks.cleaning import TextBlock
from flatout.data.checks.findings import Remark, all_remarks, lines_of
from flatout.data.checks.lengths import loss_remarks
from flatout.data.checks.seen import WHOLE, Advance, BuildPart
from flatout.data.checks.survey import TextSurvey
from flatout.data.problem import Problem
from flatout.data.store.cache import Cache, CacheReport, Recipe, recipe_key
from flatout.data.store.progress import Progress
from flatout.data.store.store import (
    GROUPS,
    SCHEMA,
    Array,
    Column,
    Ragged,
    Store,
    StoreWriter,
    smallest_token_type,
)
from flatout.data.tables.roles import Roles
from flatout.data.tables.splits import SplitBy, hash_texts
from flatout.data.texts.decisions import given_labels
from flatout.data.texts.encoded_totals import EncodedTotals
from flatout.data.texts.encoded_units import (
    ALL_UNITS,
    EncodedUnits,
    Turn,
    Unit,
    WaitingRows,
    least_rows,
)
from flatout.data.texts.source import TOPIC, Piece, Pieces, TextSource
from flatout.data.tokens.long_texts import Long, LongTexts
from flatout.data.tokens.subwords import (
    Encoder,
    Subwords,
    encode_texts,
    read_encoder,
    train_encoder,
)
from flatout.data.tokens.vocabulary import EncodedBlock, VocabularyKind
from flatout.errors import require

Targets = Array | tuple[Array, Array]
"""One value a row; or values, and how many of them each row has."""
Blocks = Iterable[tuple[str, TextBlock]]  # rows, and their splits
EncodedRows = Iterator[tuple[str, TextBlock, EncodedBlock, Targets]]
# Of more training rows a sample makes the vocabulary: more texts would hardly change it.
VOCABULARY_ROWS = 1 << 22
_HOW_TAKEN = {
    SplitBy.content: "by a hash of the text",
    SplitBy.stratified: "with the same share of each class",
    SplitBy.group: "by whole groups",
}
_TARGET_COLUMNS = {
    Problem.single: {"targets": Column("int32")},
    Problem.multi: {"targets": Column("int32", ragged=True)},
    Problem.regression: {"targets": Column("float32")},
    Problem.tags: {"targets": Column("int32", ragged=True)},
    Problem.none: {},
}


@dataclass(frozen=True, slots=True)
class EncodingPlan:
    """What the third pass needs of the first two: the fate of each row, and the encoder."""

    survey: TextSurvey
    encoder: Encoder


class OpenedTexts(TypedDict):
    """The fields that infos of texts and of tagged words have in common."""

    store: Store
    report: CacheReport
    source: str
    vocabulary: Encoder
    roles: Roles
    max_length: int
    long_texts: LongTexts


class TextPreparation:
    """Builds the store of a source, one stage a method."""

    has_units = True  # whether sources of many rows are encoded by units

    def __init__(self, source: TextSource) -> None:
        self.config = source.config
        self.source = source
        config = self.config
        self.tokenizer: Subwords | None = None
        """The tokenizer that settings name; None: a vocabulary is trained."""
        if config.tokenizer is not None:
            self.tokenizer = Subwords.load(config.tokenizer, words=config.problem is Problem.tags)
            if config.problem is Problem.none:
                self.tokenizer.require_mask(config.tokenizer)
            self._require_room(self.tokenizer)
        is_encoder = (
            self.tokenizer is not None or config.vocabulary.kind is VocabularyKind.wordpiece
        )
        require(
            is_encoder or config.long is Long.cut,
            "data.long",
            f"{config.long} is for encoders",
            hint="Set model=transformer.",
        )

    def _require_room(self, encoder: Encoder) -> None:
        """Refuse windows, or two ends of a text, that special tokens leave no room for."""
        config = self.config
        special = encoder.frame.size if isinstance(encoder, Subwords) else 0
        if config.long is Long.windows:
            least = special + config.overlap
            require(
                config.window > least,
                "data.window",
                f"{config.window} tokens, {special} of them special and {config.overlap} shared",
                allowed=f"more than {least}",
            )
        elif config.long is Long.head_tail:
            require(
                config.max_length > special + 1,
                "data.max_length",
                f"{config.max_length} tokens, {special} of them special",
                allowed=f"more than {special + 1}",
            )

    def open(self) -> OpenedTexts:
        """Open the store; it is built first where the cache has none."""
        source = self.source
        config = self.config
        cache = Cache(config.cache)
        store, report = cache.open_or_build(source.name, self.recipe(), self._build)
        # The store may come from a run that named a column of numbers; this one may not have.
        source.require_words(store.facts.get("has_words", True))
        return {
            "store": store,
            "report": report,
            "source": source.name,
            "vocabulary": read_encoder(store.read_text("tokenizer.json")),
            "roles": source.columns,
            "max_length": config.max_length,
            "long_texts": config.long_texts,
        }

    def recipe(self) -> Recipe:
        """All that the store depends on: its hash is the key of the store."""
        config = self.config
        recipe = {
            "source": self.source.fingerprints,
            "read": config.read.facts(),
            "column": asdict(self.source.columns),
            "problem": config.problem.value,
            "label_delimiter": config.label_delimiter,
            "max_classes": config.max_classes,
            "split": asdict(self.source.splitting),
            "clean": asdict(config.clean),
            "vocabulary": (
                asdict(config.vocabulary)
                if self.tokenizer is None
                else self.tokenizer.fingerprint()
            ),
            "max_length": config.max_length,
        }
        # Only where it says something: stores of cut texts, and those without groups, keep the keys
        # that they have.
        if config.long is not Long.cut:
            recipe["long"] = asdict(config.long_texts)
        if self._has_groups:
            recipe[GROUPS] = self.source.splitting.group
        return recipe | {"schema": SCHEMA}

    def encode_part(self, number: int, count: int) -> tuple[int, int]:
        """Encode part `number` of `count`, counted from 1.

        Returns the number of its units, and how many of them were in the cache before. With three
        pieces and two parts, part 1 takes pieces 0 and 2. With one piece and two parts, each part
        takes every other unit of it.
        """
        with Progress() as progress:
            plan = self._plan_encoding(progress, BuildPart(number, count))
            units = self._units(plan)
            pieces = self._pieces(plan)
            advance = progress.task("encoding")
            # a part reads its own files alone, where there are enough
            step = count if len(pieces) >= count else 1
            for place, piece in enumerate(pieces[(number - 1) % step :: step]):
                # Parts that take the same pieces take their units in turn.
                parts_of_piece = count // step
                turn = Turn(((number - 1) // step - place) % parts_of_piece, parts_of_piece)
                deque(self._open_units(piece, units, plan, advance, turn), 0)
        self.source.require_unchanged()
        return units.num_reused + units.num_encoded, units.num_reused

    def _plan_encoding(self, progress: Progress, part: BuildPart = WHOLE) -> EncodingPlan:
        """The first two passes: the fate of each row, and the vocabulary."""
        surveyed = TextSurvey(self.source, Cache(self.config.cache), part).run(
            progress.task("checking")
        )
        self.source.require_words(surveyed.has_words)
        surveyed.require_columns_as_named()
        self._require_rows(surveyed)
        self._require_classes(surveyed)
        return EncodingPlan(surveyed, self._train_vocabulary(surveyed, progress.task("reading")))

    def _build(self, writer: StoreWriter) -> None:
        with Progress() as progress:
            plan = self._plan_encoding(progress)
            surveyed = plan.survey
            pieces = self._pieces(plan)
            advance = progress.task("encoding")
            writer.expected_rows = sum(surveyed.rows.values())
            if pieces:
                totals = self._join(writer, pieces, plan, advance)
            else:
                blocks = self.source.texts_and_labels(surveyed.fates, advance)
                splits = self.config.split_names(self.source.tables)
                totals = self._encode(writer, splits, blocks, plan)
        self.source.require_unchanged()
        writer.write_text("tokenizer.json", plan.encoder.to_json())
        remarks = self._remarks(surveyed, totals)
        writer.facts |= {
            **self._label_facts(surveyed),
            "columns": {
                "text": list(self.source.columns.texts),
                "label": self.source.columns.label,
            },
            "splits": {split: total.facts() for split, total in totals.items()},
            "lengths": {split: total.lengths.as_dict() for split, total in totals.items()},
            "has_words": surveyed.has_words,
            "remarks": [remark.as_dict() for remark in remarks],
            "lines": [*self._lines(totals), *lines_of(remarks)],
        }

    def _require_classes(self, surveyed: TextSurvey) -> None:
        surveyed.census.require_classes(where="data.label")

    def _class_remarks(self, surveyed: TextSurvey) -> list[Remark]:
        return surveyed.census.remarks("training rows", given_labels(self.source.tables))

    def _label_facts(self, surveyed: TextSurvey) -> dict[str, Any]:
        census = surveyed.census
        mean, spread = census.scale()
        return {
            "classes": census.classes(),
            "class_counts": census.train_counts(),
            "target_mean": mean,
            "target_spread": spread,
        }

    def _require_rows(self, surveyed: TextSurvey) -> None:
        tables = self.source.tables
        for split in self.config.split_names(tables):
            key = split if split in tables else "train"
            if self.config.source is not None:
                key = "source"
            require(
                split in surveyed.rows,
                f"data.{key}",
                f"no rows are left for the {split} split of {self.source.name}",
                hint=(
                    "Add rows, or name a file for each split. python -m flatout check counts the"
                    " rows that are left out."
                ),
            )

    def _train_vocabulary(self, surveyed: TextSurvey, advance: Advance) -> Encoder:
        """Second pass, over the training rows: make the vocabulary, unless settings name one.

        Where labels are numbers, the same pass adds up their mean and spread.
        """
        sampled_share = VOCABULARY_ROWS / surveyed.rows["train"]  # from 1 on all texts are taken
        has_numbers = self.config.problem is Problem.regression

        def training_texts() -> Iterator[pa.Array]:
            for _, block in self.source.texts_and_labels(
                surveyed.fates, advance, splits=("train",)
            ):
                if has_numbers:
                    surveyed.census.add_numbers(block.labels.to_numpy(zero_copy_only=False))
                if sampled_share >= 1:
                    yield block.texts
                else:
                    # by a hash, so that every part of a build draws the same texts
                    is_drawn = hash_texts(block.texts) < np.uint64(sampled_share * 2.0**64)
                    yield block.texts.filter(pa.array(is_drawn))

        def train() -> Encoder:
            return train_encoder(training_texts(), self.config.vocabulary)

        if self.tokenizer is None:
            # The numbers are counted while texts are read, so a vocabulary from the cache would
            # leave them uncounted.
            is_cached = surveyed.rows["train"] >= least_rows() and not has_numbers
            vocabulary = self._train_or_reuse(train) if is_cached else train()
            self._require_room(vocabulary)
            return vocabulary
        if has_numbers:
            deque(training_texts(), 0)  # counts the numbers on the way
        return self.tokenizer

    def _train_or_reuse(self, train: Callable[[], Encoder]) -> Encoder:
        """The vocabulary from the cache if another part, or a build that was killed, has trained
        it; else train it.
        """
        recipe = self.recipe()
        key = recipe_key({name: recipe[name] for name in recipe.keys() - {"max_length", "long"}})

        def build(writer: StoreWriter) -> None:
            vocabulary = train().to_json()
            self.source.require_unchanged()
            writer.write_text("tokenizer.json", vocabulary)

        store = (
            Cache(self.config.cache).of_surveys().open_or_build_key(key, self.source.name, build)
        )
        return read_encoder(store.read_text("tokenizer.json"))

    def _columns(self, plan: EncodingPlan) -> dict[str, Column]:
        tokens = Column(smallest_token_type(plan.encoder.size), ragged=True)
        targets = _TARGET_COLUMNS[self.config.problem]
        groups = {GROUPS: Column("int64")} if self._has_groups else {}
        return {"tokens": tokens, **targets, **groups, "rows": Column("int64")}

    @property
    def _has_groups(self) -> bool:
        return self.source.splitting.group is not None

    def _encode(
        self,
        writer: StoreWriter,
        splits: Iterable[str],
        blocks: Blocks,
        plan: EncodingPlan,
        first: int = 0,
    ) -> dict[str, EncodedTotals]:
        """Third pass: write tokens, targets and row numbers. Numbers count from row `first`."""
        writers = {split: writer.split(split, self._columns(plan)) for split in splits}
        totals = {split: EncodedTotals() for split in writers}
        for split, block, encoded, targets in self._encode_blocks(blocks, plan):
            writers[split].append(
                tokens=(encoded.tokens, encoded.lengths),
                rows=block.rows - first,
                **self._name_targets(targets),
                **({GROUPS: self.source.groups_of(block)} if self._has_groups else {}),
            )
            totals[split].add(encoded, self.config.long_texts)
            if self.config.is_sample and TOPIC in block.block.schema.names:
                is_clean = pc.equal(block.block.column("label"), block.block.column(TOPIC))
                totals[split].counts["clean"] += pc.sum(is_clean).as_py() or 0
        return totals

    def _encode_blocks(self, blocks: Blocks, plan: EncodingPlan) -> EncodedRows:
        """Blocks with their ids and targets."""
        for split, block in blocks:
            encoded = encode_texts(
                plan.encoder, block.texts, self.config.max_length, self.config.long_texts
            )
            yield split, block, encoded, plan.survey.census.targets(block.labels)

    def _pieces(self, plan: EncodingPlan) -> Pieces:
        """The pieces of the source that are encoded by units. None where rows are so few that one
        store holds them.
        """
        if not self.has_units:
            return ()
        pieces = self.source.pieces(plan.survey.fates, least_rows())
        is_worthwhile = any(len(rows) >= least_rows() for _, rows, _ in pieces)
        return pieces if is_worthwhile else ()

    def _units(self, plan: EncodingPlan) -> EncodedUnits:
        # A unit depends on what its rows are and how they are encoded, not on the rest of the
        # source. New files, another split or other classes leave its tokens as they were.
        elsewhere = ("source", "split", "vocabulary", "max_classes")
        recipe = {name: value for name, value in self.recipe().items() if name not in elsewhere}
        recipe["encoder"] = plan.encoder.to_json()
        return EncodedUnits(Cache(self.config.cache), self.source.name, recipe)

    def _open_units(
        self,
        piece: Piece,
        units: EncodedUnits,
        plan: EncodingPlan,
        advance: Advance,
        turn: Turn = ALL_UNITS,
    ) -> Iterator[Store]:
        """The units of a piece that this process takes, from the cache or encoded now."""
        name, rows, _ = piece
        fates = plan.survey.fates[name][rows.start : rows.stop]

        def encode(unit: Unit, writer: StoreWriter) -> None:
            splits = dict.fromkeys(split for split, _ in unit)
            totals = self._encode(writer, splits, unit, plan, rows.start)
            writer.facts |= {
                "totals": {split: total.as_dict() for split, total in totals.items()},
                "classes": plan.survey.census.classes(),
            }
            self.source.require_as_known(piece)

        recipe = {
            "files": self.source.prints(piece),
            "fates": xxhash.xxh3_128_hexdigest(fates.tobytes()),
        }
        blocks = self.source.texts_and_labels(plan.survey.fates, advance, pieces=[piece])
        return units.open_or_encode(recipe, WaitingRows(fates, rows.start), blocks, encode, turn)

    def _join(
        self, writer: StoreWriter, pieces: Pieces, plan: EncodingPlan, advance: Advance
    ) -> dict[str, EncodedTotals]:
        """Third pass, by units: their tokens stay where they are, all else is copied."""
        splits = self.config.split_names(self.source.tables)
        units = self._units(plan)
        columns = self._columns(plan)
        writers = {split: writer.split(split, columns, sharded="tokens") for split in splits}
        totals = {split: EncodedTotals() for split in splits}
        for piece in pieces:
            for shard in self._open_units(piece, units, plan, advance):
                # A unit numbers the classes that were known when it was encoded. Its classes
                # [cat, dog] among [ant, cat, dog] → numbers [1, 2]. The -1 at the end takes those
                # that had no number then.
                numbers = np.append(plan.survey.census.targets_of(shard.facts["classes"]), -1)
                for name, split in shard.splits.items():
                    column = split.columns.get("targets")
                    targets: Targets | None = None
                    if isinstance(column, Ragged):
                        targets = numbers[column.values], column.lengths
                    elif column is not None:
                        targets = numbers[column] if self.config.problem.has_classes else column
                    rows = split.fixed("rows") + piece[1].start
                    groups = {GROUPS: split.fixed(GROUPS)} if self._has_groups else {}
                    writers[name].append_shard(
                        shard, rows=rows, **self._name_targets(targets), **groups
                    )
                    totals[name].merge(shard.facts["totals"][name])
        if units.num_reused:
            num_units = units.num_reused + units.num_encoded
            print(
                f"cache: {units.num_reused} of {num_units} units were encoded before",
                file=sys.stderr,
            )
        return totals

    def _name_targets(self, targets: Targets | None) -> dict[str, Targets]:
        """Targets as a column of the store; no column where rows have no labels."""
        if targets is None or self.config.problem is Problem.none:
            return {}
        return {"targets": targets}

    def _lines(self, totals: dict[str, EncodedTotals]) -> list[str]:
        """Lines about rows, vocabulary and windows, which a run prints."""
        rows = ", ".join(f"{split} {total.lengths.rows:,}" for split, total in totals.items())
        if taken := [split for split in totals if split not in self.source.tables]:
            how = _HOW_TAKEN[self.config.split_by]
            rows += f" ({' and '.join(taken)} taken from the training rows {how})"
        lines = [f"rows: {rows}"]
        long = self.config.long_texts
        if self.tokenizer is None and totals["train"].lengths.rows > VOCABULARY_ROWS:
            lines.append(
                f"vocabulary: of some {VOCABULARY_ROWS:,} training rows, taken by a hash of the"
                " text"
            )
        if long.window:
            windows = ", ".join(
                f"{split} {total.counts['windows']:,}" for split, total in totals.items()
            )
            lines.append(
                f"windows: {windows}, of {long.window} tokens, {long.overlap} shared by neighbours"
            )
        return lines

    def _remarks(self, surveyed: TextSurvey, totals: dict[str, EncodedTotals]) -> list[Remark]:
        account = [] if self.config.is_sample else surveyed.account()
        found = all_remarks(surveyed.findings.values())
        losses = {
            split: (total.counts["unknown"], total.lengths) for split, total in totals.items()
        }
        lost = loss_remarks(losses, self.config.max_length, are_given=self.tokenizer is not None)
        return [*self.source.remarks(), *account, *self._class_remarks(surveyed), *found, *lost]
