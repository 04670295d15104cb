"""How often the progress line moves between two flushes."""

from __future__ import annotations

import time

_SHOWN_EACH_S = 1.0


class EachSecond:
    """A clock that is asked in each step whether a second is over."""

    def __init__(self) -> None:
        self._next = 0.0

    def is_over(self) -> bool:
        """Whether a second has passed since the last time that this was true."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _SHOWN_EACH_S
        return True
