"""Rows of tagged words: entities, and words outside that are like one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.cleaning import TextBlock
from flatout.data.checks.tags import TagCensus, as_bio, find_entities

Objects = NDArray[np.object_]
Blocks = Sequence[tuple[str, TextBlock]]  # rows, each block with the split it goes to
# the class of words outside; how many words before and after one are read
NO_ENTITY = "no entity"
_AROUND = 2


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
