"""`BitData`: records with encodings as a Lightning DataModule."""

from __future__ import annotations

from flatout.bits import preparation
from flatout.bits.data import BitsDataConfig
from flatout.bits.info import BitInfo
from flatout.data.store_data import StoreData


class BitData(StoreData[BitsDataConfig, BitInfo]):
    """Records of people with their encodings, or encoded here; the 2-grams of a record are its labels.

    >>> data = BitData(source="people.csv", bits="bloomfilter", batch_size=256)  # doctest: +SKIP
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = BitsDataConfig

    def open_store(self) -> BitInfo:
        return preparation.prepare(self.config)
