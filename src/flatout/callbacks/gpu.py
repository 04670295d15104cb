"""Figures of the card that a run trains on: load, memory, power, temperature, clocks, bus, and
other processes.

They come from NVML, which every NVIDIA driver brings. Figures that a card does not report are left
out; without a card, a driver or the package `pynvml` there are none. "Utilisation" is the fraction
of the time in which any kernel ran.

The difficult part is to find the right card. NVML counts cards in the order of the bus. CUDA has
its own order, and counts only those in CUDA_VISIBLE_DEVICES. So a card is found by its bus address,
or by the name that made it visible. A slice of a card (MIG) has its own memory and processes.
Temperature and clocks are those of the whole card. Load, power and bus belong to the whole card
alone, and are left out for a slice.
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
from types import ModuleType
from typing import Any, TypeAlias

import torch

# All curves of a run by name, with the words that the page shows for each.
CURVES = tomllib.loads(Path(__file__).with_name("curves.toml").read_text("utf-8"))
# Bits of NVML that say why a clock is not higher. Bit 1 (the card idles) is no reason to report.
_REASONS = {
    0x02: "clocks set by hand",
    0x04: "power limit",
    0x10: "kept in step with other cards",
    0x20: "heat",
    0x40: "heat",
    0x80: "power supply",
    0x100: "display",
}
_SLOWED = 0x08  # set beside a closer reason, or alone where the card knows none
_CLOSER_REASONS = 0xC0  # heat or power supply
# Errors of NVML after which a card will not answer again.
_LOST = (
    "NVML_ERROR_GPU_IS_LOST",
    "NVML_ERROR_UNINITIALIZED",
    "NVML_ERROR_DRIVER_NOT_LOADED",
    "NVML_ERROR_GPU_NOT_FOUND",
    "NVML_ERROR_RESET_REQUIRED",
)
# Facts of the bus, and NVML's name for each.
_LINK = {
    "generation": "CurrPcieLinkGeneration",
    "width": "CurrPcieLinkWidth",
    "most_generation": "MaxPcieLinkGeneration",
    "most_width": "MaxPcieLinkWidth",
}
# A card, or a slice of one, as NVML names it.
Handle: TypeAlias = object


def watched_card(device: torch.device) -> Card | None:
    """The card behind a CUDA device; None if no driver reports it."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    properties = torch.cuda.get_device_properties(device)
    # Older versions of torch do not know the address.
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    address: list[Any] = [getattr(properties, name, None) for name in names]
    bus_id = None if None in address else "{:08X}:{:02X}:{:02X}.0".format(*address)
    number = torch.cuda.current_device() if device.index is None else device.index
    return find_card(pynvml, number, os.environ.get("CUDA_VISIBLE_DEVICES"), bus_id)


def find_card(
    nvml: ModuleType, number: int, visible: str | None = None, bus_id: str | None = None
) -> Card | None:
    """The card that CUDA calls `number`; None if the driver knows no such card.

    `visible`: the text of CUDA_VISIBLE_DEVICES, None if it is not set. `bus_id`: address as NVML
    writes it, such as "00000000:3B:00.0".
    """
    try:
        nvml.nvmlInit()
        if visible is None:  # CUDA sees all cards, in the driver's order
            entries = [str(index) for index in range(number + 1)]
        else:
            entries = visible_entries(visible)
        entry = entries[number] if number < len(entries) else ""
        # Without an entry the card may still be visible, by words that are unknown here.
        if not entry and bus_id is None:
            return None
        if entry.startswith("MIG-"):
            return _card_of_slice(nvml, entry)
        if entry.startswith("GPU-"):
            handle = _card_with_uuid(nvml, entry)
        elif bus_id is not None:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
        else:
            handle = nvml.nvmlDeviceGetHandleByIndex(int(entry))
        if handle is None:
            return None
        # CUDA takes the first slice of a card that is divided.
        slices = _slices(nvml, handle)
        return Card(nvml, handle, slices[0] if slices else None)
    except nvml.NVMLError:
        return None


