"""The built-in headlines: any number of rows, the same on every machine, with a known best
accuracy.

Each row has two to four words that only its topic uses. Some rows have one word of another topic,
always outnumbered. So each row shows its topic without doubt, and a perfect model errs only on the
changed labels: a fraction `noise`. Common words, topic words and made-up names follow a long-tailed
law, so a small sample leaves many words unseen. The generator makes rows in blocks of a fixed size,
each from its own random stream. So it can make any part of a split alone, and memory stays flat.
Words are numbers until one join writes them; a table lookup draws one.
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

from flatout.data.ragged import row_begins, row_bounds
from flatout.data.samples.made_up import WordMaker, disturb, draw_long_tailed, long_tail
from flatout.data.samples.settings import SampleConfig
from flatout.data.tables.table import GeneratedTable
from flatout.errors import LARGEST_SEED, setting

GENERATOR_VERSION = 1  # rows of a version never change
_BLOCK = 16_384  # rows that are drawn together
_LONGEST = 34  # words of a headline
# Words that only one topic uses: the first ones are known words, the others are made up.
_COMMON_PER_TOPIC = 30
_RARE_PER_TOPIC = 250
_NUM_NAMES = 24_000  # made-up names, of all topics

_WRITTEN = tomllib.loads(Path(__file__).with_name("headlines.toml").read_text(encoding="utf-8"))
_TOPICS = _WRITTEN["topics"]
_COMMON = _WRITTEN["common"].split()
_SYLLABLES = _WRITTEN["syllables"]
_CLOSINGS = pa.array(["", "?", "!", " ..."])
_OPENINGS = pa.array(["", "", *(f"{number} " for number in range(2, 100))])
Numbers = NDArray[np.int64]
_NUM_TEMPLATES = 40
_NAME_SHARE = 0.24  # of the places of a template
_MOST_OWN = 4  # words of its own topic in a headline
# Which places of a headline hold a name, template by template.
_TEMPLATES = (
    np.random.Generator(np.random.Philox(key=[2011, 1])).random((_NUM_TEMPLATES, _LONGEST))
    < _NAME_SHARE
)


@dataclass(kw_only=True, slots=True)
class HeadlinesConfig(SampleConfig):
    """Size and difficulty of the built-in headlines."""

    rows: int = setting(20_000, "Training rows.", least=1)
    eval_rows: int = setting(2_000, "Validation rows, and as many test rows.", least=1)
    classes: int = setting(12, "Number of topics, which are the classes.", least=2, most=64)
    noise: float = setting(
        0.06, "Fraction of rows with a wrong label, drawn at random.", least=0, below=0.5
    )
    seed: int = setting(7, "Seed of the headlines.", least=0, most=LARGEST_SEED)


class HeadlinesTable(GeneratedTable):
    """One split of the built-in headlines; `topic` is the label before the noise."""

    name = "sample:headlines"
    made_as = f"headlines {GENERATOR_VERSION}"
    block_rows = _BLOCK
    columns: Sequence[str] = ("text", "label", "topic")

    def _block(self, random: np.random.Generator, columns: Sequence[str]) -> Mapping[str, pa.Array]:
        """Texts, which cost most, are made only when asked for."""
        classes = self.config.classes
        names = _lexicon(classes)[1]
        topics = random.choice(classes, _BLOCK, p=long_tail(classes, 0.5))
        labels = disturb(random, topics, classes, self.config.noise)
        made = {"label": names.take(pa.array(labels)), "topic": names.take(pa.array(topics))}
        if "text" in columns:
            made["text"] = _texts(random, topics, classes)
        return made


def _texts(random: np.random.Generator, topics: Numbers, num_classes: int) -> pa.Array:
    """Headlines: a capital first, sometimes capitals throughout, a question, a number in front."""
    ids, lengths = _word_ids(random, topics, num_classes)
    offsets = row_bounds(lengths).astype(np.int32)
    capital = np.repeat(random.random(_BLOCK) < 0.15, lengths)
    capital[offsets[:-1]] = True
    numbers = random.integers(2, 100, _BLOCK)
    openings = _OPENINGS.take(pa.array(np.where(random.random(_BLOCK) < 0.08, numbers, 0)))
    closings = _CLOSINGS.take(pa.array(random.choice(4, _BLOCK, p=[0.82, 0.1, 0.05, 0.03])))
    words = _lexicon(num_classes)[0]
    ids[capital] += len(words) // 2
    texts = pc.binary_join(pa.ListArray.from_arrays(offsets, words.take(pa.array(ids))), " ")
    return pc.binary_join_element_wise(openings, texts, closings, "")


def _word_ids(
    random: np.random.Generator, topics: Numbers, num_classes: int
) -> tuple[NDArray[np.int32], Numbers]:
    """Word ids of every row, and how many words each row has.

    They are a long-tailed mix of common words and names, with the topic's words in random places.
    """
    lengths = np.clip(np.rint(random.gamma(9.0, 1.12, _BLOCK) + 0.7), 4, _LONGEST).astype(np.int64)
    is_word = np.arange(_LONGEST) < lengths[:, None]
    ids = draw_long_tailed(random, int(lengths.sum()), len(_COMMON), 0.9)
    is_name = _TEMPLATES[random.integers(0, _NUM_TEMPLATES, _BLOCK)][is_word]
    names_from = len(_COMMON)
    ids[is_name] = names_from + draw_long_tailed(random, int(is_name.sum()), _NUM_NAMES, 1.05)
    # Random places of each row: the first few take the topic's words, the next one perhaps a stray.
    places = _random_places(random, is_word, _MOST_OWN + 1)
    num_own = np.minimum(random.integers(2, _MOST_OWN + 1, _BLOCK), lengths - 1)[:, None]
    stray = random.random(_BLOCK)[:, None] < 0.25
    nth = np.arange(_MOST_OWN + 1)
    is_own = nth < num_own
    is_stray = (nth == num_own) & stray
    topic_from, per_topic = names_from + _NUM_NAMES, _COMMON_PER_TOPIC + _RARE_PER_TOPIC
    for chosen, shift in ((is_own, 0), (is_stray, 1)):
        own_topics = np.repeat(topics, chosen.sum(axis=1))
        topic = (
            own_topics + shift * random.integers(1, num_classes, len(own_topics))
        ) % num_classes
        ids[places[chosen]] = (
            topic_from + topic * per_topic + draw_long_tailed(random, len(topic), per_topic, 0.75)
        )
    return ids, lengths


def _random_places(random: np.random.Generator, is_word: NDArray[np.bool_], count: int) -> Numbers:
    """`count` random places of each row, counted over the words of all rows.

    A row of fewer words has meaningless places behind its own.
    """
    keys = np.full(is_word.shape, 2.0)
    keys[is_word] = random.random(np.count_nonzero(is_word))
    rows = np.arange(len(keys))
    places = np.empty((len(keys), count), dtype=np.int64)
    for nth in range(count):  # a few searches for the least cost a fraction of sorting
        places[:, nth] = keys.argmin(axis=1)
        keys[rows, places[:, nth]] = 2.0
    lengths = is_word.sum(axis=1)
    return places + row_begins(lengths)[:, None]


@lru_cache
def _lexicon(num_classes: int) -> tuple[pa.Array, pa.Array]:
    """All words, and the names of the topics.

    Words are the common ones, names, then each topic's own; all of them again with a capital.
    """
    random = np.random.Generator(np.random.Philox(key=[2011, 0]))
    known_words = [*_COMMON, *" ".join(_TOPICS.values()).split()]
    maker = WordMaker(random, known_words, _SYLLABLES)
    names = maker.make_words(_NUM_NAMES)
    topics = list(_TOPICS)[:num_classes]
    topics += [f"topic {word}" for word in maker.make_words(num_classes - len(topics))]
    topic_words: list[str] = []
    for topic in topics:
        listed = _TOPICS.get(topic, "").split()
        topic_words += listed + maker.make_words(_COMMON_PER_TOPIC + _RARE_PER_TOPIC - len(listed))
    words = pa.array([*_COMMON, *names, *topic_words])
    return pa.concat_arrays([words, pc.utf8_capitalize(words)]), pa.array(topics)
