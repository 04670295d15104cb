"""From tables of words and tags to a store.

Rows are prepared as texts are, but for their targets: see `encoding_pass`. Open this file to change
what is required of tagged words, or what a store says of them; `checks/tags` reads the tags.
"""

from __future__ import annotations

from typing import Any

from flatout.data.checks.findings import Remark
from flatout.data.checks.survey import TextSurvey
from flatout.data.tags.encoding_pass import TagEncodingPass
from flatout.data.texts.encoding_pass import EncodingPass
from flatout.data.texts.preparation import TextPreparation
from flatout.data.texts.source import TagSource
from flatout.data.tokens.subwords import Encoder
from flatout.errors import UserError


class TagPreparation(TextPreparation):
    """Builds a store as TextPreparation does, of rows that are lists of words with a tag each."""

    source: TagSource
    has_units = False

    def _require_classes(self, surveyed: TextSurvey) -> None:
        if not self.source.census.entities.get("train"):
            raise UserError(
                "data.label",
                "the training rows mark nothing",
                hint="Name the column: data.label=COLUMN.",
            )

    def _class_remarks(self, surveyed: TextSurvey) -> list[Remark]:
        return self.source.tag_remarks(surveyed.findings)

    def _encoding_pass(self, surveyed: TextSurvey, encoder: Encoder) -> TagEncodingPass:
        return TagEncodingPass(self.source, surveyed, encoder)

    def _label_facts(self, encoding: EncodingPass) -> dict[str, Any]:
        assert isinstance(encoding, TagEncodingPass)
        lost = {split: lost.facts() for split, lost in encoding.lost.items()}
        return {"classes": self.source.census.names(), "class_counts": [], "tags": lost}
