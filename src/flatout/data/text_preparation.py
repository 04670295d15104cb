"""A table of texts, made ready: read, checked, split, labelled and encoded once, into a store.

Three passes over the source, each by the block: the first looks at every row and decides its fate,
the second trains the vocabulary, the third encodes. Everything that was found on the way is kept in
the store's facts.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from flatout.data.checks.cleaning import TextBlock
from flatout.data.checks.findings import Remark, all_remarks, lines_of
from flatout.data.checks.lengths import Lengths, loss_remarks
from flatout.data.checks.seen import WHOLE, Advance, BuildPart
from flatout.data.checks.survey import TextSurvey
from flatout.data.decisions import decide, given_labels
from flatout.data.encoded_units import ALL_UNITS, EncodedUnits, Turn, Unit, WaitingRows, least_rows
from flatout.data.problem import Problem
from flatout.data.store.cache import Cache, Recipe, differences, recipe_key
from flatout.data.store.progress import Progress
from flatout.data.store.store import SCHEMA, Column, Ragged, Store, StoreWriter, smallest_token_type
from flatout.data.tables.prints import NOTES, heads_noted
from flatout.data.tables.roles import find_roles
from flatout.data.tables.sources import open_splits
from flatout.data.tables.splits import SPLITS, SplitBy, hash_texts
from flatout.data.tables.table import Table, require_columns
from flatout.data.text import SAMPLES, TextDataConfig
from flatout.data.text_source import TOPIC, Piece, Pieces, TextSource
from flatout.data.tokens.long_texts import Long, LongTexts
from flatout.data.tokens.subwords import (
    PAIR,
    Encoder,
    Subwords,
    encode_texts,
    read_encoder,
    train_encoder,
)
from flatout.data.tokens.vocabulary import EncodedBlock, VocabularyKind
from flatout.errors import require
from flatout.files import write_atomically

Blocks = Iterable[tuple[str, TextBlock]]  # rows, and their splits
EncodedRows = Iterator[tuple[str, TextBlock, EncodedBlock, Any]]  # the same with ids and targets
# of more training rows a sample makes the vocabulary, taken by a hash of the text
VOCABULARY_ROWS = 1 << 22
_TAKEN = {
    SplitBy.content: "by a hash of the text",
    SplitBy.stratified: "with the same share of each class",
    SplitBy.group: "by whole groups",
}
_TARGETS = {
    Problem.single: {"targets": Column("int32")},
    Problem.multi: {"targets": Column("int32", ragged=True)},
    Problem.regression: {"targets": Column("float32")},
    Problem.tags: {"targets": Column("int32", ragged=True)},
    Problem.none: {},
}  # the column of targets, where there is one


def open_tables(config: TextDataConfig) -> dict[str, Table]:
    """The table of each split that is given, or those of the built-in sample."""
    if not config.is_sample:
        with heads_noted(Cache(config.cache).folder, [config.source, *config.given.values()]):
            return open_splits(config.source, config.given, config.read)
    return {split: SAMPLES[type(config.sample)](config.sample, split) for split in SPLITS}


def open_source(config: TextDataConfig) -> TextSource:
    """The tables of some texts: the columns found, and all that settings name checked."""
    tables = open_tables(config)
    join = PAIR if config.pair else config.join
    is_labelled = config.problem is not Problem.none
    roles = find_roles(
        tables["train"], text=config.text, label=config.label, join=join, is_labelled=is_labelled
    )
    for table in tables.values():
        wanted = {
            f"data.text[{number}]" if number else "data.text": name
            for number, name in enumerate(roles.texts)
        }
        require_columns(table, wanted | ({"data.label": roles.label} if is_labelled else {}))
    if config.group is not None and any(config.taken_shares(tables)):
        require_columns(tables["train"], {"data.group": config.group})
    if config.exclude is not None or config.relabel is not None:
        tables = decide(tables, roles, (config.exclude, config.relabel), config.clean.escapes)
    return TextSource(config, tables, roles, config.group)


def why_all_again(config: TextDataConfig) -> str:
    """Why more rows would mean that all of some texts are encoded again; empty where the new ones
    are enough.
    """
    if config.is_sample:
        return ""
    if config.tokenizer is None:
        return "the vocabulary is made of them, and data.tokenizer=FOLDER would name one"
    is_dealt = config.split_by is not SplitBy.content
    return "the splits deal them out anew, and data.split_by=content would not" if is_dealt else ""


def encode_part(config: TextDataConfig, number: int, count: int) -> tuple[int, int]:
    """Encode a part of the units of some texts; how many these are, and how many were there (see
    `encoded_units`).
    """
    return TextPreparation(open_source(config)).encode_part(number, count)


def compare_with_part_before(config: TextDataConfig, count: int) -> str:
    """A line that says which settings differ from those of the part that was asked for before;
    empty where none does, or where a store was made of those parts.
    """
    return TextPreparation(open_source(config)).compare_with_part_before(count)


@dataclass(frozen=True, slots=True)
class Known:
    """What two passes over some texts tell: what becomes of each row, and how texts
    become tokens.
    """

    survey: TextSurvey
    encoder: Encoder


class TextPreparation:
    """From the tables of some texts to a store, a stage a method."""

    in_units = True  # where there are rows enough

    def __init__(self, source: TextSource) -> None:
        self.config = source.config
        self.source = source
        name = self.config.tokenizer
        self.given = (
            Subwords.load(name, words=self.config.problem is Problem.tags)
            if name is not None
            else None
        )
        """The tokenizer that is not made here."""
        if self.given is not None and self.config.problem is Problem.none:
            self.given.require_mask(str(name))
        is_encoder = (
            self.given is not None or self.config.vocabulary.kind is VocabularyKind.wordpiece
        )
        require(
            is_encoder or self.config.long is Long.cut,
            "data.long",
            f"{self.config.long} is for encoders",
            hint="Set model=transformer.",
        )
        if self.given is not None:
            self._require_room(self.given)

    def _require_room(self, encoder: Encoder) -> None:
        """Refuse windows, or both ends of a text, that have no room beside special tokens."""
        config = self.config
        special = encoder.frame.size if isinstance(encoder, Subwords) else 0
        if config.long is Long.windows:
            what = f"{config.window} tokens, {special} of them special and {config.overlap} shared"
            fits = config.window - special > config.overlap
            require(fits, "data.window", what, allowed=f"more than {special + config.overlap}")
        elif config.long is Long.head_tail:
            fits = config.max_length - special > 1
            require(
                fits,
                "data.max_length",
                f"{config.max_length} tokens, {special} of them special",
                allowed=f"more than {special + 1}",
            )

    def open(self) -> dict[str, Any]:
        """What the infos of texts and of tags have in common; the store is built where it is
        missing.
        """
        cache = Cache(self.config.cache)
        source = self.source
        config = self.config
        store, report = cache.open_or_build(source.name, self._recipe(), self._build)
        # another run may have named the column
        source.require_words(store.facts.get("has_words", True))
        vocabulary = read_encoder(store.read_text("tokenizer.json"))
        about = {
            "roles": source.columns,
            "max_length": config.max_length,
            "long_texts": config.long_texts,
        }
        return {
            "store": store,
            "report": report,
            "vocabulary": vocabulary,
            "source": source.name,
            **about,
        }

    def _recipe(self) -> Recipe:
        config = self.config
        splitting = self.source.splitting
        roles = self.source.columns
        return {
            "source": self.source.fingerprints,
            "read": asdict(config.read),
            "column": asdict(roles),
            "problem": config.problem.value,
            "label_delimiter": config.label_delimiter,
            "max_classes": config.max_classes,
            "split": asdict(splitting),
            "clean": asdict(config.clean),
            "vocabulary": (
                asdict(config.vocabulary) if self.given is None else self.given.fingerprint()
            ),
            "max_length": config.max_length,
            **({} if config.long is Long.cut else {"long": asdict(config.long_texts)}),
            "schema": SCHEMA,
        }

    def compare_with_part_before(self, count: int) -> str:
        recipe = self._recipe()
        cache = Cache(self.config.cache).folder
        note = cache / NOTES / f"parts-{recipe_key(recipe['source'])}"
        asked: Recipe = json.loads(json.dumps(recipe | {"parts": count}))
        try:
            before: Recipe = dict(json.loads(note.read_bytes()))
        except (OSError, ValueError, TypeError):
            before = asked
        with suppress(OSError):  # a cache that cannot be written to
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, json.dumps(asked))
        key_before = recipe_key({name: before[name] for name in before.keys() - {"parts"}})
        changes = "; ".join(differences(before, asked))
        if not changes or (cache / key_before).is_dir():
            return ""
        return (
            f"other parts of {self.source.name} were asked for with other settings ({changes}):"
            " only parts of the same settings are joined"
        )

    def encode_part(self, number: int, count: int) -> tuple[int, int]:
        """Encode part `number` of `count`, counted from 1.

        Returns the number of its units, and how many of them were in the cache before. With three
        pieces and two parts, part 1 takes pieces 0 and 2. With one piece and two parts, each part
        takes every other unit of it.
        """
        with Progress() as progress:
            known = self._known(progress, BuildPart(number, count))
            units = self._units(known)
            pieces = self._pieces(known)
            advance = progress.task("encoding")
            # a part reads its own files alone, where there are enough
            step = count if len(pieces) >= count else 1
            for place, piece in enumerate(pieces[(number - 1) % step :: step]):
                # Parts that take the same pieces take their units in turn.
                parts_of_piece = count // step
                turn = Turn(((number - 1) // step - place) % parts_of_piece, parts_of_piece)
                deque(self._encoded_units(piece, units, known, advance, turn), 0)
        self.source.require_unchanged()
        return units.found + units.made, units.found

    def _known(self, progress: Progress, part: BuildPart = WHOLE) -> Known:
        """Two passes: the fate of each row, and the vocabulary."""
        surveyed = TextSurvey(self.source, Cache(self.config.cache), part).run(
            progress.task("checking")
        )
        self.source.require_words(surveyed.has_words)
        surveyed.require_columns_as_named()
        self._require_rows(surveyed)
        self._require_classes(surveyed)
        return Known(surveyed, self._train_vocabulary(surveyed, progress.task("reading")))

    def _build(self, writer: StoreWriter) -> None:
        with Progress() as progress:
            known = self._known(progress)
            surveyed = known.survey
            pieces = self._pieces(known)
            advance = progress.task("encoding")
            writer.expected_rows = sum(surveyed.rows.values())
            if pieces:
                totals = self._join(writer, pieces, known, advance)
            else:
                blocks = self.source.texts_and_labels(surveyed.fates, advance)
                totals = self._encode(
                    writer, self.config.split_names(self.source.tables), blocks, known
                )
        self.source.require_unchanged()
        writer.write_text("tokenizer.json", known.encoder.to_json())
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
        counts = {"classes": census.classes(), "class_counts": census.train_counts()}
        return {**counts, "target_mean": mean, "target_spread": spread}

    def _require_rows(self, surveyed: TextSurvey) -> None:
        tables, rows = self.source.tables, surveyed.rows
        for split in self.config.split_names(tables):
            key = split if split in tables else "train"
            if self.config.source is not None:
                key = "source"
            require(
                split in rows,
                f"data.{key}",
                f"no rows are left for the {split} split of {self.source.name}",
                hint=(
                    "Give more rows, or a file for each split; python -m flatout check counts what"
                    " was left out."
                ),
            )

    def _train_vocabulary(self, surveyed: TextSurvey, advance: Advance) -> Encoder:
        """Second pass, over the training rows: make the vocabulary, where none was named.

        Where labels are numbers, the same pass adds up their mean and spread.
        """
        sampled = VOCABULARY_ROWS / surveyed.rows["train"]  # of the texts; all from 1 on
        has_numbers = self.config.problem is Problem.regression

        def training_texts() -> Iterator[pa.Array]:
            for _, block in self.source.texts_and_labels(
                surveyed.fates, advance, splits=("train",)
            ):
                if has_numbers:
                    surveyed.census.add_numbers(block.labels.to_numpy(zero_copy_only=False))
                if sampled >= 1:
                    yield block.texts
                else:
                    # by a hash, so that every part of a build draws the same texts
                    is_drawn = hash_texts(block.texts) < np.uint64(sampled * 2.0**64)
                    yield block.texts.filter(pa.array(is_drawn))

        def make() -> Encoder:
            return train_encoder(training_texts(), self.config.vocabulary)

        if self.given is None:
            is_kept = surveyed.rows["train"] >= least_rows() and not has_numbers
            vocabulary = self._kept_encoder(make) if is_kept else make()
            self._require_room(vocabulary)
            return vocabulary
        if has_numbers:
            for _ in training_texts():
                pass  # `training_texts` counts the numbers on the way
        return self.given

    def _kept_encoder(self, make: Callable[[], Encoder]) -> Encoder:
        """A vocabulary that another part, or a build that was killed, may have made."""
        recipe = self._recipe()
        key = recipe_key({name: recipe[name] for name in recipe.keys() - {"max_length", "long"}})

        def build(writer: StoreWriter) -> None:
            made = make().to_json()
            self.source.require_unchanged()
            writer.write_text("tokenizer.json", made)

        kept = Cache(self.config.cache).of_surveys().kept(key, self.source.name, build)
        return read_encoder(kept.read_text("tokenizer.json"))

    def _columns(self, known: Known) -> dict[str, Column]:
        tokens = Column(smallest_token_type(known.encoder.size), ragged=True)
        return {"tokens": tokens, **_TARGETS[self.config.problem], "rows": Column("int64")}

    def _encode(
        self,
        writer: StoreWriter,
        splits: Iterable[str],
        blocks: Blocks,
        known: Known,
        first: int = 0,
    ) -> dict[str, _Totals]:
        """Third pass: tokens, targets and numbers of the rows of some splits; the latter count from
        `first`.
        """
        writers = {split: writer.split(split, self._columns(known)) for split in splits}
        totals = {split: _Totals() for split in writers}
        for split, block, encoded, targets in self._encoded(blocks, known):
            given: dict[str, Any] = dict.fromkeys(_TARGETS[self.config.problem], targets)
            writers[split].append(
                tokens=(encoded.tokens, encoded.lengths), rows=block.rows - first, **given
            )
            totals[split].add(encoded, self.config.long_texts)
            if self.config.is_sample and TOPIC in block.block.schema.names:
                is_clean = pc.equal(block.block.column("label"), block.block.column(TOPIC))
                totals[split].counts["clean"] += pc.sum(is_clean).as_py() or 0
        return totals

    def _encoded(self, blocks: Blocks, known: Known) -> EncodedRows:
        """Blocks with their ids and targets."""
        for split, block in blocks:
            encoded = encode_texts(
                known.encoder, block.texts, self.config.max_length, self.config.long_texts
            )
            yield split, block, encoded, known.survey.census.targets(block.labels)

    def _pieces(self, known: Known) -> Pieces:
        """The rows in parts that are encoded by units of their own; none where there are few: one
        store has them.
        """
        pieces = self.source.pieces(known.survey.fates, least_rows())
        return (
            pieces
            if self.in_units and any(len(rows) >= least_rows() for _, rows, _ in pieces)
            else ()
        )

    def _units(self, known: Known) -> EncodedUnits:
        other = ("source", "split", "vocabulary", "max_classes")
        how = {name: value for name, value in self._recipe().items() if name not in other}
        return EncodedUnits(
            Cache(self.config.cache), self.source.name, how | {"encoder": known.encoder.to_json()}
        )

    def _encoded_units(
        self,
        piece: Piece,
        units: EncodedUnits,
        known: Known,
        advance: Advance,
        turn: Turn = ALL_UNITS,
    ) -> Iterator[Store]:
        """The units of a piece that are in this process's turn, from the cache or encoded now."""
        name, rows, _ = piece
        fates = known.survey.fates[name][rows.start : rows.stop]

        def encode(unit: Unit, writer: StoreWriter) -> None:
            totals = self._encode(
                writer, dict.fromkeys(split for split, _ in unit), unit, known, rows.start
            )
            writer.facts |= {"totals": {split: total.noted() for split, total in totals.items()}}
            writer.facts |= {"classes": known.survey.census.classes()}
            self.source.require_as_known(piece)

        about = {
            "files": self.source.prints(piece),
            "fates": xxhash.xxh3_128_hexdigest(fates.tobytes()),
        }
        blocks = self.source.texts_and_labels(known.survey.fates, advance, pieces=[piece])
        return units.of(about, WaitingRows(fates, rows.start), blocks, encode, turn)

    def _join(
        self, writer: StoreWriter, pieces: Pieces, known: Known, advance: Advance
    ) -> dict[str, _Totals]:
        """As `_encode`, by units: their tokens stay where they are, and what else they have of a
        row is copied.
        """
        splits = self.config.split_names(self.source.tables)
        units = self._units(known)
        census = known.survey.census
        writers = {
            split: writer.split(split, self._columns(known), sharded="tokens") for split in splits
        }
        totals = {split: _Totals() for split in splits}
        for piece in pieces:
            for shard in self._encoded_units(piece, units, known, advance):
                numbers = np.append(census.targets_of(shard.facts["classes"]), -1)
                for name, split in shard.splits.items():
                    targets: Any = split.columns.get("targets")
                    if isinstance(targets, Ragged):
                        targets = numbers[targets.values], targets.lengths
                    elif self.config.problem.has_classes:
                        targets = numbers[targets]
                    given: dict[str, Any] = dict.fromkeys(_TARGETS[self.config.problem], targets)
                    writers[name].append_shard(
                        shard, rows=split.fixed("rows") + piece[1].start, **given
                    )
                    totals[name].take_in(shard.facts["totals"][name])
        if units.found:
            print(
                f"cache: {units.found} of {units.found + units.made} units were encoded before",
                file=sys.stderr,
            )
        return totals

    def _lines(self, totals: dict[str, _Totals]) -> list[str]:
        counts = ", ".join(f"{split} {total.lengths.rows:,}" for split, total in totals.items())
        made = [split for split in totals if split not in self.source.tables]
        how = (
            f" ({' and '.join(made)} taken from the training rows {_TAKEN[self.config.split_by]})"
            if made
            else ""
        )
        lines = [f"rows: {counts}{how}"]
        long = self.config.long_texts
        if self.given is None and totals["train"].lengths.rows > VOCABULARY_ROWS:
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

    def _remarks(self, surveyed: TextSurvey, totals: dict[str, _Totals]) -> list[Remark]:
        account = [] if self.config.is_sample else surveyed.account()
        found = all_remarks(surveyed.findings.values())
        losses = {
            split: (total.counts["unknown"], total.lengths) for split, total in totals.items()
        }
        lost = loss_remarks(
            losses, self.config.max_length, are_given=self.config.tokenizer is not None
        )
        return [*self.source.remarks(), *account, *self._class_remarks(surveyed), *found, *lost]


