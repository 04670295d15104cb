"""Encodings are read as they are written, whatever the form, and what does not fit is
named by row.
"""

from __future__ import annotations

import base64

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused

from flatout.bits.columns import BitColumn, Form, write_bits, write_sets, written_form
from flatout.errors import UserError

ROWS = np.arange(1000)
BITS = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.binary(min_size=width, max_size=width), min_size=1, max_size=8)
)


def packed_of(rows: list[bytes]) -> np.ndarray:
    return np.array([list(row) for row in rows], dtype=np.uint8)


@given(BITS, st.sampled_from([Form.binary, Form.hex, Form.base64, Form.packed]))
def test_bits_come_back_as_they_were_written(rows, form):
    packed = packed_of(rows)
    reader = BitColumn("bits", "file", form)
    assert np.array_equal(reader.read(write_bits(packed, form), ROWS), packed)
    assert reader.num_bits == packed.shape[1] * 8


@given(BITS)
def test_written_forms_are_those_of_everybody(rows):
    packed = packed_of(rows)
    assert write_bits(packed, Form.hex).to_pylist() == [row.hex() for row in rows]
    assert write_bits(packed, Form.base64).to_pylist() == [
        base64.b64encode(row).decode().rstrip("=") for row in rows
    ]
    digits = ["".join(map("{:08b}".format, row)) for row in rows]
    assert write_bits(packed, Form.binary).to_pylist() == digits


def test_base64_with_its_padding_is_read_too():
    row = bytes(range(16))
    found = BitColumn("bits", "file", Form.base64).read(
        pa.array([base64.b64encode(row).decode()]), ROWS
    )
    assert found.tobytes() == row


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ("0110", Form.binary),
        ("01f0", Form.hex),
        ("AB+/", Form.base64),
        ("[1, 2]", Form.numbers),
        ("7 8", Form.numbers),
    ],
)
def test_the_form_is_read_off_the_first_value(value, form):
    assert written_form(value) is form


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=6))
def test_sets_of_numbers_are_read_from_lists_and_from_texts(rows):
    flat = np.array([number for row in rows for number in row], dtype=np.int32)
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    for column in (write_sets(flat, lengths), pa.array([str(row) for row in rows])):
        values, counts = BitColumn("bits", "file", Form.numbers).read(column, ROWS)
        assert (values.tolist(), counts.tolist()) == (flat.tolist(), lengths.tolist())


@pytest.mark.parametrize("form", [Form.auto, Form.binary])
def test_bits_behind_0b_are_read_as_bits(form):
    reader = BitColumn("bits", "file", form)
    assert reader.read(pa.array(["0b0000000110000000", "0b1111111100000001"]), ROWS).tolist() == [
        [1, 128],
        [255, 1],
    ]
    assert (reader.form, reader.num_bits) == (Form.binary, 16)


def test_hexadecimal_digits_may_stand_behind_0x_and_begin_with_0b():
    reader = BitColumn("bits", "file")
    assert reader.read(pa.array(["0x0b1f", "0x00ff"]), ROWS).tolist() == [[11, 31], [0, 255]]
    assert BitColumn("bits", "file").read(pa.array(["0b1f", "0bff"]), ROWS).tolist() == [
        [11, 31],
        [11, 255],
    ]


def test_a_row_without_0b_among_others_is_named():
    with refused("data.bits", "row 2", "'bits'", "8 characters", 10):
        BitColumn("bits", "file").read(pa.array(["0b00000001", "00000001", "0b00000011"]), ROWS)


def test_lists_of_zeros_and_ones_are_bits():
    reader = BitColumn("bits", "file")
    assert reader.read(pa.array([[1, 0, 0, 0, 0, 0, 0, 1], [0] * 8]), ROWS).tolist() == [[129], [0]]
    assert reader.form is Form.packed


MISTAKES = {
    "a length": (
        ["0110", "011"],
        r"people.csv row 12: column 'bits': 3 characters where others have 4",
    ),
    "a character": (
        ["0110", "01x0"],
        r"people.csv row 12: column 'bits': 'x' at place 3 is no binary digit",
    ),
    "nothing": (["0110", None], r"people.csv row 12: column 'bits': no value"),
    "an empty text": (
        ["0110", ""],
        r"people.csv row 12: column 'bits': 0 characters where others have 4",
    ),
    "a set": (
        ["[1, 2]", "[1, b]"],
        r"people.csv row 12: column 'bits': '\[1, b\]' is no set of numbers",
    ),
    "lists": ([[1, 0], [1]], r"people.csv row 12: column 'bits': 1 values where others have 2"),
    "bytes": ([b"ab", b"a"], r"people.csv row 12: column 'bits': 1 values where others have 2"),
    "a type": ([1.5, 2.5], r"column 'bits' of people.csv holds double \(texts of 0 and 1"),
    "a number too large": (
        ["[1, 99999999999]", "[2]"],
        r"column 'bits' of people.csv holds .*99999999999",
    ),
    "a list with a gap": (
        [[1, None], [0, 1]],
        r"people.csv row 4: .* a list without one of its values",
    ),
}


@pytest.mark.parametrize(
    ("form", "values"),
    [
        ("packed", ["0aff"]),
        ("packed", [[300, 1]]),
        ("packed", [5]),
        ("numbers", [b"ab"]),
        ("hex", [[0, 1]]),
    ],
)
def test_values_that_are_not_of_the_form_that_was_named_are_told(form, values):
    with pytest.raises(
        UserError, match=rf"column 'bits' of people.csv holds .*({form}|range).*data.form=hex"
    ):
        BitColumn("bits", "people.csv", Form(form)).read(pa.array(values), np.array([3]))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_named_by_row(mistake):
    values, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        BitColumn("bits", "people.csv").read(pa.array(values), np.array([3, 11]))


@pytest.mark.parametrize(
    ("characters", "text"),
    [
        (100, "01" * 50),
        (130, "10" * 65),
        (33, "0fA" * 11),
        (25, "c" * 25),
        (19, "aZ/" * 6 + "a"),
    ],
)
def test_any_number_of_characters_is_read_block_after_block_and_by_a_model_of_as_many_bits(
    characters, text
):
    column = pa.array([text, text])
    reader = BitColumn("bits", "file")
    of_model = BitColumn("bits", "file")
    first = reader.read(column, ROWS)
    again = reader.read(column, ROWS)
    of_model.num_bits = 8 * first.shape[1]
    assert len(text) == characters
    assert (first == again).all()
    assert (of_model.read(column, ROWS) == first).all()


def test_a_model_of_so_many_bits_names_the_row_that_has_others():
    reader = BitColumn("bits", "file", Form.binary)
    reader.num_bits = 8
    with refused("data.bits", "row 1", "'bits'", "16 characters", 8):
        reader.read(pa.array(["01" * 8, "0110011"[:7] + "1"]), ROWS)


def test_one_odd_row_at_the_beginning_decides_neither_form_nor_length():
    with refused("data.bits", "row 1", "'bits'", "'x'", "place 1", fix="data.form=hex"):
        BitColumn("bits", "file").read(pa.array(["x110", "0110", "0111"]), ROWS)
    with refused("data.bits", "row 1", "3 characters", 4, fix="Correct this row"):
        BitColumn("bits", "file").read(pa.array(["011", "0110", "0111"]), ROWS)


def test_a_later_block_must_be_as_long_as_the_first():
    reader = BitColumn("bits", "file")
    reader.read(pa.array(["01100110"]), ROWS)
    with refused("data.bits", "row 1", "'bits'", "16 characters", 8):
        reader.read(pa.array(["0110011001100110"]), ROWS)
