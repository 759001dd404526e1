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
from heads.export.layout import Layout, OfTarget, wanted
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

    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary, target_path: str) -> dict[str, Any]:
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
        if head.arguments["projection"] != "target":
            return
        if head.target.bias_V is not None or head.target.softcap is not None:
            raise UserError(
                f"{self.reader}'s Medusa reads its states by a plain matrix, but this target's projection has a bias "
                f"or a cap; train the head with head.projection=own."
            )

    def taken(self, tensors: dict[str, Tensor], config: dict[str, Any], of_target: OfTarget) -> DraftVocabulary:
        if config.get("original_lm_head"):
            if (shared := tensors.pop(_SHARED, None)) is None:
                raise UserError(
                    f"The weight {_SHARED} is missing; the server would load the rest in silence and accept no draft."
                )
            of_target.check_same(_SHARED, shared, "projection")
        return super().taken(tensors, config, of_target)

    def completed(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        """As it is, without what would make the server read it otherwise."""
        if not config.get("medusa_fc_bias"):
            raise UserError("The configuration lacks medusa_fc_bias, so the server would drop the biases; set it true.")
        wanted(config, *_COUNTS)
        if stray := [key for key in config if counts(key) and key not in _COUNTS]:
            raise UserError(
                f"The configuration has the key {stray[0]}, which the server takes for a number of heads or layers; "
                f"remove it."
            )
        return dict(config)

    def arguments(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        return {
            "sizes": attention_of(config, of_target),
            "depth": config["num_heads"],
            "blocks": config["num_hidden_layers"],
            "projection": "target" if config.get("original_lm_head") else "own",
        }


def counts(key: str) -> bool:
    """Whether vLLM reads this key of a Medusa configuration as a count."""
    return "num" in key and ("heads" in key or "layers" in key)


def attention_of(config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
    """The sizes of the target's layers, which a Medusa configuration does not have. UserError where it has others."""
    sizes = dict(of_target.sizes or {"num_target_layers": of_target.num_layers})
    for key in ("hidden_size", "vocab_size"):
        if config.get(key, sizes[key]) != sizes[key]:
            raise UserError(
                f"The head's {key} is {config[key]}, the target's is {sizes[key]}; give the target that the head was "
                f"trained for."
            )
    return sizes


_PARTS = ("weight", "bias")
_COUNTS = ("num_heads", "num_hidden_layers")
