"""The rows of a run's splits as three csv files, so that a usual program and a run of ours read the same ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from flatout.bits.bit_data import BitData
from flatout.bits.data import BitsDataConfig
from flatout.bits.grams import FIELD_END
from flatout.bits.info import stored_texts
from flatout.data.checks.survey import TextSurvey
from flatout.data.datamodules import SequenceData
from flatout.data.problem import Problem
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.tables.splits import SPLITS
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import open_source
from flatout.errors import require
from flatout.run_log import PrintLog

_CELL = pa.large_string()
_WITH_BREAKS = pa_csv.ParseOptions(newlines_in_values=True)


class Silent(PrintLog):
    """Prints nothing: each run reports its own data."""

    def say(self, text: str) -> None:
        return


@dataclass(frozen=True, slots=True)
class Rows:
    """Written rows: how a run of ours reads them, how a usual program does, and how many there are."""

    words: list[str]
    reading: dict[str, Any]
    count: int
    """Rows of an epoch."""


def write_rows(config: Any, folder: Path, *, joined: Mapping[str, Any] | None = None) -> Rows:
    """Write the rows of each split; `joined`: see `join_texts`."""
    folder.mkdir(parents=True, exist_ok=True)
    way = way_of(config)
    tables = way.tables(config)
    words, reading = way.read(config, tables["train"].column_names)
    if joined is not None:
        tables = {split: join_texts(table, **joined) for split, table in tables.items()}
    missing = [split for split in SPLITS if split not in tables]
    hint = "Give more rows, or a file for each split."
    require(not missing, "ladder", f"no {' and no '.join(missing)} rows", hint=hint)
    for split, table in tables.items():
        pa_csv.write_csv(table, folder / f"{split}.csv")
    names_of_files = {way.first_key: "train", "validation": "validation", "test": "test"}
    files = [f"data.{key}={quoted(str((folder / f'{split}.csv').absolute()))}" for key, split in names_of_files.items()]
    return Rows([*words, *files], reading, way.count(config, tables["train"]))


_BITS, _RECORDING = "bloomfilter", "recording"
_NO_SPLIT = ["data.group=null", "data.split_by=content"]
_AS_THEY_ARE = "data.source=null data.time=null data.step=null data.max_gap=null data.cumulate=[]".split()
_AS_THEY_ARE += ["data.split_by=auto", "data.split_at=null"]


def quoted(text: str) -> str:
    """A text as a value on Hydra's command line, whatever is in it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _listed(names: list[str]) -> str:
    return f"[{','.join(map(quoted, names))}]"


def read_rows(path: Path) -> pa.Table:
    """Written rows again, whatever line breaks their texts have; all columns as texts."""
    names = pa_csv.open_csv(path, parse_options=_WITH_BREAKS).schema.names
    cells = pa_csv.ConvertOptions(column_types=dict.fromkeys(names, _CELL), strings_can_be_null=False)
    return pa_csv.read_csv(path, parse_options=_WITH_BREAKS, convert_options=cells)


def _texts(config: TextDataConfig) -> dict[str, pa.Table]:
    """Texts and labels of each split."""
    is_single = config.problem is Problem.single and not config.pair
    hint = "Leave it out: the usual programs have one class a row."
    require(is_single, "data.problem", f"{config.problem} has no usual program", allowed="single", hint=hint)
    source = open_source(config)
    surveyed = TextSurvey(source, config.clean, config.max_classes).run(lambda _: None)
    parts: dict[str, list[pa.RecordBatch]] = {}
    for split, block in source.texts_and_labels(surveyed.fates, lambda _: None):
        columns = {"text": pc.cast(block.texts, _CELL), "label": pc.cast(block.labels, _CELL)}
        parts.setdefault(split, []).append(pa.RecordBatch.from_pydict(columns))
    return {split: pa.Table.from_batches(blocks) for split, blocks in parts.items()}


def join_texts(table: pa.Table, *, least: int, most: int, share: float = 0.5, seed: int = 5) -> pa.Table:
    """Long texts: each has `least` to `most` rows, a `share` of them with its label, the others drawn from all."""
    random = np.random.default_rng(seed)
    texts, labels = table["text"].to_pylist(), np.array(table["label"].to_pylist())
    count = 2 * len(texts) // (least + most)
    by_label = {label: np.flatnonzero(labels == label) for label in np.unique(labels)}
    made: list[str] = []
    chosen = labels[random.integers(0, len(texts), max(count, 1))]
    for label in chosen:
        lines = int(random.integers(least, most + 1))
        own: NDArray[np.int64] = random.choice(by_label[label], lines)
        other = random.integers(0, len(texts), lines)
        rows = np.where(random.random(lines) < share, own, other)
        made.append("\n".join(texts[row] for row in rows))
    return pa.table({"text": pa.array(made, _CELL), "label": pa.array(chosen.tolist(), _CELL)})


