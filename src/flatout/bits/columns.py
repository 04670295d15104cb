"""Encodings as tables hold them: bit strings (0 and 1, hexadecimal, base64), bytes, lists and sets
of numbers.

A column is turned into packed bits a block at a time, by looking its bytes up in a table. The form
is that of most of the first values and must hold for all; what does not fit is named by row and
character. `encode_table` writes such a column.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.bits.encodings import EncodingConfig, EncodingKind, Packed, Sets
from flatout.bits.grams import join_fields
from flatout.data.problem import Problem
from flatout.data.ragged import row_bounds
from flatout.data.tables.splits import bytes_of
from flatout.data.tables.table import (
    Table,
    are_bytes,
    decoded,
    is_list,
    is_missing,
    is_plain,
    is_text,
    mask_of,
)
from flatout.errors import UserError, require

_FOREIGN = 255
_LONGEST_SHOWN = 24
_LOOKED_AT = 100
_CORRECT = "Correct this row."
_NAME_FORM = "Correct this row, or name the form of all rows: data.form=hex."
_NAME_IT = "Name the column of encodings: data.bits=COLUMN."
UIDS = ("uid", "id")  # names of a column that names each record, where the settings name none
COLUMN = {
    EncodingKind.bloom: "bloomfilter",
    EncodingKind.minhash: "minhash",
    EncodingKind.twostep: "twostephash",
}
"""Name of the column that each encoding is written to."""
Form = StrEnum("Form", "auto binary hex base64 packed numbers")
BITS_A_CHARACTER = {Form.binary: 1, Form.hex: 4, Form.base64: 6}
# of programming languages; left out where all rows have it
_PREFIXES = {Form.binary: "0b", Form.hex: "0x"}
_DIGITS = {
    Form.binary: b"01",
    Form.hex: b"0123456789abcdef",
    Form.base64: b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/",
}
_TABLES = {form: np.full(256, _FOREIGN, dtype=np.uint8) for form in _DIGITS}
for _form, _digits in _DIGITS.items():
    _TABLES[_form][list(_digits)] = np.arange(len(_digits))
_TABLES[Form.hex][list(b"ABCDEF")] = np.arange(10, 16)


class BitColumn:
    """Reads one column of encodings, block by block."""

    def __init__(self, name: str, source: str, form: Form = Form.auto) -> None:
        self.name = name
        self.source = source
        self.form = form
        # bits of every record, known after the first block; None for sets of numbers
        self.num_bits: int | None = None
        self.is_of_run = False  # whether form and bits are those of a trained run, which answers
        self._width = 0  # characters of every record of a text, known after the first block

    def read(self, column: pa.Array, rows: NDArray[np.int64]) -> Packed | Sets:
        """`[N, bits / 8]` packed bits, or sets of numbers.

        `rows`: the numbers of the records in the source, from 0, for messages.
        """
        if column.null_count:
            first = int(mask_of(pc.is_null(column)).argmax())
            self._fail(rows[first], "no value")
        if is_list(column.type) and column.flatten().null_count:
            self._fail(rows[0], "a list without one of its values, in this row or below")
        if self.form is Form.auto:
            self.form = self._form_of(column)
        try:
            if self.form is Form.numbers:
                return self._numbers(column, rows)
            if self.form is Form.packed:
                return self._pack_values(column, rows)
            return self._characters(column.cast(pa.large_string()), rows)
        except pa.ArrowException as error:
            held = (
                error
                if isinstance(error, pa.ArrowInvalid)
                else f"{column.type}, not the form {self.form}"
            )
            raise UserError(
                "data.bits",
                f"column {self.name!r} of {self.source} holds {held}",
                hint="Name another column (data.bits=COLUMN), or the form (data.form=hex).",
            ) from None

    def _form_of(self, column: pa.Array) -> Form:
        kind = column.type
        if is_list(kind):
            values = column.flatten()
            are_bits = pa.types.is_boolean(values.type) or pa.types.is_uint8(values.type)
            # A set of numbers would hold each number once, so lists of zeros and ones are bits.
            if not are_bits and pa.types.is_integer(values.type) and len(values):
                are_bits = set(pc.min_max(values).as_py().values()) <= {0, 1}
            return Form.packed if are_bits else Form.numbers
        if are_bytes(kind):
            return Form.packed
        require(
            is_text(kind),
            "data.bits",
            f"column {self.name!r} of {self.source} holds {kind}",
            allowed="texts of 0 and 1, hexadecimal or base64 texts, bytes, lists",
            hint=_NAME_IT,
        )
        # The commonest form of many rows is taken: one odd row decides nothing.
        forms = Counter(map(written_form, column.slice(0, _LOOKED_AT).to_pylist()))
        return max(forms, key=forms.__getitem__, default=Form.binary)

    def _characters(self, texts: pa.Array, rows: NDArray[np.int64]) -> Packed:
        if self.form is Form.base64:
            texts = pc.utf8_rtrim(texts, "=")
        texts = self._without_prefix(texts)
        lengths = pc.binary_length(texts).to_numpy(zero_copy_only=False)
        # All rows must be as long as those before; in the first block, as long as most of them. A
        # store's bits are whole bytes. Binary and hex digits are filled up to them; of base64,
        # digits that do not fill a byte are left out.
        bits = BITS_A_CHARACTER[self.form]
        filled_up = 7 if bits < 6 else 0
        all_lengths = lengths.tolist()
        fitting = [
            length
            for length in all_lengths
            if self.num_bits == (length * bits + filled_up) // 8 * 8
        ]
        width = self._width or Counter(fitting or all_lengths).most_common(1)[0][0]
        if (odd := np.flatnonzero(lengths != width)).size:
            self._fail(
                rows[odd[0]],
                f"{int(lengths[odd[0]]):,} characters where others have {width:,}",
                _CORRECT,
            )
        if width == 0:
            self._fail(rows[0], "no value", _CORRECT)
        digits = _TABLES[self.form][bytes_of(texts)[0]].reshape(len(texts), width)
        if (foreign := digits == _FOREIGN).any():
            row = int(foreign.any(axis=1).argmax())
            place = int(foreign[row].argmax())
            character = texts[row].as_py()[place : place + 1]
            self._fail(rows[row], f"{character!r} at place {place + 1} is no {self.form} digit")
        self._width = width
        return self._alike(_packed_digits(digits, bits), rows)

    def _without_prefix(self, texts: pa.Array) -> pa.Array:
        prefix = _PREFIXES.get(self.form)
        # "0b" in front of hexadecimal digits are two digits, "0x" and "0b" in front of bits are
        # none.
        if prefix is None or not pc.all(pc.starts_with(texts, prefix)).as_py():
            return texts
        return pc.utf8_slice_codeunits(texts, len(prefix))

    def _pack_values(self, column: pa.Array, rows: NDArray[np.int64]) -> Packed:
        """Bytes that are packed already, or lists of zeros and ones."""
        if has_bytes := are_bytes(column.type):
            data = column.to_pylist()
            lengths = np.array(list(map(len, data)))
            values = np.frombuffer(b"".join(data), dtype=np.uint8)
        else:
            lengths = pc.list_value_length(column).to_numpy()
            values = column.flatten().cast(pa.uint8()).to_numpy(zero_copy_only=False)
        if (odd := np.flatnonzero(lengths != lengths[0])).size:
            self._fail(
                rows[odd[0]], f"{int(lengths[odd[0]])} values where others have {int(lengths[0])}"
            )
        packed = values.reshape(len(column), -1)
        if not has_bytes and packed.size and packed.max() <= 1:
            packed = np.packbits(packed, axis=1)
        return self._alike(packed, rows)

    def _alike(self, packed: Packed, rows: NDArray[np.int64]) -> Packed:
        count = packed.shape[1] * 8
        if self.num_bits not in (None, count):
            self._fail(rows[0], f"{count} bits where others have {self.num_bits}", _CORRECT)
        self.num_bits = count
        return packed

    def _numbers(self, column: pa.Array, rows: NDArray[np.int64]) -> Sets:
        lists = self._written_numbers(column, rows) if is_text(column.type) else column
        lengths = pc.list_value_length(lists).to_numpy().astype(np.int32)
        return lists.flatten().cast(pa.int32()).to_numpy(zero_copy_only=False), lengths

    def _written_numbers(self, column: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
        """Texts such as `[12, 7]`, `{12, 7}` or `12 7` as lists."""
        texts = column.cast(pa.string())
        is_right = pc.match_substring_regex(texts, r"^[\s\[\](){},;|0-9]*$").to_numpy(
            zero_copy_only=False
        )
        if not is_right.all():
            row = int((~is_right).argmax())
            self._fail(rows[row], f"{texts[row].as_py()[:_LONGEST_SHOWN]!r} is no set of numbers")
        spaced = pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, "[^0-9]+", " "))
        lists = pc.if_else(
            pc.equal(spaced, ""),
            pa.scalar([], pa.list_(pa.string())),
            pc.split_pattern(spaced, " "),
        )
        return lists.cast(pa.list_(pa.int64()))

    def _fail(self, row: int, problem: str, hint: str = _NAME_FORM) -> None:
        problem = f"{self.source} row {int(row) + 1}: column {self.name!r}: {problem}"
        if self.is_of_run:
            hint = "Correct this row, or encode all of them as the records of the training were."
        raise UserError("--bits" if self.is_of_run else "data.bits", problem, hint=hint)


def written_form(value: str) -> Form:
    """The form that a text is written in: `0110` and `0b01100110` are bits, not hexadecimal."""
    patterns = {
        r"[01]+|0b[01]{8,}": Form.binary,
        r"[0-9a-fA-F]+|0x[0-9a-fA-F]+": Form.hex,
        r"[\[({][\s\d,;]*[\])}]|\d+([\s,;|]+\d+)+": Form.numbers,
        r"[A-Za-z0-9+/]+=*": Form.base64,
    }
    return next(
        (form for pattern, form in patterns.items() if re.fullmatch(pattern, value)), Form.binary
    )


def _packed_digits(digits: NDArray[np.uint8], bits: int) -> Packed:
    """Digits of 1, 4 or 6 bits as bytes, left to right: the hex digits 1, 15, 8 → 0x1f 0x80.

    Of base64, bits that do not fill a byte are left out.
    """
    if bits == 1:
        return np.packbits(digits, axis=1)
    if bits == 4:
        # An odd digit is followed by zeros.
        even = np.pad(digits, ((0, 0), (0, digits.shape[1] % 2)))
        return (even[:, ::2] << 4 | even[:, 1::2]).astype(np.uint8)
    # Of a digit's eight bits the first two are zeros, and are left out.
    six_bits = np.unpackbits(digits[:, :, None], axis=2)[:, :, 2:]
    all_bits = six_bits.reshape(len(digits), -1)
    num_whole = all_bits.shape[1] // 8 * 8
    return np.packbits(all_bits[:, :num_whole], axis=1)


def write_bits(packed: Packed, form: Form) -> pa.Array:
    """Packed bits as texts of one form, or as bytes."""
    data = np.ascontiguousarray(packed)
    if form is Form.packed:
        buffers = [None, pa.py_buffer(data.tobytes())]
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(data.shape[1]), len(data), buffers)
    if form is Form.hex:
        halves = np.stack([data >> 4, data & 15], axis=2)
        digits = halves.reshape(len(data), -1)
    else:
        digits = np.unpackbits(data, axis=1)
    if form is Form.base64:
        # Six bits a digit; the last digit is filled up with zeros.
        filled = np.pad(digits, ((0, 0), (0, -digits.shape[1] % 6)))
        six_bits = filled.reshape(len(data), -1, 6)
        digits = np.packbits(six_bits, axis=2)[:, :, 0] >> 2
    characters = np.frombuffer(_DIGITS[form], dtype=np.uint8)[digits]
    offsets = np.arange(len(data) + 1, dtype=np.int64) * characters.shape[1]
    return pa.LargeStringArray.from_buffers(
        len(data), pa.py_buffer(offsets), pa.py_buffer(characters.tobytes())
    )


def write_sets(values: NDArray[np.int32], lengths: NDArray[np.int32]) -> pa.Array:
    offsets = row_bounds(lengths).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def uid_of(columns: Sequence[str], uid: str = UIDS[0]) -> str | None:
    """The column that names each record: the one asked for, else `uid` or `id`, else None."""
    usual = (name for known in UIDS for name in columns if name.lower() == known)
    return uid if uid in columns else next(usual, None)


def is_index(name: str) -> bool:
    """Whether a column is the index that pandas writes into a csv: it says nothing of a record."""
    return re.fullmatch(r"(Unnamed: \d+)?", name) is not None


def known_numbers(encoding: Sets, numbers: NDArray[np.int64] | None) -> Sets:
    """Numbers as places in the sorted list of known ones; unknown ones are left out."""
    values, lengths = encoding
    if numbers is None:
        raise UserError("data.source", "no training record has a number in its set", hint=_NAME_IT)
    # Known numbers [3, 8], sets {8, 5} and {3}: places 1 1 0, of which 5 is not at its place.
    places = np.minimum(np.searchsorted(numbers, values), len(numbers) - 1)
    is_known = numbers[places] == values
    row = np.repeat(np.arange(len(lengths)), lengths)
    counts = np.bincount(row[is_known], minlength=len(lengths))
    return places[is_known].astype(np.int32), counts.astype(np.int32)


@dataclass(slots=True)
class EncodedRecords:
    """Some records with their encoding."""

    records: pa.RecordBatch
    # fields without text by their column; a column without any is not listed
    empty_fields: Counter[str] = field(default_factory=Counter)


def encode_table(
    table: Table,
    columns: list[str],
    config: EncodingConfig,
    form: Form,
    named: Sequence[str | None] | None = None,
) -> Iterator[EncodedRecords]:
    """Encode a table block by block, as a run reads it again.

    A block has the hashed columns, the encoding, and all other columns; or only the encoding and
    the columns that are `named`.
    """
    encoder = config.build()
    encoding_name = COLUMN[config.kind]
    others = [name for name in table.columns if name not in (*columns, encoding_name)]
    before = columns
    if named is not None:
        others = [name for name in others if name in named]
        before = []
    for block in table.blocks([*columns, *others]):
        for name in columns:
            kind = decoded(block.column(name)).type
            is_value = is_text(kind) or is_plain(kind) or pa.types.is_null(kind)
            require(
                is_value,
                "--columns",
                f"column {name!r} of {table.name} holds lists or mappings",
                allowed="texts",
                hint="Name columns of plain text: --columns A,B.",
            )
        encodings = encoder.encode(join_fields([block.column(name) for name in columns]))
        if isinstance(encodings, tuple):
            column = write_sets(*encodings)
        else:
            column = write_bits(encodings, form)
        arrays = [*map(block.column, before), column, *map(block.column, others)]
        names = [*before, encoding_name, *others]
        encoded = EncodedRecords(pa.RecordBatch.from_arrays(arrays, names=names))
        for name in columns:
            is_empty = mask_of(is_missing(decoded(block.column(name)), Problem.single))
            if is_empty.any():
                encoded.empty_fields[name] = int(is_empty.sum())
        yield encoded
