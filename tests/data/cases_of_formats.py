"""Cases of the catalogue of other formats, of several files, and of folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
from tests.data.cases import GOOD, TEXTS, CaseList, csv_of, lines
from tests.run_files import jsonl_of

OTHER_FORMATS = CaseList()
case = OTHER_FORMATS.add


@case("json that is one long line", "the array ends here, but the file continues")
def _(folder: Path) -> dict[str, Any]:
    (folder / "rows.json").write_text(
        json.dumps([{"text": "a", "label": "b"}]) + "x", encoding="utf-8"
    )
    return {"train": str(folder / "rows.json")}


@case("truncated parquet", "not a whole parquet file")
def _(folder: Path) -> dict[str, Any]:
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"text": TEXTS, "label": ["a", "b"] * 30}), path)
    path.write_bytes(path.read_bytes()[:-100])
    return {"train": str(path)}


@case("truncated arrow", "not a whole Arrow file")
def _(folder: Path) -> dict[str, Any]:
    path = folder / "rows.arrow"
    pyarrow.feather.write_feather(
        pa.table({"text": TEXTS, "label": ["a", "b"] * 30}), path, compression="uncompressed"
    )
    path.write_bytes(path.read_bytes()[:-100])
    return {"train": str(path)}


@case("parquet with nested texts", "column 'text' of")
def _(folder: Path) -> dict[str, Any]:
    pq.write_table(
        pa.table({"text": [{"a": 1}] * 3, "label": ["a", "b", "c"]}), folder / "rows.parquet"
    )
    return {"train": str(folder / "rows.parquet")}


@case("nested columns that nobody needs", "60 read = 60 kept", is_error=False)
def _(folder: Path) -> dict[str, Any]:
    rows = pa.table(
        {
            "text": TEXTS,
            "label": ["a", "b"] * 30,
            "more": [{"deep": [1]}] * 60,
        }
    )
    pq.write_table(rows, folder / "rows.parquet")
    return {"train": str(folder / "rows.parquet")}


@case("NaN as text and as label", "1 row without a label, dropped (row 61)", is_error=False)
def _(folder: Path) -> dict[str, Any]:
    rows = pa.table({"text": [*TEXTS, "more"], "label": [1.0, 2.0] * 30 + [float("nan")]})
    pq.write_table(rows, folder / "rows.parquet")
    return {"train": str(folder / "rows.parquet")}


@case("validation without rows", "no rows are left for the validation split")
def _(folder: Path) -> dict[str, Any]:
    (folder / "rows.csv").write_text(GOOD, encoding="utf-8")
    (folder / "dev.csv").write_text("text,label\nno label,\n", encoding="utf-8")
    return {"train": str(folder / "rows.csv"), "validation": str(folder / "dev.csv")}


@case("test equal to train", "is the training file itself")
def _(folder: Path) -> dict[str, Any]:
    (folder / "rows.csv").write_text(GOOD, encoding="utf-8")
    return {
        "train": str(folder / "rows.csv"),
        "test": str(folder / ".." / folder.name / "rows.csv"),
    }


@case("test a copy of validation", "holds exactly the validation rows")
def _(folder: Path) -> dict[str, Any]:
    (folder / "rows.csv").write_text(GOOD, encoding="utf-8")
    for name in ("dev.csv", "test.csv"):
        (folder / name).write_text(csv_of(lines(20, 100)), encoding="utf-8")
    return {
        "source": str(folder / "rows.csv"),
        "validation": str(folder / "dev.csv"),
        "test": str(folder / "test.csv"),
    }


@case(
    "labels of validation that training never has",
    "no label of the validation rows is one of the training rows",
)
def _(folder: Path) -> dict[str, Any]:
    (folder / "rows.csv").write_text(GOOD, encoding="utf-8")
    (folder / "dev.csv").write_text(
        csv_of([(text, "7") for text, _ in lines(20, 100)]), encoding="utf-8"
    )
    return {"train": str(folder / "rows.csv"), "validation": str(folder / "dev.csv")}


@case(
    "a label that only validation has",
    "1 class that no training row has, scored as misses: 'sky' (1 row)",
    is_error=False,
)
def _(folder: Path) -> dict[str, Any]:
    (folder / "rows.csv").write_text(GOOD, encoding="utf-8")
    (folder / "dev.csv").write_text(csv_of([*lines(20, 100), ("a cloud", "sky")]), encoding="utf-8")
    return {"train": str(folder / "rows.csv"), "validation": str(folder / "dev.csv")}


@case(
    "training texts in the test",
    "2 rows whose text is a training text too, kept (rows 1, 2)",
    is_error=False,
)
def _(folder: Path) -> dict[str, Any]:
    (folder / "rows.csv").write_text(GOOD, encoding="utf-8")
    (folder / "test.csv").write_text(csv_of([*lines(2), *lines(20, 100)]), encoding="utf-8")
    return {"train": str(folder / "rows.csv"), "test": str(folder / "test.csv")}


@case(
    "training texts in the test, dropped",
    "2 rows dropped because their text is judged elsewhere (rows 1, 2)",
    is_error=False,
)
def _(folder: Path) -> dict[str, Any]:
    (folder / "rows.csv").write_text(GOOD, encoding="utf-8")
    (folder / "test.csv").write_text(csv_of([*lines(2), *lines(20, 100)]), encoding="utf-8")
    return {
        "train": str(folder / "rows.csv"),
        "test": str(folder / "test.csv"),
        "clean": {"leaks": "drop"},
    }


@case("two files with different columns", "no column 'label' in")
def _(folder: Path) -> dict[str, Any]:
    (folder / "a.csv").write_text(GOOD, encoding="utf-8")
    (folder / "b.csv").write_text(csv_of(lines(5, 200), "text,lable"), encoding="utf-8")
    return {
        "train": [str(folder / "a.csv"), str(folder / "b.csv")],
        "text": "text",
        "label": "label",
    }


@case("a wrong number in the second of two files", "b.csv:2: 'x' is no number")
def _(folder: Path) -> dict[str, Any]:
    (folder / "a.csv").write_text("text,label\na,1\nb,2\nc,3\n", encoding="utf-8")
    (folder / "b.csv").write_text("text,label\nd,4\ne,x\n", encoding="utf-8")
    return {"train": [str(folder / "a.csv"), str(folder / "b.csv")], "problem": "regression"}


@case("labels as numbers here and as texts there", "3 classes: '0' 20", is_error=False)
def _(folder: Path) -> dict[str, Any]:
    rows = [{"text": text, "label": i % 3} for i, text in enumerate(TEXTS)]
    (folder / "rows.jsonl").write_text(jsonl_of(rows), encoding="utf-8")
    (folder / "dev.csv").write_text(
        csv_of([(text, "2") for text, _ in lines(20, 100)]), encoding="utf-8"
    )
    return {"train": str(folder / "rows.jsonl"), "validation": str(folder / "dev.csv")}


@case("a pattern that nothing fits", "no file fits")
def _(folder: Path) -> dict[str, Any]:
    return {"train": str(folder / "part-*.csv")}


@case("a class folder with a text that is not UTF-8", "byte 0xe9 is not UTF-8")
def _(folder: Path) -> dict[str, Any]:
    for name in ("land", "water"):
        (folder / "texts" / name).mkdir(parents=True)
        (folder / "texts" / name / "1.txt").write_bytes(b"caf\xe9" if name == "land" else b"tea")
    return {"train": str(folder / "texts")}


@case("a name that is no file and no data set", "no file or folder nosuchset")
def _(folder: Path) -> dict[str, Any]:
    return {"source": "nosuchset"}
