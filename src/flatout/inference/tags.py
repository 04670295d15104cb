"""The predictor of a tagger: it gives each word a tag, and joins tagged words to entities.

words       Ada        Lovelace   met   Bob
tags        B-person   I-person   O     B-person
entities    person "Ada Lovelace" (words 0 to 1), person "Bob" (word 3)

Plain tags, such as parts of speech, are given without entities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from flatout.data.checks.tags import LISTS, TagCensus, TaggedTable, as_bio, split_words
from flatout.data.problem import OUTSIDE, UNANSWERED, are_plain, types_of_tags
from flatout.data.ragged import row_begins, row_bounds, row_indices
from flatout.data.tables.output import CONLL, CONLL_U, FORMATS
from flatout.data.tables.roles import Roles
from flatout.data.tables.table import Table, is_text, require_columns
from flatout.data.tokens.long_texts import CUT, LongTexts
from flatout.data.tokens.subwords import Subwords
from flatout.engine.precision import answering
from flatout.errors import UserError, require
from flatout.inference.model_folder import ModelFolder, RowSettings
from flatout.inference.run_predictor import (
    Advance,
    Answered,
    FileOptions,
    RunPredictor,
    Scored,
    in_order,
)
from flatout.models.contract import ModelConfig
from flatout.models.encoder.transformer import Outputs, Transformer
from flatout.tasks.abstention import HeldOutAnswers, WordAnswers
from flatout.tasks.tagging import EntityScores, Tagger

_ROWS_A_BATCH = 256
_MOST_TEMPERATURE = 1e6


@dataclass(frozen=True, slots=True)
class Entity:
    """A run of words with a type."""

    type: str | None  # None where it is left out (`at_error`)
    text: str  # its words, with blanks between
    start: int  # its first word, counted from 0
    stop: int  # the word after its last
    probability: float  # of its least certain word
    # of an entity that is left out: its possible types; O: it may be none
    possible: list[str] | None = None


@dataclass(frozen=True, slots=True)
class TagPrediction:
    """What a model says of a row of words."""

    words: list[str]
    # One for each word. Words beyond the longest row that the model reads have `O`, or of plain
    # tags `_`. Words that are left out (`at_error`), or whose entity is, have None.
    tags: list[str | None]
    entities: list[Entity]  # none of plain tags
    # of plain tags with `at_error`: the possible tags of each word that is left out
    possible: list[list[str] | None] | None = None


@dataclass(frozen=True, slots=True)
class TaggedRows(WordAnswers):
    """Answers for rows of words. Words that were not seen have 0 in `types`; plain tags of them are
    -1 in `ids`.
    """

    lost: int  # words that the model did not see

    @classmethod
    def untagged(
        cls, offsets: NDArray[np.int64], names: Sequence[str], lost: int = 0
    ) -> TaggedRows:
        """Rows of which no word is answered yet, for a tagger with these outputs."""
        is_plain = are_plain(names)
        # Names begin with O where tags mark entities, so 0 is the tag of a word outside of any.
        ids = np.full(offsets[-1], -1 if is_plain else 0, np.int64)
        types = np.zeros((offsets[-1], len(_possible_types(names))), np.float32)
        return cls(ids, np.ones(offsets[-1], np.float32), offsets, types, is_plain, lost)

    def names_of(self, names: Sequence[str]) -> NDArray[np.object_]:
        """The tag of each word by name; one that was not answered has `_`."""
        # The last name is that of -1.
        return np.array([*names, UNANSWERED], object)[self.ids]


@dataclass(slots=True)
class TagPredictor(RunPredictor):
    """Tags for words; made by `TagPredictor.load(RUN)` or from a run's Result."""

    problems = ("tags",)
    answers_to = "words with tags"
    options = ("text", "at_error")

    model: Transformer
    vocabulary: Subwords
    names: list[str]  # plain tags; or O, then B and I of each type
    max_length: int
    roles: Roles
    long_texts: LongTexts = CUT
    temperature: float = 1.0
    lost_words: int = 0  # words of files that the model did not see

    @property
    def formats(self) -> Sequence[str]:
        # CoNLL-U has a column of parts of speech, and none of entities.
        return (*FORMATS, CONLL, CONLL_U) if are_plain(self.names) else (*FORMATS, CONLL)

    @classmethod
    def of(cls, task: Tagger) -> TagPredictor:
        info = task.info
        model = cast(Transformer, task.model.eval())
        return cls(
            model,
            info.vocabulary,
            task.labels.names,
            info.max_length,
            info.roles,
            info.long_texts,
            task.temperature,
        )

    @classmethod
    def read_folder(cls, folder: ModelFolder, settings: dict[str, Any]) -> TagPredictor:
        names = folder.labels()
        roles = folder.roles()
        data = folder.record(RowSettings, settings["data"], "data")
        folder.require_rows(data)
        outputs = Outputs(names, "tags")
        model, vocabulary = folder.encoder(outputs, roles, data.long_texts.window)
        folder.require_short(data, model)
        temperature = settings.get("temperature", 1.0)
        is_plain = type(temperature) in (int, float) and 0 < temperature < _MOST_TEMPERATURE
        folder.require(is_plain, "temperature")
        return cls(model, vocabulary, names, data.max_length, roles, data.long_texts, temperature)

    def save(self, folder: Path, model_config: ModelConfig) -> None:
        data = {
            "max_length": self.max_length,
            "columns": asdict(self.roles),
            "long_texts": asdict(self.long_texts),
        }
        settings = {"problem": self.problems[0], "temperature": self.temperature, "data": data}
        ModelFolder(folder).write(self.model, model_config, self.names, settings, self.vocabulary)

    def predict(self, rows: Sequence[str | Sequence[str]] | str) -> list[TagPrediction]:
        """Tags and entities of each row: a list of words, or a text that `words_of` parts."""
        sources = self.rows_in_memory(rows, self.roles.texts)
        for number, row in enumerate(sources):
            # the letters of a text are texts, too
            require(
                row is not None and all(isinstance(word, str) for word in row),
                "predict",
                f"row {number} is {row!r}",
                allowed="a text, or a list of words",
            )
        words = []
        for row in sources:
            words.append(words_of(row) if isinstance(row, str) else list(row))
        if not words:
            return []
        return self.read(words, self.tags(pa.array(words, pa.list_(pa.large_string()))))

    @torch.inference_mode()
    def tags(self, words: pa.Array) -> TaggedRows:
        """A tag for each word of rows of words, in their order."""
        self.model.eval()
        encoded = self.vocabulary.encode_words(
            words, max_length=self.max_length, long=self.long_texts
        )
        # A batch has its rows by length, the results are in their order: each token of a batch is
        # written to its place there. Rows of 2, 3 and 1 tokens begin at 0, 2 and 5. A batch with
        # the rows 2 and 1 writes to 5, then to 2 3 4.
        starts = row_begins(encoded.block.lengths)
        ids = np.zeros(len(encoded.block.tokens), np.int64)
        shares = np.zeros(len(encoded.block.tokens), np.float32)
        types = np.zeros((len(ids), len(_possible_types(self.names))), np.float32)
        rows = (encoded.block.tokens, encoded.block.lengths)
        is_plain = are_plain(self.names)
        with answering(self.precision, self.device):
            for batch in self.batches(rows, len(words), _ROWS_A_BATCH):
                shares_TN = (self.model(batch).float() / self.temperature).softmax(-1)
                lengths = batch.lengths.numpy()
                answers = WordAnswers.of_tags(
                    shares_TN.cpu(), row_bounds(lengths), is_plain=is_plain
                )
                places = row_indices(starts[batch.rows.numpy()], lengths)
                ids[places] = answers.ids
                shares[places] = answers.probabilities
                types[places] = answers.types
        # A word has the answer of its first token. Words behind the longest row have none.
        counts = pc.list_value_length(words).to_numpy()
        offsets = row_bounds(counts)
        is_seen = np.arange(offsets[-1]) < np.repeat(offsets[:-1] + encoded.word_counts, counts)
        tagged = TaggedRows.untagged(offsets, self.names, lost=int((~is_seen).sum()))
        tagged.ids[is_seen] = ids[encoded.firsts]
        tagged.probabilities[is_seen] = shares[encoded.firsts]
        tagged.types[is_seen] = types[encoded.firsts]
        return tagged

    def logit_scale(self) -> tuple[float, float]:
        return 0.0, 1 / self.temperature

    def read(self, words: Sequence[Sequence[str]], tagged: TaggedRows) -> list[TagPrediction]:
        """Numbers as tags by name, and their entities; None is what is left out."""
        tags = tagged.names_of(self.names)
        by_row: list[list[Entity]] = [[] for _ in words]
        possible = None
        if not tagged.is_plain:
            by_row = self._join_entities(words, tagged)
        elif self.abstention is not None:
            possible = self._leave_out_words(tags, tagged)
        predictions = []
        for number, row in enumerate(words):
            there = slice(*tagged.offsets[number : number + 2])
            of_row = tags[there].tolist()
            for entity in by_row[number]:
                if entity.type is None:
                    of_row[entity.start : entity.stop] = [None] * (entity.stop - entity.start)
            of_words = None if possible is None else possible[there]
            predictions.append(TagPrediction(list(row), of_row, by_row[number], of_words))
        return predictions

    def _leave_out_words(
        self, tags: NDArray[np.object_], tagged: TaggedRows
    ) -> list[list[str] | None]:
        """Set unsure plain tags to None; returns the possible tags of their words."""
        assert self.abstention is not None
        possible: list[list[str] | None] = [None] * len(tags)
        is_unsure = (tagged.ids >= 0) & (tagged.probabilities <= self.abstention.above)
        for word in np.flatnonzero(is_unsure).tolist():
            tags[word] = None
            possible[word] = self.abstention.choose_possible(
                self.names, tagged.types[word].tolist()
            )
        return possible

    def _join_entities(
        self, words: Sequence[Sequence[str]], tagged: TaggedRows
    ) -> list[list[Entity]]:
        """The entities of each row."""
        entities = tagged.entities()
        by_row: list[list[Entity]] = [[] for _ in words]
        types = _possible_types(self.names)
        places = (entities.row, entities.start, entities.stop, entities.kind)
        values = (array.tolist() for array in (*places, *tagged.judge_entities(entities)))
        for row, start, stop, kind, surety, shares in zip(*values, strict=True):
            text = " ".join(words[row][start:stop])
            entity = Entity(types[1 + kind], text, start, stop, surety)
            if self.abstention is not None and surety <= self.abstention.above:
                possible = self.abstention.choose_possible(types, shares)
                entity = replace(entity, type=None, possible=possible)
            by_row[row].append(entity)
        return by_row

    def answer_table(
        self, table: Table, options: FileOptions, others: Sequence[TagPredictor]
    ) -> Iterator[Answered]:
        """A tag for each word, and the entities where tags mark some."""

        def answer(
            predictor: TagPredictor, piece: tuple[Any, pa.RecordBatch]
        ) -> tuple[Answered, int]:
            words, block = piece
            tagged = predictor.tags(words)
            rows = predictor.read(words.to_pylist(), tagged)
            tags = pa.array([tag for row in rows for tag in row.tags], pa.string())
            offsets = pa.array(tagged.offsets.astype(np.int32))
            added = {} if options.text in (None, self.roles.texts[0]) else {"words": words}
            added["prediction"] = pa.ListArray.from_arrays(offsets, tags)
            added |= predictor._columns_beside(rows)
            # Each line of CoNLL needs a tag, also that of a word that is left out.
            written = pa.ListArray.from_arrays(offsets, pc.fill_null(tags, UNANSWERED))
            sentences = pa.RecordBatch.from_arrays([words, written], names=["words", "prediction"])
            counts = _count_answers(rows, tagged)
            answered = Answered.beside(block, added, *counts, predictor.unlike)
            return replace(answered, sentences=sentences), tagged.lost

        for answered, lost in in_order(answer, others, self._words(table, options)):
            self.lost_words += lost
            yield answered

    def _columns_beside(self, rows: Sequence[TagPrediction]) -> dict[str, pa.Array]:
        """Columns that a file has beside tags: entities, or the possible tags of words left out."""
        if not are_plain(self.names):
            records = []
            for row in rows:
                records.append([asdict(entity) for entity in row.entities])
            kind = _ENTITIES if self.abstention is None else _UNSURE
            return {"entities": pa.array(records, kind)}
        if self.abstention is None:
            return {}
        possible = [row.possible for row in rows]
        return {"possible": pa.array(possible, pa.list_(pa.list_(pa.string())))}

    def _words(
        self, table: Table, options: FileOptions
    ) -> Iterator[tuple[pa.Array, pa.RecordBatch]]:
        column = options.text or self.roles.texts[0]
        require_columns(table, {"--text": column})
        for _, block in self.blocks(table):
            values = block.column(column)
            # Sentences as people write them are parted, unlike those of the run's own column.
            if column not in self.roles.texts and is_text(values.type):
                words = [words_of(text or "") for text in values.to_pylist()]
                values = pa.array(words, pa.list_(pa.large_string()))
            yield split_words(values, name=column, table=table.name, key="--text"), block

    def rows(self, table: Table, options: FileOptions) -> Iterator[list[str]]:
        return (row for words, _ in self._words(table, options) for row in words.to_pylist())

    def score_table(
        self, table: Table, options: FileOptions, others: Sequence[Any], advance: Advance
    ) -> Scored:
        """Over all rows of words and tags, and of each type."""
        roles = options.roles(self.roles)
        require_columns(table, {"--text": roles.texts[0], "--label": roles.label})
        scores = EntityScores(types_of_tags(self.names), is_plain=are_plain(self.names))
        held_out = list[HeldOutAnswers]()
        total = 0
        labelled = _read_tags(table, roles, self.names)
        for tagged, tags in in_order(
            lambda one, piece: (one.tags(piece[0]), piece[1]), others, labelled
        ):
            rows = len(tagged.offsets) - 1
            numbers = torch.arange(total, total + rows)
            is_cut = np.zeros(rows, np.bool_)
            scores.add(tagged.ids, tags, tagged.offsets, is_cut, numbers)
            held_out.append(HeldOutAnswers.of_words(tagged, tags))
            total += rows
            self.lost_words += tagged.lost
            advance(rows)
        self.require_rows(total, table)
        return Scored(
            {"rows": total, "lost_words": self.lost_words},
            scores.values(),
            scores.per_type(),
            warnings=self.notes(),
            intervals=scores.intervals(),
            held_out=HeldOutAnswers.joined(held_out),
        )

    def notes(self) -> list[str]:
        """A line about words that the model did not see, if there are any."""
        lines = RunPredictor.notes(self)
        if self.lost_words:
            answer = UNANSWERED
            if not are_plain(self.names):
                answer = "O, entities among them are missed"
            lines.append(
                f"words beyond data.max_length={self.max_length} of this run: {self.lost_words:,};"
                f" each is answered {answer}"
            )
        return lines


