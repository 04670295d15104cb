"""Records become the same store whatever they are written in; what is wrong is named by file and
row.
"""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from tests.bits.people import people
from tests.refusals import refused
from tests.stores import open_store

from flatout import BitsDataConfig, EncodingConfig, PeopleConfig, UserError
from flatout.bits.columns import Form, write_bits, write_sets
from flatout.bits.grams import (
    FIELD_END,
    LABEL_INDEX,
    LABELS,
    GramIndex,
    encode_targets,
    join_fields,
    join_rows,
    strip_punctuation,
)
from flatout.bits.people import FIELDS
from flatout.data.tables.prints import NOTES

SMALL = EncodingConfig(size=64, hashes=3)


def with_bits(form: Form, rows: int = 60) -> pa.Table:
    plain = people(rows)
    raw = join_fields([plain[name].combine_chunks() for name in FIELDS])
    return plain.add_column(3, "bloomfilter", write_bits(SMALL.build().encode(raw), form))


def content(store) -> dict[str, list]:
    return {
        name: [
            split.fixed("tokens").tolist(),
            split.ragged("targets").values.tolist(),
            split.fixed("rows").tolist(),
        ]
        for name, split in store.splits.items()
    }


def write(table: pa.Table, path: Path) -> str:
    if path.suffix == ".csv":
        pa_csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return str(path)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (Form.binary, "b.csv"),
        (Form.hex, "h.csv"),
        (Form.base64, "s.csv"),
        (Form.hex, "h.parquet"),
        (Form.packed, "p.parquet"),
    ],
)
def test_every_way_of_writing_bits_makes_the_same_store(tmp_path, form, name):
    encoded_here = open_store(BitsDataConfig(source=people(), encoding=SMALL))
    read = open_store(BitsDataConfig(source=write(with_bits(form), tmp_path / name)))
    assert content(read.store) == content(encoded_here.store)
    assert (read.num_inputs, read.is_set) == (64, False)


def test_arrays_on_disk_are_read_too(tmp_path):
    h5py = pytest.importorskip("h5py")
    table = with_bits(Form.packed)
    expected = content(open_store(BitsDataConfig(source=table)).store)
    packed = np.array([list(row) for row in table["bloomfilter"].to_pylist()], dtype=np.uint8)
    columns = {name: np.array(table[name].to_pylist()) for name in (*FIELDS, "uid")}
    kinds = [(name, columns[name].dtype) for name in FIELDS]
    array = np.empty(
        60, dtype=[*kinds, ("bloomfilter", np.uint8, (8,)), ("uid", columns["uid"].dtype)]
    )
    for name in (*FIELDS, "uid"):
        array[name] = columns[name]
    array["bloomfilter"] = packed
    np.save(tmp_path / "people.npy", array)
    with h5py.File(tmp_path / "people.h5", "w") as file:
        for name in (*FIELDS, "uid"):
            file[name] = columns[name].astype("S")
        file["bloomfilter"] = np.unpackbits(packed, axis=1)
    for name in ("people.npy", "people.h5"):
        data = BitsDataConfig(source=str(tmp_path / name), columns=list(FIELDS), bits="bloomfilter")
        assert content(open_store(data).store) == expected, name


def test_a_plain_npy_table_is_a_column_of_bits(tmp_path):
    from flatout.data.tables.sources import open_table

    np.save(tmp_path / "bits.npy", np.eye(8, dtype=np.uint8))
    table = open_table(tmp_path / "bits.npy", where="FILE")
    assert table.columns == ["bits"]
    assert next(table.blocks(["bits"])).column("bits").to_pylist() == np.eye(8, dtype=int).tolist()


def test_a_record_of_1024_bits_takes_128_bytes():
    split = open_store(BitsDataConfig(sample=PeopleConfig(rows=80))).store.splits["train"]
    assert split.fixed("tokens").shape[1] == 128
    assert split.fixed("tokens").nbytes == 128 * split.num_rows


def test_targets_are_the_grams_of_the_plain_text_then_those_of_the_raw_text():
    raw = pa.array(["ann2/5", "bo"], pa.large_string())
    hashed = GramIndex(["an", "2/", " b", "o "], is_frozen=True)
    ids, lengths = encode_targets(raw, hashed)
    first = ids[: lengths[0]].tolist()
    second = ids[lengths[0] :].tolist()
    expected = LABEL_INDEX.rows(strip_punctuation(raw))[0].tolist()
    assert first == [*expected[:4], len(LABELS), len(LABELS) + 1]
    assert {LABELS[number] for number in first[:4]} == {"an", "nn", "n2", "25"}
    assert second == [LABELS.index("bo"), len(LABELS) + 2, len(LABELS) + 3]


