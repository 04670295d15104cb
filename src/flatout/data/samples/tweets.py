"""The built-in tweets: one sample has a mood for each text, the other a tag for each word.

Our own rules generate both. A text is a row of phrases; a phrase is words and slots; a slot draws
one word or one name by a long-tailed law. Whole phrases decide the mood: "not bad" praises, "is it
good?" is neutral, and the part after "but" wins. So counting words is not enough. A model that
reads the order makes no errors, and the best score is 1 - `noise`. The phrase around a name decides
its type: some names occur with every type, and half of the names in validation and test are not in
training. Blocks of rows have their own random streams, as in `headlines.py`, and never change while
GENERATOR_VERSION stays. No data set was copied. Real tweets are richer, so judge methods on those.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.samples.made_up import SampleConfig, disturb, draw_long_tailed, made_up_words
from flatout.data.tables.table import SPLIT_STREAM, GeneratedTable
from flatout.errors import LARGEST_SEED, setting

GENERATOR_VERSION = 1
Integers = NDArray[np.int64]
MOODS = ("negative", "neutral", "positive")
ENTITY_TYPES = ("person", "place", "group", "work")
TAGS = ("O", *(f"{mark}-{kind}" for kind in ENTITY_TYPES for mark in "BI"))
_BLOCK = 4_096
_TWEETS_WORDS_KEY = 2013
_TAGGED_WORDS_KEY = 2017
_NO_WORD = -1  # an empty place of a phrase; slots are numbered down from -2

_MOOD_SHARES = (0.2, 0.44, 0.36)
_ASKED_SHARE = 0.45
_BUT_SHARE = 0.22
_THOUGH_SHARE = 0.18
_FILLER_SHARES = (0.85, 0.5, 0.25)
_EMOJI_SHARE = 0.35
_FITTING_EMOJI_SHARE = 0.6
_STRETCH_SHARE = 0.07
_LOUD_WORD_SHARE = 0.04
_LOUD_TEXT_SHARE = 0.03
_CAPITAL_SHARE = 0.6
_NUM_THINGS = 3_000
_NUM_SLANG = 50
_NUM_HASHTAGS = 400

_LONGEST_NAME = 4
_NAMES_PER_POOL = 200
_NUM_GIVEN = 120
_TYPE_SHARES = (0.36, 0.26, 0.21, 0.17)
_FIRST_NAME_SHARE = 0.75
_SECOND_NAME_SHARE = 0.35
_TAGGED_FILLER_SHARES = (0.5, 0.5, 0.5)
_AMBIGUOUS_SHARE = 0.25
_UNSEEN_SHARE = 0.5
_LOWERCASE_SHARE = 0.25
_TAIL = {"thing": 1.0, "tag": 0.8, "good": 0.6, "bad": 0.6, "name": 0.5}
_OTHER_TAIL = 0.3

_WRITTEN = tomllib.loads(Path(__file__).with_name("tweets.toml").read_text(encoding="utf-8"))
_THINGS, _GOOD, _BAD, _VERY, _TIMES = (
    _WRITTEN[name].split() for name in ("things", "good", "bad", "very", "times")
)
_EMOJI = {mood: emoji.split() for mood, emoji in _WRITTEN["emoji"].items()}
_SHARED_KINDS = {kind: _WRITTEN[f"{kind}s"] for kind in ("filler", "opening", "mark", "ending")}
_SYLLABLES = _WRITTEN["syllables"]
_UNCHANGED = r"^(@|#|http|RT$)"


@dataclass(kw_only=True, slots=True)
class TweetsConfig(SampleConfig):
    """Size and difficulty of the built-in tweets."""

    rows: int = setting(6_000, "Training rows.", least=1)
    eval_rows: int = setting(1_000, "Validation rows, and as many test rows.", least=1)
    noise: float = setting(
        0.06, "Fraction of rows with a wrong label, drawn at random.", least=0, below=0.5
    )
    seed: int = setting(0, "Seed of the tweets.", least=0, most=LARGEST_SEED)


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


class TweetsTable(GeneratedTable):
    """One split of the built-in tweets; `topic` is the label before the noise."""

    name = "sample:tweets"
    made_as = f"{name} {GENERATOR_VERSION}"
    block_rows = _BLOCK
    columns: Sequence[str] = ("text", "label", "topic")

    def _block(self, random: np.random.Generator, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        names = pa.array(MOODS)
        moods = random.choice(len(MOODS), _BLOCK, p=_MOOD_SHARES)
        labels = disturb(random, moods, len(MOODS), self.config.noise)
        made = {"label": names.take(pa.array(labels)), "topic": names.take(pa.array(moods))}
        if "text" in columns:
            made["text"] = _tweet_texts(random, moods)
        return made


class TaggedTweetsTable(GeneratedTable):
    """One split of the built-in tagged tweets; `clean_tags` are the tags before the noise."""

    name = "sample:tagged-tweets"
    made_as = f"{name} {GENERATOR_VERSION}"
    block_rows = _BLOCK
    columns: Sequence[str] = ("tokens", "tags", "clean_tags")

    def _block(self, random: np.random.Generator, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        phrases, names = _tagged_phrases()
        ids = phrases.drawn(random, _tagged_kinds(random, phrases.kinds))
        phrases.fill(random, ids)
        first_slot = _NO_WORD - 1 - len(phrases.groups)
        rows, places = np.nonzero(ids <= first_slot)
        types = (first_slot - ids[rows, places]).astype(np.int64)
        chosen = _names_for(random, types, names, SPLIT_STREAM[self.split])
        is_lower = random.random(len(rows)) < _LOWERCASE_SHARE
        tags, clean_tags = (np.zeros(ids.shape, np.int32) for _ in range(2))
        noisy = disturb(random, types, len(ENTITY_TYPES), self.config.noise)
        for nth in range(_LONGEST_NAME):
            used = chosen[:, nth] >= 0
            at = rows[used], places[used] + nth
            ids[at] = (chosen[:, nth] + np.where(is_lower, 0, phrases.num_words))[used]
            for to_fill, of_types in ((tags, noisy), (clean_tags, types)):
                to_fill[at] = 1 + 2 * of_types[used] + (nth > 0)
        _stress_texts(random, ids, phrases.num_words)
        tag_names = pa.array(TAGS, pa.large_string())
        is_used = ids >= 0
        made = {"tokens": phrases.words.take(pa.array(ids[is_used]))}
        made |= {
            name: tag_names.take(pa.array(t[is_used]))
            for name, t in (("tags", tags), ("clean_tags", clean_tags))
        }
        return {name: _lists(values, ids) for name, values in made.items()}


class _Phrases:
    """Words, groups of words, and phrases by kind; words and slots are numbers.

    `slots` are filled by the caller.
    """

    def __init__(
        self, groups: Mapping[str, Sequence[str]], slots: Sequence[str], kinds: Mapping[str, str]
    ) -> None:
        written = {
            kind: [phrase.split() for phrase in _listed(text)] for kind, text in kinds.items()
        }
        each = [phrase for phrases in written.values() for phrase in phrases]
        plain = sorted({word for phrase in each for word in phrase if word[0] != "{"})
        words = [*plain, *(word for group in groups.values() for word in group)]
        numbers = {word: number for number, word in enumerate(plain)}
        numbers |= {f"{{{slot}}}": _NO_WORD - 1 - nth for nth, slot in enumerate([*groups, *slots])}
        sizes = [len(group) for group in groups.values()]
        starts = len(plain) + np.cumsum([0, *sizes])
        places = (numbers[f"{{{name}}}"] for name in groups)
        self.groups = dict(
            zip(groups, zip(places, starts.tolist(), sizes, strict=False), strict=True)
        )
        """Of each slot: its number within phrases, its first word, how many words it has."""
        # Empty places follow the slot of a name, and fill the end.
        wide = {f"{{{slot}}}": [_NO_WORD] * (_LONGEST_NAME - 1) for slot in slots}
        placed = [
            [number for word in phrase for number in (numbers[word], *wide.get(word, ()))]
            for phrase in each
        ]
        longest = max(map(len, placed))
        self.places = np.array(
            [row + [_NO_WORD] * (longest - len(row)) for row in placed], np.int32
        )
        """Phrases by places."""
        self.words = _all_ways(words)
        self.num_words = len(words)
        # of each kind: how many phrases it has
        self.sizes = np.array([len(phrases) for phrases in written.values()])
        self.kinds = {kind: number for number, kind in enumerate(written)}

    def drawn(self, random: np.random.Generator, kinds: Integers) -> NDArray[np.int32]:
        """A phrase of each kind (rows by phrases), as words and slots (rows by places)."""
        first = np.cumsum(self.sizes) - self.sizes
        phrases = first[kinds] + (random.random(kinds.shape) * self.sizes[kinds]).astype(np.int64)
        return self.places[phrases].reshape(len(kinds), -1)

    def fill(self, random: np.random.Generator, ids: NDArray[np.int32]) -> None:
        for name, (slot, start, size) in self.groups.items():
            chosen = ids == slot
            ids[chosen] = start + draw_long_tailed(
                random, int(chosen.sum()), size, _TAIL.get(name, _OTHER_TAIL)
            )


def _listed(text: str) -> list[str]:
    """Phrases parted by | and by line ends."""
    return [phrase.strip() for phrase in text.strip().replace("\n", "|").split("|")]


def _all_ways(words: Sequence[str]) -> pa.Array:
    """Words as written, Capitalised, LOUD and streeetched; handles, hashtags and links always as
    written.
    """
    written = pa.array(words, pa.large_string())
    fixed = pc.match_substring_regex(written, _UNCHANGED)
    stretched = pc.replace_substring_regex(written, r"([aeiou])([^aeiou]*)$", r"\1\1\1\1\2")
    ways = (pc.utf8_capitalize(written), pc.utf8_upper(written), stretched)
    return pa.concat_arrays([written, *(pc.if_else(fixed, written, way) for way in ways)])


@lru_cache
def _tweet_phrases() -> _Phrases:
    random = np.random.Generator(np.random.Philox(key=[_TWEETS_WORDS_KEY, 0]))
    shared, taken = _shared_groups(random)
    slang = made_up_words(random, 2 * _NUM_SLANG, taken, _SYLLABLES)
    groups = {
        **shared,
        "good": _GOOD + slang[:_NUM_SLANG],
        "bad": _BAD + slang[_NUM_SLANG:],
        "very": _VERY,
        **_EMOJI,
    }
    as_said, denied, questions = (
        _WRITTEN[name].strip() for name in ("as_said", "reversed", "asked")
    )
    praise, blame = (
        "|".join((as_said.replace("{op}", own), denied.replace("{op}", other)))
        for own, other in (("{good}", "{bad}"), ("{bad}", "{good}"))
    )
    asked = "|".join(questions.replace("{op}", word) for word in ("{good}", "{bad}"))
    kinds = {"none": "", "negative": blame, "positive": praise, "asked": asked, **_SHARED_KINDS}
    for name, around in (("{} but", "{} but"), ("though {}", "even though {}")):
        for mood in ("negative", "positive"):
            kinds[name.format(mood)] = "|".join(map(around.format, _listed(kinds[mood])))
    kinds |= {name: f"{{{name}}}|{{{name}}}|{{{name}}} {{{name}}}" for name in _EMOJI}
    return _Phrases(groups, (), kinds)


def _shared_groups(random: np.random.Generator) -> tuple[dict[str, Sequence[str]], set[str]]:
    """Words for things, known ones first, for times and for tags; and all words that no made-up
    word may repeat.
    """
    taken = {*_THINGS, *_GOOD, *_BAD, *_VERY, *_TIMES}
    things = _THINGS + made_up_words(random, _NUM_THINGS - len(_THINGS), taken, _SYLLABLES)
    return {
        "thing": things,
        "time": _TIMES,
        "tag": [f"#{thing}" for thing in things[:_NUM_HASHTAGS]],
    }, taken


def _tweet_texts(random: np.random.Generator, moods: Integers) -> pa.Array:
    phrases = _tweet_phrases()
    ids = phrases.drawn(random, _tweet_kinds(random, moods, phrases.kinds))
    can_stress = np.isin(ids, [phrases.groups[name][0] for name in ("good", "bad", "very")])
    phrases.fill(random, ids)
    way = random.random(ids.shape)
    ids[can_stress & (way < _STRETCH_SHARE)] += 3 * phrases.num_words
    ids[can_stress & (way > 1 - _LOUD_WORD_SHARE)] += 2 * phrases.num_words
    _stress_texts(random, ids, phrases.num_words)
    texts = pc.binary_join(
        _lists(phrases.words.take(pa.array(ids[ids >= 0])), ids), pa.scalar(" ", pa.large_string())
    )
    return pc.replace_substring_regex(texts, r" ([?!.,]+)( |$)", r"\1\2").cast(pa.string())


def _tweet_kinds(random: np.random.Generator, moods: Integers, kind: Mapping[str, int]) -> Integers:
    """Kinds of phrases, rows by phrases, such that each row has its mood."""

    def some(share: float, kinds: Integers | int) -> Integers:
        return np.where(random.random(_BLOCK) < share, kinds, kind["none"])

    def by_mood(negative: str, neutral: str, positive: str) -> Integers:
        return np.array([kind[negative], kind[neutral], kind[positive]])[moods]

    chance = random.random(_BLOCK)
    none = np.full(_BLOCK, kind["none"])
    but = np.where(chance < _BUT_SHARE, by_mood("positive but", "none", "negative but"), none)
    though = np.where(
        chance > 1 - _THOUGH_SHARE, by_mood("though positive", "none", "though negative"), none
    )
    is_asked = (random.random(_BLOCK) < _ASKED_SHARE) & (moods == MOODS.index("neutral"))
    said = np.where(is_asked, kind["asked"], by_mood("negative", "filler", "positive"))
    emoji_moods = np.where(
        random.random(_BLOCK) < _FITTING_EMOJI_SHARE, moods, random.integers(0, 3, _BLOCK)
    )
    emoji = np.array([kind[name] for name in ("cross", "plain", "glad")])[emoji_moods]
    fillers = [some(share, kind["filler"]) for share in _FILLER_SHARES]
    opening, ending = (np.full(_BLOCK, kind[name]) for name in ("opening", "ending"))
    marks = [
        np.where(is_marked, kind["mark"], none) for is_marked in (fillers[0] != none, ~is_asked)
    ]
    last = some(_EMOJI_SHARE, emoji), ending
    return np.stack(
        (opening, fillers[0], marks[0], but, said, though, marks[1], *fillers[1:], *last), axis=1
    )


def _stress_texts(random: np.random.Generator, ids: NDArray[np.int32], num_words: int) -> None:
    """Most texts with a capital first (unless that word is stressed already), a few all in
    capitals.
    """
    rows = np.arange(len(ids))
    first = (ids >= 0).argmax(axis=1)
    has_capital = (ids[rows, first] < num_words) & (random.random(len(ids)) < _CAPITAL_SHARE)
    ids[rows[has_capital], first[has_capital]] += num_words
    loud = (ids >= 0) & (random.random(len(ids)) < _LOUD_TEXT_SHARE)[:, None]
    ids[loud] = ids[loud] % num_words + 2 * num_words


def _lists(values: pa.Array, ids: NDArray[np.int32]) -> pa.ListArray:
    """Values of all used places, parted into rows."""
    offsets = np.append(0, np.cumsum((ids >= 0).sum(axis=1))).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, values)


@lru_cache
def _tagged_phrases() -> tuple[_Phrases, NDArray[np.int32]]:
    """Phrases, and names as words: splits by types (the last one: any type) by names by places."""
    random = np.random.Generator(np.random.Philox(key=[_TAGGED_WORDS_KEY, 0]))
    shared, taken = _shared_groups(random)
    given = made_up_words(random, _NUM_GIVEN, taken, _SYLLABLES)
    names = [
        _names(random, kind, given, taken) for _ in SPLIT_STREAM for kind in _WRITTEN["name_forms"]
    ]
    words = list(dict.fromkeys(word for pool in names for name in pool for word in name))
    kinds = {"none": "", **_SHARED_KINDS}
    kinds |= {
        kind: text.replace("{name}", f"{{{kind}}}")
        for kind, text in _WRITTEN["about_names"].items()
    }
    phrases = _Phrases({**shared, "name": words}, ENTITY_TYPES, kinds)
    numbers = {word: phrases.groups["name"][1] + number for number, word in enumerate(words)}
    padded = [
        [numbers[word] for word in name] + [_NO_WORD] * (_LONGEST_NAME - len(name))
        for p in names
        for name in p
    ]
    shape = (len(SPLIT_STREAM), len(_WRITTEN["name_forms"]), _NAMES_PER_POOL, _LONGEST_NAME)
    return phrases, np.array(padded, np.int32).reshape(shape)


def _names(
    random: np.random.Generator, kind: str, given: Sequence[str], taken: set[str]
) -> list[list[str]]:
    """Names of one type; every one has a made-up word of its own, so no two pools share a name."""
    own = iter(made_up_words(random, 2 * _NAMES_PER_POOL, taken, _SYLLABLES))
    forms = _listed(_WRITTEN["name_forms"][kind])
    drawn = [forms[number].split() for number in random.integers(0, len(forms), _NAMES_PER_POOL)]
    firsts = iter(draw_long_tailed(random, 2 * _NAMES_PER_POOL, len(given), _TAIL["name"]))

    def filled(word: str) -> str:
        return next(own) if word == "{w}" else given[next(firsts)] if word == "{given}" else word

    return [[filled(word) for word in form] for form in drawn]


def _tagged_kinds(random: np.random.Generator, kind: Mapping[str, int]) -> Integers:
    """Kinds of phrases, rows by phrases: none, one or two of them are about names."""
    of_types = np.array([kind[name] for name in ENTITY_TYPES])
    first, second = of_types[random.choice(len(of_types), (2, _BLOCK), p=_TYPE_SHARES)]
    first = np.where(random.random(_BLOCK) < _FIRST_NAME_SHARE, first, kind["filler"])
    second = np.where(random.random(_BLOCK) < _SECOND_NAME_SHARE, second, kind["none"])
    is_filled = random.random((3, _BLOCK)) < np.array(_TAGGED_FILLER_SHARES)[:, None]
    fillers = np.where(is_filled, kind["filler"], kind["none"])
    opening, mark, ending = (np.full(_BLOCK, kind[name]) for name in ("opening", "mark", "ending"))
    return np.stack(
        (opening, fillers[0], first, mark, fillers[1], second, mark, fillers[2], ending), axis=1
    )


def _names_for(
    random: np.random.Generator, types: Integers, names: NDArray[np.int32], split: int
) -> NDArray[np.int32]:
    """A name for each type: at times one that any type may have, and outside training often one of
    the split's own.
    """
    pools = np.where(random.random(len(types)) < _UNSEEN_SHARE, split, SPLIT_STREAM["train"])
    kinds = np.where(random.random(len(types)) < _AMBIGUOUS_SHARE, len(ENTITY_TYPES), types)
    return names[pools, kinds, draw_long_tailed(random, len(types), _NAMES_PER_POOL, _TAIL["name"])]
