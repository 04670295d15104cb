"""Find the columns of a table that look like encodings, whatever they are called.

If an encoding were taken for plain text, it would be hashed together with the names, and the
exposure report would judge an encoding that does not exist. A column counts as an encoding in two
cases. Nearly all of its values have one alphabet and one length of 64 bits or more, and enough of
these bits differ between records. Or they are lists of eight numbers or more on average.

Birthdays (`19840312`), postcodes, phone and card numbers are shorter, or have digits alone; UUIDs
have their own shape. Digests and random ids have the shape of an encoding, but each of their bits
is set in half of the records. An encoding of names has bits that are set more often than others.
Diffusion hides that, so such columns are neither taken nor skipped: the caller asks what they are.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatout.bits.columns import BITS_A_CHARACTER, BitColumn, Form, written_form
from flatout.bits.encodings import Packed
from flatout.bits.settings import KNOWN_BITS
from flatout.data.tables.sources import open_source
from flatout.data.tables.table import Table, are_bytes, decoded, is_list, is_text
from flatout.errors import UserError

_ROWS_READ = 256
_LEAST_BITS = 64
_LEAST_VARYING_BITS = 48  # a counter, padded with zeros, varies in a few bits only
_LEAST_NUMBERS = 8  # on average; dates, phone and card numbers have fewer
_LEAST_FITTING = 0.9  # one odd row decides nothing; the reader names it later
# longer texts are no ids; filters with few bits set have few different characters
_LONGEST_ID_BITS = 512
_LEAST_CHARACTERS = {Form.binary: 2, Form.hex: 14, Form.base64: 48}
"""Different characters that a column as short as ids has at least: bank accounts have two letters
and ten digits."""
_PATTERNS = {
    Form.binary: re.compile(r"(0b)?[01]+"),
    Form.hex: re.compile(r"(0x)?[0-9a-fA-F]+"),
    Form.base64: re.compile(r"[A-Za-z0-9+/]+=*"),
}
# median of squared z-scores; 0.45 where every bit is set in half of the records by chance
_MOST_EVEN = 2.0
_UUID = re.compile(r"[0-9a-fA-F]{12}[1-8][0-9a-fA-F]{3}[89abAB][0-9a-fA-F]{15}")


@dataclass(frozen=True, slots=True)
class LikelyEncoding:
    """A column that looks like an encoding."""

    name: str
    form: Form
    num_bits: int | None  # None for sets of numbers
    looks_random: bool  # as a digest or a random id does, too

    def line(self) -> str:
        """The column and how it reads, in words."""
        reads_as = (
            str(self.form) if self.num_bits is None else f"{self.form} of {self.num_bits:,} bits"
        )
        return f"{self.name} ({reads_as})"


def find_encodings(table: Table, columns: Collection[str]) -> list[LikelyEncoding]:
    """The columns whose first values look like encodings, in the order given.

    It reads one small block of the table.
    """
    times = Counter(table.columns)
    wanted = [name for name in columns if times[name] == 1]
    if not wanted:
        return []
    block = next(iter(table.blocks(wanted, rows_per_block=_ROWS_READ)), None)
    if block is None:
        return []
    recognised = (recognise(name, block.column(name).slice(0, _ROWS_READ)) for name in wanted)
    return [encoding for encoding in recognised if encoding is not None]


def has_encodings(source: str) -> bool:
    """Whether a file has a column of encodings; False if it cannot be read."""
    try:
        table = open_source(source, where="data.source")
        encodings = find_encodings(table, table.columns)
    except UserError:
        return False
    return any(
        not encoding.looks_random or encoding.name.lower() in KNOWN_BITS for encoding in encodings
    )


def recognise(name: str, column: pa.Array) -> LikelyEncoding | None:
    """The encoding that some values of a column look like; None if they look like none."""
    values = decoded(column).drop_null()
    if is_list(values.type):
        return _recognise_lists(name, values)
    if are_bytes(values.type):
        lengths = pc.binary_length(values)
        return _recognise_bits(name, values, Form.packed) if len(lengths.unique()) == 1 else None
    if not is_text(values.type):
        return None
    values = values.cast(pa.large_string()).filter(
        pc.not_equal(pc.utf8_trim_whitespace(values), "")
    )
    texts = values.to_pylist()
    if not texts:
        return None
    form, _ = Counter(map(written_form, texts)).most_common(1)[0]
    if form is Form.numbers:
        return _recognise_written_numbers(name, texts)
    length, _ = Counter(map(len, texts)).most_common(1)[0]
    fitting = [text for text in texts if len(text) == length and _PATTERNS[form].fullmatch(text)]
    if len(fitting) < _LEAST_FITTING * len(texts) or all(map(_UUID.fullmatch, fitting)):
        return None
    if not _has_characters_of(form, fitting):
        return None
    return _recognise_bits(name, pa.array(fitting), form)


def _has_characters_of(form: Form, texts: list[str]) -> bool:
    """Whether texts use enough of an alphabet: ids, account numbers and DNA use few characters."""
    characters = set("".join(texts))
    if form is Form.base64:
        kinds = (string.ascii_uppercase, string.ascii_lowercase, string.digits)
        if not all(characters.intersection(kind) for kind in kinds):
            return False
    num_bits = len(texts[0]) * BITS_A_CHARACTER[form]
    return num_bits > _LONGEST_ID_BITS or len(characters) >= _LEAST_CHARACTERS[form]


def _recognise_lists(name: str, lists: pa.Array) -> LikelyEncoding | None:
    numbers = lists.flatten()
    kind = numbers.type
    is_whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    if not is_whole or numbers.null_count or not len(numbers):
        return None
    lengths = pc.list_value_length(lists)
    has_bytes = pa.types.is_boolean(kind) or pa.types.is_uint8(kind)
    if has_bytes or set(pc.min_max(numbers).as_py().values()) <= {0, 1}:
        return _recognise_bits(name, lists, Form.packed) if len(lengths.unique()) == 1 else None
    if pc.mean(lengths).as_py() < _LEAST_NUMBERS:
        return None
    return LikelyEncoding(name, Form.numbers, num_bits=None, looks_random=False)


def _recognise_written_numbers(name: str, texts: list[str]) -> LikelyEncoding | None:
    is_set = [text in ("[]", "{}", "()") or written_form(text) is Form.numbers for text in texts]
    counts = [len(re.findall(r"\d+", text)) for text in texts]
    if np.mean(is_set) < _LEAST_FITTING or np.mean(counts) < _LEAST_NUMBERS:
        return None
    return LikelyEncoding(name, Form.numbers, num_bits=None, looks_random=False)


def _recognise_bits(name: str, values: pa.Array, form: Form) -> LikelyEncoding | None:
    packed = BitColumn(name, "", form).read(values, np.arange(len(values)))
    assert not isinstance(packed, tuple)  # the form is one of bits
    # Records [1 0 1 0] and [1 1 1 0] have one bit that varies: the second.
    distinct = np.unique(packed, axis=0)  # an id of many rows is one observation
    bits = np.unpackbits(distinct, axis=1)
    varying = int((bits != bits[:1]).any(axis=0).sum())
    if bits.shape[1] < _LEAST_BITS or varying < _LEAST_VARYING_BITS:
        return None
    return LikelyEncoding(name, form, bits.shape[1], looks_random=_is_even(bits))


def _is_even(bits: Packed) -> bool:
    """Whether `[N, bits]` zeros and ones look as if coins had been thrown for them.

    The squared z-score of a fair coin has a median of 0.45: of 256 records, a bit set in 133 has
    0.39, one set in 160 has 16. The median is used because some bits of an id never change, such as
    those of its version.
    """
    shares = bits.mean(axis=0)
    squared_scores = (shares - 0.5) ** 2 * 4 * len(bits)
    return bool(np.median(squared_scores) < _MOST_EVEN)
