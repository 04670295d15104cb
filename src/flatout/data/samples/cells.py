"""The built-in cells: discharges of made-up lithium-ion cells, with a known best reachable error.

A cell has an open-circuit voltage over its charge, a series resistance and two RC pairs; resistance
and time constants depend on the temperature, which the current raises. Currents follow drive
cycles: runs of random pulses, some of them recuperating. Sensors add noise of known size. No model
can have a lower error than `soc_noise` or `voltage_noise`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from flatout.data.samples.settings import SampleConfig
from flatout.data.tables.table import SPLIT_STREAM, Table
from flatout.errors import LARGEST_SEED, setting

GENERATOR_VERSION = 1
STEP_S = 10.0
COLUMNS = ("cell", "cycle", "time_s", "voltage", "current", "temperature", "soc")
_OCV_SOC = np.array([0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0])
_OCV_V = np.array([3.00, 3.25, 3.38, 3.50, 3.59, 3.66, 3.76, 3.91, 4.03, 4.18])
Floats = NDArray[np.float64]


@dataclass(kw_only=True, slots=True)
class CellsConfig(SampleConfig):
    """How many cells are made up, and how noisy their sensors are."""

    cells: int = setting(
        16, "Training cells; a quarter as many, two at least, for validation, as for test.", least=1
    )
    cycles: int = setting(6, "Discharges of each cell.", least=1)
    samples: int = setting(
        360, "Samples of a discharge, one every ten seconds, until the cell is empty.", least=20
    )
    soc_noise: float = setting(
        0.02, "Standard deviation of the reference of the state of charge.", least=0
    )
    voltage_noise: float = setting(
        0.005, "Standard deviation of the voltage sensor, in volts.", least=0
    )
    current_noise: float = setting(
        0.01, "Standard deviation of the current sensor, in amperes.", least=0
    )
    temperature_noise: float = setting(
        0.1, "Standard deviation of the temperature sensor, in kelvins.", least=0
    )
    seed: int = setting(7, "Another seed, other cells.", least=0, most=LARGEST_SEED)

    def floor(self, target: str) -> float | None:
        """The lowest root mean square error that any model can reach; None if it is not known."""
        return {"soc": self.soc_noise, "voltage": self.voltage_noise}.get(target)


class CellsTable(Table):
    """The recordings of one split, a row a sample."""

    columns: Sequence[str] = COLUMNS

    def __init__(self, config: CellsConfig, split: str) -> None:
        self.config = config
        self.split = split
        self.name = f"sample:cells/{split}"
        self.num_cells = config.cells if split == "train" else max(2, config.cells // 4)

    def fingerprint(self) -> str:
        about = f"cells {GENERATOR_VERSION} {self.split} {sorted(asdict(self.config).items())}"
        return xxhash.xxh3_128_hexdigest(about.encode())

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        for cell in range(self.num_cells):
            block = discharge_cell(self.config, self.split, cell).select(list(columns))
            yield from pa.Table.from_batches([block]).to_batches(rows_per_block)


def discharge_cell(config: CellsConfig, split: str, cell: int) -> pa.RecordBatch:
    """All discharges of one cell: its samples one after the other."""
    # Each cell has a random stream of its own, so any of them can be made without the others.
    key = [config.seed, SPLIT_STREAM[split] * 1_000_000 + cell]
    random = np.random.Generator(np.random.Philox(key=key))
    capacity_ah = random.uniform(1.96, 2.04)
    resistance = random.uniform(0.048, 0.052)
    ambient = random.choice([10.0, 25.0, 40.0], config.cycles)
    current = draw_currents(random, config.cycles, config.samples)
    # The state of charge counts the charge that has flowed: -2 A for 1,800 s are -1 Ah, which is
    # half of a cell of 2 Ah.
    soc = (
        random.uniform(0.85, 1.0, config.cycles)[:, None]
        + np.cumsum(current, axis=1) * STEP_S / 3600 / capacity_ah
    )
    temperature, voltage = simulate_response(current, soc, ambient, resistance)
    shape = current.shape
    rows = {
        "cell": np.full(shape, f"{split}-{cell}"),
        "cycle": np.broadcast_to(np.arange(config.cycles)[:, None], shape),
        "time_s": np.broadcast_to(np.arange(config.samples) * STEP_S, shape),
        "voltage": voltage + config.voltage_noise * random.standard_normal(shape),
        "current": current + config.current_noise * random.standard_normal(shape),
        "temperature": temperature + config.temperature_noise * random.standard_normal(shape),
        "soc": soc + config.soc_noise * random.standard_normal(shape),
    }
    # A discharge ends where the cell is first empty, even if it would recuperate afterwards.
    is_kept = np.logical_and.accumulate(soc > 0.02, axis=1)
    return pa.RecordBatch.from_pydict({name: pa.array(rows[name][is_kept]) for name in COLUMNS})


def draw_currents(random: np.random.Generator, cycles: int, samples: int) -> Floats:
    """`[cycles, samples]` amperes, negative while discharging: pulses about the cycle's mean."""
    # Pulses of 2, 3 and 4 samples begin at 0, 2 and 5, and each has one level:
    #
    #     starts of the next ones   2, 5, 9
    #     sample                    0   1   2   3   4   5   6   7   8
    #     number of its pulse       0   0   1   1   1   2   2   2   2
    shape = (cycles, samples)
    mean = -random.uniform(1.2, 2.4, cycles)[:, None]
    starts = np.cumsum(random.integers(2, 12, shape), axis=1)
    number = np.stack([np.searchsorted(row, np.arange(samples), side="right") for row in starts])
    # Braking feeds charge back, so now and then a level is lowered, sometimes below zero.
    levels = random.gamma(2.0, 0.5, shape) - 0.25 * (random.random(shape) < 0.15)
    return mean * np.take_along_axis(levels, number, axis=1)


def simulate_response(
    current: Floats, soc: Floats, ambient: Floats, resistance: float
) -> tuple[Floats, Floats]:
    """Temperature and voltage of a cell under a current; all cycles at once, sample by sample."""
    # The voltage is that of the open circuit, plus the drop over the resistance, plus those of two
    # RC pairs, which follow the current with delays of 30 s and 400 s. A cold cell resists more.
    cycles, samples = current.shape
    temperature = np.empty(current.shape)
    voltage = np.empty(current.shape)
    heat = ambient.copy()
    slow = np.zeros(cycles)
    fast = np.zeros(cycles)
    for sample in range(samples):
        amps = current[:, sample]
        ohms = resistance * np.exp(1500 * (1 / (heat + 273.15) - 1 / 298.15))
        fast = _approach(fast, amps * 0.4 * ohms, 30.0)
        slow = _approach(slow, amps * 0.7 * ohms, 400.0)
        heat = heat + STEP_S * (amps**2 * 2.1 * ohms / 40.0 - (heat - ambient) / 900.0)
        temperature[:, sample] = heat
        voltage[:, sample] = np.interp(soc[:, sample], _OCV_SOC, _OCV_V) + amps * ohms + fast + slow
    return temperature, voltage


def _approach(value: Floats, goal: Floats, seconds: float) -> Floats:
    """The value one sample later, on its way to the goal with this time constant."""
    kept = np.exp(-STEP_S / seconds)
    return kept * value + (1 - kept) * goal
