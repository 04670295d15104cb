"""A column of encodings is found under any name; names, dates, numbers and ids are not taken for
one.
"""

from __future__ import annotations

import base64
import hashlib
import random
import string
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from tests.bits.people import people
from tests.params import at_once
from tests.refusals import refused
from tests.stores import open_store

from flatout import BitsDataConfig, EncodingConfig, UserError
from flatout.bits.columns import Form, write_bits, write_sets
from flatout.bits.grams import join_fields
from flatout.bits.people import FIELDS
from flatout.bits.recognise import recognise

ROWS = 300
_RANDOM = random.Random(5)


def encode(rows: int = ROWS, **settings) -> np.ndarray:
    plain = people(rows)
    raw = join_fields([plain[name].combine_chunks() for name in FIELDS])
    return EncodingConfig(**settings).build().encode(raw)


def draw(characters: str, length: int) -> str:
    return "".join(_RANDOM.choices(characters, k=length))


def draw_uuid() -> uuid.UUID:
    return uuid.UUID(bytes=_RANDOM.randbytes(16), version=4)


OTHERS = {
    "birthdays of eight digits": lambda i: f"19{i % 100:02}{i % 12 + 1:02}{i % 28 + 1:02}",
    "birthdays with dashes": lambda i: f"19{i % 100:02}-{i % 12 + 1:02}-{i % 28 + 1:02}",
    "birthdays with blanks": lambda i: f"19{i % 100:02} {i % 12 + 1:02} {i % 28 + 1:02}",
    "postcodes": lambda i: f"{10000 + 173 * i % 89999}",
    "British postcodes": lambda i: f"SW{i % 10}A {i % 9}AA",
    "single letters": lambda i: "abcdef"[i % 6],
    "sexes of 0 and 1": lambda i: str(i % 2),
    "flags of eight bits": lambda i: f"{i % 256:08b}",
    "numbers from 1": lambda i: str(i + 1),
    "numbers padded with zeros": lambda i: f"{i:024d}",
    "hexadecimal numbers padded with zeros": lambda i: f"{i * 7919:032x}",
    "binary numbers padded with zeros": lambda i: f"{i * 7919:064b}",
    "phone numbers": lambda i: "+49151" + draw(string.digits, 8),
    "phone numbers with blanks": lambda i: " ".join(
        ["030", draw(string.digits, 3), draw(string.digits, 4)]
    ),
    "card numbers": lambda i: draw(string.digits, 16),
    "card numbers in fours": lambda i: " ".join(draw(string.digits, 4) for _ in range(4)),
    "numbers of 20 digits": lambda i: draw(string.digits, 20),
    "bank accounts": lambda i: "DE" + draw(string.digits, 20),
    "insurance numbers": lambda i: draw(string.ascii_uppercase, 1) + draw(string.digits, 9),
    "vehicle numbers": lambda i: draw(string.ascii_uppercase + string.digits, 17),
    "random ids of version 4": lambda i: str(draw_uuid()),
    "random ids without dashes": lambda i: draw_uuid().hex,
    "random ids in capitals": lambda i: draw_uuid().hex.upper(),
    "ids of version 7": lambda i: f"018f3a{i:06x}7{draw_uuid().hex[13:]}",
    "sequences of DNA": lambda i: draw("ACGT", 150),
    "object ids": lambda i: f"65a1b2c3d4e5f60718{i:06x}",
    "sortable ids": lambda i: "01" + draw("0123456789ABCDEFGHJKMNPQRSTVWXYZ", 24),
    "short hexadecimal ids": lambda i: draw("0123456789abcdef", 12),
    "first names": lambda i: ["Ada", "Bea", "Dee", "Abe", "Fae"][i % 5],
    "words of one length": lambda i: ["Margarethe", "Wilhelmina", "Alexandria", "Bernadette"][
        i % 4
    ],
    "addresses": lambda i: f"{i} High Street",
    "mail addresses": lambda i: f"someone{i}@example.org",
    "nothing": lambda i: "",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_columns_do_not_look_like_encodings(kind):
    values = [OTHERS[kind](i) for i in range(ROWS)]
    assert recognise("x", pa.array(values)) is None


@pytest.mark.parametrize(
    "column",
    [
        pa.array(range(300)),
        pa.array([1.5] * 300),
        pa.array([[0.5] * 64] * 300),
    ],
)
def test_numbers_and_lists_of_measurements_do_not_look_like_encodings(column):
    assert recognise("x", column) is None


ENCODINGS = {
    "bloom": ({"size": 1024}, 1024),
    "a short filter": ({"size": 64, "hashes": 2}, 64),
    "a full filter": ({"size": 512, "hashes": 20}, 512),
    "a sparse filter": ({"size": 8192}, 8192),
    "double hashing": ({"size": 1024, "hashing": "double"}, 1024),
    "a folded filter": ({"size": 1024, "fold": 1}, 512),
    "minhash": ({"kind": "minhash", "size": 512}, 512),
}


@pytest.mark.parametrize("form", [Form.binary, Form.hex, Form.base64, Form.packed])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings_are_recognised_in_every_form(encoding, form):
    settings, num_bits = ENCODINGS[encoding]
    likely = recognise("clk", write_bits(encode(**settings), form))
    assert likely is not None
    assert likely.form is form
    assert likely.num_bits == num_bits
    assert not likely.looks_random


def test_sets_of_numbers_are_recognised_as_lists_and_as_texts():
    values, lengths = encode(kind="twostep", size=1000)
    lists = write_sets(values, lengths)
    texts = pa.array([str(numbers) for numbers in lists.to_pylist()])
    for column in (lists, texts):
        likely = recognise("clk", column)
        assert likely is not None
        assert likely.form is Form.numbers


DIGESTS = {
    "sha256": lambda i: hashlib.sha256(str(i).encode()).hexdigest(),
    "md5": lambda i: hashlib.md5(str(i).encode()).hexdigest(),
    "sha1 in base64": lambda i: base64.b64encode(hashlib.sha1(str(i).encode()).digest()).decode(),
}


@pytest.mark.parametrize("kind", DIGESTS)
def test_digests_look_random(kind):
    likely = recognise("x", pa.array([DIGESTS[kind](i) for i in range(ROWS)]))
    assert likely is not None
    assert likely.looks_random


def test_one_odd_row_does_not_hide_an_encoding_and_is_named_when_it_is_read(tmp_path):
    texts = write_bits(encode(), Form.hex).to_pylist()
    texts[20] = texts[20][:-1]
    assert recognise("clk", pa.array(texts)) is not None
    source = people(ROWS).add_column(3, "clk", pa.array(texts))
    with refused("data.bits", "row 21", "'clk'", "255 characters", 256):
        open_store(BitsDataConfig(source=source))


def write_people(path: Path, name: str, form: Form) -> str:
    table = people(ROWS).add_column(3, name, write_bits(encode(), form))
    pa_csv.write_csv(table, path)
    return str(path)


@pytest.mark.parametrize("form", [Form.binary, Form.hex, Form.base64])
@pytest.mark.parametrize(
    "name", ["clk", "x", *at_once(of=["bf", "clk_hex", "encoding"], seconds=1)]
)
def test_the_same_bits_are_stored_under_any_name(name, form, tmp_path):
    usual = open_store(BitsDataConfig(source=write_people(tmp_path / "usual.csv", "bits", form)))
    renamed = open_store(BitsDataConfig(source=write_people(tmp_path / "renamed.csv", name, form)))
    assert renamed.facts["bits_column"] == name
    assert renamed.text_columns == list(FIELDS)
    differing = {"columns", "bits_column", "about", "lines"}
    assert {key for key in usual.facts if usual.facts[key] != renamed.facts[key]} <= differing
    for split, rows in usual.store.splits.items():
        for column in ("tokens", "rows"):
            assert np.array_equal(rows.fixed(column), renamed.store.splits[split].fixed(column))
        for column in ("targets", "texts"):
            assert np.array_equal(
                rows.ragged(column).values,
                renamed.store.splits[split].ragged(column).values,
            )


def table_with(**columns) -> pa.Table:
    plain = people(ROWS).select([*FIELDS])
    for name, column in columns.items():
        plain = plain.append_column(name, column)
    return plain


def filters(**settings) -> pa.Array:
    return write_bits(encode(**settings), Form.hex)


def digests() -> pa.Array:
    return pa.array([hashlib.sha256(str(i).encode()).hexdigest() for i in range(ROWS)])


def test_two_encodings_are_refused_until_one_is_named():
    source = table_with(clk=filters(), bf=filters(size=512))
    message = (
        r"several columns that look like encodings \(clk \(hex of 1,024 bits\), bf \(hex of 512"
        r" bits\)\)\. "
    )
    with pytest.raises(
        UserError, match=message + r"Name the encoding: data\.bits=clk; .*data\.columns=\[A,B\]"
    ):
        open_store(BitsDataConfig(source=source))
    named = open_store(BitsDataConfig(source=source, bits="bf"))
    assert named.num_inputs == 512
    assert named.text_columns == list(FIELDS)
    assert "left out: column clk (hex of 1,024 bits)" in named.facts["lines"]


def test_an_encoding_before_one_of_a_usual_name_is_no_plain_text():
    source = table_with(clk=filters(), bits=filters(size=512))
    with refused("data.bits", "several columns", allowed="bits, clk (hex of 1,024 bits)"):
        open_store(BitsDataConfig(source=source))


def test_digests_are_refused_until_they_are_named():
    source = table_with(digest=digests())
    message = (
        r"data\.bits: column 'digest' of table in memory looks like an encoding or like digests "
    )
    message += r"\(digest \(hex of 256 bits\)\)\. Name it: data\.bits=digest for an encoding, "
    message += (
        r"data\.uid=digest for an id, or for plain text"
        r" 'data\.columns=\[GivenName,Surname,Birthday,digest\]'\."
    )
    with pytest.raises(UserError, match=message):
        open_store(BitsDataConfig(source=source))
    assert open_store(BitsDataConfig(source=source, bits="digest")).num_inputs == 256
    assert open_store(BitsDataConfig(source=source, uid="digest")).text_columns == list(FIELDS)
    named = [*FIELDS, "digest"]
    assert open_store(BitsDataConfig(source=source, columns=named)).text_columns == named


def test_digests_behind_the_encoding_are_neither_text_nor_encoding():
    info = open_store(BitsDataConfig(source=table_with(clk=filters(), digest=digests())))
    assert info.facts["bits_column"] == "clk"
    assert info.text_columns == list(FIELDS)


def test_a_hardened_encoding_is_asked_for_by_name():
    source = table_with(clk=filters(diffusion=10, fold=1))
    with pytest.raises(UserError, match=r"data\.bits=clk for an encoding"):
        open_store(BitsDataConfig(source=source))
    assert open_store(BitsDataConfig(source=source, bits="clk")).num_inputs == 512


def test_an_encoding_is_taken_when_the_plain_text_is_named():
    source = table_with(clk=filters())
    info = open_store(BitsDataConfig(source=source, columns=["Surname"]))
    assert info.facts["bits_column"] == "clk"
    assert info.text_columns == ["Surname"]
    as_text = open_store(BitsDataConfig(source=source, columns=[*FIELDS, "clk"]))
    assert as_text.text_columns == [*FIELDS, "clk"]
