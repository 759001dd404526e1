"""How fast a head trains, against what this machine's matrix multiplication can do at best, in one run.

Floating-point operations are those that torch counts in one step, forward and backward; the peak is the best of some
square multiplications in the same number format, taken in turn with the steps so that both see the same machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from heads.base import DraftHead, TargetFeatures
from training.optim import OptimSettings, build_optimizer, clip_gradients
from training.step import Trainee
from training.tracking import peak_memory

_SIDE, _SIDE_GPU = 2048, 8192  # of the matrices that the peak is measured on: enough work for what multiplies them


@dataclass(frozen=True)
class TrainSpeed:
    """tokens_per_second: positions per second (median step); supervised: share of them that is supervised; flops: of
    one step; share: median of each step's FLOP/s over the peak measured beside it; peak: FLOP/s (best); memory: the
    bytes that the process needed at most, of the GPU's where it trains there; spread: lowest and highest tokens/s."""

    tokens_per_second: float
    spread: tuple[float, float]
    supervised: float
    flops: float
    share: float
    peak: float
    memory: int


class StepBench:
    """Full optimizer steps on one batch, after two to warm up; flops: of one step."""

    def __init__(self, head: DraftHead, features: TargetFeatures, settings: OptimSettings, *, bf16: bool) -> None:
        self._model = Trainee(head, bf16=bf16, distributed=False)
        self._optimizer, self._settings = build_optimizer(head, settings), settings
        self._features, self._device = features, features.ids_T.device
        self._dtype = torch.bfloat16 if bf16 else torch.float32
        with FlopCounterMode(display=False) as counter:
            self._step()
        self.flops = float(counter.get_total_flops())
        self._step()
        self.peak = 0.0  # the best FLOP/s of a multiplication up to now

    def turn(self, steps: int) -> tuple[float, float]:
        """(seconds of so many steps, their share of the matmul peak measured right before)."""
        peak = matmul_peak(self._dtype, self._device)
        self.peak = max(self.peak, peak)
        seconds = _timed(lambda: [self._step() for _ in range(steps)], self._device)
        return seconds, steps * self.flops / seconds / peak

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        sums = self._model(self._features)
        (sums.loss / sums.count).backward()
        clip_gradients(self._model.trainable, self._settings)
        self._optimizer.step()


def train_speed(head: DraftHead, features: TargetFeatures, *, bf16: bool, repeats: int) -> TrainSpeed:
    """Steps on one batch, in turn with the peak."""
    bench = StepBench(head, features, OptimSettings(), bf16=bf16)
    turns = [bench.turn(1) for _ in range(repeats)]
    rates = [len(features.ids_T) / seconds for seconds, _ in turns]
    return TrainSpeed(
        tokens_per_second=statistics.median(rates),
        spread=(min(rates), max(rates)),
        supervised=features.supervised_T.float().mean().item(),
        flops=bench.flops,
        share=statistics.median(share for _, share in turns),
        peak=bench.peak,
        memory=peak_memory(features.ids_T.device),
    )


def matmul_peak(dtype: torch.dtype, device: torch.device, tries: int = 4) -> float:
    """Best FLOP/s of multiplying two square matrices."""
    side = _SIDE if device.type == "cpu" else _SIDE_GPU
    a = torch.randn(side, side, device=device).to(dtype)
    return max(2 * side**3 / _timed(lambda: a @ a, device) for _ in range(tries))


def made_up_features(
    head: DraftHead, *, hidden_size: int, lengths: Sequence[int], prompt_share: float = 1 / 3
) -> TargetFeatures:
    """A batch of random states and ids, packed; the first `prompt_share` of each document is the prompt."""
    total = sum(lengths)
    place_T = torch.cat([torch.arange(length) for length in lengths])
    prompt_T = torch.cat([torch.full((length,), int(length * prompt_share)) for length in lengths])
    last_TD = torch.randn(total, hidden_size).bfloat16()
    return TargetFeatures(
        ids_T=head.vocab.ids_W[torch.randint(len(head.vocab.ids_W), (total,))],
        supervised_T=place_T >= prompt_T,
        lengths=tuple(lengths),
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
