"""What a round would cost on a GPU that nobody has bought yet, reckoned from its bandwidth and its arithmetic.

One pass of a model over n tokens for each of B requests takes
    weights / bandwidth + 2 · parameters · B · n / FLOP/s + B · context · kv / bandwidth + launch.
The classical roofline takes the larger of the first two; near the ridge, where batches of drafts live, kernels reach
neither bound, so their sum is taken, which is the cautious side: it never promises more than the roofline. Memory
capacity, the network between several GPUs and the prompt's own pass are left out. This module measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heads.artifact import UserError

MEMORY_SHARE, COMPUTE_SHARE = 0.8, 0.6  # of the data sheet that good kernels reach
LAUNCH_MS = 0.5  # of one pass, whatever it computes: scheduling, launches, sampling
NVIDIA: Mapping[str, tuple[float, float]] = {
    "h200": (4.8, 989),
    "h100": (3.35, 989),
    "a100": (2.04, 312),
    "l4": (0.3, 121),
}
"""TB/s and dense bf16 TFLOP/s of the data sheets; SXM boards, 80 GB for a100 and h100."""


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
        if isinstance(value, Mapping) and set(value) == set(figures) and min(value.values()) > 0:
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
class Roofline:
    """Costs of target and draft on a GPU, in the way of `eval.cost_table.Costs`."""

    gpu: Gpu
    target: Reader
    draft: Reader
    launch_ms: float = LAUNCH_MS

    def pass_seconds(self, model: Reader, batch: float, tokens: int, context: float) -> float:
        """Seconds of one pass over so many tokens for every request of the batch."""
        reading, computing = self._parts(model, batch, tokens, context)
        return reading + computing + self.launch_ms / 1e3

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
        if gamma == 0:
            return 1.0
        drafting = gamma * self.pass_seconds(self.draft, batch, 1, context)
        whole = drafting + self.pass_seconds(self.target, batch, 1 + gamma, context)
        return whole / self.step_seconds(batch, context)

    def step_seconds(self, batch: float, context: float) -> float:
        """Seconds of a plain target step."""
        return self.pass_seconds(self.target, batch, 1, context)

    def reach(self, batch: float, context: float, gamma: int) -> list[str]:
        """Arithmetic reaches everywhere, and is no measurement."""
        return ["the costs are reckoned from the GPU's data sheet, not measured"]
