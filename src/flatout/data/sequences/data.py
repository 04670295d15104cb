"""The DataModule of recordings: from settings to an open store, whose rows are views.

The store keeps whole recordings; a row is a recording, a window or a chunk of one. Open this file
to change what `SequenceData` accepts. `preparation` builds a store, `views` cuts it into rows.
"""

from __future__ import annotations

from flatout.data.batches.store_data import StoreData
from flatout.data.sequences.info import SequenceInfo
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.sequences.views import open_views


class SequenceData(StoreData[SequenceDataConfig, SequenceInfo]):
    """Recordings of sensors: whole, in windows, or in chunks that pass on their hidden state.

    >>> data = SequenceData(  # doctest: +SKIP
    ...     source="cells/", features=["voltage", "current"], target="soc", time="t"
    ... )
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = SequenceDataConfig

    def open_store(self) -> SequenceInfo:
        # Only a run that trains prepares a store: a help text need not wait for these imports.
        from flatout.data.sequences.preparation import SequencePreparation

        preparation = SequencePreparation(self.config)
        store, report = preparation.open_store()
        segments, notes = open_views(store, self.config)
        return SequenceInfo(
            store=store,
            report=report,
            source=preparation.name,
            config=self.config,
            segments=segments,
            notes=notes,
        )

    @property
    def is_stream(self) -> bool:
        return self.config.chunk is not None
