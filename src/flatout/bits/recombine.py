"""New people out of known ones: each field of a record taken from another training record.

Nobody knows how such a person would be encoded, but their text is known, and so are all of its grams: enough to teach
how grams of the raw text make grams of the plain text.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatout.bits.grams import FIELD_END, raw_texts


def recombined_texts(texts: pa.Array, count: int, seed: int) -> pa.Array:
    """`count` raw texts made of fields of different records; `texts` hold their fields parted by FIELD_END."""
    random = np.random.Generator(np.random.Philox(key=[seed, 1]))
    fields = pc.split_pattern(texts, FIELD_END)
    num_fields = len(fields[0].as_py())
    values = fields.flatten()
    chosen = [random.integers(0, len(texts), count) * num_fields + number for number in range(num_fields)]
    return raw_texts([values.take(pa.array(places)) for places in chosen])
