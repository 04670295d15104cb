"""`SequenceData`: recordings as a Lightning DataModule."""

from __future__ import annotations

from dataclasses import replace

import torch

from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import PlanSettings
from flatout.data.sequences.info import SequenceInfo
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.sequences.survey import SequencePreparation
from flatout.data.sequences.views import open_views
from flatout.data.store_data import StoreData


class SequenceData(StoreData[SequenceDataConfig, SequenceInfo]):
    """Recordings of sensors: whole, in windows, or in chunks whose hidden state is carried on.

    >>> data = SequenceData(source="cells/", features=["voltage", "current"], target="soc", time="t")  # doctest: +SKIP
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = SequenceDataConfig

    def open_store(self) -> SequenceInfo:
        preparation = SequencePreparation(self.config)
        store, report = preparation.open()
        info = SequenceInfo(store=store, report=report, source=preparation.source, config=self.config)
        open_views(info)
        return info

    def _feed(self, name: str, plan: PlanSettings, device: torch.device) -> Feed:
        """The feed of a split; chunks keep the order of their recordings."""
        return super()._feed(name, replace(plan, is_stream=self.config.chunk is not None), device)
