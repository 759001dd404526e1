"""How fast a head trains, against what this machine's matrix multiplication can do at best, in one run.

Floating-point operations are those that torch counts in one step, forward and backward; the peak is the best of some
square multiplications in the same number format, taken in turn with the steps so that both see the same machine.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from heads.base import DraftHead, TargetFeatures
from training.optim import OptimSettings, build_optimizer
from training.step import Trainee

_SIDE = 2048


@dataclass(frozen=True)
class TrainSpeed:
    """tokens_per_second: positions per second (median step); supervised: share of them that is supervised; flops: of
    one step; share: median of each step's FLOP/s over the peak measured beside it; peak: FLOP/s (best); memory: the
    process's highest resident bytes; spread: lowest and highest tokens/s."""

    tokens_per_second: float
    spread: tuple[float, float]
    supervised: float
    flops: float
    share: float
    peak: float
    memory: int


def train_speed(head: DraftHead, features: TargetFeatures, *, bf16: bool, repeats: int) -> TrainSpeed:
    """Full optimizer steps on one batch, after a warm-up, in turn with the peak."""
    model = Trainee(head, bf16=bf16, distributed=False)
    optimizer = build_optimizer(head, OptimSettings())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        sums = model(features)
        (sums.loss / sums.count).backward()
        optimizer.step()

    with FlopCounterMode(display=False) as counter:
        step()
    flops = float(counter.get_total_flops())
    step()
    seconds, peaks = [], []
    for _ in range(repeats):
        peaks.append(matmul_peak(torch.bfloat16 if bf16 else torch.float32, features.ids_T.device))
        seconds.append(_timed(step, features.ids_T.device))
    rates = [len(features.ids_T) / second for second in seconds]
    shares = [flops / second / peak for second, peak in zip(seconds, peaks, strict=True)]
    return TrainSpeed(
        tokens_per_second=statistics.median(rates),
        spread=(min(rates), max(rates)),
        supervised=features.supervised_T.float().mean().item(),
        flops=flops,
        share=statistics.median(shares),
        peak=max(peaks),
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def matmul_peak(dtype: torch.dtype, device: torch.device, tries: int = 4) -> float:
    """Best FLOP/s of multiplying two square matrices of side 2048."""
    a = torch.randn(_SIDE, _SIDE, device=device).to(dtype)
    return max(2 * _SIDE**3 / _timed(lambda: a @ a, device) for _ in range(tries))


def made_up_features(head: DraftHead, *, hidden_size: int, documents: int, length: int) -> TargetFeatures:
    """A batch of random states and ids; the first third of each document is the prompt."""
    total = documents * length
    last_TD = torch.randn(total, hidden_size).bfloat16()
    return TargetFeatures(
        ids_T=head.vocab.ids_W[torch.randint(len(head.vocab.ids_W), (total,))],
        supervised_T=(torch.arange(total) % length) >= length // 3,
        lengths=(length,) * documents,
        taps_TE=torch.randn(total, len(head.needs.taps) * hidden_size).bfloat16(),
        last_TD=last_TD,
        lse_T=torch.full((total,), 10.0),
    )


def _timed(action: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
