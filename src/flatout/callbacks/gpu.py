"""Figures of the card that a run trains on: load, memory, power, temperature, clocks, bus, and
other processes.

They come from NVML, which every NVIDIA driver brings. What a card does not report is left out. A
machine without a card, a driver or the library has no such curves. "Utilisation" is the fraction of
the time in which any kernel ran. NVML counts cards in the order of the bus, CUDA in its own order
and only those in CUDA_VISIBLE_DEVICES. So a card is found by its bus address, or by the name that
made it visible. A slice of a card (MIG) has its own memory and processes, and shares temperature
and clocks with the whole. Load, power and bus belong to the whole card, and are left out.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

# all of a run, and what each shows
CURVES = tomllib.loads(Path(__file__).with_name("curves.toml").read_text("utf-8"))
_REASONS = {
    0x02: "clocks set by hand",
    0x04: "power limit",
    0x10: "kept in step with other cards",
    0x20: "heat",
    0x40: "heat",
    0x80: "power supply",
    0x100: "display",
}  # bits of NVML's reasons why a clock is not higher; that it idles (1) is none
_SLOWED = 0x08  # set beside a closer reason, or alone where the card knows none


def watched_card(device: torch.device) -> Card | None:
    """The card behind a CUDA device; None where no driver reports it."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    properties = torch.cuda.get_device_properties(device)
    place: list[Any] = [
        getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")
    ]
    bus_id = None if None in place else "{:08X}:{:02X}:{:02X}.0".format(*place)  # as NVML writes it
    number = torch.cuda.current_device() if device.index is None else device.index
    return find_card(pynvml, number, os.environ.get("CUDA_VISIBLE_DEVICES"), bus_id)


def find_card(
    nvml: Any, number: int, visible: str | None = None, bus_id: str | None = None
) -> Card | None:
    """The card that CUDA calls `number` among those in `visible`; None where the driver knows no
    such card.
    """
    try:
        nvml.nvmlInit()
        if visible is None:  # CUDA sees all cards, in the driver's order
            entries = [str(index) for index in range(number + 1)]
        else:
            entries = visible_entries(visible)
        entry = next(iter(entries[number:]), "")
        # else it was made visible by words that we do not know, but it is there
        if not entry and bus_id is None:
            return None
        if entry.startswith("MIG-"):
            return _card_of_slice(nvml, entry)
        if entry.startswith("GPU-"):
            handle = _by_uuid(nvml, entry)
        elif bus_id is not None:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
        else:
            handle = nvml.nvmlDeviceGetHandleByIndex(int(entry))
        # Of a card that is cut up CUDA takes the first slice.
        return (
            None if handle is None else Card(nvml, handle, next(iter(_slices(nvml, handle)), None))
        )
    except nvml.NVMLError:
        return None


def visible_entries(text: str) -> list[str]:
    """Devices that CUDA_VISIBLE_DEVICES names, up to the first entry that names none, where CUDA
    stops reading too.
    """
    found: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", entry) or entry in found:
            break
        found.append(entry)
    return found


