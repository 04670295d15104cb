"""The third pass over a source of texts: each row becomes tokens and a target, and is written.

    in    blocks of rows with their split, an encoder, and the classes that the first pass counted
    out   columns of a store: tokens, targets, groups where settings name them, row numbers

`encoding_in_units` surrounds this pass where a source is large. Open this file to change what a
store of texts holds of a row; tagged words have `tags/encoding_pass`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow.compute as pc

from flatout.data.checks.cleaning import TextBlock
from flatout.data.checks.survey import TextSurvey
from flatout.data.problem import Problem
from flatout.data.store.store import GROUPS, Array, Column, StoreWriter, smallest_token_type
from flatout.data.texts.encoded_totals import EncodedTotals
from flatout.data.texts.source import TOPIC, TextSource
from flatout.data.tokens.subwords import Encoder, encode_texts
from flatout.data.tokens.vocabulary import EncodedBlock

Targets = Array | tuple[Array, Array]
"""One value a row; or values, and how many of them each row has."""
Blocks = Iterable[tuple[str, TextBlock]]  # rows, and their splits
EncodedRows = Iterator[tuple[str, TextBlock, EncodedBlock, Targets]]
_TARGET_COLUMNS = {
    Problem.single: {"targets": Column("int32")},
    Problem.multi: {"targets": Column("int32", ragged=True)},
    Problem.regression: {"targets": Column("float32")},
    Problem.tags: {"targets": Column("int32", ragged=True)},
    Problem.none: {},
}


class EncodingPass:
    """Encodes rows of a source and writes them."""

    def __init__(self, source: TextSource, survey: TextSurvey, encoder: Encoder) -> None:
        self.source = source
        self.config = source.config
        self.survey = survey
        self.encoder = encoder
        self.has_groups = source.splitting.group is not None

    def columns(self) -> dict[str, Column]:
        """The columns of the store."""
        tokens = Column(smallest_token_type(self.encoder.size), ragged=True)
        targets = _TARGET_COLUMNS[self.config.problem]
        groups = {GROUPS: Column("int64")} if self.has_groups else {}
        return {"tokens": tokens, **targets, **groups, "rows": Column("int64")}

    def write(
        self, writer: StoreWriter, splits: Iterable[str], blocks: Blocks, first: int = 0
    ) -> dict[str, EncodedTotals]:
        """Write tokens, targets and row numbers; what was counted on the way, by split.

        Numbers count from row `first`.
        """
        writers = {split: writer.split(split, self.columns()) for split in splits}
        totals = {split: EncodedTotals() for split in writers}
        for split, block, encoded, targets in self.encode_blocks(blocks):
            writers[split].append(
                tokens=(encoded.tokens, encoded.lengths),
                rows=block.rows - first,
                **self.name_targets(targets),
                **({GROUPS: self.source.groups_of(block)} if self.has_groups else {}),
            )
            totals[split].add(encoded, self.config.long_texts)
            if self.config.is_sample and TOPIC in block.block.schema.names:
                is_clean = pc.equal(block.block.column("label"), block.block.column(TOPIC))
                totals[split].counts["clean"] += pc.sum(is_clean).as_py() or 0
        return totals

    def encode_blocks(self, blocks: Blocks) -> EncodedRows:
        """Blocks with their ids and targets."""
        for split, block in blocks:
            encoded = encode_texts(
                self.encoder, block.texts, self.config.max_length, self.config.long_texts
            )
            yield split, block, encoded, self.survey.census.targets(block.labels)

    def name_targets(self, targets: Targets | None) -> dict[str, Targets]:
        """Targets as a column of the store; no column where rows have no labels."""
        if targets is None or self.config.problem is Problem.none:
            return {}
        return {"targets": targets}
