"""What the bytes of many texts tell at once: how many words, which odd characters, and which texts are alike.

One look-up table sorts every byte into blank, letter or mark and raises a flag where something odd may begin; only
blocks with a flag are then searched for what it is. Two texts are alike when their letters and digits are the same,
whatever their case, blanks and marks.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.splits import bytes_of, hash_bytes

_BLANK, _LETTER, _MARK = 0, 1, 2
_KIND = 3
_BEYOND_ASCII, _CONTROL, _ESCAPE, _ENTITY, _INVISIBLE, _BROKEN = (1 << bit for bit in range(2, 8))
_ESCAPED = r"\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}"
_ENTITIES = r"&(amp|lt|gt|quot|nbsp|apos|#[0-9]{2,6}|#x[0-9a-fA-F]{2,5});"


@dataclass(frozen=True, slots=True)
class Oddity:
    """Something odd in a text: the flag that may hide it, bytes that it cannot do without, and its pattern."""

    flag: int
    bytes: tuple[bytes, ...]
    pattern: str


def _encoded(*characters: str) -> tuple[bytes, ...]:
    return tuple(character.encode() for character in characters)


ODDITIES = {
    "control": Oddity(_CONTROL, (b"",), "[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f]"),
    "escapes": Oddity(_ESCAPE, (b"\\u", b"\\x"), _ESCAPED),
    "entities": Oddity(_ENTITY, (b"&",), _ENTITIES),
    "invisible": Oddity(
        _INVISIBLE, (b"\xe2\x80", *_encoded("\u2060", "\ufeff")), "[\u200b\u200e\u200f\u2060\ufeff\u202a-\u202e]"
    ),
    "replaced": Oddity(_INVISIBLE, _encoded("\ufffd"), "\ufffd"),
    "private": Oddity(_INVISIBLE, (b"\xee", b"\xef\xa0", b"\xef\xa1", b"\xef\xa2", b"\xef\xa3"), "[\ue000-\uf8ff]"),
    "mojibake": Oddity(_BROKEN, _encoded("Ã", "Â", "â€"), "Ã[\u0080-\u00bf]|â€|Â[\u00a0-\u00bf]"),
}


def _table() -> NDArray[np.uint8]:
    """Kind and flags of each byte."""
    kinds = np.full(256, _LETTER, np.uint8)
    for byte in range(128):
        character = chr(byte)
        kinds[byte] = _BLANK if character.isspace() else _LETTER if character.isalnum() or byte == 95 else _MARK
    kinds[:9] = kinds[14:28] = kinds[127] = _MARK
    flags = {_ESCAPE: b"\\", _ENTITY: b"&", _INVISIBLE: b"\xe2\xee\xef", _BROKEN: b"\xc2\xc3"}
    for flag, letters in flags.items():
        kinds[list(letters)] |= flag
    kinds[[*range(9), 11, 12, *range(14, 32), 127]] |= _CONTROL
    kinds[128:] |= _BEYOND_ASCII
    return kinds


_KINDS = _table()
_LOWER = np.arange(256, dtype=np.uint8)
_LOWER[65:91] += 32


@dataclass(frozen=True, slots=True)
class Characters:
    """What the bytes of a block of texts tell."""

    exact: NDArray[np.uint64]
    """A hash of each text."""
    alike: NDArray[np.uint64]
    """A hash of each text's letters and digits, small ones for capitals."""
    words: NDArray[np.int64]
    """Words and marks of each text, each run of marks one."""
    odd: dict[str, NDArray[np.int64]]
    """Rows that have something odd, by what it is."""


def read_characters(texts: pa.Array) -> Characters:
    """All of it, for a block of texts without nulls."""
    data, offsets = bytes_of(texts)
    begin = int(offsets[0])
    data, offsets = data[begin : int(offsets[-1])], offsets - begin
    exact = hash_bytes(data, offsets)
    found = _KINDS[data]
    flags = int(np.bitwise_or.reduce(found)) if len(found) else 0
    kinds = np.bitwise_and(found, np.uint8(_KIND))
    words = _words(kinds, offsets)
    odd = _odd_rows(texts, data, flags)
    if flags & _BEYOND_ASCII:
        data, offsets = bytes_of(pc.utf8_lower(texts))
        begin = int(offsets[0])
        data, offsets = data[begin : int(offsets[-1])], offsets - begin
        kinds = np.bitwise_and(_KINDS[data], np.uint8(_KIND))
    return Characters(exact, _alike(data, offsets, kinds, exact), words, odd)


def _words(kinds: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    is_start = kinds != _BLANK
    is_start[1:] &= (kinds[1:] != kinds[:-1]) | _begins(offsets, len(kinds))[1:]
    return np.diff(np.searchsorted(np.flatnonzero(is_start), offsets))


def _begins(offsets: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    begins = np.zeros(length + 1, np.bool_)
    begins[offsets] = True
    return begins[:-1]


def _alike(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], kinds: NDArray[np.uint8], exact: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    is_kept = kinds == _LETTER
    kept = _LOWER[data[is_kept]]
    ends = np.searchsorted(np.flatnonzero(is_kept), offsets)
    hashes = hash_bytes(kept, ends)
    return np.where(np.diff(ends) > 0, hashes, exact)  # nothing but marks: only the same marks are alike


def _odd_rows(texts: pa.Array, data: NDArray[np.uint8], flags: int) -> dict[str, NDArray[np.int64]]:
    """Rows with something odd; a pattern is only tried where its bytes are found."""
    found = {}
    written = data.tobytes() if flags >= _CONTROL else b""
    for name, oddity in ODDITIES.items():
        if flags & oddity.flag and any(needed in written for needed in oddity.bytes):
            rows = np.flatnonzero(pc.match_substring_regex(texts, oddity.pattern).to_numpy(zero_copy_only=False))
            if len(rows):
                found[name] = rows
    return found


def decode_escapes(texts: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """Texts with `\\u2019` and `&amp;` as the characters they stand for, and which rows had any."""
    pattern = f"{_ESCAPED}|{_ENTITIES}"
    is_odd = pc.fill_null(pc.match_substring_regex(texts, pattern), False)
    rows = np.flatnonzero(is_odd.to_numpy(zero_copy_only=False))
    if not len(rows):
        return texts, rows
    decoded = pa.array([_decoded(text) for text in texts.take(pa.array(rows)).to_pylist()], pa.large_string())
    return pc.replace_with_mask(texts.cast(pa.large_string()), is_odd, decoded), rows


def _decoded(text: str) -> str:
    """Pairs of surrogates become one character; half of a pair stays as it was written."""
    plain = re.sub(f"(?:{_ESCAPED})+", _characters, text)
    return html.unescape(plain)


def _characters(found: re.Match[str]) -> str:
    codes = re.findall(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})", found.group())
    joined = "".join(chr(int(four or two, 16)) for four, two in codes)
    try:
        return joined.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return found.group()
