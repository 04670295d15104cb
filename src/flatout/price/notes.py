"""Notes of what runs on this machine cost, which the next estimate starts from and is corrected by.

A run reads two files. One has the costs of runs with the same data, network and steps. The other
has ratios, time taken over time expected, of runs with the same kind of network. Delete `prices/`
in the cache folder to forget both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flatout.data.store.cache import recipe_key
from flatout.files import load_json, write_atomically
from flatout.price.costs import Costs

_FOLDER = "prices"
_MOST_RATIOS = 20
_LONGEST_S = 1e9  # that anything may take


class PriceNotes:
    """The notes of runs like this one.

    `same` is what runs of equal steps have in common; `like` what runs of one kind have.
    """

    def __init__(self, cache: Path, same: Mapping[str, Any], like: Mapping[str, Any]) -> None:
        self._same = cache / _FOLDER / f"{recipe_key(dict(same))}.json"
        self._like = cache / _FOLDER / f"{recipe_key(dict(like))}.json"

    def costs(self) -> Costs | None:
        """The costs of the last run of equal steps; None if there was none."""
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            return _plausible(Costs.of(_read(self._same)["costs"]))
        return None

    def ratios(self) -> list[float]:
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            return [_plausible_seconds(ratio) for ratio in _read(self._like)["ratios"]]
        return []

    def note_costs(self, costs: Costs) -> None:
        _write(self._same, {"costs": asdict(costs)})

    def note_ratio(self, ratio: float) -> None:
        _write(self._like, {"ratios": [*self.ratios(), round(ratio, 4)][-_MOST_RATIOS:]})


def _read(path: Path) -> Any:
    """What a note holds; an empty mapping if it is missing or damaged."""
    with suppress(OSError, ValueError):
        return load_json(path)
    return {}


def _plausible(costs: Costs) -> Costs:
    """The costs, if all of them are numbers of seconds; a ValueError otherwise."""
    values = {**asdict(costs), **asdict(costs.pace)}
    for name in values.keys() - {"pace", "is_guessed", "leaves_cores"}:
        if name != "watts" or values[name] is not None:
            _plausible_seconds(values[name])
    return costs


def _plausible_seconds(value: object) -> float:
    """A number of at most a life's seconds; a ValueError for anything else."""
    if not isinstance(value, float | int) or not 0 <= value < _LONGEST_S:
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    # a note saves an estimate, and a full disk must not end a run for it
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(values, indent=1))
