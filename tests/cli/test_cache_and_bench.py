"""`python -m flatout cache` and `bench`: stores are listed and cleared, claims hold or do not."""

from __future__ import annotations

from benchmarks.claim import at_least, bounded, in_turn

from flatout import HeadlinesConfig, TextDataConfig
from flatout.cli.bench import line
from tests.stores import open_store
from tests.verbs import verb


def test_the_cache_is_listed_verified_and_cleared(tmp_path, capsys):
    open_store(TextDataConfig(sample=HeadlinesConfig(rows=50, eval_rows=10), cache=str(tmp_path)))
    assert verb("cache", "--cache", tmp_path, "list") == 0
    assert "50 + 10 + 10 rows  sample:headlines" in capsys.readouterr().out
    assert verb("cache", "--cache", tmp_path, "verify") == 0
    assert "whole" in capsys.readouterr().out
    (broken,) = tmp_path.glob("*/train/tokens.bin")
    broken.write_bytes(b"x")
    assert verb("cache", "--cache", tmp_path, "verify") == 1
    assert "damaged: train/tokens.bin" in capsys.readouterr().out
    assert verb("cache", "--cache", tmp_path, "size") == 0
    assert "1 stores" in capsys.readouterr().out
    assert verb("cache", "--cache", tmp_path, "clear") == 0
    assert "1 store removed" in capsys.readouterr().out
    assert verb("cache", "--cache", tmp_path, "list") == 0
    assert "no stores in" in capsys.readouterr().out


def test_claims_hold_or_do_not():
    assert at_least("speed", 30.0, 10.0, "rows/s", 3.0).holds
    assert not at_least("speed", 29.0, 10.0, "rows/s", 3.0).holds
    assert not bounded("wait", 1.5, "%", most=1.0).holds
    assert "NO" in line(bounded("wait", 1.5, "%", most=1.0, note="why"))
    assert set(bounded("wait", 1.5, "%", most=1.0).as_dict()) == {
        "claim",
        "ours",
        "theirs",
        "unit",
        "ratio",
        "goal",
        "holds",
        "note",
        "applies",
    }


def test_both_sides_are_measured_in_turn():
    order = []
    found = in_turn(
        [lambda: order.append("a") or len(order), lambda: order.append("b") or len(order)], rounds=3
    )
    assert order == list("abbaab")
    assert found == [4, 3]


def test_benches_are_listed(capsys):
    assert verb("bench", "--list") == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {
        "spine",
        "abstention",
        "defaults",
        "drift",
        "shortcuts",
        "operators",
        "shapes",
        "sources",
        "sequences",
        "tune",
        "cluster",
        "doctor",
        "doctor_run",
        "rates",
        "price",
        "headlines",
        "bits",
        "bert",
        "loaders",
        "answers",
        "audit",
        "reuse",
        "gpu",
        "scale",
        "protections",
        "quality",
    }