def test_joining_ragged_rows_keeps_their_order():
    first = (np.array([1, 2, 3], np.int32), np.array([2, 0, 1], np.int32))
    second = (np.array([7, 8], np.int32), np.array([0, 2, 0], np.int32))
    ids, lengths = join_rows(first, second)
    assert (ids.tolist(), lengths.tolist()) == ([1, 2, 7, 8, 3], [2, 2, 1])


def test_texts_are_kept_with_their_fields_apart():
    data = open_store(BitsDataConfig(source=people(), encoding=SMALL))
    rows = data.store.splits["test"].fixed("rows")
    in_order = itemgetter(*FIELDS)
    expected = [FIELD_END.join(in_order(row)).lower() for row in people().to_pylist()]
    assert data.texts("test").to_pylist() == [expected[row] for row in rows]


def test_the_same_text_always_falls_in_the_same_split():
    once = open_store(BitsDataConfig(source=people(), encoding=SMALL))
    grown = pa.concat_tables([people().slice(30), people()])
    twice = open_store(BitsDataConfig(source=grown, encoding=SMALL))
    for split in ("validation", "test"):
        assert set(once.texts(split).to_pylist()) == set(twice.texts(split).to_pylist())
    assert not set(twice.texts("train").to_pylist()) & set(twice.texts("test").to_pylist())


def test_sets_of_numbers_know_the_commonest():
    plain = people(200)
    raw = join_fields([plain[name].combine_chunks() for name in FIELDS])
    config = EncodingConfig(kind="twostep", size=50, hashes=3)
    table = plain.add_column(3, "twostephash", write_sets(*config.build().encode(raw)))
    read = open_store(BitsDataConfig(source=table, vocabulary=100))
    made = open_store(BitsDataConfig(source=plain, encoding=config, vocabulary=100))
    assert read.is_set
    assert read.num_inputs == 100
    for split in ("train", "test"):
        assert np.array_equal(
            read.store.splits[split].ragged("tokens").values,
            made.store.splits[split].ragged("tokens").values,
        )
    assert "100 of" in read.facts["lines"][2]


def test_more_than_65_536_numbers_are_told_apart():
    plain = people(300)
    random = np.random.default_rng(0)
    lists = [sorted(random.choice(200_000, 400, replace=False).tolist()) for _ in range(300)]
    found = open_store(
        BitsDataConfig(
            source=plain.add_column(3, "twostephash", pa.array(lists)), vocabulary=100_000
        )
    )
    places = found.store.splits["train"].ragged("tokens").values
    assert found.num_inputs > 66_000
    assert places.max() > 65_536


def test_the_text_columns_are_those_before_the_encoding():
    assert open_store(BitsDataConfig(source=with_bits(Form.hex))).facts["columns"] == list(FIELDS)
    reordered = with_bits(Form.hex).select(["bloomfilter", "uid", *FIELDS])
    with refused("data.columns", "no column of table in memory", fix="data.columns="):
        open_store(BitsDataConfig(source=reordered))
    assert open_store(BitsDataConfig(source=reordered, columns=["Surname"])).facts["columns"] == [
        "Surname"
    ]


def test_files_for_validation_and_test_are_used_whole():
    table = with_bits(Form.hex, 90)
    data = open_store(
        BitsDataConfig(
            source=table.slice(0, 50), validation=table.slice(50, 25), test=table.slice(75)
        )
    )
    assert data.summary()["rows"] == {"train": 50, "validation": 25, "test": 15}


def test_an_opened_store_says_the_same_as_a_built_one():
    built, opened = (open_store(BitsDataConfig(source=people(), encoding=SMALL)) for _ in range(2))
    assert (built.report.hit, opened.report.hit) == (False, True)
    assert built.facts == opened.facts


def test_the_secret_is_not_kept():
    data = open_store(
        BitsDataConfig(source=people(), encoding=EncodingConfig(size=64, secret="swordfish"))
    )
    assert "swordfish" not in (data.store.folder / "manifest.json").read_text(encoding="utf-8")
    other = open_store(
        BitsDataConfig(source=people(), encoding=EncodingConfig(size=64, secret="another"))
    )
    assert not other.report.hit


def table_with(**columns) -> pa.Table:
    rows = {
        "name": ["ann", "bob"] * 20,
        "bloomfilter": ["0f", "f0"] * 20,
        "uid": [str(i) for i in range(40)],
    } | columns
    return pa.table(rows)


def warnings_of(**settings) -> list[str]:
    lines = open_store(BitsDataConfig(**settings)).facts["lines"]
    return [line for line in lines if line.startswith("warning ")]


