"""Keys of earlier versions. Each is refused with the words that replace it."""

from __future__ import annotations

from flatout.errors import UserError

_MOVED = {
    "experiment": "name={value}",
    "data.builtin": "data={value}",
    "data.tweets": "data=tweets data.sample{rest}={value}",
    "data.tagged_tweets": "data=tagged_tweets data.sample{rest}={value}",
}
"""Old key: new words. `{rest}` is what follows the old key."""


def find_moved(key: str, value: str) -> UserError | None:
    """The mistake of a key that moved; None for any other key. `value` may be empty."""
    for old, new in _MOVED.items():
        if key == old or key.startswith(f"{old}."):
            words = new.format(rest=key.removeprefix(old), value=value or "VALUE")
            where = f"{key}={value}" if value else key
            return UserError(where, "has moved", hint=f"Use {words}.")
    return None
