"""EAGLE-3 in the envelope of the speculators library, which vLLM 0.32 loads: the block's sizes one level down, and
around them what the head is for. The tensors are those of vLLM's plain layout, with the target's embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from heads.artifact import UserError
from heads.base import DraftHead
from heads.export.layout import OfTarget, llama_sizes, wanted
from heads.export.vllm_eagle import EMBEDDING, FLAGS, TAPS, Eagle3Layout
from heads.vocab import DraftVocabulary

_LAYER = "transformer_layer_config"
# What speaks of the head and not of its block.
_OUTSIDE = ("draft_vocab_size", TAPS, "num_aux_hidden_states", *FLAGS)
VERSION = "0.3.0"


class SpeculatorsLayout(Eagle3Layout):
    """Llama blocks only."""

    title, lends = "speculators EAGLE-3", True

    def fits(self, config: Mapping[str, Any]) -> bool:
        return config.get("speculators_model_type") == "eagle3"

    def check(self, head: DraftHead) -> None:
        super().check(head)
        if head.arguments["qk_norm"]:
            raise UserError(
                "The speculators layout is tried with Llama blocks only; train the head with head.qk_norm=false, or "
                "export it with export=vllm."
            )

    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary, target_path: str) -> dict[str, Any]:
        plain = super().settings(arguments, vocab, target_path)
        layer = {key: value for key, value in plain.items() if key not in _OUTSIDE}
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": arguments["depth"],
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": VERSION,
            **{key: plain[key] for key in _OUTSIDE if key in plain},
            "norm_before_fc": False,
            "target_hidden_size": arguments["sizes"]["hidden_size"],
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": target_path, "architectures": []},
            },
            _LAYER: {**layer, "architectures": ["LlamaForCausalLM"]},
        }

    def added(self, head: DraftHead) -> dict[str, Tensor]:
        return {**super().added(head), EMBEDDING: head.target.embedding_VD}

    def completed(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        """The block's sizes at the top. The one flag that has two defaults must be there."""
        wanted(config, _LAYER, "norm_before_residual")
        if config.get("norm_before_fc"):
            raise UserError("The configuration says norm_before_fc, which our EAGLE-3 has not; give another head.")
        told = super().completed({**config, **llama_sizes(config[_LAYER])}, of_target)
        return {**told, "architectures": ["LlamaForCausalLMEagle3"]}
