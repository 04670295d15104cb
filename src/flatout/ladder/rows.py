"""Write the rows of a run as three csv files that a usual program and a run of ours both read.

Each kind of data (texts, bit strings, recordings) has a `ProgramRecipe` in `WAYS`. It makes a table
for each split, the words with which a run of flatout reads it, and what the usual program needs.
Data that no usual program can follow are refused with the key that asks for them. Open this file to
change what the csv files hold, or to give another kind of data a ladder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from flatout.bits.data import BitData
from flatout.bits.grams import FIELD_END
from flatout.bits.settings import BitsDataConfig
from flatout.data.checks.survey import TextSurvey
from flatout.data.problem import Problem
from flatout.data.ragged import row_indices
from flatout.data.sequences.data import SequenceData
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.tables.splits import SPLITS
from flatout.data.texts.opening import open_source
from flatout.data.texts.settings import TextDataConfig
from flatout.errors import require
from flatout.run_log import RunLog

ProgramData = TextDataConfig | BitsDataConfig | SequenceDataConfig  # what usual programs read
Written = tuple[dict[str, pa.Table], list[str], dict[str, Any]]
"""The rows of each split, the words of a run of ours that reads them, and what the usual program is
given."""
_CELL = pa.large_string()
_WITH_BREAKS = pa_csv.ParseOptions(newlines_in_values=True)


class Silent(RunLog):
    """Prints nothing: each run reports its own data."""

    def say(self, text: str) -> None:
        return


def write_rows(
    config: ProgramData, folder: Path, *, joined: Mapping[str, Any] | None
) -> tuple[list[str], dict[str, Any], int]:
    """Write the rows of each split.

    Returns the words of a run that reads them, what the usual program needs to read them, and how
    many rows an epoch has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    way = way_of(config)
    tables, words, reading = way.tables(config)
    if joined is not None:
        tables = {split: join_texts(table, **joined) for split, table in tables.items()}
    missing = [split for split in SPLITS if split not in tables]
    require(
        not missing,
        "ladder",
        f"no {' and no '.join(missing)} rows",
        hint="Give more rows, or a file for each split.",
    )
    for split, table in tables.items():
        pa_csv.write_csv(table, folder / f"{split}.csv")
    splits = {way.first_key: "train", "validation": "validation", "test": "test"}
    files = [
        f"data.{key}={quoted(str((folder / f'{split}.csv').absolute()))}"
        for key, split in splits.items()
    ]
    return [*words, *files], reading, way.count(config, tables["train"])


_BITS = "bloomfilter"
_RECORDING = "recording"
_AS_THEY_ARE = (
    "data.source=null data.time=null data.step=null data.max_gap=null data.cumulate=[]".split()
)
_AS_THEY_ARE += ["data.split_by=auto", "data.split_at=null"]


