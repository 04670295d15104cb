"""Cases of the catalogue that one file shows: its bytes, lines, columns, texts and labels."""

from __future__ import annotations

import gzip

from tests.data.cases import GOOD, TEXTS, Case, CaseList, csv_of, lines
from tests.run_files import jsonl_of

ONE_FILE = CaseList()
plain = ONE_FILE.add_file

ONE_FILE.append(
    Case("missing file", "no such file", lambda folder: {"train": str(folder / "nowhere.csv")})
)
plain("empty file", "is empty", "")
ONE_FILE.append(
    Case(
        "a folder with nothing to read",
        "nothing to read in the folder",
        lambda folder: {"train": str(folder)},
    )
)
plain("only the header of recordings", "columns=[column1,column2,column3,column4]", "t,a,b,c\n")
plain("only a header", "no rows below the line that names the columns", "text,label\n")
plain(
    "zero rows after cleaning", "no rows are left for the train split", "text,label\n,a\n,b\n ,c\n"
)
plain("missing column", "no column 'headline'", GOOD, text="headline", label="label")
plain("misspelt column", "Did you mean 'text'?", GOOD, text="txt", label="label")
plain(
    "duplicated column",
    "has column text more than once",
    "text,text,label\na,b,c\n",
    text="text",
    label="label",
)
plain("a setting that names no column", "data.label: no column is named", GOOD, label="")
plain(
    "an index of pandas beside columns of other names",
    "(columns: '', a, b)",
    csv_of([(f"7,{text}", label) for text, label in lines()], ",a,b"),
)
plain(
    "a file of pandas that has a mapping for each column",
    "Write a row an object: to_json(orient='records')",
    '{"text": {"0": "some words"}, "label": {"0": "a"}}',
    file="rows.json",
)
plain(
    "two files joined with their first lines",
    "1 row that repeats the names of the columns, kept: files were joined",
    GOOD + "text,label\n",
    is_error=False,
)
plain(
    "several labels a row that are read as one",
    "'wood|land' look like several labels a row; data.problem=multi data.label_delimiter='|'",
    GOOD
    + "".join(f"some text {number},wood|land\nother {number},land|water\n" for number in range(5)),
    is_error=False,
)
plain(
    "labels that pandas has written as lists",
    "are lists that were written as text; write JSON lines",
    csv_of([(text, f"['{label}']") for text, label in lines()]),
    is_error=False,
)
plain(
    "columns of 0 and 1 behind the texts",
    "(columns: text, sea, land). Set data.label=COLUMN.",
    csv_of([(text, "0,1") for text, _ in lines()], "text,sea,land"),
)
plain(
    "numbers to predict that are all equal",
    "each training row has the number 3",
    csv_of([(text, "3.0") for text, _ in lines()]),
    problem="regression",
)
TAGGED = [(text, f"B-{label}" + " O" * text.count(" ")) for text, label in lines()]
plain(
    "tags where words are expected",
    "rows.csv are tags: 'B-land', 'O', 'B-water'. Set data.text=words data.label=tags.",
    csv_of(TAGGED, "words,tags"),
    text="tags",
    label="words",
    problem="tags",
)
plain(
    "words and tags that pandas has written as lists",
    "rows.csv holds lists that were written as text",
    csv_of([(f"['{text}']", "['O']") for text, _ in lines()], "words,tags"),
    text="words",
    label="tags",
    problem="tags",
)
plain(
    "a CoNLL file without empty lines",
    "one sentence of 240 words: an empty line parts sentences",
    "".join(f"{word} O\n" for text, _ in lines() for word in text.split()).replace("O", "B-x", 9),
    file="rows.conll",
    problem="tags",
    is_error=False,
)
plain("no column by a known name", "which column of", csv_of(lines(), "a,b"))
plain(
    "one column left for the labels",
    "(columns: text, kind). Set data.label=kind.",
    csv_of(lines(), "text,kind"),
)
NUMBERS = csv_of([(str(i * 37), label) for i, (_, label) in enumerate(lines())])
plain("a found column of numbers", "rows.csv holds numbers only (columns: text, label)", NUMBERS)
plain(
    "a named column of numbers",
    "60 rows whose text is a number, as all are",
    NUMBERS,
    text="text",
    is_error=False,
)
plain(
    "nothing but numbers",
    "Are they recordings? Set data.target=COLUMN",
    "time,volt\n" + "1,2.5\n" * 9,
)
plain(
    "two columns that may be the text",
    "holds the texts: 'sentence' or 'tweet'?",
    "sentence,tweet,label\na,b,c\n",
)
plain(
    "null texts",
    "2 rows without a text (null), dropped (rows 61, 62)",
    jsonl_of(
        [{"text": text, "label": label} for text, label in lines()]
        + [{"text": None, "label": "land"}] * 2
    ),
    file="rows.jsonl",
    is_error=False,
)
plain(
    "null label", "1 row without a label, dropped (row 61)", GOOD + "some text,\n", is_error=False
)
plain(
    "empty and blank texts",
    "3 rows with an empty text, dropped (rows 61, 62, 63)",
    GOOD + ",land\n  ,wood\n\u3000,wood\n",
    is_error=False,
)
plain("not UTF-8", "line 62: byte 0xe9 is not UTF-8", GOOD.encode() + b"caf\xe9,land\n")
plain("UTF-16", "written in UTF-16. Set data.read.encoding=utf-16", GOOD.encode("utf-16"))
plain(
    "another encoding, named",
    "60 read = 60 kept as written",
    GOOD.replace("amber", "caf\u00e9").encode("cp1252"),
    is_error=False,
    read={"encoding": "cp1252"},
)
plain(
    "the wrong encoding, named",
    "not ascii from about line",
    GOOD.replace("amber", "caf\u00e9"),
    read={"encoding": "ascii"},
)
plain("byte order mark", "UTF-8 with a byte order mark", GOOD.encode("utf-8-sig"), is_error=False)
plain("CRLF", "CRLF at line ends", GOOD.replace("\n", "\r\n"), is_error=False)
plain(
    "NUL bytes",
    "1 row with control characters in the text, kept unchanged (row 61)",
    GOOD + "a\x00b,land\n",
    is_error=False,
)
plain(
    "NUL bytes refused",
    "row 61: with control characters in the text",
    GOOD + "a\x00b,land\n",
    clean={"odd": "refuse"},
)
plain(
    "lone surrogate in json",
    "row 1: text is '\\ud800'",
    '{"text": "\\ud800", "label": "a"}\n',
    file="rows.jsonl",
)
plain("lone surrogate in csv", "byte 0xed is not UTF-8", GOOD + "a\ud800b,land\n")
plain(
    "a text of 10 MB",
    "61 read = 61 kept as written",
    GOOD + "long " * 2_000_000 + ",land\n",
    is_error=False,
)
plain("a row of 40 MB", "row 61: longer than 16 MB", GOOD + '"' + "long " * 8_000_000 + '",land\n')
plain(
    "an id column as label",
    "Is that a column of ids?",
    csv_of([(f"text {i}", f"id{i}") for i in range(3_000)]),
)
plain(
    "numbers as classes",
    "Are they numbers to predict? Set data.problem=regression. Is that a column of ids?",
    csv_of([(f"text {i}", f"{i / 7:.3f}") for i in range(600)]),
)
plain(
    "100,000 classes",
    "training rows, such as 'id0'",
    csv_of([(f"text {i}", f"id{i % 100_000}") for i in range(220_000)]),
)
plain("one class", "only one class: 'land'", csv_of([(text, "land") for text in TEXTS]))
plain(
    "a class with one row, stratified",
    "1 class with fewer than 5 training rows: 'rare' (1 row)",
    GOOD + "rare text,rare\n",
    is_error=False,
    split_by="stratified",
)
plain(
    "a class with a thirtieth of the rows",
    "times the rows of the rarest",
    csv_of([(f"text {i}", ("rare", *29 * ["land"])[i % 30]) for i in range(600)]),
    is_error=False,
)
plain("ragged row", "row 61: expected 2 columns, got 3 (line 62)", GOOD + "a,b,land\n")
plain(
    "unclosed quote",
    "a quote is opened in line 62 and not closed",
    GOOD + '"open,land\nmore,wood\nstill,land\n"odd,"land\n',
)
plain(
    "a text column that is not there, and no label named",
    "data.text and data.label: no column 'title'; which column of",
    csv_of(lines(), "a,b"),
    text="title",
)
plain(
    "a label column that is not there, and no text named",
    "data.text and data.label: no column 'kind'; which column of",
    csv_of(lines(), "a,b"),
    label="kind",
)
plain(
    "text and label swapped",
    "6 texts in 240 rows, 235 classes",
    csv_of([(f"what is {i % 235} ?", f"kind {i % 6}") for i in range(240)], "question,kind"),
    text="kind",
    label="question",
)
plain("wrong delimiter named", "which column of", GOOD, read={"delimiter": ";"})
plain(
    "another delimiter, found out",
    "semicolon between values, found out",
    GOOD.replace(",", ";"),
    is_error=False,
)
plain("a delimiter inside texts", "row 61: expected 2 columns, got 3", GOOD + "one, two,land\n")
plain(
    "broken jsonl line",
    "line 2: not valid JSON",
    '{"text": "a", "label": "b"}\n{"text": \n',
    file="rows.jsonl",
)
plain(
    "json with mixed types",
    "row 2: text is 7",
    '{"text": "a", "label": "b"}\n{"text": 7, "label": "b"}\n',
    file="rows.jsonl",
)
plain("json of another form", "a str where an object is needed", '["a", "b"]', file="rows.json")
plain(
    "gzip cut short",
    "not a whole gzip file",
    gzip.compress(GOOD.encode() * 50)[:-30],
    file="rows.csv.gz",
)
plain("no gzip at all", "is no gzip file", GOOD, file="rows.csv.gz")
plain(
    "gzip that is a bomb",
    "bytes unpack to more than",
    gzip.compress(b"a" * (300 << 20), 9),
    file="rows.csv.gz",
)
plain("an unknown ending", "is no format we read", GOOD, file="rows.xlsx")
plain(
    "an unknown ending, named",
    "60 read = 60 kept",
    GOOD,
    file="rows.dat",
    is_error=False,
    read={"format": "csv"},
)
plain(
    "no header",
    "Is its first line a row already?",
    csv_of(lines()).split("\n", 1)[1].replace("number", "number one two three four"),
)
plain(
    "no header, names given",
    "60 read = 60 kept",
    csv_of(lines()).split("\n", 1)[1],
    is_error=False,
    read={"columns": ["text", "label"]},
)
plain(
    "names given, but too few",
    "its first row has 2 values, data.read.columns has 1",
    GOOD,
    read={"columns": ["text"]},
)
plain(
    "labels of two types",
    "row 2: label is 'b'",
    '{"text": "a", "label": 1}\n{"text": "b", "label": "b"}\n',
    file="rows.jsonl",
)
plain(
    "labels written in two ways",
    "labels that differ in case, blanks or a zero after the point, each a class: 'land' (20 rows),"
    " 'Land' (10 rows)",
    GOOD + csv_of([(f"more {i}", "Land") for i in range(10)]).split("\n", 1)[1],
    is_error=False,
    validation_share=0.01,
    test_share=0.01,
)
plain(
    "labels written in two ways, merged",
    "10 rows whose label was written in another way, merged",
    GOOD + csv_of([(f"more {i}", "Land") for i in range(10)]).split("\n", 1)[1],
    is_error=False,
    clean={"labels": "merge"},
)
TWO_LABELS_OR_ONE = list(zip(TEXTS, ["wood", "land|water"] * 30, strict=True))
plain(
    "several labels, an empty list",
    "2 rows with an empty list of labels, kept",
    csv_of([*TWO_LABELS_OR_ONE, ("none", ""), ("none too", "")]),
    is_error=False,
    problem="multi",
    label_delimiter="|",
)
plain("several labels without a delimiter", "Set data.label_delimiter", GOOD, problem="multi")
plain(
    "lists of labels, one asked for",
    "Set data.problem=multi",
    jsonl_of([{"text": "a", "label": ["x", "y"]}]),
    file="rows.jsonl",
)
plain("regression on words", "row 1: 'land' is no number", GOOD, problem="regression")
plain(
    "regression, stratified",
    "stratified needs classes",
    GOOD,
    problem="regression",
    split_by="stratified",
)
plain(
    "words and tags of unequal number",
    "row 2: 2 words and 1 tags",
    jsonl_of([{"tokens": ["a"], "tags": ["O"]}, {"tokens": ["a", "b"], "tags": ["O"]}]),
    file="rows.jsonl",
    problem="tags",
)
plain(
    "an unknown scheme of tags",
    "no tag of a scheme we know: 'PERSON'",
    jsonl_of([{"tokens": ["a", "b"], "tags": ["O", "PERSON"]}]),
    file="rows.jsonl",
    problem="tags",
)
plain(
    "tags against their scheme",
    "2 rows with tags that their scheme does not allow, repaired (rows 31, 32)",
    jsonl_of(
        [{"tokens": [f"w{i}", "b"], "tags": ["B-x", "I-x"]} for i in range(30)]
        + [{"tokens": [f"v{i}", "b"], "tags": ["O", "I-x"]} for i in range(2)]
    ),
    file="rows.jsonl",
    problem="tags",
    is_error=False,
)
plain(
    "tags by their numbers",
    "Write tags by their names",
    jsonl_of([{"tokens": ["a"], "tags": [1]}]),
    file="rows.jsonl",
    problem="tags",
)
plain(
    "a list where a text is asked",
    "holds list<",
    jsonl_of([{"text": ["a"], "label": "x"}, {"text": ["b"], "label": "y"}]),
    file="rows.jsonl",
)
plain(
    "a path with spaces and other letters",
    "60 read = 60 kept",
    GOOD,
    file="meine größten Zeilen ☃.csv",
    is_error=False,
)
plain(
    "NA, null and None",
    "'007' 14 (31.8%)",
    csv_of(
        [(("NA", "null", "None")[i % 3] + f" {i}", ("NA", "null", "007")[i % 3]) for i in range(60)]
    ),
    is_error=False,
)
plain(
    "equal texts with other labels",
    "2 rows whose text has another label elsewhere, kept (rows 1, 61)",
    GOOD + f"{TEXTS[0]},wood\n",
    is_error=False,
)
plain(
    "equal texts with other labels, refused",
    "one of the rows whose text has another label elsewhere",
    GOOD + f"{TEXTS[0]},wood\n",
    clean={"conflicts": "refuse"},
)
plain(
    "repeated rows, dropped",
    "1 row equal to an earlier training row, dropped (row 61)",
    GOOD + f"{TEXTS[0]},land\n",
    is_error=False,
    clean={"duplicates": "drop"},
)
plain("a NUL in the name", "can be no file's name", GOOD, is_error=True, test="a\0b.csv")
plain(
    "groups too few",
    "cannot be parted into 3 splits",
    csv_of(list(zip(TEXTS, ["b,one", "a,one"] * 30, strict=True)), "text,label,who"),
    split_by="group",
    group="who",
)
