"""The built-in tagged tweets: texts with a tag for each word, B-person to I-work or O.

Zero to two phrases of a text are about a name, and the phrase around a name decides its type: some
names occur with every type. Half of the names in validation and test are not in training, so a
model that learns names by heart fails. `noise` is the fraction of names with tags of a wrong type.
Open this file to change names and their tags; phrases become texts in `phrases.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.data.samples.made_up import WordMaker, disturb, draw_long_tailed
from flatout.data.samples.phrases import (
    BLOCK,
    GENERATOR_VERSION,
    LONGEST_NAME,
    NO_WORD,
    SHARED_KINDS,
    TAIL,
    WRITTEN,
    Integers,
    Phrases,
    list_phrases,
    lists_of_rows,
    make_shared_groups,
    stress_texts,
)
from flatout.data.samples.settings import SampleConfig
from flatout.data.tables.table import SPLIT_STREAM, GeneratedTable
from flatout.errors import LARGEST_SEED, setting

ENTITY_TYPES = ("person", "place", "group", "work")
TAGS = ("O", *(f"{mark}-{kind}" for kind in ENTITY_TYPES for mark in "BI"))
_WORDS_KEY = 2017  # of the random stream that makes words up
_NAMES_PER_POOL = 200
_NUM_GIVEN = 120  # given names
_TYPE_SHARES = (0.36, 0.26, 0.21, 0.17)  # in the order of ENTITY_TYPES
_FIRST_NAME_SHARE = 0.75  # texts with a name
_SECOND_NAME_SHARE = 0.35  # texts with a name at the second place
_FILLER_SHARES = (0.5, 0.5, 0.5)
_AMBIGUOUS_SHARE = 0.25  # names that occur with every type
_UNSEEN_SHARE = 0.5  # names of validation and test that training has not
_LOWERCASE_SHARE = 0.25  # names without capitals
_NAME_FORMS: dict[str, str] = WRITTEN["name_forms"]  # by type; the last one is for any type

NamePools = NDArray[np.int32]  # [splits, types and "any", names, LONGEST_NAME] words of names


@dataclass(kw_only=True, slots=True)
class TaggedTweetsConfig(SampleConfig):
    """Size and difficulty of the built-in tagged tweets."""

    rows: int = setting(4_000, "Training rows.", least=1)
    eval_rows: int = setting(1_000, "Validation rows, and as many test rows.", least=1)
    noise: float = setting(
        0.04, "Fraction of names with tags of a wrong type, drawn at random.", least=0, below=0.5
    )
    seed: int = setting(
        0, "Seed of the tweets; the names stay the same.", least=0, most=LARGEST_SEED
    )


class TaggedTweetsTable(GeneratedTable):
    """One split of the built-in tagged tweets; `clean_tags` are the tags before the noise."""

    name = "sample:tagged-tweets"
    made_as = f"{name} {GENERATOR_VERSION}"
    block_rows = BLOCK
    columns: Sequence[str] = ("tokens", "tags", "clean_tags")

    def _block(self, random: np.random.Generator, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        phrases, pools = _tagged_phrases()
        ids = phrases.draw(random, _draw_kinds(random, phrases.kinds))
        phrases.fill(random, ids)
        # The slots that are left are those of names, one for each type. With "ada lovelace":
        #
        #     drawn    thanks   {person}   -          -   -   for   the   movie
        #     words    thanks   ada        lovelace   -   -   for   the   movie
        #     tags     O        B-person   I-person   -   -   O     O     O
        rows, places = np.nonzero(ids <= phrases.first_free_slot)
        types = (phrases.first_free_slot - ids[rows, places]).astype(np.int64)
        names = _draw_names(random, types, pools, SPLIT_STREAM[self.split])
        is_lower = random.random(len(rows)) < _LOWERCASE_SHARE
        noisy_types = disturb(random, types, len(ENTITY_TYPES), self.config.noise)

        tags = np.zeros(ids.shape, np.int32)
        clean_tags = np.zeros(ids.shape, np.int32)
        # Write the first word of every name, then the second of those that have one, and so on.
        spelling = np.where(is_lower, 0, phrases.num_words)
        for nth in range(LONGEST_NAME):
            has_word = names[:, nth] != NO_WORD
            at = (rows[has_word], places[has_word] + nth)
            ids[at] = (names[:, nth] + spelling)[has_word]
            tags[at] = _tag_of(noisy_types[has_word], nth)
            clean_tags[at] = _tag_of(types[has_word], nth)
        stress_texts(random, ids, phrases.num_words)

        is_word = ids >= 0
        tag_names = pa.array(TAGS, pa.large_string())
        tokens = phrases.words.take(pa.array(ids[is_word]))
        return {
            "tokens": lists_of_rows(tokens, ids),
            "tags": lists_of_rows(tag_names.take(pa.array(tags[is_word])), ids),
            "clean_tags": lists_of_rows(tag_names.take(pa.array(clean_tags[is_word])), ids),
        }


def _tag_of(types: Integers, nth: int) -> Integers:
    """Numbers in TAGS for the `nth` word of names: B for the first word, I for the others."""
    return 1 + 2 * types + (nth > 0)


@lru_cache
def _tagged_phrases() -> tuple[Phrases, NamePools]:
    """The phrases, and all names as words.

    Every split has names of its own for each type, and some for any type.
    """
    groups, maker = make_shared_groups(_WORDS_KEY)
    given_names = maker.make_words(_NUM_GIVEN)
    names: list[list[str]] = []
    for _ in SPLIT_STREAM:
        for forms in _NAME_FORMS.values():
            names += _make_names(maker, list_phrases(forms), given_names)
    words = list(dict.fromkeys(word for name in names for word in name))

    kinds = {"none": "", **SHARED_KINDS}
    for kind, text in WRITTEN["about_names"].items():
        kinds[kind] = text.replace("{name}", f"{{{kind}}}")
    phrases = Phrases({**groups, "name": words}, ENTITY_TYPES, kinds)

    first_word = phrases.groups["name"].first_word
    numbers = {word: first_word + nth for nth, word in enumerate(words)}
    pools = np.full((len(names), LONGEST_NAME), NO_WORD, np.int32)
    for row, name in enumerate(names):
        pools[row, : len(name)] = [numbers[word] for word in name]
    shape = (len(SPLIT_STREAM), len(_NAME_FORMS), _NAMES_PER_POOL, LONGEST_NAME)
    return phrases, pools.reshape(shape)


def _make_names(
    maker: WordMaker, forms: Sequence[str], given_names: Sequence[str]
) -> list[list[str]]:
    """Names in forms such as `{given} {w}`, as words: [mira, kolben], [sanu, tarok], …

    Every name has a made-up word that no other name has, so no two pools share a name.
    """
    new_words = iter(maker.make_words(2 * _NAMES_PER_POOL))
    drawn_forms = maker.random.integers(0, len(forms), _NAMES_PER_POOL)
    firsts = draw_long_tailed(maker.random, 2 * _NAMES_PER_POOL, len(given_names), TAIL["name"])
    drawn_given = iter([given_names[number] for number in firsts])
    return [_fill_form(forms[number], new_words, drawn_given) for number in drawn_forms]


def _fill_form(form: str, new_words: Iterator[str], given_names: Iterator[str]) -> list[str]:
    words = []
    for word in form.split():
        if word == "{w}":
            words.append(next(new_words))
        elif word == "{given}":
            words.append(next(given_names))
        else:
            words.append(word)
    return words


def _draw_kinds(random: np.random.Generator, kind: Mapping[str, int]) -> Integers:
    """`[rows, phrases]` kinds of phrases; none, one or two of a row are about names."""
    of_types = np.array([kind[name] for name in ENTITY_TYPES])
    first, second = of_types[random.choice(len(of_types), (2, BLOCK), p=_TYPE_SHARES)]
    first = np.where(random.random(BLOCK) < _FIRST_NAME_SHARE, first, kind["filler"])
    second = np.where(random.random(BLOCK) < _SECOND_NAME_SHARE, second, kind["none"])
    is_filled = random.random((3, BLOCK)) < np.array(_FILLER_SHARES)[:, None]
    fillers = np.where(is_filled, kind["filler"], kind["none"])
    opening = np.full(BLOCK, kind["opening"])
    mark = np.full(BLOCK, kind["mark"])
    ending = np.full(BLOCK, kind["ending"])
    return np.stack(
        (
            opening,
            fillers[0],
            first,
            mark,
            fillers[1],
            second,
            mark,
            fillers[2],
            ending,
        ),
        axis=1,
    )


def _draw_names(
    random: np.random.Generator, types: Integers, pools: NamePools, split: int
) -> NDArray[np.int32]:
    """`[names, LONGEST_NAME]` words of a name for each type.

    Some names are of the pool for any type. Outside training, half are of the split's own pools.
    """
    is_unseen = random.random(len(types)) < _UNSEEN_SHARE
    splits = np.where(is_unseen, split, SPLIT_STREAM["train"])
    is_ambiguous = random.random(len(types)) < _AMBIGUOUS_SHARE
    kinds = np.where(is_ambiguous, len(ENTITY_TYPES), types)
    nth = draw_long_tailed(random, len(types), _NAMES_PER_POOL, TAIL["name"])
    return pools[splits, kinds, nth]
