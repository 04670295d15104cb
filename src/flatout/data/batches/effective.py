"""How a wanted number of rows an optimizer step is divided into batches that one device computes at once."""

from __future__ import annotations

from flatout.errors import require

_FURTHEST = 4096
"""How far from the wanted number others are looked for."""


def divided(wanted: int, most: int, world: int) -> tuple[int, int]:
    """Rows of a batch, at most `most`, and batches a step: their product times the devices is exactly `wanted`.

    >>> divided(512, most=64, world=4)
    (64, 2)
    """
    found = _divided(wanted, most, world)
    if found is None:
        nearest = [
            next((near for near in reach if _divided(near, most, world)), None)
            for reach in (range(wanted - 1, max(0, wanted - _FURTHEST), -1), range(wanted + 1, wanted + _FURTHEST))
        ]
        numbers = " or ".join(str(number) for number in nearest if number is not None)
        shared = f"{world} devices" if world > 1 else "one device"
        what = f"{wanted} rows cannot be divided evenly among {shared} in batches of {-(-most // 2)} to {most} rows"
        require(False, "data.effective_batch", what, hint=f"Set {numbers}, or another data.batch_size.")
    assert found is not None
    return found


def _divided(wanted: int, most: int, world: int) -> tuple[int, int] | None:
    """The largest batch that divides a device's share; None where only batches less than half as large as could be do.

    Such would cost more steps of the device than they save: rows are never dropped or filled up for it.
    """
    share, rest = divmod(wanted, world)
    if rest or not share:
        return None
    batch = next(rows for rows in range(min(most, share), 0, -1) if share % rows == 0)
    return (batch, share // batch) if batch == share or 2 * batch >= most else None
