"""Count words, find odd characters, and hash texts so that equal and like texts are found.

`read_characters` does all of it for a block of texts. The texts lie in one array of bytes, one
behind the other. Words and likeness are arithmetic over that array: numpy handles sixteen and more
bytes at a time. Two texts are alike when their letters and digits are the same, whatever their
case, blanks and marks. Open this file to add an oddity, or to change what counts as a word.
"""

# Two texts going through, `Hi you!` and `hi, YOU`:
#
#     data       H i _ y o u ! h i , _ Y O U    offsets 0, 7, 14  (_ is a blank)
#     is_letter  1 1 0 1 1 1 0 1 1 0 0 1 1 1
#     starts     1 0 0 1 0 0 1 1 0 1 0 1 0 0    words 3 and 3: each run of marks is a word
#     alike      h i   y o u   h i     y o u    equal hashes: the texts are alike

from __future__ import annotations

import html
import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from flatout.data.ragged import row_bounds
from flatout.data.tables.splits import bytes_of, hash_bytes

_ESCAPED = r"\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}"
_ENTITIES = r"&(amp|lt|gt|quot|nbsp|apos|#[0-9]{2,6}|#x[0-9a-fA-F]{2,5});"
_CASE_BIT = np.uint8(32)  # the bit that tells "a" (97) from "A" (65)
Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]
# Characters that rarely stand in a text on purpose. A row keeps a bit for each, in this order.
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
    """What `read_characters` found in a block of texts."""

    exact: NDArray[np.uint64]  # a hash of each text; equal texts have equal hashes
    alike: NDArray[np.uint64]  # a hash of each text's letters and digits in lower case
    words: NDArray[np.int64]  # words and marks of each text, each run of marks one
    odd: dict[str, NDArray[np.int64]]  # rows that have each of `ODDITIES`, where any have


def read_characters(texts: pa.Array) -> Characters:
    """Count words, hash texts and find odd characters in a block of texts without nulls."""
    data, offsets = bytes_of(texts)
    is_letter = _find_letters(data)
    words = _count(_find_word_starts(data, is_letter, offsets), offsets)
    alike = _hash_letters(data, offsets, is_letter)
    # A bit lowers ASCII capitals. The few rows with other capitals take arrow's slower way.
    rows = _rows_with_other_capitals(data, offsets)
    if len(rows):
        lowered = pc.utf8_lower(texts.take(pa.array(rows)))
        data, offsets = bytes_of(lowered)
        alike[rows] = _hash_letters(data, offsets, _find_letters(data))
    return Characters(_hash_texts_exactly(texts), alike, words, _find_odd_rows(texts))


def hash_words(texts: pa.Array) -> NDArray[np.uint64]:
    """A hash of every word and mark, text after text."""
    # "I am." without its blank is "Iam."; its words begin at 0, 1 and 3, and the last ends at 4.
    data, offsets = bytes_of(texts)
    is_start = _find_word_starts(data, _find_letters(data), offsets)
    is_ink = _find_ink(data)
    ink = np.compress(is_ink, data)
    begins = np.flatnonzero(np.compress(is_ink, is_start))
    return hash_bytes(ink, np.append(begins, len(ink)))


def _within(data: Bytes, low: int, high: int) -> Mask:
    """Which bytes lie between two, both included.

    One comparison is enough: a byte below `low` wraps round to a large number. From "a" (97) to
    "z" (122): "c" → 99 - 97 = 2 ≤ 25, "A" → 65 - 97 + 256 = 224 > 25.
    """
    return data - np.uint8(low) <= np.uint8(high - low)


def _find_letters(data: Bytes) -> Mask:
    """Letters, digits, the underscore, and whatever is beyond ASCII."""
    is_letter = _within(data | _CASE_BIT, ord("a"), ord("z"))
    is_digit = _within(data, ord("0"), ord("9"))
    is_beyond_ascii = data >= 128
    return is_letter | is_digit | is_beyond_ascii | (data == ord("_"))


