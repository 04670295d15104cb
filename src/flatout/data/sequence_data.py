"""The DataModule of recordings: from settings to an open store and views of its rows."""

from __future__ import annotations

from typing import Any

from flatout.data.sequences.info import SequenceInfo
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.sequences.survey import SequencePreparation
from flatout.data.sequences.views import open_views
from flatout.data.store_data import StoreData


class SequenceData(StoreData[SequenceDataConfig, SequenceInfo]):
    """Recordings of sensors: whole, in windows, or in chunks whose hidden state is carried on.

    >>> data = SequenceData(  # doctest: +SKIP
    ...     source="cells/", features=["voltage", "current"], target="soc", time="t"
    ... )
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = SequenceDataConfig

    def open_store(self) -> SequenceInfo:
        preparation = SequencePreparation(self.config)
        store, report = preparation.open()
        segments, notes = open_views(store, self.config)
        about: dict[str, Any] = {"segments": segments, "notes": notes}
        return SequenceInfo(
            store=store, report=report, source=preparation.source, config=self.config, **about
        )

    @property
    def is_stream(self) -> bool:
        return self.config.chunk is not None
