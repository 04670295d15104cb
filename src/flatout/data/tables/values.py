"""What kind of values a column holds, which of them are missing, and how they are written out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.problem import Problem


def decoded(values: pa.Array) -> pa.Array:
    """Categories as the values they stand for."""
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_plain(kind: pa.DataType) -> bool:
    """Numbers, dates, true and false: what has one way of being written."""
    return pa.types.is_primitive(kind) or pa.types.is_decimal(kind)


def written(values: pa.Array) -> pa.Array:
    """Values as texts. A float that is whole is written as one: a missing value had turned the column into floats."""
    texts = values.cast(pa.large_string())
    if not pa.types.is_floating(values.type):
        return texts
    is_whole = pc.and_(pc.equal(pc.floor(values), values), pc.less(pc.abs(values), 2.0**53))
    whole = pc.if_else(is_whole, values, pa.scalar(0, values.type)).cast(pa.int64())
    return pc.if_else(is_whole, whole.cast(pa.large_string()), texts)


def is_missing(labels: pa.Array, problem: Problem) -> pa.Array:
    """Which labels are none: null, not a number, or (but for several a row) nothing but white space."""
    if pa.types.is_floating(labels.type):
        return pc.is_null(labels, nan_is_null=True)
    if is_text(labels.type) and problem is not Problem.multi:  # no text is no label, but a fine list of several
        return pc.fill_null(is_blank(labels), True)
    return pc.is_null(labels)


def is_blank(texts: pa.Array) -> pa.Array:
    """Empty, or nothing but white space of any alphabet."""
    return pc.or_(pc.equal(pc.binary_length(texts), 0), pc.utf8_is_space(texts))


def mask_of(values: pa.Array) -> NDArray[np.bool_]:
    return pc.fill_null(values, False).to_numpy(zero_copy_only=False)
