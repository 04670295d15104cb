"""The page of encoders has the sizes that the bench measures, and their parameters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from benchmarks.claim import measured_apart
from benchmarks.sizes import SIZES, table

PAGE = Path(__file__).parents[2] / "docs" / "which_encoder.md"
# the page has two speeds
ROW = r"^\| ([^|]+) \| ([\w-]+) \| ([\d.]+) \|(?: ([\d,]+) \|){1,2} ([\d.]+) \|$"


def test_the_page_lists_every_size_with_its_family_and_parameters():
    rows = re.findall(ROW, PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [(name, family) for name, family, *_ in rows] == [
        (name, size.family) for name, size in SIZES.items()
    ]
    for name, _, parameters, *_ in rows:
        with torch.device("meta"):  # nothing is filled in
            model = SIZES[name].build(padding_id=0)
        assert f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f}" == parameters, (
            name
        )
        assert model.is_flat


def test_rows_of_the_bench_become_rows_of_the_page():
    rows = [
        {
            "claim": "Ettin-17M: tokens a second of training",
            "ours": 1234.5,
            "note": "16.9 M parameters, 1.1 GB at",
        }
    ]
    assert re.fullmatch(ROW, table(rows))
    assert "| 1,234 | 1.1 |" in table(rows)


@pytest.mark.soak(seconds=60)
def test_a_size_is_measured_in_a_process_of_its_own():
    found = measured_apart("benchmarks.sizes:measure", {"name": "Ettin-17M", "steps": 2})
    assert found["tokens_per_s"] > 0
    assert 0.3 < found["peak_gb"] < 4
