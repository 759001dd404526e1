"""What a training run is asked for, and what it came to, as flat values.

It does not know how either comes about.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from heads.artifact import UserError
from training.optim import OptimSettings


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long, in what portions and how precisely to train.

    epochs, max_steps: the smaller one ends the run; global_batch_tokens: most positions of one step over all
    processes; max_length: documents are cut there; accumulation: micro-batches per process and step;
    mixed_precision: "no" or "bf16" (fp32 weights and optimizer either way); save_every in steps, 0 for never;
    keep: checkpoints that stay; eval_every in steps, None for never; read_ahead: micro-batches read in the
    background.
    """

    epochs: int = 1
    max_steps: int | None = None
    global_batch_tokens: int = 8192
    max_length: int | None = 2048
    accumulation: int = 1
    mixed_precision: str = "no"
    seed: int = 0
    save_every: int = 200
    keep: int = 2
    log_every: int = 10
    eval_every: int | None = None
    read_ahead: int = 2
    optim: OptimSettings = field(default_factory=OptimSettings)

    def __post_init__(self) -> None:
        if self.mixed_precision not in ("no", "bf16"):
            raise UserError(f"train.mixed_precision={self.mixed_precision} is not supported; choose no or bf16.")
        least = dict.fromkeys(("epochs", "accumulation", "keep", "log_every", "max_steps", "eval_every"), 1)
        least |= {"save_every": 0, "read_ahead": 0, "global_batch_tokens": 1, "max_length": 2}
        for name, value in asdict(self).items():
            if name in least and value is not None and value < least[name]:
                raise UserError(f"train.{name}={value} is not possible; give at least {least[name]}.")

    def identity(self) -> dict[str, Any]:
        """The settings that decide which weights come out; the others may change when a run continues."""
        free = {"accumulation", "save_every", "keep", "log_every", "eval_every", "read_ahead"}
        return {name: value for name, value in asdict(self).items() if name not in free}


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to.

    loss and metrics (one value per depth) are means over the last logged window; seconds and
    tokens_per_second count the steps of all sessions, without evaluations and checkpoints; skipped_steps had
    nothing supervised.
    """

    steps: int
    epochs: float
    loss: float
    metrics: dict[str, list[float]]
    seconds: float
    tokens: int
    tokens_per_second: float
    skipped_steps: int
    truncated_documents: int
    checkpoint: str
    resumed_from: int | None
