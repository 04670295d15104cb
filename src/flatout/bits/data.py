"""The DataModule of records of people and their encodings.

`open_store` builds the store where the cache has none; StoreData makes feeds of it. Open this file
to change what `BitData` accepts; `preparation` has how a store is built.
"""

from __future__ import annotations

from flatout.bits.info import BitInfo
from flatout.bits.settings import BitsDataConfig
from flatout.data.batches.store_data import StoreData


class BitData(StoreData[BitsDataConfig, BitInfo]):
    """Records of people with their encodings; the labels of a record are its 2-grams.

    >>> data = BitData(source="people.csv", bits="bloomfilter", batch_size=256)  # doctest: +SKIP
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = BitsDataConfig

    def open_store(self) -> BitInfo:
        # Only a run that trains prepares a store: a help text need not wait for these imports.
        from flatout.bits.preparation import BitsPreparation

        return BitsPreparation(self.config).open()
