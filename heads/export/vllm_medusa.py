"""Medusa heads as vLLM 0.32 loads them (method `medusa`): residual blocks by their numbers, and projections.

The server skips unknown names in silence, drops biases unless `medusa_fc_bias` is set, and takes any key that has
"num" and "heads" or "layers" in it for its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from heads.artifact import UserError
from heads.base import DraftHead
from heads.export.layout import Layout
from heads.vocab import DraftVocabulary

_SHARED = "lm_head.weight"


class MedusaLayout(Layout):
    """With the target's projection its rows are written into the folder, for the server shares none."""

    title, head, method, lends = "Medusa", "heads.medusa.MedusaHead", "medusa", True

    def fits(self, config: Mapping[str, Any]) -> bool:
        return config.get("architectures") == ["MedusaModel"]

    def names(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        depth = range(arguments["depth"])
        blocks = [f"blocks.{i}.layers.{j}.{part}" for i in depth for j in range(arguments["blocks"]) for part in _PARTS]
        own = [f"lm_heads.{i}.weight" for i in depth] if arguments["projection"] == "own" else []
        return {name: name for name in (*blocks, *own)}

    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": arguments["sizes"]["hidden_size"],
            "vocab_size": vocab.size,
            "num_heads": arguments["depth"],
            "num_hidden_layers": arguments["blocks"],
            "medusa_fc_bias": True,
            **({"original_lm_head": True} if arguments["projection"] == "target" else {}),
        }

    def added(self, head: DraftHead) -> dict[str, Tensor]:
        return {_SHARED: head.target.lm_head_VD} if head.arguments["projection"] == "target" else {}

    def check(self, head: DraftHead) -> None:
        super().check(head)
        weights = head.target
        if head.arguments["projection"] == "target" and (weights.bias_V is not None or weights.softcap is not None):
            raise UserError(
                "vLLM's Medusa reads its states by a plain matrix, but this target's projection has a bias or a cap; "
                "train the head with head.projection=own."
            )

    def taken(self, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> DraftVocabulary:
        if config.get("original_lm_head") and tensors.pop(_SHARED, None) is None:
            raise UserError(
                f"The weight {_SHARED} is missing; the server would load the rest in silence and accept no draft."
            )
        if not config.get("medusa_fc_bias"):
            raise UserError("The configuration lacks medusa_fc_bias, so the server would drop the biases; set it true.")
        return super().taken(tensors, config)

    def arguments(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Any]:
        # The sizes beyond these are the target's attention and are of no account to this head.
        return {
            "depth": config["num_heads"],
            "blocks": config["num_hidden_layers"],
            "projection": "target" if config.get("original_lm_head") else "own",
        }


_PARTS = ("weight", "bias")
