"""Settings of the price: what an hour and a kilowatt-hour cost, and limits in a user's unit.

`Budget` reads `budget=20min`, `0.5kWh` or `2EUR`; `Target` reads `until=val/accuracy:0.90`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flatout.errors import UserError, as_seconds, check_settings, require, setting

_JOULES_A_KWH = 3.6e6
_SECONDS_AN_HOUR = 3600.0


@dataclass(kw_only=True, slots=True)
class PriceConfig:
    """What computing costs here. Without a price, money is left out."""

    per_hour: float | None = setting(
        None, "Money for an hour of all machines of the run.", above=0, example="price.per_hour=2.5"
    )
    per_kwh: float | None = setting(
        None, "Money for a kilowatt-hour.", above=0, example="price.per_kwh=0.3"
    )
    currency: str = setting("EUR", "Its name, in results and in budget=2EUR.", allowed="letters")
    watts: float | None = setting(
        None,
        "Watts of the machine while it trains, where it has no counter of energy.",
        above=0,
        example="price.watts=65",
    )

    def __post_init__(self) -> None:
        check_settings(self, "price")
        require(self.currency.isalpha(), "price.currency", repr(self.currency), allowed="letters")

    def money(self, seconds: float, kwh: float | None) -> float | None:
        """What so long a run costs; None without a price, or if its energy is not known."""
        if self.per_hour is None and self.per_kwh is None:
            return None
        total = (self.per_hour or 0.0) * seconds / _SECONDS_AN_HOUR
        if self.per_kwh is None:
            return total
        return None if kwh is None else total + self.per_kwh * kwh


def as_kwh(joules: float | None) -> float | None:
    return None if joules is None else joules / _JOULES_A_KWH


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may take, in seconds, kWh or money."""

    amount: float
    unit: str  # "s", "kWh", or the currency

    @staticmethod
    def of(text: str, price: PriceConfig) -> Budget:
        """`20min` → 1,200 s, `0.5kWh`, `2EUR`."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
        allowed = f"such as 20min, 2h, 0.5kWh, 2{price.currency}"
        amount = float(match[1]) if match else 0.0
        if match is None or amount == 0:
            raise UserError("budget", f"{text!r} is no budget", allowed=allowed)
        unit = match[2]
        if unit.lower() == "kwh":
            return Budget(amount, "kWh")
        if unit.lower() == price.currency.lower():
            has_price = price.per_hour is not None or price.per_kwh is not None
            require(
                has_price,
                "budget",
                f"{text}, but nothing has a price",
                hint="Set price.per_hour=MONEY or price.per_kwh=MONEY.",
            )
            return Budget(amount, price.currency)
        short = re.sub("^min$", "m", unit)
        try:
            seconds = as_seconds(f"{match[1]}{short}", "budget")
        except UserError:
            raise UserError("budget", f"{text!r} is no budget", allowed=allowed) from None
        assert seconds is not None
        return Budget(seconds, "s")

    def seconds(self, price: PriceConfig, watts: float | None) -> float:
        """How long a run of so many watts may take."""
        if self.unit == "s":
            return self.amount
        needs_energy = self.unit == "kWh" or price.per_kwh is not None
        require(
            watts is not None or not needs_energy,
            "budget",
            "the energy of this machine is not known: it has no counter that can be read",
            hint="Set price.watts=WATTS, or a budget of time.",
        )
        kwh_a_second = (watts or 0.0) / _JOULES_A_KWH
        if self.unit == "kWh":
            return self.amount / kwh_a_second
        money_a_second = price.money(1.0, kwh_a_second)
        assert money_a_second
        return self.amount / money_a_second


@dataclass(frozen=True, slots=True)
class Target:
    """A validation metric and the value at which training ends."""

    metric: str  # without `val/`
    value: float

    @staticmethod
    def of(text: str) -> Target:
        """`val/accuracy:0.90` → accuracy, 0.9."""
        match = re.fullmatch(r"(?:val/)?([\w/]+):(-?\d+(?:\.\d+)?(?:e-?\d+)?)", text.strip())
        if match is None:
            raise UserError("until", f"{text!r} is no target", allowed="such as val/accuracy:0.90")
        return Target(match[1], float(match[2]))