@dataclass(slots=True)
class _Totals:
    counts: Counter[str] = field(default_factory=Counter)
    """Tokens, those unknown, what was cut, windows, and in a sample that knows them the rows with
    their clean label."""
    lengths: Lengths = field(default_factory=Lengths)  # lengths before anything is cut

    def add(self, block: EncodedBlock, long: LongTexts) -> None:
        self.counts.update(
            tokens=len(block.tokens),
            unknown=block.unknown,
            windows=long.count_windows(block.lengths),
            truncated_rows=block.truncated_rows,
            truncated_tokens=block.truncated_tokens,
        )
        self.lengths.add(block.whole_lengths)

    def noted(self) -> dict[str, Any]:
        """Plain values that `take_in` knows."""
        return {"counts": dict(self.counts), "lengths": self.lengths.noted()}

    def take_in(self, noted: dict[str, Any]) -> None:
        """Add the rows of another."""
        self.counts.update(noted["counts"])
        self.lengths.take_in(noted["lengths"])

    def facts(self) -> dict[str, Any]:
        rows = max(1, self.lengths.rows)
        tokens = self.counts["tokens"]
        shares = {
            "mean_length": tokens / rows,
            "unknown_share": self.counts["unknown"] / max(1, tokens),
        }
        cut = {name: self.counts[name] for name in ("truncated_rows", "truncated_tokens")}
        known = {"ceiling": self.counts["clean"] / rows} if "clean" in self.counts else {}
        return {"rows": self.lengths.rows, "tokens": tokens, **shares, **cut, **known}
