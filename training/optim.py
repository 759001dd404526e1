"""What moves the weights: parameter groups, the optimizer, the learning-rate schedule, clipping.

It does not know the loop, the data or which head the parameters belong to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from heads.artifact import UserError

OPTIMIZERS = ("adamw", "muon")
# Our names, and those of transformers.get_scheduler (whose "constant" would ignore the warm-up).
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """Everything between a gradient and the next weights.

    name: adamw; or muon, which is Muon for the matrices inside a head and AdamW for the rest, at one rate for both
    (MuonAndAdamW); momentum: of Muon, None for 0.95, and None with adamw, which has betas;
    lr_multipliers: prefix of a parameter's name -> factor on lr (the longest prefix wins; 0 freezes);
    warmup_share: share of all steps in which lr rises from 0; clip_norm, clip_value: None leaves gradients
    as they are.
    """

    name: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_multipliers: Mapping[str, float] = field(default_factory=dict)
    schedule: str = "cosine"
    warmup_share: float = 0.03
    clip_norm: float | None = 1.0
    clip_value: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise UserError(f"optim.name={self.name} is unknown; choose one of {', '.join(OPTIMIZERS)}.")
        if self.schedule not in SCHEDULES:
            raise UserError(f"optim.schedule={self.schedule} is unknown; choose one of {', '.join(SCHEDULES)}.")
        if not 0 < self.lr <= 1:
            raise UserError(f"optim.lr={self.lr} must be a positive number, at most 1; 1e-3 is a good start.")
        if self.name != "muon" and self.momentum is not None:
            raise UserError(f"optim.momentum={self.momentum} is Muon's; set it to null, or choose optim=muon.")
        self._check_numbers()
        if not 0 <= self.warmup_share < 1:
            raise UserError(f"optim.warmup_share={self.warmup_share} must be at least 0 and less than 1.")
        if self.clip_norm is not None and self.clip_value is not None:
            raise UserError("optim.clip_norm and optim.clip_value exclude each other; set one of them to null.")

    def _check_numbers(self) -> None:
        """Refuse what would reverse or silence gradients, or let weights run away."""
        clips = {"clip_norm": self.clip_norm, "clip_value": self.clip_value}
        allowed = {
            "betas": (all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1, such as [0.9, 0.95]"),
            "eps": (0 < self.eps <= 1, "a positive number such as 1e-8, at most 1"),
            # A step takes lr · weight_decay of each weight away.
            "weight_decay": (0 <= self.weight_decay <= 1 / self.lr, "0 or a positive number, at most 1 / optim.lr"),
            **{
                name: (value is None or (math.isfinite(value) and value > 0), "a positive number, or null for none")
                for name, value in clips.items()
            },
            "momentum": (
                self.momentum is None or 0 <= self.momentum < 1,
                "a number from 0 to below 1, or null for 0.95",
            ),
            "lr_multipliers": (
                all(0 <= factor <= 1 / self.lr for factor in self.lr_multipliers.values()),
                "factors of 0 (frozen) or more, at most 1 / optim.lr",
            ),
        }
        for name, (good, rule) in allowed.items():
            if not good:
                raise UserError(f"optim.{name}={self.__dict__[name]} is not possible; set optim.{name} to {rule}.")


def parameter_groups(module: nn.Module, settings: OptimSettings) -> list[dict[str, Any]]:
    """Trainable parameters in groups of equal rate and decay, in the module's order.

    No weight decay on norms, biases and other vectors. With Muon, groups of matrices inside the head come first and
    are marked `matrices`. Raises UserError when a prefix of lr_multipliers fits
    no parameter or when nothing is left to train.
    """
    groups: dict[tuple[float, bool, bool], list[Tensor]] = {}
    used: set[str] = set()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        prefixes = [prefix for prefix in settings.lr_multipliers if name.startswith(prefix)]
        used.update(prefixes)
        factor = settings.lr_multipliers[max(prefixes, key=len)] if prefixes else 1.0
        inside = settings.name == "muon" and _is_inside(name, parameter, module)
        groups.setdefault((factor, _decays(name, parameter), inside), []).append(parameter)
    unused = sorted(set(settings.lr_multipliers) - used)
    if unused:
        names = ", ".join(sorted({name.split(".")[0] for name, _ in module.named_parameters()}))
        raise UserError(f"optim.lr_multipliers names {unused[0]!r}, but parameters begin with: {names}.")
    if not groups:
        raise UserError("The head has no trainable parameter; leave some of it unfrozen.")
    return [
        {
            "params": parameters,
            "lr": settings.lr * factor,
            "weight_decay": settings.weight_decay if decays else 0.0,
            "matrices": inside,
        }
        for (factor, decays, inside), parameters in sorted(groups.items(), key=lambda item: not item[0][2])
    ]


def _decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay makes sense: matrices that are not part of a norm."""
    owner, _, leaf = name.rpartition(".")
    return parameter.ndim >= 2 and leaf != "bias" and "norm" not in owner.rpartition(".")[2].lower()


