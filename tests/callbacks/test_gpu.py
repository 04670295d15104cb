"""The right card is watched, what it does not tell is left out, and nothing it does ends a run."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from flatout.callbacks.gpu import CURVES, find_card, visible_entries, watched_card
from flatout.callbacks.hardware_watch import Watch
from tests.callbacks.recorded_nvml import (
    RecordedNvml,
    a16_board,
    cut_a100,
    hot_4090,
    plain_t4,
    shared_card,
)


def test_every_curve_of_a_card_that_tells_all():
    card = find_card(a16_board(), 2)
    found = card.sample()
    assert found.keys() == {name for name in CURVES if name.startswith("gpu/")}
    assert found == pytest.approx(
        {
            "gpu/utilisation": 0.96,
            "gpu/memory_gb": 9.0,
            "gpu/power_w": 58.0,
            "gpu/temperature_c": 61,
            "gpu/sm_clock_mhz": 1695,
            "gpu/memory_clock_mhz": 6251,
            "gpu/throttled_share": 0,
            "gpu/pcie_in_mb_per_s": 1200.0,
            "gpu/pcie_out_mb_per_s": 45.0,
            "gpu/other_processes": 0,
        }
    )
    link = {
        "generation": 4,
        "width": 8,
        "most_generation": 4,
        "most_width": 8,
    }
    assert card.facts() == {"throttled": None, "others": None, "pcie": link}


def test_the_highest_clock_is_asked_for_once():
    machine = hot_4090()
    card = find_card(machine, 0)
    card.sample(), card.sample()
    assert card.facts()["most_sm_clock_mhz"] == 2520
    assert machine.asked.count("MaxClockInfo") == 1


@pytest.mark.parametrize(
    ("visible", "number", "expected"),
    [
        (None, 0, 0),
        (None, 2, 2),
        ("2", 0, 2),
        ("3,1", 1, 1),
        (" 3 , 1 ", 0, 3),
        ("GPU-2a16c0de-1111-2222-3333-444455556666", 0, 2),
        ("GPU-2a16", 0, 2),
        ("GPU-3a16,GPU-0a16", 1, 0),
        ("1,GPU-3a16", 1, 3),
    ],
)
def test_the_card_that_was_made_visible_is_the_one_that_is_watched(visible, number, expected):
    machine = a16_board()
    assert find_card(machine, number, visible).whole is machine.cards[expected]


@pytest.mark.parametrize(
    ("visible", "number"),
    [
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("2,2", 1),
        ("9", 0),
        ("GPU-ffff", 0),
        ("GPU-", 0),
    ],
)
def test_a_card_that_is_hidden_unknown_or_fits_several_is_none(visible, number):
    assert find_card(a16_board(), number, visible) is None


def test_a_place_on_the_bus_counts_more_than_a_number_for_cuda_counts_the_fastest_first():
    machine = cut_a100()
    assert find_card(machine, 0, None, "00000000:00:1E.0").whole is machine.cards[1]
    assert (
        find_card(machine, 0, "words of a later CUDA", "00000000:00:1E.0").whole is machine.cards[1]
    )
    assert find_card(machine, 0, None, "00000000:FF:00.0") is None


def test_the_visible_list_ends_where_cuda_stops_reading():
    assert visible_entries("0, 1,-1,2") == ["0", "1"]
    assert visible_entries("GPU-a,MIG-b,x,1") == ["GPU-a", "MIG-b"]
    assert visible_entries("") == []


@pytest.mark.parametrize(
    "visible",
    [
        "MIG-5311ce00-aaaa-bbbb-cccc-dddd00000003",
        "MIG-5311ce00",
        "MIG-GPU-a100a100-0000-1111-2222-333344445555/10/0",
    ],
)
def test_a_slice_is_found_by_both_forms_of_its_name_and_tells_what_is_its_own(visible):
    machine = cut_a100()
    card = find_card(machine, 0, visible)
    assert card.own is machine.cards[0].slices[3]
    assert card.sample() == {
        "gpu/memory_gb": 4.0,
        "gpu/temperature_c": 48,
        "gpu/sm_clock_mhz": 1410,
        "gpu/memory_clock_mhz": 1215,
        "gpu/throttled_share": 0,
        "gpu/other_processes": 0,
    }
    assert card.facts() == {"throttled": None, "others": None, "pcie": None}


@pytest.mark.parametrize(
    "visible", ["MIG-ffff", "MIG-GPU-a100a100/9/0", "MIG-5", "MIG-GPU-ffff/10/0"]
)
def test_a_slice_that_is_not_there_or_fits_several_is_none(visible):
    assert find_card(cut_a100(), 0, visible) is None


def test_of_a_card_that_is_cut_up_the_first_slice_is_taken_as_cuda_does():
    machine = cut_a100()
    assert find_card(machine, 0, "0").own is machine.cards[0].slices[0]


def test_what_a_card_does_not_tell_is_left_out():
    card = find_card(plain_t4(), 0)
    assert card.sample() == {
        "gpu/utilisation": 1.0,
        "gpu/memory_gb": 4.0,
        "gpu/temperature_c": 77,
        "gpu/sm_clock_mhz": 1590,
        "gpu/memory_clock_mhz": 5000,
        "gpu/throttled_share": 1.0,
    }
    assert card.facts() == {
        "throttled": {"power limit": 1.0},
        "others": None,
        "pcie": None,
    }


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (0x00, set()),
        (0x01, set()),
        (0x02, {"clocks set by hand"}),
        (0x04, {"power limit"}),
        (0x08, {"the card slowed itself"}),
        (0x48, {"heat"}),
        (0x60, {"heat"}),
        (0x88, {"power supply"}),
        (0x24, {"power limit", "heat"}),
    ],
)
def test_reasons_are_told_in_words(reasons, words):
    machine = hot_4090()
    machine.cards[0].reasons = reasons
    card = find_card(machine, 0)
    assert card.sample()["gpu/throttled_share"] == bool(words)
    assert set(card.facts()["throttled"] or {}) == words


def test_reasons_come_with_the_share_of_looks_at_which_they_held_the_clocks_down():
    machine = hot_4090()
    card = find_card(machine, 0)
    for reasons in (0x04, 0x04, 0x48, 0x01):
        machine.cards[0].reasons = reasons
        card.sample()
    assert card.facts()["throttled"] == {"power limit": 0.5, "heat": 0.25}


def test_a_link_that_narrows_when_idle_counts_as_wide_as_it_was_seen():
    machine = hot_4090()
    card = find_card(machine, 0)
    for generation in (1, 4, 1):
        machine.cards[0].link = (generation, 16, 4, 16)
        card.sample()
    assert card.facts()["pcie"] == {
        "generation": 4,
        "width": 16,
        "most_generation": 4,
        "most_width": 16,
    }


def test_others_on_the_card_are_counted_and_how_much_they_hold():
    machine = shared_card()
    card = find_card(machine, 0)
    assert card.sample()["gpu/other_processes"] == 2
    machine.cards[0].processes = machine.cards[0].processes[:1]
    assert card.sample()["gpu/other_processes"] == 0
    assert card.facts()["others"] == {"processes": 2, "share": 0.5, "memory_gb": 3.0}


def test_in_a_container_one_of_the_unknown_processes_is_this_one():
    card = find_card(shared_card(mine=None), 0)
    assert card.sample()["gpu/other_processes"] == 2
    assert card.facts()["others"] == {"processes": 2, "share": 1.0, "memory_gb": None}


def test_a_card_that_falls_off_the_bus_is_said_once_and_what_was_seen_stays():
    machine = hot_4090()
    said = []
    watch = Watch([find_card(machine, 0)], said.append)
    watch.look()
    machine.cards[0].is_lost = True
    watch.look()
    asked = len(machine.asked)
    watch.look()
    assert len(machine.asked) == asked
    assert said == ["gpu: no longer watched (GPU is lost); training continues"]
    found = watch.summary()["gpu"]
    assert (found["power_w"], found["throttled"]) == (449.0, {"power limit": 1.0})


def test_a_lost_card_hides_no_other():
    machine = a16_board()
    machine.cards[0].is_lost = True
    assert find_card(machine, 0, "GPU-2a16").whole is machine.cards[2]
    assert find_card(machine, 0, "0") is None


def test_behind_a_cuda_device_is_the_card_at_its_place_on_the_bus(monkeypatch):
    machine = a16_board()
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x43, pci_device_id=0)
    monkeypatch.setitem(sys.modules, "pynvml", machine)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert watched_card(torch.device("cuda", 0)).whole is machine.cards[2]
    # an older torch
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert watched_card(torch.device("cuda", 1)).whole is machine.cards[1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3a16")
    assert watched_card(torch.device("cuda", 0)).whole is machine.cards[3]
    machine.has_driver = False
    assert watched_card(torch.device("cuda", 0)) is None


def test_a_machine_without_card_or_driver_says_nothing(capfd):
    assert find_card(RecordedNvml([]), 0) is None
    assert find_card(RecordedNvml([], has_driver=False), 0) is None
    assert watched_card(torch.device("cpu")) is None
    assert capfd.readouterr() == ("", "")
