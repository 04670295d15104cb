"""The built-in headlines: any number of rows, the same on every machine, with a known best accuracy.

Each row has two to four words that only its topic uses. Some rows have one word of another topic, always outnumbered.
So each row shows its topic without doubt, and a perfect model errs only on the changed labels: a fraction `noise`.
Common words, topic words and made-up names follow a long-tailed law, so a small sample leaves many words unseen.

The generator makes rows in blocks of a fixed size, each from its own random stream. So it can make any part of a split
alone, and memory stays flat. Words are numbers until one join writes them; a table lookup draws one. The rows of a
seed never change while GENERATOR_VERSION stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from flatout.data.samples.made_up import Syllables, draw_long_tailed, long_tail, made_up_words
from flatout.data.tables.table import Table
from flatout.errors import LARGEST_SEED, check_settings, require, setting

GENERATOR_VERSION = 1
_BLOCK = 16_384
_SPLIT_STREAM = {"train": 0, "validation": 1, "test": 2}
_COMMON_PER_TOPIC, _RARE_PER_TOPIC, _NUM_NAMES = 30, 250, 24_000
_LONGEST = 34

_TOPICS: dict[str, str] = {
    "politics": "senate minister ballot coalition veto lobby mayor treaty referendum cabinet senator congress",
    "sport": "striker goalkeeper playoff marathon referee penalty league coach sprint tournament medal transfer",
    "science": "telescope genome fossil neutron glacier microbe laboratory orbit vaccine enzyme quantum comet",
    "business": "shares merger dividend startup revenue investor retailer bankruptcy takeover profit tariff payroll",
    "travel": "island resort airline itinerary hostel backpack cruise passport beach luggage ferry sightseeing",
    "food": "recipe roast dumpling bakery vineyard seasoning dessert chef brunch casserole noodle pastry",
    "health": "diabetes therapist allergy insomnia cholesterol surgeon clinic migraine fitness asthma dentist",
    "technology": "smartphone browser chip software robot laptop modem encryption keyboard satellite server drone",
    "culture": "sculpture novelist gallery opera ballet poet curator manuscript premiere exhibition violin theatre",
    "crime": "burglar detective verdict smuggler arson prosecutor fugitive heist ransom inmate forgery alibi",
    "weather": "hurricane drought blizzard humidity rainfall thunderstorm heatwave frost tornado forecast hail monsoon",
    "parenting": "toddler bedtime stroller kindergarten tantrum diaper babysitter playground lullaby crayon",
}
_COMMON = (
    "the a of in to for on and with at from by as after over is are was will why how what this new first last more"
    " about into it its their his her but not than when who could may says say said gets makes takes finds shows"
    " wants needs tells helps brings keeps leaves calls plan city people day week year world home life way big best"
    " five ten two three old young little former local public early late long open final major real secret"
).split()
_SYLLABLES = Syllables(
    onsets=tuple("b br c ch d f g gr h j k l m n p r s sh st t tr v w z".split()),
    vowels=tuple("a a e e i i o o u ea ia é ö".split()),
    ends=("", "", "n", "r", "s", "l", "nd", "ck", "th"),
)
_CLOSINGS = pa.array(["", "?", "!", " ..."])
_OPENINGS = pa.array(["", "", *(f"{number} " for number in range(2, 100))])
_NUM_TEMPLATES, _NAME_SHARE, _MOST_OWN = 40, 0.24, 4


@dataclass(kw_only=True, slots=True)
class HeadlinesConfig:
    """Size and difficulty of the built-in headlines."""

    rows: int = setting(20_000, "Training rows.", least=1)
    eval_rows: int = setting(2_000, "Validation rows, and as many test rows.", least=1)
    classes: int = setting(12, "Number of topics, which are the classes.", least=2, most=64)
    noise: float = setting(0.06, "Fraction of rows with a wrong label, drawn at random.", least=0, below=0.5)
    seed: int = setting(7, "Seed of the headlines.", least=0, most=LARGEST_SEED)

    def __post_init__(self) -> None:
        check_settings(self, "data.sample")


class HeadlinesTable(Table):
    """One split of the built-in headlines, read like any other table."""

    columns: Sequence[str] = ("text", "label", "topic")

    def __init__(self, config: HeadlinesConfig, split: str) -> None:
        require(split in _SPLIT_STREAM, "split", repr(split), allowed=", ".join(_SPLIT_STREAM))
        self.config, self.split = config, split
        self.name = "sample:headlines"
        self.num_rows = config.rows if split == "train" else config.eval_rows

    def fingerprint(self) -> str:
        about = f"headlines {GENERATOR_VERSION} {self.split} {sorted(asdict(self.config).items())}"
        return xxhash.xxh3_128_hexdigest(about.encode())

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        """The rows, in blocks of about `rows_per_block`."""
        waiting: list[pa.RecordBatch] = []
        for number in range(-(-self.num_rows // _BLOCK)):
            left = self.num_rows - number * _BLOCK
            waiting.append(_block(self.config, self.split, number, columns).slice(0, left))
            if sum(block.num_rows for block in waiting) >= rows_per_block or left <= _BLOCK:
                yield from pa.Table.from_batches(waiting).combine_chunks().to_batches(rows_per_block)
                waiting = []

    def known_ceiling(self) -> float:
        """The best accuracy reachable on these rows."""
        clean = sum(_num_clean(block["label"], block["topic"]) for block in self.blocks(["label", "topic"]))
        return clean / self.num_rows


def ceiling(labels: pa.Array | pa.ChunkedArray, topics: pa.Array | pa.ChunkedArray) -> float:
    """The best accuracy reachable on some rows: the fraction with an unchanged label."""
    return _num_clean(labels, topics) / len(labels)


def _num_clean(labels: pa.Array | pa.ChunkedArray, topics: pa.Array | pa.ChunkedArray) -> int:
    return int(pc.sum(pc.equal(labels, topics)).as_py())


def _block(config: HeadlinesConfig, split: str, number: int, columns: Sequence[str]) -> pa.RecordBatch:
    """Block `number` of a split, whole; texts, which cost most, only when asked for."""
    key = [config.seed, (_SPLIT_STREAM[split] << 48) + number]
    random = np.random.Generator(np.random.Philox(key=key))
    names = _lexicon(config.classes)[1]
    topics = random.choice(config.classes, _BLOCK, p=long_tail(config.classes, 0.5))
    changed = random.random(_BLOCK) < config.noise
    others = (topics + random.integers(1, config.classes, _BLOCK)) % config.classes
    made = {"label": names.take(pa.array(np.where(changed, others, topics))), "topic": names.take(pa.array(topics))}
    if "text" in columns:
        made["text"] = _texts(random, topics, config.classes)
    return pa.RecordBatch.from_arrays([made[name] for name in columns], names=list(columns))


def _texts(random: np.random.Generator, topics: NDArray[np.int64], num_classes: int) -> pa.Array:
    """Headlines: a capital first, sometimes capitals throughout, a question, a number in front."""
    ids, lengths = _word_ids(random, topics, num_classes)
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
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
    random: np.random.Generator, topics: NDArray[np.int64], num_classes: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Word ids of every row, and how many words each has: a long-tailed mix with the topic's words in random places."""
    lengths = np.clip(np.rint(random.gamma(9.0, 1.12, _BLOCK) + 0.7), 4, _LONGEST).astype(np.int64)
    total = int(lengths.sum())
    is_word = np.arange(_LONGEST) < lengths[:, None]
    ids = draw_long_tailed(random, total, len(_COMMON), 0.9)
    is_name = _templates()[random.integers(0, _NUM_TEMPLATES, _BLOCK)][is_word]
    names_from = len(_COMMON)
    ids[is_name] = names_from + draw_long_tailed(random, int(is_name.sum()), _NUM_NAMES, 1.05)
    # Random places of each row: the first few take the topic's words, the next one perhaps a stray.
    places = _random_places(random, is_word, _MOST_OWN + 1)
    own = np.minimum(random.integers(2, _MOST_OWN + 1, _BLOCK), lengths - 1)
    stray = random.random(_BLOCK) < 0.25
    nth = np.arange(_MOST_OWN + 1)
    is_own = nth < own[:, None]
    is_stray = (nth == own[:, None]) & stray[:, None]
    topic_from = names_from + _NUM_NAMES
    per_topic = _COMMON_PER_TOPIC + _RARE_PER_TOPIC
    for chosen, shift in ((is_own, 0), (is_stray, 1)):
        own_topics = np.repeat(topics, chosen.sum(axis=1))
        topic = (own_topics + shift * random.integers(1, num_classes, len(own_topics))) % num_classes
        ids[places[chosen]] = topic_from + topic * per_topic + draw_long_tailed(random, len(topic), per_topic, 0.75)
    return ids, lengths


