"""How recordings are split: files and groups stay whole, and copies are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from tests.data.recordings import (
    SETTINGS,
    labelled_recordings,
    open_data,
    recording,
    refusal,
    table_of_recordings,
)
from tests.refusals import refused

from flatout.data import SequenceData


def test_groups_part_a_table_and_the_first_group_stays_whole():
    parts = [
        {"cell": f"c{cell}", "cycle": cycle, **recording(20, cell + cycle / 9)}
        for cell in range(5)
        for cycle in range(3)
    ]
    info = open_data(table_of_recordings(parts), group=["cell", "cycle"]).info
    assert len(info.recording_names) == 15
    cell_of = [name.split("cell=")[1][:2] for name in info.recording_names]
    cells = {
        split: set(map(cell_of.__getitem__, segments.recording))
        for split, segments in info.segments.items()
    }
    assert cells["train"] | cells["validation"] | cells["test"] == {f"c{cell}" for cell in range(5)}
    assert sum(map(len, cells.values())) == 5


def test_a_single_recording_is_cut_in_time_at_the_samples_that_are_named(tmp_path):
    info = open_data(pa.table(recording(100)), split_by="time", split_at=[60, 80, 95]).info
    spans = {
        split: (int(each.first[0]), int(each.stop[0])) for split, each in info.segments.items()
    }
    assert spans == {"train": (0, 60), "validation": (60, 80), "test": (80, 95)}
    short = open_data(pa.table(recording(100))).info
    assert {split: int(each.stop[0] - each.first[0]) for split, each in short.segments.items()} == {
        "train": 80,
        "validation": 10,
        "test": 10,
    }


def _splits_of_files(data: SequenceData) -> dict[str, set[str]]:
    names = data.info.facts["recordings"]
    segments = data.info.segments
    return {
        split: set(map(names.__getitem__, each.recording.tolist()))
        for split, each in segments.items()
    }


def test_files_stay_whole_where_they_are_asked_to_and_groups_otherwise(tmp_path):
    for number, name in enumerate("abcd"):
        pq.write_table(
            labelled_recordings(1, 2, 3, 4, phase=10 * number), tmp_path / f"{name}.parquet"
        )
    given: dict[str, Any] = {"group": ["cell"]}
    for split_by, file_or_group in (
        ("file", lambda name: name.partition(": ")[0]),
        ("auto", lambda name: name[-1]),
    ):
        splits = _splits_of_files(open_data(tmp_path, **given, split_by=split_by))
        parts = [set(map(file_or_group, names)) for names in splits.values()]
        assert len(parts) == 3
        assert sum(map(len, parts)) == 4 == len(set.union(*parts))


def test_pieces_of_a_group_between_gaps_stand_in_one_split(tmp_path):
    times = [place + 1000.0 * (place // 8) for place in range(32)]
    tables = [
        pa.table(
            {
                "cell": [str(cell)] * 32,
                **recording(32, cell),
                "t": times,
            }
        )
        for cell in range(5)
    ]
    found = _splits_of_files(open_data(pa.concat_tables(tables), group=["cell"], max_gap=10))
    assert sum(map(len, found.values())) == 20
    splits_of_cell: dict[str, set[str]] = {}
    for split, names in found.items():
        for name in names:
            splits_of_cell.setdefault(name.partition(" part ")[0], set()).add(split)
    assert [len(splits) for splits in splits_of_cell.values()] == [1] * 5
    given = {
        "train": tables[0],
        "validation": pa.concat_tables([tables[1], tables[2]]),
        "test": tables[3],
    }
    assert open_data(None, **given, group=["cell"], max_gap=10)
    same = tables[1].set_column(0, "cell", pa.array(["0"] * 32))
    with refused("data.validation", "cell=0 part 1 is the group of", "the train split"):
        open_data(None, **given | {"validation": same}, group=["cell"], max_gap=10)


def test_places_to_split_at_do_not_go_with_given_splits():
    given = {
        name: pa.table(recording(40, seed))
        for seed, name in enumerate(("train", "validation", "test"))
    }
    with refused("data.split_at", "files give the splits"):
        open_data(None, **given, split_by="time", split_at=[20, 30])


def test_a_group_in_two_splits_and_equal_recordings_are_refused(tmp_path):
    def table(group: str, phase: float) -> pa.Table:
        return pa.table({"cell": [group] * 20, **recording(20, phase)})

    given = {
        "train": table("c1", 0),
        "validation": table("c2", 1),
        "test": table("c1", 2),
        "source": None,
    }
    message = refusal(None, **{k: v for k, v in given.items() if k != "source"}, group=["cell"])
    assert (
        "data.test: table in memory: cell=c1 is the group of table in memory: cell=c1, which is in"
        " the train" in message
    )
    given["test"] = table("c3", 0)
    message = refusal(None, **{k: v for k, v in given.items() if k != "source"}, group=["cell"])
    assert (
        "data.test: table in memory: cell=c3 holds the samples of table in memory: cell=c1"
        in message
    )


def test_a_part_of_a_training_recording_in_another_split_is_warned_of():
    random = np.random.default_rng(0)
    columns = {
        name: values + random.standard_normal(400)
        for name, values in recording(400).items()
        if name != "t"
    }
    columns["t"] = np.arange(400)
    other = {name: values + (name != "t") for name, values in columns.items()}
    given = {
        "train": columns,
        "validation": other,
        "test": {name: values[60:] for name, values in columns.items()},
    }
    info = SequenceData(**{**SETTINGS, **{name: pa.table(each) for name, each in given.items()}})
    info.setup()
    (line,) = [line for line in info.info.lines if line.startswith("warning")]
    assert (
        line
        == "warning test: table in memory has 100% of its samples in table in memory, which is in"
        " the train split; leave one out"
    )
