"""Phrases with slots, whole blocks of texts at once: what both samples of tweets are written with.

A text is a row of phrases; a phrase is words and slots; a slot draws one word of its group by a
long-tailed law. Words and slots are numbers, a block of texts is an array `[rows, places]` of them,
and each place draws for all rows together. Open this file to change how phrases become texts; the
phrases themselves stand in `tweets.toml`.

    "the {thing} is {op}" -> [the, slot thing, is, slot op] -> [the, movie, is, great]

With the words numbered the = 0, is = 1, movie = 2, great = 3 and the slots thing = -2, op = -3:

    [0, -2, 1, -3] -> [0, 2, 1, 3]      and "The" is 0 + 4, the first of four vocabularies further
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.ragged import row_begins, row_bounds
from flatout.data.samples.made_up import WordMaker, draw_long_tailed

GENERATOR_VERSION = 1  # rows of a version never change
BLOCK = 4_096  # rows that are drawn together
Integers = NDArray[np.int64]
WordIds = NDArray[np.int32]  # [rows, places] words (0 and up), slots or NO_WORD

NO_WORD = -1  # an empty place
_FIRST_SLOT = -2  # slots are numbered downwards from here
LONGEST_NAME = 4  # words; so many places a slot of names has
# Each word is there four times. A word's number plus so many vocabularies is its other spelling.
CAPITALISED = 1
LOUD = 2
STRETCHED = 3

_CAPITAL_SHARE = 0.6  # of texts
_LOUD_TEXT_SHARE = 0.03
_NUM_THINGS = 3_000
_NUM_HASHTAGS = 400
# exponents of the long-tailed laws: the higher, the more often the first words of a group
TAIL = {"thing": 1.0, "tag": 0.8, "good": 0.6, "bad": 0.6, "name": 0.5}
_OTHER_TAIL = 0.3

WRITTEN = tomllib.loads(Path(__file__).with_name("tweets.toml").read_text(encoding="utf-8"))
GOOD = WRITTEN["good"].split()
BAD = WRITTEN["bad"].split()
VERY = WRITTEN["very"].split()
_SYLLABLES = WRITTEN["syllables"]
# kinds of phrases that both samples use
SHARED_KINDS = {kind: WRITTEN[f"{kind}s"] for kind in ("filler", "opening", "mark", "ending")}
_THINGS = WRITTEN["things"].split()
_TIMES = WRITTEN["times"].split()
_ONE_SPELLING = r"^(@|#|http|RT$)"  # handles, hashtags, links and retweets


@dataclass(frozen=True, slots=True)
class WordSlot:
    """A place of a phrase that draws one word of a group."""

    number: int  # in the phrases
    first_word: int
    num_words: int


class Phrases:
    """All words, groups of words and phrases of a sample, as numbers."""

    def __init__(
        self, groups: Mapping[str, Sequence[str]], slots: Sequence[str], kinds: Mapping[str, str]
    ) -> None:
        """Number the words of phrases and groups.

        Args:
            groups: words by the name of their slot; `fill` draws from them.
            slots: slots without a group; the caller fills their places, LONGEST_NAME each.
            kinds: phrases of each kind as one text, parted by | and by line ends.
        """
        phrases_of_kind = {}
        for kind, text in kinds.items():
            phrases_of_kind[kind] = [phrase.split() for phrase in list_phrases(text)]
        phrases = [phrase for listed in phrases_of_kind.values() for phrase in listed]
        plain_words = sorted({word for phrase in phrases for word in phrase if word[0] != "{"})

        # Words of phrases come first, then those of each group. A word of two groups is there
        # twice, so that a group's words are one range of numbers.
        words = list(plain_words)
        self.groups: dict[str, WordSlot] = {}
        for name, group in groups.items():
            number = _FIRST_SLOT - len(self.groups)
            self.groups[name] = WordSlot(number, len(words), len(group))
            words += group
        self.first_free_slot = _FIRST_SLOT - len(groups)
        """Number of the first of `slots`; the others follow downwards."""
        self.words = _spell_all_ways(words)
        self.num_words = len(words)

        numbers = {word: [number] for number, word in enumerate(plain_words)}
        for name, slot in self.groups.items():
            numbers[f"{{{name}}}"] = [slot.number]
        for nth, name in enumerate(slots):
            empty = [NO_WORD] * (LONGEST_NAME - 1)  # for the other words of a name
            numbers[f"{{{name}}}"] = [self.first_free_slot - nth, *empty]
        self.places = _pad_phrases(phrases, numbers)
        """`[phrases, places]` words and slots of each phrase."""
        # how many phrases each kind has, and the number of each kind
        self.sizes = np.array([len(listed) for listed in phrases_of_kind.values()])
        self.kinds = {kind: number for number, kind in enumerate(phrases_of_kind)}

    def draw(self, random: np.random.Generator, kinds: Integers) -> WordIds:
        """A phrase for each of `[rows, phrases]` kinds, as words and slots of the whole text."""
        first = row_begins(self.sizes)
        nth = (random.random(kinds.shape) * self.sizes[kinds]).astype(np.int64)
        return self.places[first[kinds] + nth].reshape(len(kinds), -1)

    def fill(self, random: np.random.Generator, ids: WordIds) -> None:
        """Replace the slots of all groups by words of theirs, in place."""
        for name, slot in self.groups.items():
            is_slot = ids == slot.number
            count = int(is_slot.sum())
            exponent = TAIL.get(name, _OTHER_TAIL)
            drawn = draw_long_tailed(random, count, slot.num_words, exponent)
            ids[is_slot] = slot.first_word + drawn


def list_phrases(text: str) -> list[str]:
    """Phrases parted by | and by line ends."""
    return [phrase.strip() for phrase in text.strip().replace("\n", "|").split("|")]


def make_shared_groups(key: int) -> tuple[dict[str, Sequence[str]], WordMaker]:
    """The groups of both samples, and what makes further words that none of them has.

    The groups are things (known ones first), times, and hashtags of things. `key`: of the random
    stream, another for each sample.
    """
    known = [*_THINGS, *GOOD, *BAD, *VERY, *_TIMES]
    maker = WordMaker(np.random.Generator(np.random.Philox(key=[key, 0])), known, _SYLLABLES)
    things = _THINGS + maker.make_words(_NUM_THINGS - len(_THINGS))
    hashtags = [f"#{thing}" for thing in things[:_NUM_HASHTAGS]]
    return {"thing": things, "time": _TIMES, "tag": hashtags}, maker


def stress_texts(random: np.random.Generator, ids: WordIds, num_words: int) -> None:
    """Capitalise the first word of most texts, and write a few all in capitals, in place.

    A first word that is stressed already stays.
    """
    rows = np.arange(len(ids))
    first = (ids >= 0).argmax(axis=1)
    is_as_written = ids[rows, first] < num_words
    has_capital = is_as_written & (random.random(len(ids)) < _CAPITAL_SHARE)
    ids[rows[has_capital], first[has_capital]] += CAPITALISED * num_words
    is_loud_text = random.random(len(ids)) < _LOUD_TEXT_SHARE
    is_loud = (ids >= 0) & is_loud_text[:, None]
    ids[is_loud] = ids[is_loud] % num_words + LOUD * num_words


def lists_of_rows(values: pa.Array, ids: WordIds) -> pa.ListArray:
    """A list for each row; `values` has one value for each place of `ids` that holds a word."""
    lengths = (ids >= 0).sum(axis=1)
    offsets = row_bounds(lengths).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, values)


def _pad_phrases(phrases: Sequence[Sequence[str]], numbers: Mapping[str, Sequence[int]]) -> WordIds:
    """Phrases as rows of numbers, filled up with empty places to the longest."""
    rows = []
    for phrase in phrases:
        row: list[int] = []
        for word in phrase:
            row += numbers[word]
        rows.append(row)
    longest = max(map(len, rows))
    padded = np.full((len(rows), longest), NO_WORD, np.int32)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def _spell_all_ways(words: Sequence[str]) -> pa.Array:
    """All words as written, then all Capitalised, all LOUD, all streeetched.

    Handles, hashtags and links are written one way only.
    """
    written = pa.array(words, pa.large_string())
    has_one_spelling = pc.match_substring_regex(written, _ONE_SPELLING)
    # the last vowel of a word is stretched
    stretched = pc.replace_substring_regex(written, r"([aeiou])([^aeiou]*)$", r"\1\1\1\1\2")
    spellings = [written]
    for changed in (pc.utf8_capitalize(written), pc.utf8_upper(written), stretched):
        spellings.append(pc.if_else(has_one_spelling, written, changed))
    return pa.concat_arrays(spellings)
