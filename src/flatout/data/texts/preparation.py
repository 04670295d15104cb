"""From a table of texts to a store: rows are read, checked, split, labelled and encoded once.

Three passes over the source, each block by block and each a class:

    TextSurvey      looks at every row and decides its fate: its split, or none
    VocabularyPass  makes the vocabulary of the training rows
    EncodingPass    writes tokens and targets; in units where a source is large

Remarks and counts go into the facts of the store. Open this file to change what a store depends on,
or what its facts say; `tags/preparation` is the same for tagged words.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TypedDict

from flatout.data.checks.findings import Remark, all_remarks, lines_of
from flatout.data.checks.lengths import loss_remarks
from flatout.data.checks.seen import WHOLE, BuildPart
from flatout.data.checks.survey import TextSurvey
from flatout.data.problem import Problem
from flatout.data.store.cache import Cache, CacheReport, Recipe, recipe_key
from flatout.data.store.preparation import Preparation
from flatout.data.store.progress import Progress
from flatout.data.store.store import GROUPS, SCHEMA, Store, StoreWriter
from flatout.data.tables.roles import Roles
from flatout.data.tables.splits import SplitBy
from flatout.data.texts.decisions import given_labels
from flatout.data.texts.encoded_totals import EncodedTotals
from flatout.data.texts.encoding_in_units import EncodingInUnits
from flatout.data.texts.encoding_pass import EncodingPass
from flatout.data.texts.source import TextSource
from flatout.data.texts.vocabulary_pass import VocabularyPass, describe_sample
from flatout.data.tokens.long_texts import Long, LongTexts
from flatout.data.tokens.subwords import Encoder, Subwords, read_encoder
from flatout.data.tokens.vocabulary import VocabularyKind
from flatout.errors import require

_HOW_TAKEN = {
    SplitBy.content: "by a hash of the text",
    SplitBy.stratified: "with the same share of each class",
    SplitBy.group: "by whole groups",
}


class OpenedTexts(TypedDict):
    """The fields that infos of texts and of tagged words have in common."""

    store: Store
    report: CacheReport
    source: str
    vocabulary: Encoder
    roles: Roles
    max_length: int
    long_texts: LongTexts


class TextPreparation(Preparation):
    """Builds the store of a source of texts."""

    has_units = True  # whether sources of many rows are encoded by units

    def __init__(self, source: TextSource) -> None:
        self.config = source.config
        self.source = source
        config = self.config
        self.name = source.name
        self.cache_folder = config.cache
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
        """Refuse lengths that special tokens leave no room in for a token of each text."""
        if not isinstance(encoder, Subwords):
            return
        config = self.config
        frame = encoder.frame
        if config.long is Long.windows:
            least = frame.size + config.overlap
            require(
                config.window > least,
                "data.window",
                f"{config.window} tokens, {frame.size} of them special and {config.overlap} shared",
                allowed=f"more than {least}",
            )
            return
        special = frame.size
        num_parts = 1
        if config.pair:
            special += len(frame.parting)
            num_parts = 2
        elif config.long is Long.head_tail:
            num_parts = 2  # a beginning and an end
        least = special + num_parts - 1
        require(
            config.max_length > least,
            "data.max_length",
            f"{config.max_length} tokens, {special} of them special",
            allowed=f"more than {least}",
        )

    def open(self) -> OpenedTexts:
        """Open the store; it is built first where the cache has none."""
        store, report = self.open_store()
        # The store may come from a run that named a column of numbers; this one may not have.
        self.source.require_words(store.facts.get("has_words", True))
        return {
            "store": store,
            "report": report,
            "source": self.name,
            "vocabulary": read_encoder(store.read_text("tokenizer.json")),
            "roles": self.source.columns,
            "max_length": self.config.max_length,
            "long_texts": self.config.long_texts,
        }

    def recipe(self) -> Recipe:
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
        if self.source.splitting.group is not None:
            recipe[GROUPS] = self.source.splitting.group
        return recipe | {"schema": SCHEMA}

    def require_unchanged(self) -> None:
        self.source.require_unchanged()

    def write(self, writer: StoreWriter, progress: Progress) -> dict[str, Any]:
        surveyed = self._survey(progress)
        encoding = self._prepare_encoding(surveyed, progress)
        advance = progress.task("encoding")
        writer.expected_rows = sum(surveyed.rows.values())
        in_units = EncodingInUnits(encoding, self.recipe()) if self.has_units else None
        if in_units is not None and in_units.is_worthwhile:
            totals = in_units.join(writer, advance)
        else:
            blocks = self.source.texts_and_labels(surveyed.fates, advance)
            totals = encoding.write(writer, self.config.split_names(self.source.tables), blocks)
        writer.write_text("tokenizer.json", encoding.encoder.to_json())
        return self._facts(encoding, totals)

    def encode_part(self, number: int, count: int) -> tuple[int, int]:
        """Encode part `number` of `count`, counted from 1, so that a build finds it in the cache.

        Returns the number of its units, and how many of them were in the cache before.
        """
        part = BuildPart(number, count)
        with Progress() as progress:
            encoding = self._prepare_encoding(self._survey(progress, part), progress)
            in_units = EncodingInUnits(encoding, self.recipe())
            counts = in_units.encode_part(part, progress.task("encoding"))
        self.require_unchanged()
        return counts

    def _survey(self, progress: Progress, part: BuildPart = WHOLE) -> TextSurvey:
        """The first pass: the fate of each row. Refuse rows that nothing can be learnt from."""
        surveyed = TextSurvey(self.source, Cache(self.config.cache), part).run(
            progress.task("checking")
        )
        self.source.require_words(surveyed.has_words)
        surveyed.require_columns_as_named()
        self._require_rows(surveyed)
        self._require_classes(surveyed)
        return surveyed

    def _prepare_encoding(self, surveyed: TextSurvey, progress: Progress) -> EncodingPass:
        """The second pass: the vocabulary. With it the third can begin."""
        recipe = self.recipe()
        key = recipe_key({name: recipe[name] for name in recipe.keys() - {"max_length", "long"}})
        vocabulary = VocabularyPass(self.source, surveyed, self.tokenizer, key)
        encoder = vocabulary.run(progress.task("reading"))
        if self.tokenizer is None:
            self._require_room(encoder)
        return self._encoding_pass(surveyed, encoder)

    def _encoding_pass(self, surveyed: TextSurvey, encoder: Encoder) -> EncodingPass:
        return EncodingPass(self.source, surveyed, encoder)

    def _facts(self, encoding: EncodingPass, totals: dict[str, EncodedTotals]) -> dict[str, Any]:
        """What the store says of itself."""
        surveyed = encoding.survey
        remarks = self._remarks(surveyed, totals)
        return {
            **self._label_facts(encoding),
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

    def _label_facts(self, encoding: EncodingPass) -> dict[str, Any]:
        census = encoding.survey.census
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

    def _lines(self, totals: dict[str, EncodedTotals]) -> list[str]:
        """Lines about rows, vocabulary and windows, which a run prints."""
        rows = ", ".join(f"{split} {total.lengths.rows:,}" for split, total in totals.items())
        if taken := [split for split in totals if split not in self.source.tables]:
            how = _HOW_TAKEN[self.config.split_by]
            rows += f" ({' and '.join(taken)} taken from the training rows {how})"
        lines = [f"rows: {rows}"]
        long = self.config.long_texts
        if self.tokenizer is None:
            lines += describe_sample(totals["train"].lengths.rows)
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
        of_rows = all_remarks(surveyed.findings.values())
        losses = {
            split: (total.counts["unknown"], total.lengths) for split, total in totals.items()
        }
        of_lengths = loss_remarks(
            losses, self.config.max_length, are_given=self.tokenizer is not None
        )
        return [
            *self.source.remarks(),
            *account,
            *self._class_remarks(surveyed),
            *of_rows,
            *of_lengths,
        ]
