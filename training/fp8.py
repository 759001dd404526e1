"""Taps in 8 bits: float8_e4m3fn (4 bits of exponent, 3 of mantissa) with one float32 scale per tap and position.

The scale puts a state's largest entry on the format's largest number, so that one outlier channel costs the others no
more than it must: entries down to 2^-15 of it keep a relative error of at most 2^-4, smaller ones an absolute one.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


def to_fp8(states_TE: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` states side by side [T, E] as FP8 [T, E] and their scales float32 [T, count]."""
    parts_TSD = states_TE.float().unflatten(1, (count, -1))
    scale_TS = parts_TSD.abs().amax(-1) / _LARGEST
    scale_TS = torch.where(scale_TS > 0, scale_TS, 1.0)
    values_TSD = (parts_TSD / scale_TS[..., None]).clamp(-_LARGEST, _LARGEST)
    return values_TSD.flatten(1).to(FP8), scale_TS


def from_fp8(values_TE: Tensor, scale_TS: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [T, E] that `to_fp8` was given, rounded, in this dtype."""
    parts_TSD = values_TE.float().unflatten(1, (scale_TS.shape[1], -1))
    return (parts_TSD * scale_TS[..., None]).flatten(1).to(dtype)
