"""What formats share that keep the types of their columns: whole values, and classes by their names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from flatout.errors import UserError


def require_whole(block: pa.RecordBatch, first_row: int, fail: Callable[[str], UserError]) -> None:
    """Texts in such a file may be anything; what is not UTF-8 would stop a later step."""
    for name, column in zip(block.schema.names, block.columns, strict=True):
        try:
            column.validate(full=True)
        except (pa.ArrowException, ValueError) as error:
            rows = f"rows {first_row + 1:,} to {first_row + block.num_rows:,}"
            raise fail(f"{rows}: column {name!r} is damaged or not UTF-8 ({first_line(error)})") from None


def named_classes(block: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Columns of class numbers as names, where the file lists them, as `datasets` does."""
    for name, names in class_names(schema).items():
        if name in block.schema.names:
            place = block.schema.names.index(name)
            column = block.column(place)
            if pa.types.is_integer(column.type):
                block = block.set_column(place, name, names_of(column, names))
            elif pa.types.is_list(column.type) and pa.types.is_integer(column.type.value_type):
                values = names_of(column.values, names)
                block = block.set_column(place, name, pa.ListArray.from_arrays(column.offsets, values))
    return block


def names_of(numbers: pa.Array, names: list[str]) -> pa.Array:
    """Class names from their numbers; a number outside the list, as -1 for unknown, is no label."""
    is_named = pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, len(names)))
    return pa.array(names, pa.large_string()).take(pc.if_else(is_named, numbers, None))


def class_names(schema: pa.Schema) -> Mapping[str, list[str]]:
    """The class names that `datasets` writes into a file's schema, by column."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        found = {name: (feature.get("feature") or feature).get("names") for name, feature in features.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}
    return {name: names for name, names in found.items() if names and all(isinstance(each, str) for each in names)}


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
