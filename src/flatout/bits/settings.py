"""Settings of tables of people: the columns of encodings and of plain text, and how to encode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flatout.bits.columns import Form
from flatout.bits.encodings import EncodingConfig
from flatout.bits.people import PeopleConfig
from flatout.data.feeding import FILES, SOURCES, FeedingConfig, require_other_files
from flatout.errors import setting

KNOWN_BITS = ("bloomfilter", "tabminhash", "minhash", "twostephash", "bits")
"""Usual names of a column of encodings, for tables where no setting names it."""


@dataclass(kw_only=True, slots=True)
class BitsDataConfig(FeedingConfig):
    """A table of people with their encodings, or one that is encoded here."""

    source: Any = setting(
        None,
        "File with the records (csv, tsv, json, jsonl, parquet, npy, hdf5); null: the built-in"
        " people. From Python also a mapping of columns, or a pandas, pyarrow or datasets table.",
        allowed=SOURCES,
        example="people.csv",
    )
    validation: Any = setting(
        None,
        "The validation records; null: taken from the source.",
        allowed=FILES,
        example="data.source=people.csv data.validation=more.csv",
    )
    test: Any = setting(
        None,
        "File with the test records; null: taken from the source when no validation file is given"
        " either.",
        allowed=FILES,
        example="data.source=people.csv data.test=more.csv",
    )
    columns: list[str] | None = setting(
        None,
        "Columns of plain text, as they were encoded; null: all before the bits but uid.",
        example="[name,born]",
    )
    bits: str | None = setting(
        None,
        "Column of the encodings; null: bloomfilter, tabminhash, minhash, twostephash, bits or one"
        " whose values look like encodings where there is one, else the records are encoded here.",
        example="filter",
    )
    form: Form = setting(
        Form.auto,
        "Bits: binary (0, 1), hex, base64, packed (bytes, lists), numbers (sets) or auto.",
    )
    uid: str = setting(
        "uid",
        "Column that names each record, else one called uid or id; may be missing.",
        example="id",
    )
    encoding: EncodingConfig = setting(
        EncodingConfig, "How records are encoded that come without bits."
    )
    sample: PeopleConfig = setting(
        PeopleConfig, "The built-in people, used when there is no source."
    )
    vocabulary: int = setting(
        4096, "Numbers of a two-step hash that have an input each, the commonest first.", least=1
    )
    batch_size: int = setting(256, "Records one device computes at once.", least=1)

    def __post_init__(self) -> None:
        FeedingConfig.__post_init__(self)  # a class with slots has no working super()
        self.read.require_texts()
        require_other_files(
            {"source": self.source, "validation": self.validation, "test": self.test}, ("source",)
        )
