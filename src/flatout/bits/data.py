"""Settings of records: where they are, how they are encoded, how they become batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flatout.bits.columns import Form
from flatout.bits.encodings import EncodingConfig
from flatout.bits.people import PeopleConfig
from flatout.data.feeding import FeedingConfig, require_other_files
from flatout.errors import as_choice, require


@dataclass(kw_only=True, slots=True)
class BitsDataConfig(FeedingConfig):
    """A table of people with their encodings, or one that is encoded here."""

    source: Any = None
    """File with the records (csv, tsv, json, jsonl, parquet, npy, hdf5); null: the built-in people.
    From Python also a mapping of columns, or a pandas, pyarrow or datasets table."""
    validation: Any = None
    """File with the validation records; null: taken from the source."""
    test: Any = None
    """File with the test records; null: taken from the source when no validation file is given either."""
    columns: list[str] | None = None
    """Columns of plain text, in the order in which they were encoded; null: all before the bits and the uid."""
    bits: str | None = None
    """Column of the encodings; null: bloomfilter, tabminhash, minhash, twostephash or bits where there is one,
    else the records are encoded here."""
    form: Form = Form.auto
    """How bits are written: binary (0 and 1), hex, base64, packed (bytes, lists) or numbers (sets); auto: as seen."""
    uid: str = "uid"
    """Column that names each record; it may be missing, its values may not."""
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    """How records are encoded that come without bits."""
    sample: PeopleConfig = field(default_factory=PeopleConfig)
    """The built-in people, used when there is no source."""
    vocabulary: int = 4_096
    """Numbers of a two-step hash that have an input each, the commonest first."""
    batch_size: int = 256
    """Records one device computes at once."""

    def __post_init__(self) -> None:
        FeedingConfig.__post_init__(self)  # a class with slots has no working super()
        self.form = as_choice(Form, self.form, "data.form")
        require(self.vocabulary >= 1, "data.vocabulary", f"{self.vocabulary}", allowed="1 or more")
        given = {"source": self.source, "validation": self.validation, "test": self.test}
        require_other_files(given, ("source",))
