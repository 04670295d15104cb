"""Parts that other installed packages offer: kinds of data, models and loggers, by entry points.

A package names a part in its `pyproject.toml`; from then on the part has that name here:

    [project.entry-points."flatout.models"]
    average = "their_package.models:AverageConfig"      →    python -m train model=average

A package is imported when a name is asked for that flatout itself does not have, and not before.
The logger of Trackio comes this way from flatout's own `pyproject.toml`: what it needs is an extra.
Only what is installed can be named: no file of settings adds a place to look in. Open this file to
add a group of parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from flatout.errors import UserError, first_line

PartGroup = StrEnum("PartGroup", "kinds models loggers")


def find_part(group: PartGroup, name: str) -> Any:
    """The part that a package offers under a name; None where there is none."""
    points = list(_points(group, name))
    if not points:
        return None
    if len(points) > 1:
        packages = ", ".join(sorted(map(_package, points)))
        raise UserError(
            f"flatout.{group}",
            f"{name!r} is offered by several packages ({packages})",
            hint="Uninstall all but one.",
        )
    return _load(points[0])


def all_parts(group: PartGroup) -> Iterator[Any]:
    """Every part that packages offer in a group; all of them are imported."""
    for point in _points(group):
        yield _load(point)


def names_of_parts(group: PartGroup) -> list[str]:
    """The names in a group; nothing is imported."""
    return sorted({point.name for point in _points(group)})


def name_of_part(group: PartGroup, kind: type) -> str | None:
    """The name under which a class is offered; None where it is not. Nothing is imported."""
    path = f"{kind.__module__}:{kind.__qualname__}"
    return next((point.name for point in _points(group) if point.value == path), None)


def _points(group: PartGroup, name: str | None = None) -> Iterator[EntryPoint]:
    for point in entry_points(group=f"flatout.{group}"):
        if name in (None, point.name):
            yield point


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # what a package of others raises when it is imported may be of any class
        raise UserError(
            f"{point.group}.{point.name}",
            f"{point.value} of {_package(point)} cannot be imported: {first_line(error)}",
            hint="Install a version of the package that fits, or uninstall it.",
        ) from error


def _package(point: EntryPoint) -> str:
    return "flatout" if point.dist is None else point.dist.name
