"""MTP modules as vLLM 0.32 attaches them to any dense target (method `mtp`), in two layouts that it has classes for.

Without a norm at the end it is ERNIE's layout, with one MiMo's. The server builds the layer from the *target's*
configuration, which therefore must be told that there is a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heads.artifact import UserError
from heads.base import DraftHead
from heads.export.layout import Layout, OfTarget, block_names, llama_sizes, sizes_of
from heads.vocab import DraftVocabulary

_BIAS = "model.mtp_layers.0.self_attn.{}_proj.bias"
_BIASED = "biases that are not zero"  # not a key of a configuration: what the weights say
_ERNIE, _MIMO = ["Ernie4_5_MoeForCausalLM"], ["MiMoForCausalLM"]


class MTPLayout(Layout):
    """One module, which the server applies K times."""

    title, head, method = "MTP", "heads.mtp.MTPHead", "mtp"
    inside = "model.mtp_layers."

    def fits(self, config: Mapping[str, Any]) -> bool:
        return config.get("architectures") in (_ERNIE, _MIMO)

    def names(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        if arguments["final_norm"]:
            place = "model.mtp_layers.0."
            parts = {"embed_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "proj": "input_proj"}
            parts |= {"input_layernorm": "input_layernorm", "norm": "final_layernorm"}
            own = {f"{ours}.weight": f"{place}{theirs}.weight" for ours, theirs in parts.items()}
        else:
            place = "model.mtp_block.0."
            parts = {"embed_norm": "mtp_emb_norm", "hidden_norm": "mtp_hidden_norm", "proj": "mtp_linear_proj"}
            own = {f"{ours}.weight": f"model.{theirs}.0.weight" for ours, theirs in parts.items()}
            own["input_layernorm.weight"] = f"{place}input_layernorm.weight"
        if arguments.get("qkv_bias"):
            own |= {f"layer.self_attn.{name}_proj.bias": _BIAS.format(name) for name in "qkv"}
        return {**own, **block_names("layer.", place)}

    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary, target_path: str) -> dict[str, Any]:
        sizes = arguments["sizes"]
        if arguments["final_norm"]:
            kind: dict[str, Any] = {"architectures": _MIMO, "model_type": "qwen2"}
        else:
            kind = {"architectures": _ERNIE, "model_type": "ernie4_5_moe", "use_bias": False}
        return {
            **kind,
            "num_hidden_layers": sizes["num_target_layers"],
            "num_nextn_predict_layers": 1,
            **self.llama_settings(arguments),
        }

    def check(self, head: DraftHead) -> None:
        super().check(head)
        self.check_module(head.arguments)

    def check_module(self, arguments: Mapping[str, Any]) -> None:
        """Raises UserError where the server has no such module."""
        sizes = arguments["sizes"]
        if arguments["final_norm"] and sizes["head_dim"] * sizes["num_attention_heads"] != sizes["hidden_size"]:
            raise UserError(
                f"vLLM's MiMo layout needs heads of width D / heads, not {sizes['head_dim']}; train the head with "
                f"head.final_norm=false."
            )

    def completed(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        return llama_sizes(config)

    def arguments(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        biased = {"qkv_bias": True} if config.get(_BIASED) else {}
        return {"sizes": sizes_of(config, of_target), "final_norm": config["architectures"] == _MIMO, **biased}

    def turned(self, name: str, tensor: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """MiMo's projection reads the hidden state first, ours and ERNIE's the embedding."""
        if not arguments["final_norm"] or name != "proj.weight":
            return tensor
        first, second = tensor.chunk(2, dim=1)
        return torch.cat([second, first], dim=1)

    def added(self, head: DraftHead) -> dict[str, Tensor]:
        """MiMo's block has biases: zeros where this head has none."""
        if not head.arguments["final_norm"] or head.arguments.get("qkv_bias"):
            return {}
        state = head.state_dict()
        return {_BIAS.format(name): torch.zeros(len(state[f"layer.self_attn.{name}_proj.weight"])) for name in "qkv"}

    def taken(self, tensors: dict[str, Tensor], config: dict[str, Any], of_target: OfTarget) -> DraftVocabulary:
        biases = [name for name in (_BIAS.format(name) for name in "qkv") if name in tensors]
        config[_BIASED] = any(bool(tensors[name].any()) for name in biases)
        for name in biases if not config[_BIASED] else ():
            del tensors[name]
        return super().taken(tensors, config, of_target)

    def target_overrides(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """There is a module, and how many layers it comes after (read where the target lists kinds of layers)."""
        return {
            "num_nextn_predict_layers": 1,
            **({} if arguments["final_norm"] else {"target_layer_count": arguments["sizes"]["num_target_layers"]}),
        }
