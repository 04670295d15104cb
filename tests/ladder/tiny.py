"""A few rows of each kind, with the case of a usual program on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.bits.people import PeopleConfig
from flatout.bits.settings import BitsDataConfig
from flatout.data.samples.cells import CellsConfig
from flatout.data.samples.headlines import HeadlinesConfig
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.texts.settings import TextDataConfig
from flatout.engine.optimizer import OptimConfig
from flatout.ladder.case import describe, encoder_folder
from flatout.ladder.rows import write_rows
from flatout.ladder.usual.program import Case
from flatout.models.bilstm import BiLSTMConfig
from flatout.models.bit_mlp import BitMLPConfig
from flatout.models.encoder.transformer import TransformerConfig
from flatout.models.rnn import RNNConfig

HEADLINES = HeadlinesConfig(rows=96, eval_rows=40, classes=3)


def parts_of(program: str) -> tuple[Any, Any]:
    """Data and model of a program, as small as they can be."""
    if program == "headlines":
        data = TextDataConfig(sample=HEADLINES, batch_size=16, max_length=16)
        return data, BiLSTMConfig(embedding=8, hidden=8, dropout=0.0)
    if program == "tweets":
        data = TextDataConfig(sample=HEADLINES, batch_size=16, max_length=24)
        return data, TransformerConfig(hidden=16, layers=1, heads=2)
    if program == "bloom":
        model = BitMLPConfig(detectors=False, straight=False, blend=False, widths=[16])
        return BitsDataConfig(sample=PeopleConfig(rows=120), batch_size=16), model
    sample = CellsConfig(cells=2, cycles=2, samples=40)
    data = SequenceDataConfig(
        sample=sample, lookback=5, batch_size=16, target="soc", features=["voltage", "current"]
    )
    return data, RNNConfig(hidden=8)


def tiny_case(program: str, folder: Path) -> Case:
    """Rows on disk, and the case on them."""
    data, model = parts_of(program)
    _, read, _ = write_rows(replace(data, cache=str(folder / "cache")), folder, joined=None)
    reading: dict[str, Any] = {**read, "usual_batch": 8}
    if isinstance(model, TransformerConfig):
        reading["pretrained"] = str(
            encoder_folder(model, data, folder / "train.csv", folder / "encoder", 0)
        )
    optim = OptimConfig(lr=1e-2)
    return describe(data, model, optim, folder=folder, clip=1.0, epochs=1, seed=0, reading=reading)