def _rows_with_other_capitals(data: Bytes, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows with letters beyond ASCII that may be capitals: À to Þ, and other alphabets."""
    if not len(data) or data.max() < 0xC3:
        return np.empty(0, np.int64)
    # First bytes of UTF-8: C4 to DF begin letters with marks, Greek, Cyrillic and others, E1 to EF
    # the alphabets of three bytes. E2 is left out: it begins dashes and quotation marks.
    may_be = _within(data, 0xC4, 0xDF)
    may_be |= _within(data, 0xE1, 0xEF) & (data != 0xE2)
    may_be |= data >= 0xF0
    # C3 begins À to ÿ; its capitals are those with a second byte up to 9E.
    may_be[:-1] |= (data[:-1] == 0xC3) & _within(data[1:], 0x80, 0x9E)
    # With rows that begin at 0, 5 and 9, a capital at 6 is one of row 1.
    places = np.flatnonzero(may_be)
    return np.unique(np.searchsorted(offsets, places, "right") - 1)


def _find_ink(data: Bytes) -> Mask:
    """Which bytes are no white space."""
    return ~((data == ord(" ")) | _within(data, 9, 13) | _within(data, 28, 31))


def _find_word_starts(data: Bytes, is_letter: Mask, offsets: NDArray[np.int64]) -> Mask:
    """Where a run of letters or of marks begins, as tokenizers part words."""
    is_ink = _find_ink(data)
    is_start = is_ink.copy()
    is_start[1:] &= (is_letter[1:] != is_letter[:-1]) | ~is_ink[:-1]
    # A text's first byte begins a word, even where the text before it ended in one.
    first_bytes = offsets[:-1][np.diff(offsets) > 0]
    is_start[first_bytes] = is_ink[first_bytes]
    return is_start


def _count(mask: Mask, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many bytes of each text the mask has."""
    counts = np.zeros(len(offsets) - 1, np.int64)
    # `reduceat` of an empty run gives the byte at its start, not 0.
    is_filled = np.diff(offsets) > 0
    begins = offsets[:-1][is_filled]
    counts[is_filled] = np.add.reduceat(mask.view(np.uint8), begins, dtype=np.int32)
    return counts


def _hash_texts_exactly(texts: pa.Array) -> NDArray[np.uint64]:
    """A hash of each text, which decides whether two are the same."""
    # Splits go by the sums of `hash_bytes`, and stay as they are. But sums modulo 2^64 are equal
    # for a word of Thue and Morse and the same with its letters exchanged, which are two texts.
    hashes = map(xxhash.xxh3_64_intdigest, texts.cast(pa.large_binary()).to_pylist())
    return np.fromiter(hashes, np.uint64, len(texts))


def _hash_letters(data: Bytes, offsets: NDArray[np.int64], is_letter: Mask) -> NDArray[np.uint64]:
    """A hash of each text's letters and digits in lower case; of its marks if it has no others."""
    letters = np.compress(is_letter, data)
    letters += _within(letters, ord("A"), ord("Z")) * _CASE_BIT
    counts = _count(is_letter, offsets)
    hashes = hash_bytes(letters, row_bounds(counts))
    # Without this ":-)" and "!!!" would be alike: both have no letters.
    is_bare = counts == 0
    if is_bare.any():
        lengths = np.diff(offsets)
        marks = np.compress(np.repeat(is_bare, lengths), data)
        hashes[is_bare] = hash_bytes(marks, row_bounds(lengths[is_bare]))
    return hashes


def _find_odd_rows(texts: pa.Array) -> dict[str, NDArray[np.int64]]:
    """The rows that have each oddity."""
    # One pass over all texts for all oddities: most texts have none.
    rows = _rows_with("|".join(ODDITIES.values()), texts)
    odd_texts = texts.take(pa.array(rows))
    rows_of_oddity = {}
    for name, pattern in ODDITIES.items():
        places = _rows_with(pattern, odd_texts)
        if len(places):
            rows_of_oddity[name] = rows[places]
    return rows_of_oddity


def _rows_with(pattern: str, texts: pa.Array) -> NDArray[np.int64]:
    return np.flatnonzero(pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False))


def decode_escapes(texts: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """Texts with `\\u2019` and `&amp;` as the characters they stand for, and which rows had any."""
    is_odd = pc.fill_null(pc.match_substring_regex(texts, f"{_ESCAPED}|{_ENTITIES}"), False)
    rows = np.flatnonzero(is_odd.to_numpy(zero_copy_only=False))
    if not len(rows):
        return texts, rows
    # A run of escapes is decoded as one: two of them may be the halves of one character.
    decoded = []
    for text in texts.take(pa.array(rows)).to_pylist():
        without_escapes = re.sub(f"(?:{_ESCAPED})+", _decode_run, text)
        decoded.append(html.unescape(without_escapes))
    replacements = pa.array(decoded, pa.large_string())
    return pc.replace_with_mask(texts.cast(pa.large_string()), is_odd, replacements), rows


def _decode_run(escapes: re.Match[str]) -> str:
    """The characters of a run of escapes: `\\ud83d\\ude00` → 😀.

    A run with half of such a pair stays as it was written.
    """
    codes = re.findall(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})", escapes.group())
    joined = "".join(chr(int(four or two, 16)) for four, two in codes)
    try:
        return joined.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return escapes.group()
