"""A LoRA adapter (arXiv 2106.09685) on a head that has learned already: PEFT's layers, put in, read, and merged away.

The head keeps its class and computes through PEFT's layers while it is trained; merged, it is a head like any other.
The module knows neither how an adapter is stored nor what it learns from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.artifact import UserError
from heads.base import DraftHead

_ADAPTER = "default"  # PEFT's name for the only one


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What the adapter is.

    rank: of its two matrices, whose product is scaled by alpha / rank; modules: linear layers by their name, its
    beginning or its end (`layer.mlp`, `q_proj`), None for all of them. The vocabulary projection of a head's own is
    never adapted: the loss reads it as a matrix (heads.losses). Raises UserError on values that cannot be.
    """

    rank: int = 8
    alpha: float = 16.0
    modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or not (math.isfinite(self.alpha) and self.alpha > 0):
            raise UserError(
                f"train.lora: rank={self.rank} must be at least 1 and alpha={self.alpha} a number above 0; "
                f"'train.lora={{rank: 8, alpha: 16}}' is a good start."
            )


def adaptable(head: DraftHead, modules: Sequence[str] | None = None) -> list[str]:
    """The full names of the linear layers that an adapter goes on. Raises UserError on one that there is not."""
    own = [name for name, one in head.named_modules() if isinstance(one, nn.Linear)]
    known = [name for name in own if not any(_is(name, projection) for projection in head.projections)]
    if modules is None:
        return known
    if not modules or (unknown := [one for one in modules if not any(_is(name, one) for name in known)]):
        what = f"names {unknown[0]!r}" if modules else "is empty"
        raise UserError(
            f"train.lora.modules {what}; choose among {', '.join(known)} or their beginnings and ends, or null for all "
            f"of them (a vocabulary projection of the head's own stays as it is)."
        )
    return [name for name in known if any(_is(name, one) for one in modules)]


def add_adapter(head: DraftHead, settings: LoraSettings) -> list[str]:
    """Freeze a head and put an adapter on it that changes nothing yet; returns the names of the layers that have one.

    It is drawn from torch's global generator. Raises UserError when the settings name no layer of this head.
    """
    from peft import LoraConfig, inject_adapter_in_model  # slow to import, and seldom needed

    chosen = adaptable(head, settings.modules)
    head.requires_grad_(False)
    pattern = "|".join(re.escape(name) for name in chosen)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=pattern)
    inject_adapter_in_model(config, head, _ADAPTER)
    return chosen


def adapter_state(head: DraftHead) -> dict[str, Tensor]:
    """The adapter's own matrices, by PEFT's names: `fc.lora_A.weight` [rank, in], `fc.lora_B.weight` [out, rank]."""
    found = {name: tensor for name, tensor in head.state_dict().items() if _matrix(name)}
    return {name.replace(f".{_ADAPTER}.", "."): tensor for name, tensor in found.items()}


def fill_adapter(head: DraftHead, tensors: Mapping[str, Tensor]) -> None:
    """Put matrices, named as `adapter_state` names them, into a head's adapter; the caller has compared the names."""
    state = {name.replace(".weight", f".{_ADAPTER}.weight"): tensor for name, tensor in tensors.items()}
    missing, unexpected = head.load_state_dict(state, strict=False)
    assert not unexpected and not any(_matrix(name) for name in missing), "names were compared before"


@torch.no_grad()
def merge(head: DraftHead) -> None:
    """Add the adapter to the weights and take it away, in place; a head without one stays as it is."""
    from peft.tuners.lora import LoraLayer

    for parent in list(head.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLayer):
                child.merge()
                setattr(parent, name, child.get_base_layer())
    vars(head).pop("peft_config", None)


@torch.no_grad()
def merged_state(head: DraftHead, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A whole state of the head as `merge` would leave it: copies where there is an adapter, else the tensors given."""
    if not any(map(_matrix, state)):
        return dict(state)
    from peft.tuners.lora import LoraLayer

    merged = {name.replace(".base_layer.", "."): one for name, one in state.items() if not _matrix(name)}
    for name, module in head.named_modules():
        if isinstance(module, LoraLayer):
            a, b = (state[f"{name}.lora_{letter}.{_ADAPTER}.weight"] for letter in "AB")
            weight = merged[f"{name}.weight"]
            merged[f"{name}.weight"] = weight + (b @ a * module.scaling[_ADAPTER]).to(weight)
    return merged


def _is(name: str, wanted: str) -> bool:
    return f".{name}.".startswith(f".{wanted}.") or f".{name}.".endswith(f".{wanted}.")


def _matrix(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