def _random_places(random: np.random.Generator, is_word: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    """`count` places of each row in random order, counted over all rows' words; meaningless beyond a row's words."""
    keys = np.full(is_word.shape, 2.0)
    keys[is_word] = random.random(np.count_nonzero(is_word))
    rows, places = np.arange(len(keys)), np.empty((len(keys), count), dtype=np.int64)
    for nth in range(count):  # a few searches for the least cost a fraction of sorting
        places[:, nth] = keys.argmin(axis=1)
        keys[rows, places[:, nth]] = 2.0
    lengths = is_word.sum(axis=1)
    return places + (np.cumsum(lengths) - lengths)[:, None]


@lru_cache
def _templates() -> NDArray[np.bool_]:
    """Which places of a headline hold a name, template by template."""
    random = np.random.Generator(np.random.Philox(key=[2011, 1]))
    return random.random((_NUM_TEMPLATES, _LONGEST)) < _NAME_SHARE


@lru_cache
def _lexicon(num_classes: int) -> tuple[pa.Array, pa.Array]:
    """All words (common, names, then each topic's own; all again with a capital) and the topics' names."""
    random = np.random.Generator(np.random.Philox(key=[2011, 0]))
    taken = set(_COMMON)
    taken.update(word for words in _TOPICS.values() for word in words.split())
    names = made_up_words(random, _NUM_NAMES, taken, _SYLLABLES)
    topics = list(_TOPICS)[:num_classes]
    topics += [f"topic {word}" for word in made_up_words(random, num_classes - len(topics), taken, _SYLLABLES)]
    own: list[str] = []
    for topic in topics:
        known = _TOPICS.get(topic, "").split()
        own += known + made_up_words(random, _COMMON_PER_TOPIC + _RARE_PER_TOPIC - len(known), taken, _SYLLABLES)
    words = pa.array([*_COMMON, *names, *own])
    return pa.concat_arrays([words, pc.utf8_capitalize(words)]), pa.array(topics)