def quoted(text: str) -> str:
    """A text as a value on Hydra's command line, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _listed(names: list[str]) -> str:
    return f"[{','.join(map(quoted, names))}]"


def read_rows(path: Path) -> pa.Table:
    """Read written rows, all columns as texts; a text may have line breaks."""
    names = pa_csv.open_csv(path, parse_options=_WITH_BREAKS).schema.names
    cells = pa_csv.ConvertOptions(
        column_types=dict.fromkeys(names, _CELL), strings_can_be_null=False
    )
    return pa_csv.read_csv(path, parse_options=_WITH_BREAKS, convert_options=cells)


def _texts(config: TextDataConfig) -> Written:
    is_single = config.problem is Problem.single and not config.pair
    require(
        is_single,
        "data.problem",
        f"there is no ladder for {config.problem}",
        allowed="single",
        hint="Leave it out: ladders are for texts of one class each.",
    )
    source = open_source(config)
    surveyed = TextSurvey(source).run(lambda _: None)
    parts: dict[str, list[pa.RecordBatch]] = {}
    for split, block in source.texts_and_labels(surveyed.fates, lambda _: None):
        columns = {"text": pc.cast(block.texts, _CELL), "label": pc.cast(block.labels, _CELL)}
        parts.setdefault(split, []).append(pa.RecordBatch.from_pydict(columns))
    words = [
        "data.source=null",
        "data.text=text",
        "data.label=label",
        "data.group=null",
        "data.split_by=content",
    ]
    return {split: pa.Table.from_batches(blocks) for split, blocks in parts.items()}, words, {}


def join_texts(table: pa.Table, *, least: int, most: int) -> pa.Table:
    """Join rows to long texts of `least` to `most` rows each.

    Half of a text's rows have its label, the others are drawn from all rows.
    """
    random = np.random.default_rng(5)
    texts = table["text"].to_pylist()
    labels = np.array(table["label"].to_pylist())
    rows_of_label = {label: np.flatnonzero(labels == label) for label in np.unique(labels)}
    mean_lines = (least + most) / 2
    count = max(1, int(len(texts) / mean_lines))
    labels_of_texts = labels[random.integers(0, len(texts), count)]
    long_texts = list[str]()
    for label in labels_of_texts:
        num_lines = int(random.integers(least, most + 1))
        of_label: NDArray[np.int64] = random.choice(rows_of_label[label], num_lines)
        of_any = random.integers(0, len(texts), num_lines)
        rows = np.where(random.random(num_lines) < 0.5, of_label, of_any)
        long_texts.append("\n".join(texts[row] for row in rows))
    columns = {"text": long_texts, "label": labels_of_texts.tolist()}
    return pa.table({name: pa.array(values, _CELL) for name, values in columns.items()})


def _records(config: BitsDataConfig) -> Written:
    data = BitData.of(config, log=Silent())
    data.setup()
    info = data.info
    require(
        not info.is_set,
        "data.encoding",
        "there is no ladder for sets of numbers",
        hint="Use Bloom filters.",
    )
    tables = {}
    for split, view in data.store.splits.items():
        fields = pc.split_pattern(info.texts(split), FIELD_END)
        columns = {
            name: pc.list_element(fields, place) for place, name in enumerate(info.text_columns)
        }
        bits = np.unpackbits(view.fixed("tokens"), axis=1)[:, : info.num_inputs]
        digits = bits + ord("0")  # their characters
        columns[_BITS] = pa.array([row.tobytes().decode() for row in digits], _CELL)
        tables[split] = pa.table(columns)
    texts = [name for name in info.text_columns if name != _BITS]
    words = [f"data.columns={_listed(texts)}", f"data.bits={_BITS}", "data.form=binary"]
    return tables, words, {"columns": texts}


def _recordings(config: SequenceDataConfig) -> Written:
    is_window = (
        config.problem is SequenceProblem.estimate
        and config.lookback is not None
        and not config.chunk
    )
    require(
        is_window,
        "data.lookback",
        "the usual program reads windows with one answer",
        hint="Set data.lookback=SAMPLES, and leave data.chunk and other problems out.",
    )
    data = SequenceData.of(config, log=Silent())
    data.setup()
    info = data.info
    factor = np.array(info.scaler.factor)
    shift = np.array(info.scaler.shift)
    tables = {}
    for split, segments in info.segments.items():
        values = info.rows_of(split).values.astype(np.float64) * factor + shift
        lengths = segments.stop - segments.first
        rows = values[row_indices(segments.first, lengths)]
        columns: dict[str, Any] = {
            name: rows[:, column] for column, name in enumerate(info.columns)
        }
        recordings = np.repeat(np.arange(len(lengths)), lengths)
        columns[_RECORDING] = [f"{split} {number}" for number in recordings]
        tables[split] = pa.table(columns)
    features = [name for name in info.columns if name not in (_RECORDING, *config.targets)]
    words = [f"data.features={_listed(features)}", f"data.target={_listed(config.targets)}"]
    return tables, [*words, f"data.group=[{_RECORDING}]", *_AS_THEY_ARE], {"features": features}


def _count_windows(config: SequenceDataConfig, table: pa.Table) -> int:
    counts = pc.value_counts(table[_RECORDING]).field("counts").to_numpy()
    return int(np.maximum(0, counts - (config.lookback or 1) + 1).sum())


def _limits_of_texts(config: TextDataConfig) -> dict[str, Any]:
    words = config.vocabulary
    return {
        "max_length": config.max_length,
        "words": words.size,
        "min_frequency": words.min_frequency,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRecipe:
    """How rows of one kind of data are written, and how both programs read them."""

    kind: str  # what ladders call it
    title: str
    metric: str  # the test metric; a hundredth of it is a point
    tables: Callable[[Any], Written]
    first_key: str = "train"  # the setting that names the training rows
    # rows of an epoch
    count: Callable[[Any, pa.Table], int] = lambda config, table: int(table.num_rows)
    # how the usual program makes numbers of rows
    reading: Callable[[Any], dict[str, Any]] = lambda config: {}


WAYS: dict[type, ProgramRecipe] = {
    TextDataConfig: ProgramRecipe(
        kind="text", title="texts", metric="accuracy", tables=_texts, reading=_limits_of_texts
    ),
    BitsDataConfig: ProgramRecipe(
        kind="bits", title="bit strings", metric="dice", tables=_records, first_key="source"
    ),
    SequenceDataConfig: ProgramRecipe(
        kind="sequence",
        title="recordings",
        metric="r2",
        tables=_recordings,
        count=_count_windows,
        reading=lambda config: {"lookback": config.lookback, "targets": config.targets},
    ),
}


def way_of(data: object) -> ProgramRecipe:
    require(
        type(data) in WAYS,
        "ladder",
        f"there is none for {type(data).__name__}",
        hint="Use texts, bit strings or recordings.",
    )
    return WAYS[type(data)]