def _records(config: BitsDataConfig) -> dict[str, pa.Table]:
    """Plain columns and Bloom filters of each split."""
    data = BitData.of(config, log=Silent())
    data.setup()
    info = data.info
    require(not info.is_set, "data.encoding", "sets of numbers have no usual program", hint="Use Bloom filters.")
    tables = {}
    for split in (name for name in SPLITS if name in data.store.splits):
        view = data.store.splits[split]
        fields = pc.split_pattern(stored_texts(view), FIELD_END)
        columns = {name: pc.list_element(fields, place) for place, name in enumerate(info.text_columns)}
        bits = np.unpackbits(view.fixed("tokens"), axis=1)[:, : info.num_inputs] + ord("0")
        columns[_BITS] = pa.array([row.tobytes().decode() for row in bits], _CELL)
        tables[split] = pa.table(columns)
    return tables


def _recordings(config: SequenceDataConfig) -> dict[str, pa.Table]:
    """Samples of each split in their own units, with the number of their recording."""
    is_window = config.problem is SequenceProblem.estimate and config.lookback is not None and not config.chunk
    hint = "Set data.lookback=SAMPLES, and leave data.chunk and other problems out."
    require(is_window, "data.lookback", "the usual program reads windows with one answer", hint=hint)
    data = SequenceData.of(config, log=Silent())
    data.setup()
    info, scaler, tables = data.info, data.info.scaler, {}
    for split, segments in info.segments.items():
        values = info.rows_of(split).values.astype(np.float64) * np.array(scaler.factor) + np.array(scaler.shift)
        places = [np.arange(first, stop) for first, stop in zip(segments.first, segments.stop, strict=True)]
        number = np.repeat(np.arange(len(places)), [len(part) for part in places])
        rows = values[np.concatenate(places)]
        columns: dict[str, Any] = {name: rows[:, column] for column, name in enumerate(info.columns)}
        columns[_RECORDING] = [f"{split} {each}" for each in number]
        tables[split] = pa.table(columns)
    return tables


def _read_texts(config: TextDataConfig, columns: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    return ["data.source=null", "data.text=text", "data.label=label", *_NO_SPLIT], {}


def _read_records(config: BitsDataConfig, columns: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    texts = [name for name in columns if name != _BITS]
    return [f"data.columns={_listed(texts)}", f"data.bits={_BITS}", "data.form=binary"], {"columns": texts}


def _read_recordings(config: SequenceDataConfig, columns: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    features = [name for name in columns if name not in (_RECORDING, *config.targets)]
    words = [f"data.features={_listed(features)}", f"data.target={_listed(config.targets)}"]
    return [*words, f"data.group=[{_RECORDING}]", *_AS_THEY_ARE], {"features": features}


def _count_rows(config: Any, table: pa.Table) -> int:
    return int(table.num_rows)


def _count_windows(config: SequenceDataConfig, table: pa.Table) -> int:
    counts = pc.value_counts(table[_RECORDING]).field("counts").to_numpy()
    return int(np.maximum(0, counts - (config.lookback or 1) + 1).sum())


def _limits_of_texts(config: TextDataConfig) -> dict[str, Any]:
    words = config.vocabulary
    return {"max_length": config.max_length, "words": words.size, "min_frequency": words.min_frequency}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a kind of data is written for a usual program, and what both sides make of it."""

    kind: str
    """What ladders call it."""
    title: str
    metric: str
    """The test metric; a hundredth of it is a point."""
    tables: Callable[[Any], dict[str, pa.Table]]
    """The rows of each split."""
    read: Callable[[Any, Sequence[str]], tuple[list[str], dict[str, Any]]]
    """From the written columns: the words of a run of ours, and what the usual program is given."""
    first_key: str = "train"
    """The setting that names the training rows."""
    count: Callable[[Any, pa.Table], int] = _count_rows
    """Rows of an epoch."""
    reading: Callable[[Any], dict[str, Any]] = lambda config: {}
    """How the usual program makes numbers of rows."""


WAYS: dict[type, Way] = {
    TextDataConfig: Way(
        kind="text",
        title="texts",
        metric="accuracy",
        tables=_texts,
        read=_read_texts,
        reading=_limits_of_texts,
    ),
    BitsDataConfig: Way(
        kind="bits", title="bit strings", metric="dice", tables=_records, read=_read_records, first_key="source"
    ),
    SequenceDataConfig: Way(
        kind="sequence",
        title="recordings",
        metric="r2",
        tables=_recordings,
        read=_read_recordings,
        count=_count_windows,
        reading=lambda config: {"lookback": config.lookback, "targets": config.targets},
    ),
}


def way_of(data: Any) -> Way:
    """How the data of a run are written."""
    hint = "Use texts, bit strings or recordings."
    require(type(data) in WAYS, "ladder", f"{type(data).__name__} has no usual program", hint=hint)
    return WAYS[type(data)]
