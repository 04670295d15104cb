"""A large source is encoded by units, so that several processes share the work.

This surrounds the encoding pass: it decides which rows make a unit, takes units that were encoded
before from the cache (`encoded_units`), and joins all to one store. Open this file to change how
parts of a build share a source, or how units become a store.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatout.data.checks.seen import Advance, BuildPart
from flatout.data.store.cache import Cache, Recipe
from flatout.data.store.store import GROUPS, Ragged, Store, StoreWriter
from flatout.data.texts.encoded_totals import EncodedTotals
from flatout.data.texts.encoded_units import (
    ALL_UNITS,
    EncodedUnits,
    Turn,
    Unit,
    WaitingRows,
    least_rows,
)
from flatout.data.texts.encoding_pass import EncodingPass, Targets
from flatout.data.texts.source import Piece

# What no unit depends on: new files, another split or other classes leave its tokens as they were.
_OF_THE_WHOLE_SOURCE = ("source", "split", "vocabulary", "max_classes")


class EncodingInUnits:
    """The encoding pass of a source, unit after unit."""

    def __init__(self, encoding: EncodingPass, recipe: Recipe) -> None:
        """`recipe`: of the whole store."""
        self.encoding = encoding
        self.source = encoding.source
        self.fates = encoding.survey.fates
        self.recipe = recipe
        self.pieces = self.source.pieces(self.fates, least_rows())

    @cached_property
    def units(self) -> EncodedUnits:
        """The units in the cache; opened where there are any."""
        recipe = {
            name: value for name, value in self.recipe.items() if name not in _OF_THE_WHOLE_SOURCE
        }
        recipe["encoder"] = self.encoding.encoder.to_json()
        return EncodedUnits(Cache(self.encoding.config.cache), self.source.name, recipe)

    @property
    def is_worthwhile(self) -> bool:
        """Whether rows are too many for one store to hold them all."""
        return any(len(rows) >= least_rows() for _, rows, _ in self.pieces)

    def encode_part(self, part: BuildPart, advance: Advance) -> tuple[int, int]:
        """Encode the units of one part of a build.

        Returns the number of its units, and how many of them were in the cache before. With three
        pieces and two parts, part 1 takes pieces 0 and 2. With one piece and two parts, each part
        takes every other unit of it.
        """
        if not self.is_worthwhile:
            return 0, 0
        # a part reads its own files alone, where there are enough
        step = part.num_parts if len(self.pieces) >= part.num_parts else 1
        for number, piece in enumerate(self.pieces[(part.number - 1) % step :: step]):
            # Parts that take the same pieces take their units in turn.
            parts_of_piece = part.num_parts // step
            turn = Turn(((part.number - 1) // step - number) % parts_of_piece, parts_of_piece)
            deque(self._open_units(piece, advance, turn), 0)
        return self.units.num_reused + self.units.num_encoded, self.units.num_reused

    def join(self, writer: StoreWriter, advance: Advance) -> dict[str, EncodedTotals]:
        """Write the store: tokens of the units stay where they are, all else is copied."""
        encoding = self.encoding
        splits = encoding.config.split_names(self.source.tables)
        columns = encoding.columns()
        writers = {split: writer.split(split, columns, sharded="tokens") for split in splits}
        totals = {split: EncodedTotals() for split in splits}
        for piece in self.pieces:
            for shard in self._open_units(piece, advance):
                numbers = self._numbers_of_classes(shard)
                for name, split in shard.splits.items():
                    column = split.columns.get("targets")
                    targets: Targets | None = None
                    if isinstance(column, Ragged):
                        targets = numbers[column.values], column.lengths
                    elif column is not None:
                        has_classes = encoding.config.problem.has_classes
                        targets = numbers[column] if has_classes else column
                    rows = split.fixed("rows") + piece[1].start
                    groups = {GROUPS: split.fixed(GROUPS)} if encoding.has_groups else {}
                    writers[name].append_shard(
                        shard, rows=rows, **encoding.name_targets(targets), **groups
                    )
                    totals[name].merge(shard.facts["totals"][name])
        self._say_what_was_reused()
        return totals

    def _numbers_of_classes(self, shard: Store) -> NDArray[Any]:
        """The number of each class of a unit in the whole store.

        A unit numbers the classes that were known when it was encoded. Its classes [cat, dog]
        among [ant, cat, dog] → numbers [1, 2]. The -1 at the end takes those that had no number
        then.
        """
        census = self.encoding.survey.census
        return np.append(census.targets_of(shard.facts["classes"]), -1)

    def _say_what_was_reused(self) -> None:
        if self.units.num_reused:
            num_units = self.units.num_reused + self.units.num_encoded
            print(
                f"cache: {self.units.num_reused} of {num_units} units were encoded before",
                file=sys.stderr,
            )

    def _open_units(
        self, piece: Piece, advance: Advance, turn: Turn = ALL_UNITS
    ) -> Iterator[Store]:
        """The units of a piece that this process takes, from the cache or encoded now."""
        name, rows, _ = piece
        fates = self.fates[name][rows.start : rows.stop]

        def encode(unit: Unit, writer: StoreWriter) -> None:
            splits = dict.fromkeys(split for split, _ in unit)
            totals = self.encoding.write(writer, splits, unit, rows.start)
            writer.facts |= {
                "totals": {split: total.as_dict() for split, total in totals.items()},
                "classes": self.encoding.survey.census.classes(),
            }
            self.source.require_as_known(piece)

        recipe = {
            "files": self.source.prints(piece),
            "fates": xxhash.xxh3_128_hexdigest(fates.tobytes()),
        }
        blocks = self.source.texts_and_labels(self.fates, advance, pieces=[piece])
        waiting = WaitingRows(fates, rows.start)
        return self.units.open_or_encode(recipe, waiting, blocks, encode, turn)