class Card:
    """One card, or a slice of one."""

    name = "gpu"

    def __init__(self, nvml: Any, whole: Any, own_slice: Any = None) -> None:
        self.nvml = nvml
        self.whole = whole
        self.is_slice = own_slice is not None
        self.own = own_slice if self.is_slice else whole
        self.looks = 0
        self.shared_looks = 0
        self.most_others = 0
        self.others_gb = 0.0
        self.reasons: Counter[str] = Counter()
        self.link: dict[str, int] = {}
        self.most_clock: float | None = None
        lost = (
            "GPU_IS_LOST",
            "UNINITIALIZED",
            "DRIVER_NOT_LOADED",
            "GPU_NOT_FOUND",
            "RESET_REQUIRED",
        )
        self._lost = {
            value
            for name in lost
            if (value := getattr(nvml, f"NVML_ERROR_{name}", None)) is not None
        }

    def sample(self) -> dict[str, float]:
        """The card's figures now, by curve name; NVML's error where the card is lost."""
        nvml = self.nvml
        # first of all: of a card that is gone nothing is counted
        memory = self._ask("MemoryInfo", self.own)
        self.looks += 1
        if self.looks == 1:
            self.most_clock = self._scaled(
                1, self._ask("MaxClockInfo", self.whole, nvml.NVML_CLOCK_SM)
            )
        found = {
            "gpu/memory_gb": self._scaled(1e-9, memory, "used"),
            "gpu/temperature_c": self._scaled(
                1, self._ask("Temperature", self.whole, nvml.NVML_TEMPERATURE_GPU)
            ),
            "gpu/sm_clock_mhz": self._scaled(
                1, self._ask("ClockInfo", self.whole, nvml.NVML_CLOCK_SM)
            ),
            "gpu/memory_clock_mhz": self._scaled(
                1, self._ask("ClockInfo", self.whole, nvml.NVML_CLOCK_MEM)
            ),
            "gpu/throttled_share": self._throttled(),
            "gpu/other_processes": self._others(),
        }
        if not self.is_slice:
            sent, received = nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES
            found |= {
                "gpu/utilisation": self._scaled(
                    1e-2, self._ask("UtilizationRates", self.own), "gpu"
                ),
                "gpu/power_w": self._scaled(1e-3, self._ask("PowerUsage", self.own)),
                "gpu/pcie_in_mb_per_s": self._scaled(
                    1e-3, self._ask("PcieThroughput", self.own, received)
                ),
                "gpu/pcie_out_mb_per_s": self._scaled(
                    1e-3, self._ask("PcieThroughput", self.own, sent)
                ),
            }
            # The link narrows when it idles: the widest counts.
            parts = {"generation": "CurrPcieLinkGeneration", "width": "CurrPcieLinkWidth"}
            parts |= {"most_generation": "MaxPcieLinkGeneration", "most_width": "MaxPcieLinkWidth"}
            for name, what in parts.items():
                # of the card itself: it does not change
                is_known = what.startswith("Max") and name in self.link
                if not is_known and (value := self._ask(what, self.own)) is not None:
                    self.link[name] = max(value, self.link.get(name, 0))
        return {name: value for name, value in found.items() if value is not None}

    def facts(self) -> dict[str, Any]:
        """What is no curve: reasons for throttling, other processes, width of the bus; None if
        unknown.
        """
        others = {"processes": self.most_others, "share": self.shared_looks / max(1, self.looks)}
        return {
            "throttled": {
                reason: count / self.looks for reason, count in self.reasons.most_common()
            }
            or None,
            "others": others | {"memory_gb": self.others_gb or None} if self.most_others else None,
            "pcie": self.link or None,
            **({} if self.most_clock is None else {"most_sm_clock_mhz": self.most_clock}),
        }

    def _ask(self, what: str, *about: Any) -> Any:
        """An answer of NVML; None where this card, this driver or this moment has none."""
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{what}")(*about)
        except self.nvml.NVMLError as error:
            if getattr(error, "value", None) in self._lost:
                raise
            return None

    @staticmethod
    def _scaled(factor: float, answer: Any, part: str | None = None) -> float | None:
        value = getattr(answer, part) if part is not None and answer is not None else answer
        return None if value is None else factor * value

    def _throttled(self) -> float | None:
        newer = hasattr(self.nvml, "nvmlDeviceGetCurrentClocksEventReasons")
        bits = self._ask("CurrentClocksEventReasons", self.whole) if newer else None
        if bits is None:  # by its name until driver 535, and in older packages
            bits = self._ask("CurrentClocksThrottleReasons", self.whole)
        if bits is None:
            return None
        words = {word for bit, word in _REASONS.items() if bits & bit}
        if bits & _SLOWED and not bits & 0xC0:
            words.add("the card slowed itself")
        self.reasons.update(words)
        return float(bool(words))

    def _others(self) -> float | None:
        """Other processes; in a container the driver may number this one differently, but it is one
        of them.
        """
        processes = self._ask("ComputeRunningProcesses", self.own)
        if processes is None:
            return None
        others = [each for each in processes if each.pid != os.getpid()]
        is_known = len(others) < len(processes)
        count = len(others) if is_known else max(0, len(others) - 1)
        self.shared_looks += bool(count)
        self.most_others = max(self.most_others, count)
        if is_known:
            self.others_gb = max(
                self.others_gb, sum(each.usedGpuMemory or 0 for each in others) / 1e9
            )
        return float(count)


def _by_uuid(nvml: Any, uuid: str) -> Any:
    """The card of this name, which may be cut short as long as it fits one card only."""
    fitting = [handle for handle in _cards(nvml) if nvml.nvmlDeviceGetUUID(handle).startswith(uuid)]
    return fitting[0] if len(fitting) == 1 else None


def _card_of_slice(nvml: Any, name: str) -> Card | None:
    """By its own name, or in the older form by its card's name and two numbers."""
    older = re.fullmatch(r"MIG-(GPU-[\w-]+)/(\d+)/(\d+)", name)

    def fits(part: Any) -> bool:
        if older is None:
            return bool(nvml.nvmlDeviceGetUUID(part).startswith(name))
        numbers = nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part)
        return numbers == (int(older[2]), int(older[3]))

    cards = _cards(nvml) if older is None else filter(None, [_by_uuid(nvml, older[1])])
    found = [(whole, part) for whole in cards for part in _slices(nvml, whole) if fits(part)]
    return Card(nvml, *found[0]) if len(found) == 1 else None


def _cards(nvml: Any) -> list[Any]:
    return _numbered(nvml, nvml.nvmlDeviceGetCount(), nvml.nvmlDeviceGetHandleByIndex)


def _numbered(nvml: Any, count: int, handle_of: Callable[[int], Any]) -> list[Any]:
    """Handles by their numbers; a number not in use, or of a card that has fallen off the bus,
    hides no other.
    """
    found = []
    for number in range(count):
        with suppress(nvml.NVMLError):
            found.append(handle_of(number))
    return found


def _slices(nvml: Any, whole: Any) -> list[Any]:
    try:
        if not nvml.nvmlDeviceGetMigMode(whole)[0]:
            return []
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(whole)
    except nvml.NVMLError:
        return []
    return _numbered(nvml, count, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, whole))