def test_two_records_of_one_id_are_warned_of_with_their_rows():
    names = [f"ann{number}" for number in range(40)]
    twice = table_with(name=names, uid=["1", "2", "3", "2", *map(str, range(10, 46))])
    message = (
        "column uid: one id names several records (table in memory row 2 and table in memory row 4)"
    )
    assert warnings_of(source=twice) == [f"warning {message}, and answers are joined by it"]
    assert warnings_of(source=table_with(name=names)) == []


def test_ids_of_two_files_are_compared_too():
    test = {"name": ["eve", "joe"], "bloomfilter": ["0f", "f0"], "uid": ["99", "7"]}
    source = table_with(name=[f"ann{number}" for number in range(40)])
    [warning] = warnings_of(source=source, test=test)
    assert (
        "one id names several records (table in memory row 8 and table in memory row 2)" in warning
    )


MISTAKES = {
    "a missing uid": (
        lambda: BitsDataConfig(source=table_with(uid=["1", " ", *"x" * 38])),
        r"data.uid: table in memory: no uid in row 2\. Fill it in",
    ),
    "a uid that is not there": (
        lambda: BitsDataConfig(source=table_with(), uid="number"),
        r"data.uid: no column 'number' in table in memory",
    ),
    "many missing uids": (
        lambda: BitsDataConfig(source=table_with(uid=[None] * 40)),
        r"no uid in row 1, 2, 3, 4, 5, …",
    ),
    "a wrong length": (
        lambda: BitsDataConfig(source=table_with(bloomfilter=["0f"] * 30 + ["0"] + ["0f"] * 9)),
        r"table in memory row 31: column 'bloomfilter': 1 characters where others have 2",
    ),
    "a foreign character": (
        lambda: BitsDataConfig(source=table_with(bloomfilter=["0f"] * 30 + ["0g"] + ["0f"] * 9)),
        r"row 31: column 'bloomfilter': 'g' at place 2 is no hex digit",
    ),
    "a foreign character in another file": (
        lambda: BitsDataConfig(
            source=table_with(), test={"name": ["x"], "bloomfilter": ["zz"], "uid": ["1"]}
        ),
        r"row 1: column 'bloomfilter': 'z' at place 1 is no hex digit",
    ),
    "the same bits in every record": (
        lambda: BitsDataConfig(source=table_with(bloomfilter=["0000"] * 40)),
        (
            r"data.bits: every record of table in memory has the same bits\. Name the column of the"
            r" encodings\."
        ),
    ),
    "no such column": (
        lambda: BitsDataConfig(source=table_with(), bits="blomfilter"),
        r"data.bits: no column 'blomfilter' .* Did you mean 'bloomfilter'\?",
    ),
    "two encodings": (
        lambda: BitsDataConfig(source=table_with(minhash=["00"] * 40)),
        (
            r"data.bits: table in memory has several encodings \(bloomfilter, minhash\). Name one:"
            r" data.bits=bloomfilter."
        ),
    ),
    "a file of another shape": (
        lambda: BitsDataConfig(source=table_with(), test=pa.table({"name": ["x"]})),
        r"data.bits: no column 'bloomfilter' in table in memory",
    ),
    "a list of lists as text": (
        lambda: BitsDataConfig(source=table_with(name=[["a"], ["b"]] * 20)),
        r"data.columns: column 'name' of table in memory holds list",
    ),
    "too few records": (
        lambda: BitsDataConfig(source=table_with().slice(0, 1)),
        r"data.source: no records are left for",
    ),
    "the source as test": (
        lambda: BitsDataConfig(source="a.csv", test="a.csv"),
        r"data.test: a.csv is the source file itself",
    ),
    "a copy of the source as test": (
        lambda: BitsDataConfig(source=table_with(), test=table_with()),
        r"data.test: table in memory holds exactly the training rows",
    ),
    "a test without a source": (
        lambda: BitsDataConfig(test="a.csv"),
        r"data.test: is set without training rows. Set data.source=FILE",
    ),
    "no columns": (
        lambda: BitsDataConfig(source=table_with(), columns=[]),
        r"data.columns: an empty list",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_is_told_with_its_place(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        open_store(make())


def test_nothing_half_written_is_left_by_a_mistake(tmp_path):
    source = table_with(bloomfilter=["0f"] * 39 + ["0g"])
    with pytest.raises(UserError):
        open_store(BitsDataConfig(source=source, cache=str(tmp_path / "stores")))
    assert not [
        path
        for path in (tmp_path / "stores").iterdir()
        if not path.name.startswith((".lock-", NOTES))
    ]
