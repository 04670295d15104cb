"""Settings of recordings: their columns, the sampling step, and how a model reads through time.

A model reads a recording whole, in windows of `lookback` samples (each answered alone), or in
chunks (the next one takes the hidden state). `problem` says what it answers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flatout.data.feeding import FILES, FOLDERS, SOURCES, FeedingConfig, require_other_files
from flatout.data.samples.cells import CellsConfig
from flatout.data.sequences.missing import Missing
from flatout.errors import require, setting

_ROWS = 64  # of a batch, where nothing says otherwise
SequenceProblem = StrEnum("SequenceProblem", "estimate forecast label")
"""What is answered: the target at each time, its next steps, or one class or number a recording."""
Scale = StrEnum("Scale", "standard minmax none")  # how columns are scaled, by the training rows
PartBy = StrEnum("PartBy", "auto file group time")
"""What is kept whole when recordings are split: a file, a group, or neither, where time splits each
recording."""


@dataclass(kw_only=True, slots=True)
class SequenceDataConfig(FeedingConfig):
    """Recordings of sensors: tables with a row a sample."""

    source: Any = setting(
        None,
        "All recordings: a file, a pattern, a folder of files, or a folder with a file for each"
        " split; null with no data.train: the built-in cells. From Python also a table.",
        allowed=SOURCES,
        example="cells/ data.features=[voltage,current] data.target=soc",
    )
    train: Any = setting(
        None,
        "Training recordings.",
        allowed=FOLDERS,
        example="train/ data.features=[voltage,current] data.target=soc",
    )
    validation: Any = setting(
        None,
        "The validation recordings; null: taken from the training recordings.",
        allowed=FILES,
        example="data.train=train/ data.validation=dev/ data.features=[voltage] data.target=soc",
    )
    test: Any = setting(
        None,
        "The test recordings; null: taken from the training recordings when no validation is given"
        " either.",
        allowed=FILES,
        example="data.train=train/ data.test=test/ data.features=[voltage] data.target=soc",
    )
    sample: CellsConfig = setting(CellsConfig, "The built-in cells, used when there is no source.")
    problem: SequenceProblem = setting(
        SequenceProblem.estimate,
        "estimate: the target at each time; forecast: its next steps; label: one class or number a"
        " recording.",
        example="forecast data.lookback=96 data.horizon=24",
    )
    features: list[str] | None = setting(
        None,
        "Columns that are read; null: of the built-in cells their sensors, of a forecast the"
        " targets alone.",
        example="[voltage,current]",
        allowed="a list, each column once, or null",
    )
    target: Any = setting(
        None, "What is answered.", allowed="a column, or a list of columns", example="soc"
    )
    time: str | None = setting(
        None, "Column of the time, in seconds or as dates; null: a row is a step.", example="t"
    )
    group: list[str] | None = setting(
        None, "Columns that tell recordings apart; null: files.", example="[cell,cycle]"
    )
    cumulate: list[str] = setting(
        list,
        "Features whose integral since the recording's beginning is read too, in unit-hours, such"
        " as the charge drawn by a current; in unit-samples without data.time.",
        example="data.features=[voltage,current] data.cumulate=[current]",
    )
    step: float | None = setting(
        None,
        "Seconds between samples, resampled: the last sample at or before each time, for labels"
        " linearly; null: as is.",
        above=0,
        example="data.time=t data.step=10",
    )
    max_gap: float | None = setting(
        None,
        "Longer gaps part a recording, in seconds; null: none.",
        above=0,
        example="data.time=t data.max_gap=60",
    )
    missing: Missing = setting(
        Missing.refuse,
        "Rows with a missing value: refuse, fill (with the value before, for labels linearly over"
        " time) or drop.",
    )
    scale: Scale = setting(
        Scale.standard, "How columns are scaled, by the training rows: standard, minmax or none."
    )
    lookback: int | None = setting(
        None, "Samples of a window; null: recordings or chunks.", least=1, example="96"
    )
    stride: int = setting(
        1,
        "Samples between training windows; others use every one.",
        least=1,
        example="data.lookback=96 data.stride=12",
    )
    horizon: int = setting(
        1, "Steps ahead.", least=1, example="data.problem=forecast data.lookback=96 data.horizon=24"
    )
    chunk: int | None = setting(
        None, "Samples of a chunk; the next takes its hidden state.", least=1, example="200"
    )
    split_by: PartBy = setting(
        PartBy.auto,
        "What stays whole when splits are taken: file, group (by the first column of data.group) or"
        " time, which cuts each recording. With auto: groups where there are three, else files,"
        " else time.",
        example="time data.split_at=[8640,11520,14400]",
    )
    split_at: list[int] | None = setting(
        None,
        "For split_by=time: samples of each recording at which training, validation and, if given,"
        " the test end.",
        example="data.split_by=time data.split_at=[8640,11520,14400]",
        allowed="two or three rising numbers of samples, or null",
    )
    noise: dict[str, float] = setting(
        dict,
        "Training only: standard deviation of noise added to a feature, in its unit, another in"
        " each epoch.",
        least=0,
        allowed="0 or more, for features by name",
        example="+data.noise.voltage=0.01",
    )
    offset: dict[str, float] = setting(
        dict,
        "Training only: standard deviation of a constant added to a feature of each row of a"
        " batch.",
        least=0,
        allowed="0 or more, for features by name",
        example="+data.offset.voltage=0.02",
    )
    low_pass: dict[str, float] = setting(
        dict,
        "Training only: most that a feature is smoothed; the memory of an exponential mean, drawn"
        " for each row.",
        least=0,
        below=1,
        allowed="0 to below 1, for features by name",
        example="+data.low_pass.current=0.5",
    )
    batch_size: int | None = setting(
        None,
        "Recordings, windows or chunks one device computes at once; null: 64, and fewer where a"
        " run has few recordings or chunks.",
        least=1,
        example="data.batch_size=64",
    )

    def __post_init__(self) -> None:
        FeedingConfig.__post_init__(self)  # a class with slots has no working super()
        require_other_files({"source": self.source, **self.given}, ("train", "source"))
        self._complete_columns()
        self._check_columns()
        self._check_counts()
        self._check_problem()

    @property
    def are_recordings(self) -> bool:
        return True

    @property
    def has_windows(self) -> bool:
        return self.lookback is not None

    @property
    def usual_rows(self) -> int:
        return _ROWS

    @property
    def targets(self) -> list[str]:
        return [self.target] if isinstance(self.target, str) else list(self.target or [])

    @property
    def label(self) -> str | None:
        """Column of the one label of a recording, for data.problem=label."""
        return self.targets[0] if self.problem is SequenceProblem.label else None

    def _complete_columns(self) -> None:
        """Name the columns of the built-in cells where the settings leave them open."""
        if self.is_sample:
            usual_target = "voltage" if self.problem is SequenceProblem.forecast else "soc"
            self.target = self.target or usual_target
            if self.features is None:
                sensors = ("voltage", "current", "temperature")
                self.features = [name for name in sensors if name not in self.targets]
            self.time = self.time or "time_s"
            self.group = self.group or ["cell", "cycle"]
        # From Python a single column may be given as a text.
        self.group = [self.group] if isinstance(self.group, str) else self.group
        self.features = [self.features] if isinstance(self.features, str) else self.features

    def _check_columns(self) -> None:
        where = "data.target"
        targets = self.targets
        require(
            bool(targets),
            where,
            "is not set",
            hint="Name the column that is answered: data.target=COLUMN.",
        )
        require(
            len(set(targets)) == len(targets),
            where,
            f"{', '.join(targets)}",
            allowed="each column once",
        )
        features = [] if self.features is None else list(self.features)
        require(
            len(set(features)) == len(features),
            "data.features",
            ", ".join(features),
            allowed="each column once",
        )
        # A forecast reads the past of its targets, so they may be features, or the only ones.
        if self.problem is SequenceProblem.forecast:
            return
        require(
            bool(features),
            "data.features",
            "is not set",
            hint="Name the columns that are read: data.features=[COLUMN,COLUMN].",
        )
        for name in targets:
            require(
                name not in features,
                "data.features",
                f"{name!r} is the target",
                hint="Leave it out.",
            )
        require(
            self.problem is not SequenceProblem.label or len(targets) == 1,
            where,
            f"{len(targets)} columns",
            allowed="one column for data.problem=label",
        )

    def _check_counts(self) -> None:
        for name, value in (("step", self.step), ("max_gap", self.max_gap)):
            require(
                value is None or self.time is not None,
                f"data.{name}",
                f"{value} without data.time",
                hint="Name the column: data.time=COLUMN.",
            )
        cuts = self.split_at
        if cuts is not None:
            is_rising = all(before < cut for before, cut in itertools.pairwise([0, *cuts]))
            require(
                is_rising and len(cuts) in (2, 3),
                "data.split_at",
                f"{cuts}",
                allowed="two or three rising numbers of samples",
            )
            require(
                self.split_by is PartBy.time,
                "data.split_at",
                f"with split_by={self.split_by}",
                hint="Set data.split_by=time.",
            )
        features = self.features or []
        inputs = [*features, *(self.targets if self.problem is SequenceProblem.forecast else [])]
        for name in self.cumulate:
            require(
                name in features,
                "data.cumulate",
                f"no such feature {name!r}",
                allowed=", ".join(features),
            )
        for name in ("noise", "offset", "low_pass"):
            for feature in getattr(self, name):
                require(
                    feature in inputs,
                    f"data.{name}.{feature}",
                    "no such feature",
                    allowed=", ".join(inputs),
                )

    def _check_problem(self) -> None:
        """Refuse windows, chunks and splits that do not go with what is answered."""
        require(
            self.lookback is None or self.chunk is None,
            "data.chunk",
            "with data.lookback",
            hint="Leave one of them out.",
        )
        if self.problem is SequenceProblem.forecast:
            require(
                self.lookback is not None,
                "data.problem",
                "forecast without data.lookback",
                hint="Set data.lookback to the samples that a forecast reads.",
            )
        require(
            self.horizon == 1 or self.problem is SequenceProblem.forecast,
            "data.horizon",
            f"{self.horizon}, but no forecast",
            hint="Set data.problem=forecast.",
        )
        if self.problem is SequenceProblem.label:
            require(
                self.lookback is None and self.chunk is None,
                "data.problem",
                "label reads whole recordings",
                hint="Leave out data.lookback and data.chunk.",
            )
            require(
                self.split_by is not PartBy.time,
                "data.split_by",
                "time cuts recordings, which have one label",
                allowed="file, group",
            )
        # A batch of chunks has a chunk of each of so many recordings, so its rows are fixed.
        require(
            self.chunk is None or self.tokens_per_batch is None,
            "data.tokens_per_batch",
            "with data.chunk",
            hint="Set data.batch_size instead.",
        )
        require(
            self.group is not None or self.split_by is not PartBy.group,
            "data.split_by",
            "group without data.group",
            hint="Name its columns: data.group=[COLUMN].",
        )
