"""The rows of an audit of tagged words: entities, and words outside that look like one.

Of plain tags, such as parts of speech, each word is a row.

Most words of a sentence are plainly no entity, so an audit would drown in them. The rows are the
entities, and those words outside that are easily overlooked. Such a word has a capital inside its
sentence, or is in an entity elsewhere. Open this file to change which words are rows, or
what of their surroundings the quick model reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.cleaning import TextBlock
from flatout.data.checks.tags import TagBlock, TagCensus, as_bio, find_entities

Blocks = Sequence[tuple[str, TextBlock]]  # rows, each block with the name of its split
NO_ENTITY = "no entity"  # name of the class of words outside
_CONTEXT_WORDS = 2  # before and after a row's own words: they decide between most types


@dataclass(frozen=True, slots=True)
class WordRow:
    """An entity, or a word outside that looks like one."""

    read: str  # what the quick model reads: the words, those around them, and a letter shape
    shown: str  # what a person reads: the words in brackets, and those around them
    label: int  # number of the entity's type, from 1; 0: no entity; of a plain tag from 0
    sentence: int  # number of its sentence, over all blocks
    start: int  # its first word in the sentence
    stop: int  # the word behind its last one


def find_word_rows(census: TagCensus, blocks: Blocks) -> Iterator[WordRow]:
    """All rows of tagged sentences: of each block its entities, then the words like them."""
    tags_of_blocks = [census.numbered(block.labels, block.rows) for _, block in blocks]
    words_of_blocks = [
        np.array(pc.list_flatten(block.texts).to_pylist(), object) for _, block in blocks
    ]
    entity_words = set[str]()
    for tags, words in zip(tags_of_blocks, words_of_blocks, strict=True):
        entity_words.update(word.lower() for word in words[tags.types > 0])
    first_sentence = 0
    for tags, words in zip(tags_of_blocks, words_of_blocks, strict=True):
        spans = list(_find_entity_spans(tags, is_plain=bool(census.is_plain)))
        spans += _find_similar_words(tags, words, entity_words)
        for sentence, start, stop, label in spans:
            begin = tags.offsets[sentence]
            before = words[max(begin, start - _CONTEXT_WORDS) : start].tolist()
            end = min(tags.offsets[sentence + 1], stop + _CONTEXT_WORDS)
            after = words[stop:end].tolist()
            inside = " ".join(words[start:stop])
            yield WordRow(
                read=_mark_context(before, inside, after),
                shown=" ".join([*before, f"[{inside}]", *after]),
                label=label,
                sentence=first_sentence + sentence,
                start=start - begin,
                stop=stop - begin,
            )
        first_sentence += len(tags.offsets) - 1


Span = tuple[int, int, int, int]  # sentence, first word, word behind the last, label


def _find_entity_spans(tags: TagBlock, *, is_plain: bool) -> Iterator[Span]:
    """The entities of a block; words are numbered over the whole block."""
    entities = find_entities(as_bio(tags), tags.offsets, is_plain=is_plain)
    begin = tags.offsets[:-1][entities.row]
    yield from zip(
        entities.row,
        entities.start + begin,
        entities.stop + begin,
        entities.kind + (not is_plain),
        strict=True,
    )


def _find_similar_words(
    tags: TagBlock, words: NDArray[np.object_], entity_words: set[str]
) -> Iterator[Span]:
    """Single words outside that look like an entity."""
    for sentence, (begin, end) in enumerate(pairwise(tags.offsets)):
        for number in range(begin, end):
            if tags.types[number]:
                continue
            word = words[number]
            # The first word of a sentence has a capital anyhow.
            has_capital = number > begin and word[:1].isupper()
            if has_capital or word.lower() in entity_words:
                yield sentence, number, number + 1, 0


def _mark_context(before: Sequence[str], inside: str, after: Sequence[str]) -> str:
    """The text that the quick model reads, in which context differs from a row's own words.

    `in [Room 2B] until noon` → `in_ Room 2B _until _noon _uldu_`
    """
    marked_before = [f"{word}_" for word in before]
    marked_after = [f"_{word}" for word in after]
    return " ".join([*marked_before, inside, *marked_after, _letter_shape(inside)])


def _letter_shape(words: str) -> str:
    """Kinds of characters, each run once: u upper case, l lower case, d digits, nothing for others.

    `Room 2B` → `_uldu_`. It tells names, numbers and codes apart, also unseen ones.
    """
    shape = ""
    for character in words:
        kind = _letter_kind(character)
        if not shape.endswith(kind):
            shape += kind
    return f"_{shape}_"


def _letter_kind(character: str) -> str:
    if character.isupper():
        return "u"
    if character.islower():
        return "l"
    return "d" if character.isdigit() else ""
