"""What the bytes of many texts tell at once: how many words, which odd characters, and which texts
are alike.

Words and likeness are arithmetic over whole runs of bytes, which numpy does sixteen and more at a
time. Two texts are alike when their letters and digits are the same, whatever their case, blanks
and marks.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from flatout.data.tables.splits import bytes_of, hash_bytes

_ESCAPED = r"\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}"
_ENTITIES = r"&(amp|lt|gt|quot|nbsp|apos|#[0-9]{2,6}|#x[0-9a-fA-F]{2,5});"
_CAPITAL_TO_SMALL = 32
Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]
ODDITIES = {
    "control": r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]",
    "escapes": _ESCAPED,
    "entities": _ENTITIES,
    "invisible": "[\u200b\u200e\u200f\u2060\ufeff\u202a-\u202e]",
    "replaced": "\ufffd",
    "private": "[\ue000-\uf8ff]",
    "mojibake": "Ã[\u0080-\u00bf]|â€|Â[\u00a0-\u00bf]",
}


@dataclass(frozen=True, slots=True)
class Characters:
    """What the bytes of a block of texts tell."""

    exact: NDArray[np.uint64]  # a hash of each text, which decides whether two are the same
    alike: NDArray[np.uint64]  # a hash of each text's letters and digits, small ones for capitals
    words: NDArray[np.int64]  # words and marks of each text, each run of marks one
    odd: dict[str, NDArray[np.int64]]  # rows that have something odd, by what it is


def read_characters(texts: pa.Array) -> Characters:
    """All of it, for a block of texts without nulls."""
    data, offsets = bytes_of(texts)
    is_letter = _letters(data)
    words = _count(_word_starts(data, is_letter, offsets), offsets)
    alike = _alike(data, offsets, is_letter)
    if len(rows := _rows_with_other_capitals(data, offsets)):
        small, small_offsets = bytes_of(pc.utf8_lower(texts.take(pa.array(rows))))
        alike[rows] = _alike(small, small_offsets, _letters(small))
    return Characters(_identify(texts), alike, words, _odd_rows(texts))


def word_hashes(texts: pa.Array) -> NDArray[np.uint64]:
    """A hash of every word and mark of some texts."""
    data, offsets = bytes_of(texts)
    starts = _word_starts(data, _letters(data), offsets)
    is_ink = _ink(data)
    kept = np.compress(is_ink, data)
    return hash_bytes(kept, np.append(np.flatnonzero(np.compress(is_ink, starts)), len(kept)))


def _within(data: Bytes, low: int, high: int) -> Mask:
    return data == np.uint8(low) if low == high else (data - np.uint8(low)) <= np.uint8(high - low)


def _letters(data: Bytes) -> Mask:
    """Letters, digits, the underscore, and whatever is beyond ASCII."""
    is_letter = _within(data | np.uint8(_CAPITAL_TO_SMALL), ord("a"), ord("z")) | _within(
        data, ord("0"), ord("9")
    )
    return is_letter | (data >= np.uint8(128)) | (data == np.uint8(ord("_")))


def _rows_with_other_capitals(data: Bytes, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows with letters beyond ASCII that may be capitals: À to Þ, and other alphabets."""
    if not len(data) or data.max() < 0xC3:
        return np.empty(0, np.int64)
    may_be = _within(data, 0xC4, 0xDF) | _within(data, 0xE1, 0xEF) & (data != 0xE2) | (data >= 0xF0)
    may_be[:-1] |= (data[:-1] == 0xC3) & _within(data[1:], 0x80, 0x9E)
    return np.unique(np.searchsorted(offsets, np.flatnonzero(may_be), "right") - 1)


def _ink(data: Bytes) -> Mask:
    """Whatever is no white space."""
    return ~((data == ord(" ")) | _within(data, 9, 13) | _within(data, 28, 31))


def _word_starts(data: Bytes, is_letter: Mask, offsets: NDArray[np.int64]) -> Mask:
    """Where a run of letters or of marks begins, as tokenizers part words."""
    is_ink = _ink(data)
    is_start = is_ink.copy()
    is_start[1:] &= (is_letter[1:] != is_letter[:-1]) | ~is_ink[:-1]
    starts = offsets[:-1][np.diff(offsets) > 0]
    is_start[starts] = is_ink[starts]
    return is_start


def _count(mask: Mask, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.zeros(len(offsets) - 1, np.int64)
    filled = np.diff(offsets) > 0
    counts[filled] = np.add.reduceat(mask.view(np.uint8), offsets[:-1][filled], dtype=np.int32)
    return counts


def _identify(texts: pa.Array) -> NDArray[np.uint64]:
    """A hash of each text by which texts are told apart."""
    # Splits go by the sums of `hash_bytes`, and stay as they are. But sums modulo 2^64 are equal
    # for a word of Thue and Morse and the same with its letters exchanged, which are two texts.
    hashes = map(xxhash.xxh3_64_intdigest, texts.cast(pa.large_binary()).to_pylist())
    return np.fromiter(hashes, np.uint64, len(texts))


def _alike(data: Bytes, offsets: NDArray[np.int64], is_letter: Mask) -> NDArray[np.uint64]:
    kept = np.compress(is_letter, data)
    kept += _within(kept, ord("A"), ord("Z")).view(np.uint8) * np.uint8(_CAPITAL_TO_SMALL)
    counts = _count(is_letter, offsets)
    hashes = hash_bytes(kept, np.append(0, np.cumsum(counts)))
    if len(bare := np.flatnonzero(counts == 0)):  # only the same marks are alike
        lengths = np.diff(offsets)
        marks = np.compress(np.repeat(counts == 0, lengths), data)
        hashes[bare] = hash_bytes(marks, np.append(0, np.cumsum(lengths[bare])))
    return hashes


def _odd_rows(texts: pa.Array) -> dict[str, NDArray[np.int64]]:
    rows = _rows_with("|".join(ODDITIES.values()), texts)  # one pass over all texts: most have none
    few = texts.take(pa.array(rows))
    found = {name: rows[_rows_with(pattern, few)] for name, pattern in ODDITIES.items()}
    return {name: rows for name, rows in found.items() if len(rows)}


def _rows_with(pattern: str, texts: pa.Array) -> NDArray[np.int64]:
    return np.flatnonzero(pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False))


def decode_escapes(texts: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """Texts with `\\u2019` and `&amp;` as the characters they stand for, and which rows had any."""
    is_odd = pc.fill_null(pc.match_substring_regex(texts, f"{_ESCAPED}|{_ENTITIES}"), False)
    rows = np.flatnonzero(is_odd.to_numpy(zero_copy_only=False))
    if not len(rows):
        return texts, rows
    plain = [
        re.sub(f"(?:{_ESCAPED})+", _characters, text)
        for text in texts.take(pa.array(rows)).to_pylist()
    ]
    decoded = pa.array(map(html.unescape, plain), pa.large_string())
    return pc.replace_with_mask(texts.cast(pa.large_string()), is_odd, decoded), rows


def _characters(found: re.Match[str]) -> str:
    """Pairs of surrogates become one character; half of a pair stays as it was written."""
    codes = re.findall(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})", found.group())
    joined = "".join(chr(int(four or two, 16)) for four, two in codes)
    try:
        return joined.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return found.group()