def visible_entries(text: str) -> list[str]:
    """Devices that CUDA_VISIBLE_DEVICES names, up to the first invalid or repeated entry.

    CUDA stops reading there, too: "0, 1,-1,2" gives ["0", "1"].
    """
    entries: list[str] = []
    for word in text.split(","):
        entry = word.strip()
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", entry) or entry in entries:
            break
        entries.append(entry)
    return entries


class Card:
    """Samples one card, or a slice of one, and counts what is no curve."""

    name = "gpu"

    def __init__(self, nvml: ModuleType, whole: Handle, own_slice: Handle | None = None) -> None:
        self.nvml = nvml
        self.whole = whole
        self.is_slice = own_slice is not None
        self.own = own_slice if self.is_slice else whole
        self.samples = 0
        self.shared_samples = 0  # samples in which other processes were on the card
        self.most_others = 0  # other processes at once
        self.others_gb = 0.0  # most memory of other processes
        self.reasons: Counter[str] = Counter()  # samples with each reason for throttling
        self.link: dict[str, int] = {}
        self.most_clock: float | None = None
        self._lost = {getattr(nvml, name) for name in _LOST if hasattr(nvml, name)}

    def sample(self) -> dict[str, float]:
        """The card's figures now, by curve name. Raises NVML's error if the card is lost."""
        nvml = self.nvml
        whole = self.whole
        # First of all: if the card is lost, this raises, and nothing is counted.
        memory_gb = self._figure(1e-9, "MemoryInfo", self.own, field="used")
        self.samples += 1
        if self.samples == 1:
            self.most_clock = self._figure(1, "MaxClockInfo", whole, nvml.NVML_CLOCK_SM)
        temperature = self._figure(1, "Temperature", whole, nvml.NVML_TEMPERATURE_GPU)
        figures = {
            "gpu/memory_gb": memory_gb,
            "gpu/temperature_c": temperature,
            "gpu/sm_clock_mhz": self._figure(1, "ClockInfo", whole, nvml.NVML_CLOCK_SM),
            "gpu/memory_clock_mhz": self._figure(1, "ClockInfo", whole, nvml.NVML_CLOCK_MEM),
            "gpu/throttled_share": self._throttled(),
            "gpu/other_processes": self._count_others(),
        }
        if not self.is_slice:
            sent = nvml.NVML_PCIE_UTIL_TX_BYTES
            received = nvml.NVML_PCIE_UTIL_RX_BYTES
            figures |= {
                "gpu/utilisation": self._figure(1e-2, "UtilizationRates", whole, field="gpu"),
                "gpu/power_w": self._figure(1e-3, "PowerUsage", whole),
                "gpu/pcie_in_mb_per_s": self._figure(1e-3, "PcieThroughput", whole, received),
                "gpu/pcie_out_mb_per_s": self._figure(1e-3, "PcieThroughput", whole, sent),
            }
            self._note_link()
        return {name: value for name, value in figures.items() if value is not None}

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded; None for a slice, and where nothing counts them."""
        if self.is_slice:
            return None
        try:
            return self._figure(1e-3, "TotalEnergyConsumption", self.whole)
        except self.nvml.NVMLError:
            return None  # the card is lost, which the monitor says

    def facts(self) -> dict[str, Any]:
        """Facts that are no curve: reasons for throttling, other processes, and the bus.

        None for a fact that is unknown or never happened.
        """
        facts: dict[str, Any] = {"throttled": None, "others": None, "pcie": self.link or None}
        if self.reasons:
            reasons = self.reasons.most_common()
            facts["throttled"] = {reason: count / self.samples for reason, count in reasons}
        if self.most_others:
            facts["others"] = {
                "processes": self.most_others,
                "share": self.shared_samples / max(1, self.samples),
                "memory_gb": self.others_gb or None,
            }
        if self.most_clock is not None:
            facts["most_sm_clock_mhz"] = self.most_clock
        return facts

    def _ask(self, question: str, *arguments: Any) -> Any:
        """NVML's answer; None if this card or driver has none, or not at this moment."""
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{question}")(*arguments)
        except self.nvml.NVMLError as error:
            if error.value in self._lost:
                raise
            return None

    def _figure(
        self, factor: float, question: str, *arguments: Any, field: str = ""
    ) -> float | None:
        """NVML's answer, or a field of it, times `factor`; None if there is no answer."""
        answer = self._ask(question, *arguments)
        if answer is None:
            return None
        number: float = getattr(answer, field) if field else answer
        return factor * number

    def _note_link(self) -> None:
        """Note the generation and width of the bus, now and at most."""
        for name, question in _LINK.items():
            # The maximum never changes: one answer is enough.
            if question.startswith("Max") and name in self.link:
                continue
            value = self._ask(question, self.own)
            if value is not None:
                # The link narrows when it idles: the widest counts.
                self.link[name] = max(value, self.link.get(name, 0))

    def _throttled(self) -> float | None:
        """1 if something keeps the clocks down, else 0; None if unknown. Counts the reasons."""
        is_newer = hasattr(self.nvml, "nvmlDeviceGetCurrentClocksEventReasons")
        bits = self._ask("CurrentClocksEventReasons", self.whole) if is_newer else None
        if bits is None:  # the name until driver 535, and in older packages
            bits = self._ask("CurrentClocksThrottleReasons", self.whole)
        if bits is None:
            return None
        reasons = {reason for bit, reason in _REASONS.items() if bits & bit}
        if bits & _SLOWED and not bits & _CLOSER_REASONS:
            reasons.add("the card slowed itself")
        self.reasons.update(reasons)
        return float(bool(reasons))

    def _count_others(self) -> float | None:
        """Number of other processes on the card; None if unknown."""
        processes = self._ask("ComputeRunningProcesses", self.own)
        if processes is None:
            return None
        others = [process for process in processes if process.pid != os.getpid()]
        # In a container the driver may give this process another number. It is one of them then.
        is_known = len(others) < len(processes)
        count = len(others) if is_known else max(0, len(others) - 1)
        self.shared_samples += bool(count)
        self.most_others = max(self.most_others, count)
        if is_known:
            others_gb = sum(process.usedGpuMemory or 0 for process in others) / 1e9
            self.others_gb = max(self.others_gb, others_gb)
        return float(count)


