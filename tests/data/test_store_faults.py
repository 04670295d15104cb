"""Stores under attack: every bit flip is seen, every step may fail or be the last, no builder blocks the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.store_faults import flips_detected, seconds_to_replace, write_faults_survived

IN_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Where waiting for the disk costs nothing."""


@pytest.mark.slow
def test_every_flipped_bit_of_a_store_is_detected():
    assert flips_detected(500, seed=0, folder=IN_MEMORY) == (500, 500)


def test_some_flipped_bits_of_a_store_are_detected():
    assert flips_detected(60, seed=1, folder=IN_MEMORY) == (60, 60)


@pytest.mark.slow
def test_a_build_may_be_killed_or_refused_at_every_step():
    survived, tried = write_faults_survived(each_refusal=False, folder=IN_MEMORY)
    assert survived == tried >= 120


@pytest.mark.slow
def test_a_builder_that_is_killed_is_replaced_within_a_second():
    assert seconds_to_replace() < 1
