"""What a round would cost on a GPU that nobody has bought yet, reckoned from its bandwidth and its arithmetic.

One pass of a model over n tokens for each of B requests takes
    weights / bandwidth + 2 · parameters · B · n / FLOP/s + B · context · kv / bandwidth + launch.
The classical roofline takes the larger of the first two; near the ridge, where batches of drafts live, kernels reach
neither bound, so seconds are their sum, the slower of both. A round in plain steps is the worse of both ratios: their
sum makes a plain step slower too, which flatters drafts where arithmetic is what is waited for. So neither tokens per
second nor speed-ups are above what the roofline says. Memory capacity, the network between several GPUs and the
prompt's own pass are left out. This module measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from heads.artifact import UserError

MEMORY_SHARE, COMPUTE_SHARE = 0.8, 0.6  # of the data sheet that good kernels reach
PASSES = ("each", "one")
LAUNCH_MS = 0.5  # of one pass, whatever it computes: scheduling, launches, sampling
NVIDIA: Mapping[str, tuple[float, float]] = {
    "h200": (4.8, 989),
    "h100": (3.35, 989),
    "a100": (2.04, 312),
    "l4": (0.3, 121),
}
"""TB/s and dense bf16 TFLOP/s of the data sheets; SXM boards, 80 GB for a100 and h100."""

Bound = Callable[[tuple[float, float]], float]  # of the seconds for reading and computing: their sum, or the larger


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(frozen=True)
class Gpu:
    """bandwidth in TB/s, tflops dense at the precision that is served, both as on the data sheet."""

    bandwidth: float
    tflops: float

    @staticmethod
    def of(value: str | Mapping[str, float]) -> Gpu:
        """By name or by its figures. Raises UserError."""
        figures = ("bandwidth_TBs", "tflops")
        if isinstance(value, str) and value in NVIDIA:
            return Gpu(*NVIDIA[value])
        if isinstance(value, Mapping) and set(value) == set(figures) and all(_is_size(one) for one in value.values()):
            return Gpu(*(float(value[name]) for name in figures))
        raise UserError(
            f"gpu={value} is unknown; choose {', '.join(NVIDIA)}, or give its figures: "
            f"'gpu={{bandwidth_TBs: 3.35, tflops: 989}}'."
        )


@dataclass(frozen=True)
class Reader:
    """A model as memory traffic: parameters read for every pass (the table of embeddings aside), bytes of each, bytes
    of keys and values for each position, and how many positions it looks back at most (None: all)."""

    parameters: float
    bytes_per_parameter: float = 2.0
    kv_bytes_per_token: float = 0.0
    window: int | None = None


@dataclass(frozen=True)
class DraftReader(Reader):
    """A draft. passes: "each" drafted token takes a pass of its own, or "one" drafts them all, as with parallel heads
    on one shared projection. Raises UserError."""

    passes: str = "each"

    def __post_init__(self) -> None:
        if self.passes not in PASSES:
            raise UserError(f"draft_size.passes={self.passes} is unknown; choose {' or '.join(PASSES)}.")


@dataclass(frozen=True)
class Roofline:
    """Costs of target and draft on a GPU, in the way of `eval.cost_table.Costs`."""

    gpu: Gpu
    target: Reader
    draft: DraftReader
    launch_ms: float = LAUNCH_MS

    def pass_seconds(self, model: Reader, batch: float, tokens: int, context: float) -> float:
        """Seconds of one pass over so many tokens for every request of the batch."""
        return self._seconds(sum, model, batch, tokens, context)

    def bound(self, batch: float, context: float, gamma: int) -> str:
        """What the target's pass over 1 + γ tokens waits for most: "memory" or "compute"."""
        reading, computing = self._parts(self.target, batch, 1 + gamma, context)
        return "memory" if reading >= computing else "compute"

    def _parts(self, model: Reader, batch: float, tokens: int, context: float) -> tuple[float, float]:
        bandwidth, arithmetic = self.gpu.bandwidth * 1e12 * MEMORY_SHARE, self.gpu.tflops * 1e12 * COMPUTE_SHARE
        seen = context if model.window is None else min(context, model.window)
        weights = model.parameters * model.bytes_per_parameter
        reading = (weights + batch * seen * model.kv_bytes_per_token) / bandwidth
        return reading, 2 * model.parameters * batch * tokens / arithmetic

    def round_cost(self, batch: float, context: float, gamma: int) -> float:
        """Plain target steps that a round with γ drafts takes."""
        return max(self._round_cost(bound, batch, context, gamma) for bound in (sum, max)) if gamma else 1.0

    def _round_cost(self, bound: Bound, batch: float, context: float, gamma: int) -> float:
        passes, each = (gamma, 1) if self.draft.passes == "each" else (1, gamma)
        drafting = passes * self._seconds(bound, self.draft, batch, each, context)
        verifying = self._seconds(bound, self.target, batch, 1 + gamma, context)
        return (drafting + verifying) / self._seconds(bound, self.target, batch, 1, context)

    def _seconds(self, bound: Bound, model: Reader, batch: float, tokens: int, context: float) -> float:
        return bound(self._parts(model, batch, tokens, context)) + self.launch_ms / 1e3

    def step_seconds(self, batch: float, context: float) -> float:
        """Seconds of a plain target step."""
        return self.pass_seconds(self.target, batch, 1, context)

    def reach(self, batch: float, context: float, gamma: int) -> list[str]:
        """Arithmetic reaches everywhere, and is no measurement."""
        return ["the costs are reckoned from the GPU's data sheet, not measured"]
