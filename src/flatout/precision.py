"""Which numbers a run computes with, and why: sixteen bits where the device multiplies them natively."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class Precision(StrEnum):
    """Arithmetic of matrix products; weights stay fp32."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


LIGHTNING_NAMES = {Precision.fp32: "32-true", Precision.bf16: "bf16-mixed", Precision.fp16: "16-mixed"}


@dataclass(frozen=True, slots=True)
class PrecisionChoice:
    """A precision, why it was chosen, and what that was read off."""

    precision: Precision
    why: str
    evidence: str

    @property
    def lightning_name(self) -> str:
        return LIGHTNING_NAMES[self.precision]


def choose_precision(asked: Precision, device: torch.device) -> PrecisionChoice:
    """What was asked for, or bf16 where it is native, else fp16 on a GPU, else fp32."""
    if asked is not Precision.auto:
        return PrecisionChoice(asked, "asked for", f"precision={asked}")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        evidence = f"compute capability {major}.{minor}"
        if major >= 8:
            return PrecisionChoice(Precision.bf16, "bf16 is native on this GPU", evidence)
        return PrecisionChoice(Precision.fp16, "bf16 is not native on this GPU, fp16 is", evidence)
    if device.type == "cpu" and bf16_is_native_on_cpu():
        return PrecisionChoice(Precision.bf16, "bf16 is native on this CPU", "the processor has AVX512_BF16 or AMX")
    return PrecisionChoice(Precision.fp32, f"sixteen bits are not native on this {device.type}", "no native bf16")


def bf16_is_native_on_cpu() -> bool:
    """Whether the processor itself multiplies bf16; oneDNN's own answer is yes wherever it can emulate it."""
    asked = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(question() for question in asked if question is not None)
