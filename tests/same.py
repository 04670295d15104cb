"""Whether two values are equal, however deep their tensors lie in dicts and lists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def same(
    one: object,
    other: object,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    float_rtol: float = 0.0,
) -> bool:
    """Whether two values are equal, NaN to NaN.

    Tensors may differ by `rtol` and `atol`, floats of Python by `float_rtol` and `atol`; without
    these, each bit is compared.
    """
    limits = {"rtol": rtol, "atol": atol, "float_rtol": float_rtol}
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same_tensors(one, other, rtol, atol)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            same(one[key], other[key], **limits) for key in one
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        is_one_kind = type(one) is type(other) and len(one) == len(other)
        return is_one_kind and all(same(*pair, **limits) for pair in zip(one, other, strict=True))
    if isinstance(one, float) and float_rtol:
        return one == pytest.approx(other, rel=float_rtol, abs=atol, nan_ok=True)
    are_nan = one != one and other != other
    return bool(one == other) or are_nan


def _same_tensors(one: Tensor, other: Tensor, rtol: float, atol: float) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True)
