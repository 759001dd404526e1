"""EAGLE-1 and EAGLE-3 heads as vLLM 0.32 loads them (methods `eagle` and `eagle3`): one Llama-like layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heads.artifact import UserError
from heads.base import DraftHead
from heads.eagle3 import default_taps
from heads.export.layout import Layout, OfTarget, block_names, llama_sizes, sizes_of, wanted
from heads.vocab import DraftVocabulary

FLAGS = ("norm_before_residual", "fc_norm", "norm_output")
TAPS = "eagle_aux_hidden_state_layer_ids"
# What the server builds the block from, without and with norms on queries and keys.
ARCHITECTURES = {
    False: {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    True: {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"},
}
EMBEDDING = "embed_tokens.weight"


class EagleLayout(Layout):
    """EAGLE-1: no norm in front of the layer or behind it; embeddings and projection are the target's."""

    title, head, method = "EAGLE-1", "heads.eagle.EagleHead", "eagle"

    def fits(self, config: Mapping[str, Any]) -> bool:
        one = config.get("num_hidden_layers") == 1 and "draft_vocab_size" not in config
        return one and config.get("architectures") == ["LlamaForCausalLM"]

    def completed(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        return llama_sizes(config)

    def taken(self, tensors: dict[str, Tensor], config: dict[str, Any], of_target: OfTarget) -> DraftVocabulary:
        """A copy of the target's embeddings is in many repositories, and a bias of zeros in some."""
        take_embedding(tensors, of_target)
        if "fc.bias" in tensors and tensors.pop("fc.bias").any():
            raise UserError("The weight fc.bias is a bias that this kind of head, and vLLM, has no place for.")
        return super().taken(tensors, config, of_target)

    def names(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        return {"fc.weight": "fc.weight", **block_names("layer.", "layers.0.")}

    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary, target_path: str) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **self.llama_settings(arguments),
            "attention_bias": False,
            "mlp_bias": False,
        }

    def arguments(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        return {"sizes": sizes_of(config, of_target)}


class Eagle3Layout(Layout):
    """EAGLE-3 and 3.1: own final norm, own projection to the draft vocabulary, which is stored as offsets."""

    title, head, method = "EAGLE-3", "heads.eagle3.Eagle3Head", "eagle3"
    whole_vocabulary = False
    nested_from = 0  # what turns an id in eagle_config into a boundary

    def fits(self, config: Mapping[str, Any]) -> bool:
        return any(config.get("architectures") == kind["architectures"] for kind in ARCHITECTURES.values())

    def names(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        norms = [f"fc_norm.{i}.weight" for i in range(len(arguments["taps"]))] if arguments["fc_norm"] else []
        inside = ["input_layernorm", "hidden_norm"]
        qk_norms = [f"self_attn.{name}_norm" for name in "qk"] if arguments["qk_norm"] else []
        return {
            **{name: name for name in norms},
            "fc.weight": "fc.weight",
            **{f"{name}.weight": f"layers.0.{name}.weight" for name in inside},
            **block_names("layer.", "layers.0."),
            **{f"layer.{name}.weight": f"layers.0.{name}.weight" for name in qk_norms},
            "norm.weight": "norm.weight",
            "lm_head.weight": "lm_head.weight",
        }

    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary, target_path: str) -> dict[str, Any]:
        taps = list(arguments["taps"])
        return {
            **ARCHITECTURES[arguments["qk_norm"]],
            "num_hidden_layers": 1,
            **self.llama_settings(arguments),
            "draft_vocab_size": len(vocab.ids_W),
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            TAPS: taps,
            # The number of taps is said twice where it is not vLLM's default of three.
            **({"num_aux_hidden_states": len(taps)} if len(taps) != 3 else {}),
            **{flag: arguments[flag] for flag in FLAGS},
        }

    def completed(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        """The taps at the top, as boundaries; where none are given those that servers take then, said aloud."""
        told = llama_sizes(config)
        nested = dict(told.get("eagle_config") or {})
        if TAPS not in told and TAPS in nested:
            told[TAPS] = [tap + self.nested_from for tap in nested[TAPS]]
        if TAPS not in told:
            told[TAPS] = list(default_taps(of_target.num_layers))
            of_target.say(f"it does not say which boundaries it taps; servers then take {told[TAPS]}, and so does this")
        return told

    def arguments(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        return {
            "sizes": sizes_of(config, of_target),
            "taps": list(config[TAPS]),
            **{flag: bool(config.get(flag, False)) for flag in FLAGS},
            "qk_norm": config["architectures"] == ARCHITECTURES[True]["architectures"],
        }

    def plain_name(self, name: str) -> str:
        """`midlayer.` is another accepted spelling of `layers.0.`."""
        return re.sub(r"^midlayer\.", "layers.0.", name)

    def added(self, head: DraftHead) -> dict[str, Tensor]:
        vocab = head.vocab
        return {} if vocab.full else {"d2t": vocab.d2t.to(torch.int64), "t2d": vocab.t2d}

    def check(self, head: DraftHead) -> None:
        """Taps as the head reads them, and a draft vocabulary that its projection has rows for."""
        sizes, vocab, rows = head.arguments["sizes"], head.vocab, len(head.state_dict()["lm_head.weight"])
        head.needs.check(sizes["num_target_layers"])
        if list(head.needs.taps) != list(head.arguments["taps"]):
            raise UserError(
                f"The head reads the taps {list(head.needs.taps)} but says {head.arguments['taps']}; load it again."
            )
        ids, size = vocab.ids_W, sizes["vocab_size"]
        ascending = ids.dtype == torch.int64 and bool((ids[1:] > ids[:-1]).all())
        if not ascending or not len(ids) or ids[0] < 0 or ids[-1] >= size or vocab.size != size:
            raise UserError(
                f"The draft vocabulary must be ascending, distinct ids below {size}; use DraftVocabulary.choose."
            )
        if len(ids) != rows:
            raise UserError(f"The draft vocabulary has {len(ids)} tokens but lm_head has {rows} rows; train again.")

    def taken(self, tensors: dict[str, Tensor], config: dict[str, Any], of_target: OfTarget) -> DraftVocabulary:
        """The draft vocabulary out of the offsets. A projection that is left out is the target's own."""
        mappings = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
        sizes_of(config, of_target)
        wanted(config, "draft_vocab_size")
        take_embedding(tensors, of_target)
        size, draft_size = int(config["vocab_size"]), int(config["draft_vocab_size"])
        if draft_size == size:
            if "lm_head.weight" not in tensors and of_target.weights is not None:
                tensors["lm_head.weight"] = of_target.weights.lm_head_VD.detach().cpu().to(tensors["fc.weight"].dtype)
                of_target.say("it has no lm_head; servers then take the target's, and so does this")
            return DraftVocabulary.identity(size)
        if "d2t" not in mappings:
            raise UserError(
                f"The mapping d2t is missing for a draft vocabulary of {draft_size} out of {size}; export it again."
            )
        d2t = mappings["d2t"].to(torch.int64)
        ids = d2t + torch.arange(draft_size) if len(d2t) == draft_size else d2t[:0]
        if not len(ids) or ids.min() < 0 or ids.max() >= size or len(ids.unique()) < draft_size:
            raise UserError(
                f"The mapping d2t does not hold {draft_size} offsets to distinct ids below {size}; export again."
            )
        vocab = DraftVocabulary(ids, size)
        if "t2d" in mappings and not torch.equal(mappings["t2d"].bool(), vocab.t2d):
            raise UserError(
                "The mappings d2t and t2d contradict each other (ids instead of offsets?); export them again."
            )
        return vocab

    def facts(self, arguments: Mapping[str, Any], vocab: DraftVocabulary) -> dict[str, str]:
        taps = str(list(arguments["taps"]))
        return {"tapped boundaries (id k: after k layers)": taps, **super().facts(arguments, vocab)}


def take_embedding(tensors: dict[str, Tensor], of_target: OfTarget) -> None:
    """Takes a copy of the target's embeddings away. Raises UserError when it is none."""
    if EMBEDDING in tensors:
        of_target.check_same(EMBEDDING, tensors.pop(EMBEDDING), "embedding")
