"""Products that give a row the same bits at any place of a batch, as exact answers need.

The library of products on a CPU may sum the numbers of a row in another order where the row begins
at another place in memory. Where its setting `MKL_CBWR` ends in `STRICT` it does not. It reads that
setting at the first product of the process. Open this file if exact answers differ.
"""

from __future__ import annotations

import os

import torch

_SETTING = "MKL_CBWR"
_STRICT = "AUTO,STRICT"
_ROWS = 32
_ODD = 7  # numbers of a row, so that rows begin at all places


def ask_for_equal_bits() -> str:
    """Let products not depend on a row's place in memory.

    Returns why they still do, in words; empty where they do not.
    """
    own_value = os.environ.get(_SETTING, _STRICT)
    os.environ.setdefault(_SETTING, _STRICT)
    row = torch.linspace(-1.0, 1.0, _ODD).sin()
    weights = torch.linspace(0.0, 9.0, 6 * _ODD).cos().view(6, _ODD)
    products = torch.nn.functional.linear(row.expand(_ROWS, _ODD).contiguous(), weights)
    if bool((products == products[0]).all()):
        return ""
    if own_value != _STRICT:
        return f"{_SETTING} is {own_value}, so last bits may still differ; leave it out"
    return (
        "products computed before in this process, so last bits may still differ; start it with"
        f" {_SETTING}={_STRICT}"
    )
