"""The built-in tweets: texts of our own rules, with a mood for each text.

Whole phrases decide the mood: "not bad" praises, "is it good?" is neutral, and the part after "but"
wins. So counting words is not enough. A model that reads the order makes no errors, and the best
score is 1 - `noise`. Blocks of rows have their own random streams, as in `headlines.py`, and never
change while GENERATOR_VERSION stays. No data set was copied. Real tweets are richer, so judge
methods on those. Open this file to change moods; phrases become texts in `phrases.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatout.data.samples.made_up import disturb
from flatout.data.samples.phrases import (
    BAD,
    BLOCK,
    GENERATOR_VERSION,
    GOOD,
    LOUD,
    SHARED_KINDS,
    STRETCHED,
    VERY,
    WRITTEN,
    Integers,
    Phrases,
    list_phrases,
    lists_of_rows,
    make_shared_groups,
    stress_texts,
)
from flatout.data.samples.settings import SampleConfig
from flatout.data.tables.table import GeneratedTable
from flatout.errors import LARGEST_SEED, setting

MOODS = ("negative", "neutral", "positive")
_WORDS_KEY = 2013  # of the random stream that makes words up
_MOOD_SHARES = (0.2, 0.44, 0.36)  # in the order of MOODS
_ASKED_SHARE = 0.45  # neutral texts that ask for an opinion
_BUT_SHARE = 0.22  # texts that begin with the other opinion: "… but"
_THOUGH_SHARE = 0.18  # texts that end with the other opinion: "even though …"
_FILLER_SHARES = (0.85, 0.5, 0.25)  # before, after and once more after the opinion
_EMOJI_SHARE = 0.35
_FITTING_EMOJI_SHARE = 0.6  # emoji that show the mood for certain; others are of any mood
_STRETCH_SHARE = 0.07  # of words of opinion
_LOUD_WORD_SHARE = 0.04  # of words of opinion
_NUM_SLANG = 50  # made-up words of praise, and as many of blame

_EMOJI = {name: emoji.split() for name, emoji in WRITTEN["emoji"].items()}
_EMOJI_OF_MOODS = ("cross", "plain", "glad")  # in the order of MOODS


@dataclass(kw_only=True, slots=True)
class TweetsConfig(SampleConfig):
    """Size and difficulty of the built-in tweets."""

    rows: int = setting(6_000, "Training rows.", least=1)
    eval_rows: int = setting(1_000, "Validation rows, and as many test rows.", least=1)
    noise: float = setting(
        0.06, "Fraction of rows with a wrong label, drawn at random.", least=0, below=0.5
    )
    seed: int = setting(0, "Seed of the tweets.", least=0, most=LARGEST_SEED)


class TweetsTable(GeneratedTable):
    """One split of the built-in tweets; `topic` is the label before the noise."""

    name = "sample:tweets"
    made_as = f"{name} {GENERATOR_VERSION}"
    block_rows = BLOCK
    columns: Sequence[str] = ("text", "label", "topic")

    def _block(self, random: np.random.Generator, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        names = pa.array(MOODS)
        moods = random.choice(len(MOODS), BLOCK, p=_MOOD_SHARES)
        labels = disturb(random, moods, len(MOODS), self.config.noise)
        block = {"label": names.take(pa.array(labels)), "topic": names.take(pa.array(moods))}
        if "text" in columns:
            block["text"] = _write_texts(random, moods)
        return block


@lru_cache
def _tweet_phrases() -> Phrases:
    shared_groups, maker = make_shared_groups(_WORDS_KEY)
    slang = maker.make_words(2 * _NUM_SLANG)
    groups = {
        **shared_groups,
        "good": GOOD + slang[:_NUM_SLANG],
        "bad": BAD + slang[_NUM_SLANG:],
        "very": VERY,
        **_EMOJI,
    }
    return Phrases(groups, (), _kinds_of_phrases())


def _kinds_of_phrases() -> dict[str, str]:
    """The phrases of each kind; their order decides which phrase a random number means."""
    # "this {thing} was {op}" praises with a good word, "not a {op} {thing}" with a bad one. So no
    # word decides a mood alone, and a model must read the order.
    negative = _express(opinion="{bad}", opposite="{good}")
    positive = _express(opinion="{good}", opposite="{bad}")
    questions = WRITTEN["asked"].strip()
    asked = [questions.replace("{op}", word) for word in ("{good}", "{bad}")]
    kinds = {
        "none": "",
        "negative": negative,
        "positive": positive,
        "asked": "|".join(asked),
        **SHARED_KINDS,
        "negative but": _frame_each("{} but", negative),
        "positive but": _frame_each("{} but", positive),
        "though negative": _frame_each("even though {}", negative),
        "though positive": _frame_each("even though {}", positive),
    }
    for name in _EMOJI:
        kinds[name] = f"{{{name}}}|{{{name}}}|{{{name}}} {{{name}}}"
    return kinds


def _express(opinion: str, opposite: str) -> str:
    """Phrases that say an opinion, and phrases that deny the opposite one."""
    as_said = WRITTEN["as_said"].strip().replace("{op}", opinion)
    denied = WRITTEN["reversed"].strip().replace("{op}", opposite)
    return f"{as_said}|{denied}"


def _frame_each(frame: str, phrases: str) -> str:
    return "|".join(frame.format(phrase) for phrase in list_phrases(phrases))


def _write_texts(random: np.random.Generator, moods: Integers) -> pa.Array:
    """A text for each mood."""
    phrases = _tweet_phrases()
    ids = phrases.draw(random, _draw_kinds(random, moods, phrases.kinds))
    opinion_slots = [phrases.groups[name].number for name in ("good", "bad", "very")]
    can_stress = np.isin(ids, opinion_slots)
    phrases.fill(random, ids)
    chance = random.random(ids.shape)
    ids[can_stress & (chance < _STRETCH_SHARE)] += STRETCHED * phrases.num_words
    ids[can_stress & (chance > 1 - _LOUD_WORD_SHARE)] += LOUD * phrases.num_words
    stress_texts(random, ids, phrases.num_words)
    words = phrases.words.take(pa.array(ids[ids >= 0]))
    blank = pa.scalar(" ", pa.large_string())
    texts = pc.binary_join(lists_of_rows(words, ids), blank)
    # marks stand at the word before: "good !" -> "good!"
    return pc.replace_substring_regex(texts, r" ([?!.,]+)( |$)", r"\1\2").cast(pa.string())


def _draw_kinds(random: np.random.Generator, moods: Integers, kind: Mapping[str, int]) -> Integers:
    """`[rows, phrases]` kinds of phrases such that each row has its mood."""
    # Rows never change: every draw stays where it is in the order of draws.
    none = np.full(BLOCK, kind["none"])

    def with_share(share: float, kinds: Integers | int) -> Integers:
        return np.where(random.random(BLOCK) < share, kinds, none)

    def by_mood(negative: str, neutral: str, positive: str) -> Integers:
        return np.array([kind[negative], kind[neutral], kind[positive]])[moods]

    chance = random.random(BLOCK)
    other_before = by_mood("positive but", "none", "negative but")
    other_after = by_mood("though positive", "none", "though negative")
    but = np.where(chance < _BUT_SHARE, other_before, none)
    though = np.where(chance > 1 - _THOUGH_SHARE, other_after, none)

    is_asked = (random.random(BLOCK) < _ASKED_SHARE) & (moods == MOODS.index("neutral"))
    opinion = by_mood("negative", "filler", "positive")
    main = np.where(is_asked, kind["asked"], opinion)

    is_fitting = random.random(BLOCK) < _FITTING_EMOJI_SHARE
    emoji_moods = np.where(is_fitting, moods, random.integers(0, 3, BLOCK))
    emoji = np.array([kind[name] for name in _EMOJI_OF_MOODS])[emoji_moods]
    fillers = [with_share(share, kind["filler"]) for share in _FILLER_SHARES]
    return np.stack(
        (
            np.full(BLOCK, kind["opening"]),
            fillers[0],
            np.where(fillers[0] != none, kind["mark"], none),
            but,
            main,
            though,
            np.where(is_asked, none, kind["mark"]),  # questions have a mark already
            fillers[1],
            fillers[2],
            with_share(_EMOJI_SHARE, emoji),
            np.full(BLOCK, kind["ending"]),
        ),
        axis=1,
    )
