"""Self-speculation by early exit (LayerSkip, arXiv 2404.16710): the target's first layers draft for the whole target.

Nothing is copied: the draft is a view of the target that ends early, then its final norm and vocabulary projection.
Only its keys and values are its own. The paper trains targets for this; on others early layers guess badly.
"""

from __future__ import annotations

import copy

import torch

from eval.proposers.draft_model import DraftModel
from heads.artifact import UserError
from heads.cache import BlockCache
from heads.target import FrozenTarget


def early_exit(*, target: FrozenTarget, exit_layer: int | None = None) -> DraftModel:
    """The first `exit_layer` layers of the target as its draft (None: half of them).

    Raises UserError when the target does not have more layers than that.
    """
    layers = target.num_layers // 2 if exit_layer is None else exit_layer
    if not 1 <= layers < target.num_layers:
        raise UserError(
            f"rivals.early_exit.exit_layer={layers} must be between 1 and {target.num_layers - 1} "
            f"for a target of {target.num_layers} layers."
        )
    view = truncated(target, layers)
    cache = BlockCache(1, target.device)
    view.forward(torch.zeros(1, 1, dtype=torch.long, device=target.device), cache=cache)
    if len(cache.kv.layers) != layers:
        raise UserError(
            f"{type(target.model).__name__} runs all of its layers whatever its config says, so it cannot exit early; "
            f"leave early_exit out of rival=[…]."
        )
    return DraftModel(model=view, vocab_size=target.vocab_size)


def truncated(target: FrozenTarget, layers: int) -> FrozenTarget:
    """A view of the target that stops after its first `layers` layers and shares every module with it."""
    model = copy.copy(target.model)
    base = copy.copy(model.base_model)
    # transformers' models run the layers up to the number that their config names.
    base.config = copy.copy(base.config)
    base.config.num_hidden_layers = layers
    model._modules = {**model._modules, model.base_model_prefix: base}
    view = copy.copy(target)
    view.model, view.num_layers = model, layers
    return view