_FIELDS = [
    ("type", pa.string()),
    ("text", pa.string()),
    ("start", pa.int64()),
    ("stop", pa.int64()),
    ("probability", pa.float32()),
]
_ENTITIES = pa.list_(pa.struct(_FIELDS))
_UNSURE = pa.list_(pa.struct([*_FIELDS, ("possible", pa.list_(pa.string()))]))
_OPENING = "([{\"'«“"
_CLOSING = ".,;:!?)]}\"'»”…"


def words_of(text: str) -> list[str]:
    """The words of a text, with marks parted from them as in tagged texts.

    `("Well," he asked.)` → `(` `"` `Well` `,` `"` `he` `asked` `.` `)`.
    """
    words = []
    for token in text.split():
        end = len(token.rstrip(_CLOSING))  # of the word; each mark behind it stands alone
        start = 0
        while start < len(token):
            is_mark = token[start] in _OPENING or start >= end
            stop = start + 1 if is_mark else end
            words.append(token[start:stop])
            start = stop
    return words


def _possible_types(names: Sequence[str]) -> list[str]:
    """Columns of `WordAnswers.types`: the plain tags, or `O` and the types of entities."""
    types = types_of_tags(names)
    return types if are_plain(names) else [OUTSIDE, *types]


def _count_answers(rows: Sequence[TagPrediction], tagged: TaggedRows) -> tuple[int, int]:
    """How many entities, or words with plain tags, are answered; and how many there are."""
    if tagged.is_plain:
        num_seen = int((tagged.ids >= 0).sum())
        num_left_out = sum(row.tags.count(None) for row in rows)
        return num_seen - num_left_out, num_seen
    types = [entity.type for row in rows for entity in row.entities]
    return len(types) - types.count(None), len(types)


def _read_tags(table: Table, roles: Roles, names: Sequence[str]) -> Iterator[tuple[pa.Array, Any]]:
    """Block by block the words, and their tags as the run numbers them."""
    types = types_of_tags(names)
    census = TagCensus(table.name)
    census.expect(names)
    for rows, block in RunPredictor.blocks(TaggedTable(table, roles, "test", census), LISTS):
        words, tags = block.columns
        numbered = census.numbered(tags, rows)
        if unknown := list(census.types)[len(types) :]:
            raise UserError(
                "--label",
                f"{table.name}: tags that the run does not know: {', '.join(unknown[:5])}",
                allowed=", ".join(types),
            )
        yield words, as_bio(numbered)
