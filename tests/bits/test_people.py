"""The built-in people: the same everywhere, any number of them, long-tailed, mistyped
on request.
"""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import xxhash
from tests.data.whole_tables import whole_table

from flatout.bits.people import FIELDS, GENERATOR_VERSION, PeopleConfig, PeopleTable, _make_names
from flatout.errors import UserError


def read(rows_per_block: int = 65_536, **settings) -> pa.Table:
    return whole_table(PeopleTable(PeopleConfig(**settings)), None, rows_per_block)


def test_the_same_settings_give_the_same_people_in_any_blocks():
    assert read(rows=20_000).equals(read(rows=20_000, rows_per_block=999))


def test_fewer_people_are_the_first_of_more():
    assert read(rows=18_000).slice(0, 500).combine_chunks().equals(read(rows=500).combine_chunks())


def test_the_people_of_a_generator_version_never_change():
    rows = read(rows=200)
    found = xxhash.xxh3_64_hexdigest(
        "\n".join(" ".join(row.values()) for row in rows.to_pylist()).encode()
    )
    assert (GENERATOR_VERSION, found) == (1, "08238fd4e6040af8")


def test_everybody_has_a_name_a_birthday_and_a_number_of_their_own():
    rows = read(rows=20_000)
    assert pc.count_distinct(rows["uid"]).as_py() == 20_000
    assert all(
        re.fullmatch(r"[A-Z][a-z]{2,}", name)
        for column in FIELDS[:2]
        for name in rows[column].to_pylist()
    )
    for birthday in rows["Birthday"].to_pylist():
        month, day, year = map(int, birthday.split("/"))
        assert 1 <= month <= 12
        assert 1 <= day <= 31
        assert 1930 < year <= 2006
        assert birthday == f"{month}/{day}/{year}"


def test_a_few_names_are_common_and_most_are_rare():
    counts = (
        pc.value_counts(read(rows=20_000)["Surname"].combine_chunks()).field("counts").to_pylist()
    )
    assert max(counts) > 100
    assert sum(count <= 3 for count in counts) > len(counts) / 2


def test_typing_errors_change_one_letter_of_the_share_asked_for():
    given, surnames = (set(names.to_pylist()) for names in _make_names())
    rows = read(rows=16_000, typos=0.3)
    odd = [
        row["GivenName"] not in given or row["Surname"] not in surnames
        for row in rows.select(FIELDS[:2]).to_pylist()
    ]
    # a letter may be replaced by itself, or the error be another name
    assert 0.2 < sum(odd) / len(odd) < 0.3
    assert (
        read(rows=1_000, typos=0.0)["Surname"]
        .combine_chunks()
        .filter(
            pc.invert(
                pc.is_in(read(rows=1_000)["Surname"].combine_chunks(), pa.array(sorted(surnames)))
            )
        )
        .to_pylist()
        == []
    )
    shapes = all(re.fullmatch(r"[A-Z][a-z]+", name) for name in rows["Surname"].to_pylist())
    assert shapes


def test_settings_are_checked():
    with pytest.raises(UserError, match=r"data.sample.rows: 0 \(1 or more\)"):
        PeopleConfig(rows=0)
    with pytest.raises(UserError, match=r"data.sample.typos: 1.5 \(0 to 1\)"):
        PeopleConfig(typos=1.5)
