"""Attention's kernels against rectangles of the CPU: answers and gradients, and the mask that
dropout has backwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.card.place import Place
from benchmarks.claim import Claim, bounded
from flatout.models.encoder.attention import Kernel, Scores
from flatout.models.encoder.flat_rows import FlatRows

FP32 = torch.float32
FP16 = torch.float16
BF16 = torch.bfloat16
_ALLOWED = {FP32: 2e-4, FP16: 5e-3, BF16: 3e-2}
"""Differences, in parts of the largest number: some roundings of the format."""
_WINDOW = 8
_MODES = {"all": (False, None), "all, window": (False, _WINDOW), "first": (True, None)}
"""Whether first tokens alone ask, and how far a token sees."""
_KERNELS = {
    Kernel.varlen: ((BF16, FP16), ("all", "all, window", "first")),
    Kernel.efficient: ((FP32, FP16), ("all", "first")),
    Kernel.padded: ((FP32, BF16), ("all", "all, window", "first")),
}
_DROPPING = (
    (Kernel.varlen, BF16),
    (Kernel.varlen, FP16),
    (Kernel.padded, FP32),
    (Kernel.padded, BF16),
)
_BATCHES = {"5 rows": [3, 17, 30, 64, 100], "1 row": [30]}
"""The tokens of rows; a bound of 64 tokens is above all those of the second."""
_HEADS = ((4, 12), (12, 64))
"""How many, and how wide: 12 is no multiple of 8."""


def _name(kernel: Kernel, dtype: torch.dtype) -> str:
    return f"{kernel.value} {str(dtype).removeprefix('torch.')}"


KERNEL_ROWS = (
    *(
        f"attention {_name(kernel, dtype)}, {mode}: largest difference"
        for kernel, (dtypes, modes) in _KERNELS.items()
        for dtype in dtypes
        for mode in modes
    ),
    *(f"dropout {_name(kernel, dtype)}: forwards against backwards" for kernel, dtype in _DROPPING),
)


def kernel_claims(place: Place) -> Iterator[Claim]:
    """Each kernel over every kind of batch, then dropout."""
    rows = iter(KERNEL_ROWS)
    for kernel, (dtypes, modes) in _KERNELS.items():
        for dtype in dtypes:
            for mode in modes:
                found = {
                    f"{batch}, heads {heads} x {width}": difference(
                        place.device, kernel, dtype, mode, batch, (heads, width)
                    )
                    for batch in _BATCHES
                    for heads, width in _HEADS
                }
                worst = max(found, key=lambda name: found[name])
                yield bounded(
                    next(rows), found[worst], "", most=_ALLOWED[dtype], note=f"worst: {worst}"
                )
    for kernel, dtype in _DROPPING:
        gap, kept = dropout_gap(place.device, kernel, dtype)
        note = (
            f"of the answers' squares; dropout of a half leaves {kept:.2f} times the size of the"
            " answers without"
        )
        yield bounded(next(rows), gap, "", most=_ALLOWED[dtype], note=note)


def difference(
    device: torch.device,
    kernel: Kernel,
    dtype: torch.dtype,
    mode: str,
    batch: str,
    heads: tuple[int, int],
) -> float:
    """The largest of answers and gradients on the device from those of rectangles, in parts of the
    largest number.
    """
    is_first, window = _MODES[mode]
    ours = attended(device, kernel, dtype, _BATCHES[batch], heads, is_first=is_first, window=window)
    theirs = attended(
        torch.device("cpu"),
        Kernel.rectangles,
        dtype,
        _BATCHES[batch],
        heads,
        is_first=is_first,
        window=window,
    )
    parts = zip(ours, theirs, strict=True)
    return max(
        float((found - expected).abs().max() / expected.abs().max()) for found, expected in parts
    )


def attended(
    device: torch.device,
    kernel: Kernel,
    dtype: torch.dtype,
    lengths: list[int],
    heads: tuple[int, int],
    *,
    is_first: bool,
    window: int | None,
) -> list[Tensor]:
    """Answers and gradients on the host, of numbers that are rounded alike for every kernel;
    rectangles take fp32.
    """
    random = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    asking = len(lengths) if is_first else sum(lengths)
    drawn = [
        torch.randn(count, *heads, generator=random).to(dtype)
        for count in (asking, tokens, tokens, asking)
    ]
    kind = FP32 if kernel is Kernel.rectangles else dtype
    query, key, value, goal = (part.to(device, kind) for part in drawn)
    parts = [part.requires_grad_() for part in (query, key, value)]
    rows = _rows(device, kernel, lengths)
    scores = Scores(heads[1] ** -0.5, 0.0, window)
    if is_first:
        found = rows.attend(torch.stack((key, value), 1), scores, query)
    else:
        found = rows.attend(torch.stack((query, key, value), 1), scores)
    gradients = torch.autograd.grad(found, parts, goal)
    return [part.detach().float().cpu() for part in (found, *gradients)]


def _rows(device: torch.device, kernel: Kernel, lengths: list[int]) -> FlatRows:
    ends = torch.tensor(lengths).cumsum(0)
    return FlatRows(
        torch.tensor(lengths),
        torch.cat((torch.zeros(1, dtype=ends.dtype), ends)).to(device),
        kernel,
    )


def dropout_gap(device: torch.device, kernel: Kernel, dtype: torch.dtype) -> tuple[float, float]:
    """How far answers times themselves are from values times their gradients, and how large answers
    are by dropout.

    An answer is a line in the values, so both are the same number where the mask is the same
    forwards and backwards.
    """
    random = torch.Generator().manual_seed(0)
    lengths, heads = _BATCHES["5 rows"], _HEADS[1]
    qkv = torch.randn(sum(lengths), 3, *heads, generator=random).to(device, dtype).requires_grad_()
    rows = _rows(device, kernel, lengths)
    whole = rows.attend(qkv, Scores(heads[1] ** -0.5, 0.0, None))
    torch.manual_seed(7)
    found = rows.attend(qkv, Scores(heads[1] ** -0.5, 0.5, None))
    (gradient,) = torch.autograd.grad(found, qkv, found.detach())
    squares = found.detach().double().square().sum()
    backwards = (qkv.detach()[:, 2].double() * gradient[:, 2].double()).sum()
    return float((squares - backwards).abs() / squares), float(
        found.detach().norm() / whole.detach().norm()
    )