def _is_inside(name: str, parameter: Tensor, module: nn.Module) -> bool:
    """Whether Muon makes sense: matrices between states, not those with a row for each token of a vocabulary."""
    vocab = getattr(module, "vocab", None)
    return parameter.ndim == 2 and _decays(name, parameter) and (vocab is None or len(parameter) != len(vocab.ids_W))


class MuonAndAdamW(torch.optim.Optimizer):
    """Two of torch's optimizers as one, so that a schedule and a checkpoint see a single list of groups."""

    def __init__(self, groups: list[dict[str, Any]], settings: OptimSettings) -> None:
        momentum = 0.95 if settings.momentum is None else settings.momentum
        muon = [group for group in groups if group["matrices"]]
        adamw = [group for group in groups if not group["matrices"]]
        # Updates of the size of AdamW's (arXiv 2502.16982), so that one rate and one decay serve both.
        parts = [torch.optim.Muon(muon, momentum=momentum, adjust_lr_fn="match_rms_adamw")] if muon else []
        self.parts = [*parts, *([_adamw(adamw, settings)] if adamw else [])]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both work on the groups and the state that this one holds."""
        first = 0
        for part in self.parts:
            count = len(part.param_groups)
            part.param_groups, part.state = self.param_groups[first : first + count], self.state
            first += count

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody here steps by a closure
        for part in self.parts:
            part.step()


def _adamw(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True)


def build_optimizer(module: nn.Module, settings: OptimSettings) -> torch.optim.Optimizer:
    """The optimizer over the module's trainable parameters."""
    groups = parameter_groups(module, settings)
    return MuonAndAdamW(groups, settings) if settings.name == "muon" else _adamw(groups, settings)


def build_scheduler(optimizer: torch.optim.Optimizer, settings: OptimSettings, total_steps: int) -> LRScheduler:
    """Warm-up, then the named schedule down to the last of `total_steps`."""
    from transformers import get_scheduler  # slow to import, and needed only when training begins

    scheduler: LRScheduler = get_scheduler(
        SCHEDULES[settings.schedule],
        optimizer=optimizer,
        num_warmup_steps=round(settings.warmup_share * total_steps),
        num_training_steps=total_steps,
    )
    return scheduler


def clip_gradients(parameters: Iterable[Tensor], settings: OptimSettings) -> float:
    """Clip by norm or by value in place; returns the norm before clipping, which may be infinite or nan.

    Gradients whose norm is not finite are left as they are.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in with_grad if parameter.grad is not None])
    if isinstance(norm, DTensor):  # of a sharded head
        norm = norm.full_tensor()
    value = float(norm)
    if not math.isfinite(value):
        return value
    if settings.clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(with_grad, settings.clip_norm, norm)
    if settings.clip_value is not None:
        torch.nn.utils.clip_grad_value_(with_grad, settings.clip_value)
    return value
