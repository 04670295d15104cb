"""The built-in people: any number of records with a name, a birthday and a number.

They are the same on every machine. Common names come from a short list of our own, the rest from
syllables. Both follow a long-tailed frequency law: a few names are on every page, and most are
rare. Rows are made in blocks of a fixed size, each from its own random stream. On request some
names carry a typing error: a letter replaced, left out, or swapped with its neighbour.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from flatout.data.samples.made_up import WordMaker, draw_long_tailed
from flatout.data.samples.settings import SampleConfig
from flatout.data.tables.table import Table
from flatout.errors import LARGEST_SEED, setting

GENERATOR_VERSION = 1
FIELDS = ("GivenName", "Surname", "Birthday")
_BLOCK = 16_384  # rows that are made from one random stream
_FIRST_UID = 100_001
_NUM_GIVEN = 1_500
_NUM_SURNAMES = 12_000
# How fast names become rare: the nearer to 1, the more rows have one of the commonest names.
_COMMON_GIVEN = 0.85
_COMMON_SURNAMES = 0.75

_WRITTEN = tomllib.loads(Path(__file__).with_name("people.toml").read_text(encoding="utf-8"))
_GIVEN = _WRITTEN["given"].split()
_SURNAMES = _WRITTEN["surnames"].split()
_SYLLABLES = _WRITTEN["syllables"]
_YOUNGEST = 2006  # the last year of birth, and how many years there are
_YEARS = 72
_DAYS_OF_MONTH = np.array([31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])


@dataclass(kw_only=True, slots=True)
class PeopleConfig(SampleConfig):
    """How many people are made up, and how well they are typed."""

    rows: int = setting(20_000, "People.", least=1)
    typos: float = setting(
        0.0, "Share of records with one typing error in the name.", least=0, most=1
    )
    seed: int = setting(11, "Another seed, other people.", least=0, most=LARGEST_SEED)


class PeopleTable(Table):
    """The people of one seed, read like any other table."""

    name = "sample:people"
    columns: Sequence[str] = (*FIELDS, "uid")

    def __init__(self, config: PeopleConfig) -> None:
        self.config = config
        self.num_rows = config.rows

    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(
            f"people {GENERATOR_VERSION} {sorted(asdict(self.config).items())}".encode()
        )

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        for start in range(0, self.num_rows, _BLOCK):
            people = _make_people(self.config, start // _BLOCK)
            wanted = people.slice(0, self.num_rows - start).select(list(columns))
            yield from pa.Table.from_batches([wanted]).to_batches(rows_per_block)


def _make_people(config: PeopleConfig, block: int) -> pa.RecordBatch:
    """The people of one block; each block has a random stream of its own."""
    random = np.random.Generator(np.random.Philox(key=[config.seed, block]))
    all_given, all_surnames = _make_names()
    given_names = _draw_names(random, all_given, _COMMON_GIVEN)
    surnames = _draw_names(random, all_surnames, _COMMON_SURNAMES)
    birthdays = _draw_birthdays(random)
    if config.typos:
        has_typo = random.random(_BLOCK) < config.typos
        in_surname = random.random(_BLOCK) < 0.5
        given_names = _mistype(given_names, has_typo & ~in_surname, random)
        surnames = _mistype(surnames, has_typo & in_surname, random)
    uids = pa.array(np.arange(_BLOCK) + block * _BLOCK + _FIRST_UID).cast(pa.string())
    return pa.RecordBatch.from_arrays(
        [given_names, surnames, birthdays, uids], names=list(PeopleTable.columns)
    )


def _draw_names(random: np.random.Generator, names: pa.Array, common: float) -> pa.Array:
    return names.take(pa.array(draw_long_tailed(random, _BLOCK, len(names), common)))


def _draw_birthdays(random: np.random.Generator) -> pa.Array:
    """Month, day and year, as M/D/YYYY."""
    months = random.integers(0, 12, _BLOCK)
    days = (random.random(_BLOCK) * _DAYS_OF_MONTH[months]).astype(np.int64)
    years_before = (random.beta(1.4, 1.6, _BLOCK) * _YEARS).astype(np.int64)
    numbers = (months + 1, days + 1, _YOUNGEST - years_before)
    texts = [pa.array(parts).cast(pa.string()) for parts in numbers]
    return pc.binary_join_element_wise(*texts, "/")


def _mistype(names: pa.Array, chosen: NDArray[np.bool_], random: np.random.Generator) -> pa.Array:
    """The names, those that are chosen with one typing error each."""
    # All letters lie in one array, and each kind of error is made for all names at once. Mary with
    # two letters swapped, Bob with one left out:
    #
    #     letters    M a r y B o b     offsets [0, 4, 7]
    #     swapped    M a y r B o b
    #     kept       x x x x x . x     letters left out before each offset [0, 0, 1]
    #     result     M a y r B b       offsets [0, 4, 6]
    _, offset_buffer, letter_buffer = names.buffers()
    own = slice(names.offset, names.offset + len(names) + 1)
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)[own]
    letters = np.frombuffer(letter_buffer, dtype=np.uint8)[: offsets[-1]].copy()
    rows = np.flatnonzero(chosen)
    lengths = np.diff(offsets)[rows]
    kind = random.integers(0, 3, len(rows))
    # The first letter of a name stays: people get it right. The last one stays too, so that any
    # chosen letter has another behind it to swap with.
    letter_of_name = 1 + (random.random(len(rows)) * (lengths - 2)).astype(np.int32)
    place = offsets[rows] + letter_of_name
    replaced, swapped, left_out = (place[kind == number] for number in range(3))
    letters[replaced] = random.integers(ord("a"), ord("z") + 1, len(replaced))
    first = letters[swapped].copy()
    letters[swapped] = letters[swapped + 1]
    letters[swapped + 1] = first
    is_kept = np.ones(len(letters), dtype=np.bool_)
    is_kept[left_out] = False
    num_left_out_before = np.append(0, np.cumsum(~is_kept))[offsets]
    new_offsets = (offsets - num_left_out_before).astype(np.int32)
    buffers = [None, pa.py_buffer(new_offsets), pa.py_buffer(letters[is_kept].tobytes())]
    return pa.Array.from_buffers(pa.string(), len(names), buffers)


@lru_cache
def _make_names() -> tuple[pa.Array, pa.Array]:
    """Given names and surnames, the commonest first."""
    random = np.random.Generator(np.random.Philox(key=[2009, 0]))
    maker = WordMaker(random, [*_GIVEN, *_SURNAMES], _SYLLABLES)
    given = _GIVEN + maker.make_words(_NUM_GIVEN - len(_GIVEN))
    surnames = _SURNAMES + maker.make_words(_NUM_SURNAMES - len(_SURNAMES))
    return pc.utf8_capitalize(pa.array(given)), pc.utf8_capitalize(pa.array(surnames))
