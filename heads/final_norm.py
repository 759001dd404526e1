"""The target's final norm, for states that come from elsewhere and stop before it.

transformers hands out the state after the norm only, and gives the module another name in every family, so it is found
by running the target once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from heads.artifact import UserError
from heads.target import FrozenTarget


@torch.inference_mode()
def final_norm(target: FrozenTarget) -> nn.Module:
    """The module whose output is the state that the vocabulary projection takes; it maps [..., D] to [..., D].

    That lm_head of its output is what the whole model says was checked when the target was loaded. Raises UserError
    where the last state comes out of no module of its own.
    """
    made: list[tuple[nn.Module, Any]] = []

    def keep(module: nn.Module, _args: Any, output: Any) -> None:
        made.append((module, output))

    hooks = [module.register_forward_hook(keep) for module in target.model.base_model.modules()]
    try:
        ids = torch.arange(1, 3, device=target.device)[None] % target.vocab_size
        last_BTD = target.forward(ids).last_BTD
    finally:
        for hook in hooks:
            hook.remove()
    for module, output in reversed(made):
        if output is last_BTD:
            return module
    raise UserError(
        f"The final norm of {type(target.model).__name__} is not to be found, so states from a server cannot be "
        f"completed; set collect.features=transformers."
    )