def _card_with_uuid(nvml: ModuleType, uuid: str) -> Handle | None:
    """The card with this UUID, or with one that begins so if only one does."""
    cards = [card for card in _cards(nvml) if nvml.nvmlDeviceGetUUID(card).startswith(uuid)]
    return cards[0] if len(cards) == 1 else None


def _card_of_slice(nvml: ModuleType, name: str) -> Card | None:
    """The slice with this name; None unless exactly one fits.

    The name is its UUID or the beginning of it, or in the older form its card's UUID and two
    numbers: "MIG-GPU-8f3a…/10/0".
    """
    older = re.fullmatch(r"MIG-(GPU-[\w-]+)/(\d+)/(\d+)", name)

    def fits(part: Handle) -> bool:
        if older is None:
            return bool(nvml.nvmlDeviceGetUUID(part).startswith(name))
        numbers = nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part)
        return numbers == (int(older[2]), int(older[3]))

    if older is None:
        cards = _cards(nvml)
    else:
        card = _card_with_uuid(nvml, older[1])
        cards = [] if card is None else [card]
    fitting = [(card, part) for card in cards for part in _slices(nvml, card) if fits(part)]
    return Card(nvml, *fitting[0]) if len(fitting) == 1 else None


def _cards(nvml: ModuleType) -> list[Handle]:
    return _numbered(nvml, nvml.nvmlDeviceGetCount(), nvml.nvmlDeviceGetHandleByIndex)


def _slices(nvml: ModuleType, card: Handle) -> list[Handle]:
    """The slices of a card; empty if it is not divided, or cannot be."""
    try:
        if not nvml.nvmlDeviceGetMigMode(card)[0]:
            return []
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(card)
    except nvml.NVMLError:
        return []
    return _numbered(nvml, count, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, card))


def _numbered(nvml: ModuleType, count: int, handle_of: Callable[[int], Handle]) -> list[Handle]:
    """Handles of the numbers 0 to `count` - 1.

    A number without a handle is skipped: it is not in use, or its card has fallen off the bus.
    """
    handles = []
    for number in range(count):
        with suppress(nvml.NVMLError):
            handles.append(handle_of(number))
    return handles
