"""What files tell, kept for each: a survey finds the same, whichever process looked at a file, and
whenever.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.params import at_once
from tests.refusals import refused

from flatout.cli.cache import show
from flatout.data.checks import seen, survey
from flatout.data.checks.cleaning import CleaningConfig
from flatout.data.checks.survey import TextSurvey
from flatout.data.store.cache import Cache
from flatout.data.tables.formats.csv_file import CsvTable
from flatout.data.texts import encoded_units
from flatout.data.texts.data import TextData
from flatout.data.texts.opening import open_source
from flatout.data.texts.parts import encode_part
from flatout.data.texts.settings import TextDataConfig
from flatout.errors import UserError

FILES = 6
ROWS = 40
ODD = ["", "NA", "\u200bhidden", "a &amp; b", "same as ever", "Same as ever!", "x" * 50, "  "]


def write_files(folder: Path, files: int = FILES) -> str:
    """Texts that are empty, odd, alike and equal, in files that do not begin with the
    same classes.
    """
    folder.mkdir(exist_ok=True)
    for number in range(files):
        texts = [ODD[row % 8] for row in range(ROWS)]
        for row in range(0, ROWS, 3):
            texts[row] = f"w{number} says {row % 17}"
        rows = [
            f"{texts[row]},{'cab'[(row + number) % 3]}|b,{row / 7},g{row % 9}"
            for row in range(ROWS)
        ]
        rows[5] = "no label here,,,"
        lines = ["text,label,value,who", *rows, ""]
        (folder / f"part-{number}.csv").write_text("\n".join(lines), encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def small_sources(monkeypatch):
    monkeypatch.setattr(survey, "KEPT_FROM_BYTES", 1)
    monkeypatch.setattr(seen, "_ROWS_PER_BLOCK", 16)


@pytest.fixture
def looked(monkeypatch) -> list[str]:
    """The tables whose rows are looked at."""
    found: list[str] = []
    look = seen.Rules.look

    def looking(rules: Any, table: Any, *given: Any) -> Any:
        found.append(Path(table.name).name)
        return look(rules, table, *given)

    monkeypatch.setattr(seen.Rules, "look", looking)
    return found


def config_of(source: Any, cache: Path, **settings: Any) -> TextDataConfig:
    return TextData(source=source, cache=str(cache), **settings).config


def surveyed(config: TextDataConfig, *kept: Any) -> dict[str, Any]:
    """All that a survey finds."""
    source = open_source(config)
    found = TextSurvey(source, *kept).run(lambda rows: None)
    counts = {name: words.counts.tolist() for name, words in found.words.items()}
    remarks = [
        remark.as_dict() for findings in found.findings.values() for remark in findings.remarks()
    ]
    remarks += [remark.as_dict() for remark in found.account()]
    fates = {name: fate.tolist() for name, fate in found.fates.items()}
    ordered = sorted(map(str, remarks))
    return {
        "fates": fates,
        "words": counts,
        "classes": found.census.counts,
        "remarks": ordered,
        "rows": found.rows,
    }


WAYS: dict[str, dict[str, Any]] = {
    "classes": {},
    "several labels": {"problem": "multi", "label_delimiter": "|"},
    "numbers": {"problem": "regression", "label": "value"},
    "texts alone": {"problem": "none"},
    "groups": {"group": "who", "split_by": "group"},
    "odd rows dropped": {"clean": CleaningConfig(odd="drop", duplicates="drop", labels="merge")},
}


@pytest.mark.parametrize("way", at_once("classes", "groups", of=list(WAYS), seconds=1))
def test_a_survey_of_kept_files_finds_what_one_of_all_rows_finds(way, tmp_path, looked):
    config = config_of(write_files(tmp_path / "rows"), tmp_path / "cache", **WAYS[way])
    whole = surveyed(config)
    assert len(looked) == 1
    assert np.unique(whole["fates"]["train"]).tolist() == [-1, 0, 1, 2]
    for part in (seen.BuildPart(1, 1), seen.BuildPart(2, 3)):
        assert surveyed(config, Cache(config.cache), part) == whole
    assert sorted(looked[1:]) == [f"part-{number}.csv" for number in range(FILES)]


def test_files_that_are_small_on_average_are_looked_at_together(tmp_path, looked, monkeypatch):
    config = config_of(write_files(tmp_path / "rows"), tmp_path / "cache")
    sizes = [path.stat().st_size for path in (tmp_path / "rows").iterdir()]
    for least, number in ((sum(sizes) // FILES, FILES), (sum(sizes) // FILES + 1, 1)):
        monkeypatch.setattr(survey, "KEPT_FROM_BYTES", least)
        looked.clear()
        surveyed(config, Cache(tmp_path / f"cache of {number}"))
        assert len(looked) == number


def test_a_row_is_named_by_its_file_though_another_process_looked_at_it(tmp_path, looked):
    config = config_of(write_files(tmp_path / "rows"), tmp_path / "cache")
    for _ in range(2):
        source = open_source(config)
        findings = TextSurvey(source, Cache(config.cache)).run(lambda rows: None).findings["train"]
        (what,) = [
            remark.what
            for remark in findings.remarks()
            if "label" in remark.what and "without" in remark.what
        ]
        named = [f"{tmp_path}/rows/part-{number}.csv:6" for number in range(5)]
        assert ", ".join(named) in what
    assert len(looked) == FILES


def test_one_more_file_is_looked_at_alone_and_so_is_one_that_was_changed(tmp_path, looked):
    config = config_of(write_files(tmp_path / "rows"), tmp_path / "cache")
    surveyed(config, Cache(config.cache))
    write_files(tmp_path / "rows", FILES + 1)
    first = tmp_path / "rows" / "part-0.csv"
    first.write_text(
        first.read_text(encoding="utf-8").replace("w0 says 3", "w0 said 3"), encoding="utf-8"
    )
    looked.clear()
    found = surveyed(config, Cache(config.cache))
    assert sorted(looked) == ["part-0.csv", f"part-{FILES}.csv"]
    assert found == surveyed(config)


def test_rows_of_folders_are_named_by_their_folders_and_files(tmp_path, looked):
    folders = [write_files(tmp_path / name, 2) for name in ("first", "second")]
    config = config_of(folders, tmp_path / "cache")
    assert surveyed(config, Cache(config.cache)) == surveyed(config)
    remarks = str(surveyed(config, Cache(config.cache))["remarks"])
    assert f"{tmp_path}/second/part-1.csv:6" in remarks
    assert len(looked) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"text": "who"},
        {"group": "who", "split_by": "group"},
        {"label": "who"},
    ],
)
def test_other_settings_look_at_all_files_again(tmp_path, looked, settings):
    source = write_files(tmp_path / "rows")
    surveyed(config_of(source, tmp_path / "cache"), Cache(tmp_path / "cache"))
    looked.clear()
    config = config_of(source, tmp_path / "cache", **settings)
    found = surveyed(config, Cache(tmp_path / "cache"))
    assert len(looked) == FILES
    assert found == surveyed(config)


def test_what_was_damaged_is_looked_at_again(tmp_path, looked):
    config = config_of(write_files(tmp_path / "rows"), tmp_path / "cache")
    found = surveyed(config, Cache(config.cache))
    kept = sorted(Cache(config.cache).of_surveys().folder.glob("*/rows/bytes.bin"))
    kept[2].write_bytes(kept[2].read_bytes()[::-1])
    looked.clear()
    assert surveyed(config, Cache(config.cache)) == found
    assert len(looked) == 1


def test_a_survey_that_is_killed_goes_on_with_the_file_it_was_at(tmp_path, looked):
    config = config_of(write_files(tmp_path / "rows"), tmp_path / "cache")

    def killed() -> None:
        look = seen.Rules.look
        files = iter(range(3))

        def looking(*given: Any) -> Any:
            if next(files, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return look(*given)

        seen.Rules.look = looking
        seen._THREADS = 1
        TextSurvey(open_source(config), Cache(config.cache)).run(lambda rows: None)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    found = surveyed(config, Cache(config.cache))
    assert 0 < len(looked) <= FILES - 2
    assert found == surveyed(config)


def test_processes_that_survey_at_once_look_at_each_file_once(tmp_path):
    config = config_of(write_files(tmp_path / "rows"), tmp_path / "cache")
    notes = tmp_path / "notes"
    notes.mkdir()

    def part(number: int) -> None:
        keep = seen.KeptFiles._keep

        def keeping(kept: Any, file: Any, *given: Any) -> None:
            (notes / f"{number}-{Path(file.name).name}").touch()
            keep(kept, file, *given)

        seen.KeptFiles._keep = keeping
        TextSurvey(open_source(config), Cache(config.cache), seen.BuildPart(number, 3)).run(
            lambda rows: None
        )

    processes = [
        multiprocessing.get_context("fork").Process(target=part, args=(number,))
        for number in (1, 2, 3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    names = sorted(path.name.partition("-")[2] for path in notes.iterdir())
    assert names == [f"part-{number}.csv" for number in range(FILES)]


def test_a_mistake_in_a_file_is_named_and_nothing_of_it_is_kept(tmp_path):
    config = config_of(
        write_files(tmp_path / "rows"), tmp_path / "cache", problem="regression", label="label"
    )
    with refused("data.label", "csv row 1", "'c|b'"):
        surveyed(config, Cache(config.cache))
    assert not [path for path in Cache(config.cache).of_surveys().folder.glob("*") if path.is_dir()]


def test_a_file_that_changes_while_it_is_looked_at_leaves_nothing(tmp_path, monkeypatch):
    config = config_of(write_files(tmp_path / "rows"), tmp_path / "cache")
    look = seen.Rules.look

    def looking(rules: Any, table: Any, *given: Any) -> Any:
        yield from look(rules, table, *given)
        if table.name.endswith("part-3.csv"):
            Path(table.name).touch()

    monkeypatch.setattr(seen.Rules, "look", looking)
    with pytest.raises(UserError, match=r"part-3.csv changed while it was read"):
        surveyed(config, Cache(config.cache))
    assert len(list(Cache(config.cache).of_surveys().folder.glob("*/manifest.json"))) < FILES


def test_a_part_reads_its_own_files_alone_once_all_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(encoded_units, "UNIT_ROWS", 2 * ROWS)
    config = config_of(write_files(tmp_path / "rows"), tmp_path / "cache")
    encode_part(config, 1, 3)
    read = list[str]()
    blocks = CsvTable._blocks

    def reading(table: CsvTable, *given: Any) -> Any:
        read.append(table.path.name)
        return blocks(table, *given)

    monkeypatch.setattr(CsvTable, "_blocks", reading)
    assert encode_part(config, 2, 3) == (2, 0)
    assert read == ["part-1.csv", "part-4.csv"]


def test_the_size_of_a_cache_counts_surveys_and_clearing_it_removes_them(tmp_path, capsys):
    config = config_of(write_files(tmp_path / "rows"), tmp_path / "cache")
    surveyed(config, Cache(config.cache))
    show(Cache(config.cache), whole=False)
    assert f"MB in {FILES} surveys of files" in capsys.readouterr().out
    Cache(config.cache).clear()
    assert not Cache(config.cache).of_surveys().folder.exists()


def test_surveys_of_files_that_were_made_long_ago_leave_with_the_next(tmp_path, looked):
    config = config_of(write_files(tmp_path / "rows"), tmp_path / "cache")
    surveyed(config, Cache(config.cache))
    kept = sorted(
        path for path in Cache(config.cache).of_surveys().folder.glob("*") if path.is_dir()
    )
    os.utime(kept[0], (0, 0))
    looked.clear()
    surveyed(config, Cache(config.cache))
    assert len(looked) == 1


def test_a_source_may_have_more_files_than_a_process_may_open(tmp_path):
    files = 50
    config = config_of(write_files(tmp_path / "rows", files), tmp_path / "cache")
    found = surveyed(config, Cache(config.cache))  # with all that is imported on the way
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + files // 2, hard)
    )
    try:
        assert (
            surveyed(config, Cache(config.cache))
            == surveyed(config, Cache(tmp_path / "another"))
            == found
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
