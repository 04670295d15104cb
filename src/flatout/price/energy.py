"""Joules that this machine has used: of the card by NVML, of the processor by RAPL.

A counter of the processor is a file that most systems let only root read. It starts again from
zero when it is full, so `EnergyMeter.read` is called at least every few minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from flatout.callbacks.gpu import Card

Read = Callable[[], float | None]
_RAPL = "sys/class/powercap/intel-rapl:[0-9]*"


class EnergyMeter:
    """Adds up joules since it was made; `sources` names what is counted.

    Ranks do the same work, so the counter of one card stands for all cards, and the counters of
    this machine for all machines.
    """

    def __init__(
        self,
        card: Card | None,
        watts: float | None = None,
        root: Path = Path("/"),
        *,
        cards: int = 1,
        machines: int = 1,
    ) -> None:
        """`watts`: of a whole machine, for one that has no counter.

        `cards`: of all machines together.
        """
        self.watts = None if watts is None else watts * machines
        self._counters: list[_Counter] = []
        self.sources: list[str] = []
        if card is not None:
            self._add("card", card.energy_j, 0.0, cards)
        for folder in sorted(root.glob(_RAPL)):
            if folder.name.count(":") == 1:  # a domain within it would count twice
                most = _read_microjoules(folder / "max_energy_range_uj") or 0.0
                read = partial(_read_microjoules, folder / "energy_uj")
                self._add("processor", read, most, machines)
        if not self.sources and watts is not None:
            self.sources.append("price.watts")

    def _add(self, name: str, read: Read, most: float, alike: int) -> None:
        first = read()
        if first is not None:
            self._counters.append(_Counter(read, most, first, alike))
            self.sources.append(name)

    def joules(self, seconds: float) -> float | None:
        """Joules so far, in `seconds`; None where nothing is counted."""
        if self._counters:
            return sum(counter.update() for counter in self._counters)
        return None if self.watts is None else self.watts * seconds


class _Counter:
    """A counter that grows, and starts again from zero at `most`.

    `alike`: for how many cards or machines it stands.
    """

    def __init__(self, read: Read, most: float, first: float, alike: int) -> None:
        self._read = read
        self._most = most
        self._last = first
        self._alike = alike
        self._total = 0.0

    def update(self) -> float:
        now = self._read()
        if now is not None:
            grown = now - self._last
            self._total += grown if grown >= 0 else grown + self._most
            self._last = now
        return self._total * self._alike


def _read_microjoules(path: Path) -> float | None:
    try:
        return int(path.read_text(encoding="ascii")) / 1e6
    except (OSError, ValueError):
        return None
