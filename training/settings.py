"""What a training run is asked for, and what it came to, as flat values.

It does not know how either comes about.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from heads.artifact import UserError
from heads.compiled import check_compiler
from training.optim import OptimSettings

MEANS = ("token", "sequence")
_MOST = {"epochs": 10_000, "accumulation": 10_000}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long, in what portions and how precisely to train.

    epochs, max_steps: the smaller one ends the run; global_batch_tokens: most positions of one step over all
    processes; max_length: documents are cut there; accumulation: micro-batches per process and step;
    mixed_precision: "no" or "bf16" (fp32 weights and optimizer either way); mean: of the loss over the "token"s of a
    global batch, or over its "sequence"s, each of them the mean over its tokens; gradient_checkpointing: the passes of
    the head are computed again in the backward instead of being kept; compile: what the loss is made of goes through
    torch.compile, and on a GPU the attention of the passes is FlexAttention; save_every in steps, 0 for never;
    keep: checkpoints that stay; eval_every in steps, None for never; keep_best: the head of the best evaluation is the
    one that comes out; patience: evaluations without a better one that end the run, None for none; read_ahead:
    micro-batches read in the background.
    """

    epochs: int = 5
    max_steps: int | None = None
    global_batch_tokens: int = 2048
    max_length: int | None = 2048
    accumulation: int = 1
    mixed_precision: str = "bf16"
    mean: str = "token"
    gradient_checkpointing: bool = False
    compile: bool = False
    seed: int = 0
    save_every: int = 100
    keep: int = 2
    log_every: int = 10
    eval_every: int | None = None
    keep_best: bool = False
    patience: int | None = None
    read_ahead: int = 2
    optim: OptimSettings = field(default_factory=OptimSettings)

    def __post_init__(self) -> None:
        if self.mixed_precision not in ("no", "bf16"):
            raise UserError(f"train.mixed_precision={self.mixed_precision} is not supported; choose no or bf16.")
        if self.mean not in MEANS:
            raise UserError(f"train.mean={self.mean} is unknown; choose one of {', '.join(MEANS)}.")
        if self.compile:
            check_compiler()
        if self.eval_every is None and (self.keep_best or self.patience is not None):
            asked = "train.keep_best=true" if self.keep_best else f"train.patience={self.patience}"
            raise UserError(f"{asked} needs evaluations; set train.eval_every=<steps>.")
        least = dict.fromkeys(("epochs", "accumulation", "keep", "log_every", "max_steps", "eval_every", "patience"), 1)
        least |= {"save_every": 0, "read_ahead": 0, "global_batch_tokens": 1, "max_length": 2}
        for name, value in asdict(self).items():
            if name in least and value is not None and value < least[name]:
                raise UserError(f"train.{name}={value} is not possible; give at least {least[name]}.")
        for name, most in _MOST.items():
            if vars(self)[name] > most:
                raise UserError(f"train.{name}={vars(self)[name]} is beyond any sense; give at most {most}.")

    def identity(self) -> dict[str, Any]:
        """The settings that decide which weights come out; the others may change when a run continues."""
        free = {"accumulation", "gradient_checkpointing", "compile", "save_every", "keep", "log_every", "read_ahead"}
        if not self.keep_best and self.patience is None:
            free.add("eval_every")
        return {name: value for name, value in asdict(self).items() if name not in free}


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to.

    loss and metrics (one value per depth, None where nothing was counted) are means over the last logged window;
    seconds and tokens_per_second count the steps of all sessions, without evaluations and checkpoints; skipped_steps
    had nothing supervised; chosen: which evaluated head came out and by what numbers (training.selection), None where
    it is the last one; evaluation_seconds: spent in evaluations; stopped_early: `patience` ended the run.
    """

    steps: int
    epochs: float
    loss: float
    metrics: dict[str, list[float | None]]
    seconds: float
    tokens: int
    tokens_per_second: float
    skipped_steps: int
    truncated_documents: int
    checkpoint: str
    resumed_from: int | None
    evaluation_seconds: float = 0.0
    chosen: dict[str, Any] | None = None
    stopped_early: bool = False
