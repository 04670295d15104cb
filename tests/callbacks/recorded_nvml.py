"""NVML as it answers on several machines: records of cards, behind the names and the errors of the
real library.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
ME = os.getpid()


@dataclass
class Record:
    """What a card, or a slice of one, answers; what is None it does not support."""

    uuid: str
    bus: str = "00000000:01:00.0"
    utilisation: int | None = None
    memory: int | None = None
    power_mw: int | None = None
    temperature: int | None = None
    clocks: dict[int, int] | None = None
    most_clocks: dict[int, int] | None = None
    reasons: int | None = None
    pcie_kb: dict[int, int] | None = None
    link: tuple[int, int, int, int] | None = None
    """Generation and width at the moment, and at most."""
    processes: list[tuple[int, int | None]] | None = None
    """Process number and bytes."""
    slices: dict[int, Record] | None = None
    """By their place on the card, with gaps; None for a card that cannot be cut."""
    instance: tuple[int, int] = (0, 0)
    is_lost: bool = False
    energy_mj: int | None = 5_000


@dataclass
class RecordedNvml:
    """Constants and errors are those of the real library; everything else comes from
    the records.
    """

    cards: list[Record]
    has_driver: bool = True
    is_old: bool = False
    """Whether reasons still have the name of drivers before 535."""
    asked: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML"):
            return getattr(pynvml, name)
        if name.startswith("nvmlDeviceGet"):
            return self._answering(name.removeprefix("nvmlDeviceGet"))
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Record:
        if number >= len(self.cards):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if self.cards[number].is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.cards[number]

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> Record:
        for card in self.cards:
            if card.bus == bus:
                return card
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Record, number: int) -> Record:
        if card.slices is None or number not in card.slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return card.slices[number]

    def _answering(self, what: str) -> Callable[..., Any]:
        answers: dict[str, Callable[..., Any]] = {
            "UUID": lambda card: card.uuid,
            "MigMode": lambda card: None if card.slices is None else [int(bool(card.slices))] * 2,
            "MaxMigDeviceCount": lambda card: 7,
            "GpuInstanceId": lambda card: card.instance[0],
            "ComputeInstanceId": lambda card: card.instance[1],
            "UtilizationRates": lambda card: _named(
                card.utilisation, gpu=card.utilisation, memory=0
            ),
            "MemoryInfo": lambda card: _named(card.memory, used=card.memory, total=2**34),
            "PowerUsage": lambda card: card.power_mw,
            "TotalEnergyConsumption": lambda card: card.energy_mj,
            "Temperature": lambda card, kind: card.temperature,
            "ClockInfo": lambda card, kind: (card.clocks or {}).get(kind),
            "MaxClockInfo": lambda card, kind: (card.most_clocks or {}).get(kind),
            "PcieThroughput": lambda card, kind: (card.pcie_kb or {}).get(kind),
            "CurrPcieLinkGeneration": lambda card: card.link and card.link[0],
            "CurrPcieLinkWidth": lambda card: card.link and card.link[1],
            "MaxPcieLinkGeneration": lambda card: card.link and card.link[2],
            "MaxPcieLinkWidth": lambda card: card.link and card.link[3],
            "ComputeRunningProcesses": lambda card: _processes(card.processes),
            "CurrentClocksThrottleReasons": lambda card: card.reasons,
        }
        if not self.is_old:
            answers["CurrentClocksEventReasons"] = answers["CurrentClocksThrottleReasons"]
        if what not in answers:
            raise AttributeError(what)

        def answer(card: Record, *about: Any) -> Any:
            self.asked.append(what)
            if card.is_lost:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            value = answers[what](card, *about)
            if value is None:
                raise pynvml.NVMLError(NOT_SUPPORTED)
            return value

        return answer


def _named(value: object, **parts: Any) -> Any:
    return None if value is None else SimpleNamespace(**parts)


def _processes(found: list[tuple[int, int | None]] | None) -> Any:
    if found is None:
        return None
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in found]


def clocks(sm: int, memory: int) -> dict[int, int]:
    return {pynvml.NVML_CLOCK_SM: sm, pynvml.NVML_CLOCK_MEM: memory}


def bus_load(to_card: int, from_card: int) -> dict[int, int]:
    return {pynvml.NVML_PCIE_UTIL_RX_BYTES: to_card, pynvml.NVML_PCIE_UTIL_TX_BYTES: from_card}


def a16_board() -> RecordedNvml:
    """Four GPUs on one board, each a card to the driver; training runs on the third."""
    cards = []
    for number in range(4):
        is_busy = number == 2
        card = Record(
            uuid=f"GPU-{number}a16c0de-1111-2222-3333-444455556666",
            bus=f"00000000:{0x41 + number:02X}:00.0",
            utilisation=96 if is_busy else 0,
            memory=9 * 10**9 if is_busy else 0,
            power_mw=58_000 if is_busy else 14_000,
            temperature=61,
            clocks=clocks(1695, 6251),
            reasons=0 if is_busy else 1,
            pcie_kb=bus_load(1_200_000, 45_000),
            link=(4, 8, 4, 8),
            processes=[(ME, 9 * 10**9)] if is_busy else [],
        )
        cards.append(card)
    return RecordedNvml(cards)


def cut_a100() -> RecordedNvml:
    """An A100 in three slices, of which the driver tells no load; beside it a T4 of an older
    driver's making.
    """
    process_of = {0: 4000, 1: 4001, 3: ME}
    slices = {
        place: Record(
            uuid=f"MIG-5{place}11ce00-aaaa-bbbb-cccc-dddd0000000{place}",
            memory=(place + 1) * 10**9,
            processes=[(process, 10**9)],
            instance=(7 + place, 0),
        )
        for place, process in process_of.items()
    }
    whole = Record(
        uuid="GPU-a100a100-0000-1111-2222-333344445555",
        bus="00000000:07:00.0",
        memory=9 * 10**9,
        power_mw=231_000,
        temperature=48,
        clocks=clocks(1410, 1215),
        reasons=0,
        pcie_kb=bus_load(1, 1),
        link=(4, 16, 4, 16),
        slices=slices,
    )
    return RecordedNvml([whole, plain_t4().cards[0]])


def plain_t4() -> RecordedNvml:
    """A T4 behind a virtual machine's manager: no power, no bus, no processes."""
    card = Record(
        uuid="GPU-74747474-0000-1111-2222-333344445555",
        bus="00000000:00:1E.0",
        utilisation=100,
        memory=4 * 10**9,
        temperature=77,
        clocks=clocks(1590, 5000),
        reasons=0x04,
    )
    return RecordedNvml([card], is_old=True)


def hot_4090() -> RecordedNvml:
    """Held down by its power limit, then by heat, which it calls a slowdown too."""
    card = Record(
        uuid="GPU-40904090-0000-1111-2222-333344445555",
        utilisation=99,
        memory=20 * 10**9,
        power_mw=449_000,
        temperature=84,
        clocks=clocks(2310, 10251),
        most_clocks=clocks(2520, 10501),
        reasons=0x04,
        pcie_kb=bus_load(900_000, 80_000),
        link=(1, 16, 4, 16),
        processes=[(ME, 20 * 10**9)],
    )
    return RecordedNvml([card])


def shared_card(mine: int | None = ME) -> RecordedNvml:
    """Two others compute beside this process; `mine` is None where the driver sees other numbers
    than the container.
    """
    machine = hot_4090()
    own = 77_001 if mine is None else mine
    machine.cards[0].processes = [
        (own, 5 * 10**9),
        (31_337, 3 * 10**9),
        (31_338, None),
    ]
    return machine
