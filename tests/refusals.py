"""What a refusal must say, whatever its words are: where, which value, what is allowed, and a fix.

A test that wants a whole sentence would have to change with each word of it. These ask the parts of
a `UserError` instead, so that a sentence can be bettered in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flatout.errors import UserError


@contextmanager
def refused(
    where: str, *values: object, allowed: str | None = None, fix: str = ""
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """What is done within is refused: at this place, naming these values, and with this fix.

    `allowed` is compared whole where it is given.

        with refused("data.batch_size", 0, allowed="1 or more"):
            TextDataConfig(batch_size=0)
    """
    with pytest.raises(UserError) as caught:
        yield caught
    _require_refusal(caught.value, where, *values, allowed=allowed, fix=fix)


def _require_refusal(
    error: UserError, where: str, *values: object, allowed: str | None = None, fix: str = ""
) -> None:
    """Fail unless an error is this refusal."""
    assert error.where == where, error
    for value in values:
        assert str(value) in error.what, error
    if allowed is not None:
        assert error.allowed == allowed, error
    assert fix in error.hint, error


def require_printed(said: str, where: str, *values: object) -> None:
    """Fail unless a printed line names a place and, behind it, these values in their order."""
    rest = said[said.index(where) + len(where) :] if where in said else ""
    assert rest, said
    line = rest.partition("\n")[0]
    for value in values:
        _, found, line = line.partition(str(value))
        assert found, f"no {value} behind {where}: {said}"
