"""New people out of known ones: each field of a record taken from another training record.

The encoding of such a record is unknown. But its text is known, and so are all of its grams. That is enough to teach
how grams of the raw text make grams of the plain text.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from flatout.bits.grams import FIELD_END, GramIndex, raw_texts, targets_of
from flatout.bits.info import BitInfo, GramLabels
from flatout.data.batches.flat_batch import multi_hot

_RECOMBINED, _TEXTS_READ = 65_536, 131_072


def recombine_training_texts(labels: GramLabels, info: BitInfo, device: torch.device, seed: int) -> Recombined:
    """Texts of people that do not exist, made of the training records' fields."""
    texts = info.texts("train").slice(0, _TEXTS_READ)
    index = GramIndex(labels.hashed, is_frozen=True)
    ids, lengths = targets_of(recombined_texts(texts, _RECOMBINED, seed), index)
    offsets = torch.from_numpy(np.append(0, np.cumsum(lengths, dtype=np.int64)))
    return Recombined(torch.from_numpy(ids).to(device), offsets.to(device), labels.num_targets)


def recombined_texts(texts: pa.Array, count: int, seed: int) -> pa.Array:
    """`count` raw texts made of fields of different records; `texts` hold their fields parted by FIELD_END."""
    random = np.random.Generator(np.random.Philox(key=[seed, 1]))
    fields = pc.split_pattern(texts, FIELD_END)
    num_fields = len(fields[0].as_py())
    values = fields.flatten()
    chosen = [random.integers(0, len(texts), count) * num_fields + number for number in range(num_fields)]
    return raw_texts([values.take(pa.array(places)) for places in chosen])


class Recombined:
    """Grams of texts that were put together from parts of the training texts, taken round and round."""

    def __init__(self, ids: Tensor, offsets: Tensor, num_targets: int) -> None:
        self.ids, self.offsets, self.num_targets = ids, offsets, num_targets
        self.bounds = offsets.tolist()
        self.next = 0
        """The text that is taken next."""

    def ready(self, count: int) -> int:
        """How many of so many texts there are; starts again where fewer are left."""
        num_texts = len(self.bounds) - 1
        count = min(count, num_texts)
        if self.next + count > num_texts:
            self.next = 0
        return count

    def take(self, count: int) -> Tensor:
        """`[count, targets]` zeros and ones of the next texts."""
        count = self.ready(count)
        start, stop = self.next, self.next + count
        self.next = stop
        first, last = self.bounds[start], self.bounds[stop]
        return multi_hot(self.ids[first:last], self.offsets[start : stop + 1] - first, self.num_targets)
