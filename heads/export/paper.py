"""EAGLE, Medusa and MTP under the names that their authors' own code has, and what other servers read of them.

Written to the letter of that code and not run there: EAGLE (SafeAILab/EAGLE, eagle/model), Medusa
(FasterDecoding/Medusa, medusa/model/medusa_model.py), SGLang (srt/models/llama_eagle.py, llama_eagle3.py and
mimo_mtp.py), TensorRT-LLM (_torch/models/modeling_speculative.py, models/medusa) and llama.cpp (conversion/llama.py,
src/models/eagle3.cpp). They take what they do not know in silence, so it is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from heads.artifact import UserError
from heads.base import DraftHead
from heads.eagle3 import default_taps
from heads.export.layout import OfTarget, wanted
from heads.export.vllm_eagle import EMBEDDING, FLAGS, TAPS, Eagle3Layout, EagleLayout
from heads.export.vllm_medusa import MedusaLayout
from heads.export.vllm_mtp import MTPLayout
from heads.export.weights import MEDUSA, TENSORS
from heads.vocab import DraftVocabulary

_TENSORRT_HEADS = "num_medusa_heads"  # what TensorRT-LLM's Python interface calls medusa_num_heads


class PaperEagle3Layout(Eagle3Layout):
    """`midlayer.` instead of `layers.0.`, rotary embeddings as configurations had them before transformers 5.

    flags: those that the reader knows; taps: "default" (it always taps 2, L/2, L-3), "told" (its command says others)
    or "config" (they are in eagle_config, as layer outputs counted from 0, one less than the boundary); ropes: the
    kinds of rotary embeddings that the reader has, None: all.
    """

    dtype_key = "torch_dtype"
    nested_from = 1

    def __init__(
        self,
        reader: str,
        method: str,
        *,
        flags: Collection[str] = (),
        taps: str = "default",
        ropes: Collection[str] | None = None,
        file: str = TENSORS,
    ) -> None:
        self.reader, self.method, self.flags, self.taps = reader, method, flags, taps
        self.ropes, self.file = ropes, file

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Public repositories say one architecture or another."""
        plain = config.get("model_type", "llama") == "llama" and "speculators_model_type" not in config
        return plain and "draft_vocab_size" in config and config.get("num_hidden_layers") == 1

    def names(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        plain = super().names(arguments)
        return {ours: re.sub(r"^layers\.0\.", "midlayer.", theirs) for ours, theirs in plain.items()}

    def plain_name(self, name: str) -> str:
        """Trainers write `model.` in front and `layers.0.` too."""
        return re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model."))

    def check(self, head: DraftHead) -> None:
        super().check(head)
        if unknown := [flag for flag in (*FLAGS, "qk_norm") if head.arguments[flag] and flag not in self.flags]:
            raise UserError(
                f"{self.reader} knows no {unknown[0]} and would leave it out in silence; train the head with "
                f"head.{unknown[0]}=false, or export it with export=vllm."
            )
        taps, ours = list(head.arguments["taps"]), list(default_taps(head.arguments["sizes"]["num_target_layers"]))
        if self.taps == "default" and taps != ours:
            raise UserError(
                f"{self.reader} always taps {ours} of this target, but the head was trained on {taps}; train it with "
                f"head.taps=null, or export it with export=vllm."
            )
        if 0 in taps or (self.taps == "config" and len(taps) != 3):
            raise UserError(
                f"{self.reader} taps outputs of layers, three of them, not {taps}; train the head with head.taps=null."
            )

    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary, target_path: str) -> dict[str, Any]:
        settings = super().settings(arguments, vocab, target_path)
        taps, rope = settings.pop(TAPS), dict(settings.pop("rope_parameters"))
        for key in (*FLAGS, "num_aux_hidden_states"):
            if key not in self.flags:
                settings.pop(key, None)
        if self.taps == "config" and taps != list(default_taps(arguments["sizes"]["num_target_layers"])):
            settings["eagle_config"] = {TAPS: [tap - 1 for tap in taps], "use_aux_hidden_state": True}
        return {**settings, **old_rope(rope, self.reader, self.ropes), "bias": False}

    def remembered(self, config: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config, TAPS: own["taps"]} if self.taps == "told" and "taps" in own else config

    def target_overrides(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the command must say about the taps."""
        taps = list(arguments["taps"])
        default = list(default_taps(arguments["sizes"]["num_target_layers"]))
        return (
            {"eagle3_layers_to_capture": [tap - 1 for tap in taps]} if self.taps == "told" and taps != default else {}
        )

    def completed(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        if config.get("bias"):
            raise UserError("The configuration says that fc has a bias, which our EAGLE-3 has not; give another head.")
        return super().completed({**config, "architectures": ["LlamaForCausalLMEagle3"]}, of_target)


class PaperEagleLayout(EagleLayout):
    """EAGLE-1. embeddings: a strict reader wants a copy of the target's; bias: the reader's fc has one, which would
    keep its random start if it were not given; ropes: as above."""

    dtype_key = "torch_dtype"

    def __init__(
        self,
        reader: str,
        method: str,
        architecture: str,
        *,
        embeddings: bool = False,
        bias: bool = False,
        ropes: Collection[str] | None = None,
        file: str = TENSORS,
    ) -> None:
        self.reader, self.method, self.architecture = reader, method, architecture
        self.lends, self.bias, self.ropes, self.file = embeddings, bias, ropes, file

    def fits(self, config: Mapping[str, Any]) -> bool:
        one = config.get("num_hidden_layers") == 1 and "draft_vocab_size" not in config
        return one and config.get("architectures") == [self.architecture]

    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary, target_path: str) -> dict[str, Any]:
        settings = super().settings(arguments, vocab, target_path)
        rope = old_rope(dict(settings.pop("rope_parameters")), self.reader, self.ropes)
        more = {"tie_word_embeddings": False, "bias": self.bias}
        return {**settings, "architectures": [self.architecture], **rope, **more}

    def added(self, head: DraftHead) -> dict[str, Tensor]:
        bias = {"fc.bias": torch.zeros(head.arguments["sizes"]["hidden_size"])} if self.bias else {}
        return bias | ({EMBEDDING: head.target.embedding_VD} if self.lends else {})


class PaperMedusaLayout(MedusaLayout):
    """One projection per head, whether shared or not, and numbers instead of names. The keys beyond the authors' two
    are those that vLLM needs to read it too."""

    dtype_key = "torch_dtype"
    file = MEDUSA

    def __init__(self, reader: str, *, blocks: int | None = None) -> None:
        """blocks: the most residual blocks that the reader can tell apart, None: no limit."""
        self.reader, self.most_blocks = reader, blocks

    def check(self, head: DraftHead) -> None:
        super().check(head)
        if self.most_blocks is not None and head.arguments["blocks"] > self.most_blocks:
            raise UserError(
                f"In {self.reader} all blocks of a head are one and the same, so only the last would be used; train "
                f"the head with head.blocks={self.most_blocks}, or export it with export=vllm."
            )

    def fits(self, config: Mapping[str, Any]) -> bool:
        return "medusa_num_heads" in config and "architectures" not in config

    def names(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        last = arguments["blocks"]
        blocks, own = (r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear."), (r"^lm_heads\.(\d+)\.", rf"\g<1>.{last}.")
        return {ours: re.sub(*own, re.sub(*blocks, ours)) for ours in super().names(arguments)}

    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary, target_path: str) -> dict[str, Any]:
        return {
            "base_model_name_or_path": target_path,
            "medusa_num_heads": arguments["depth"],
            "medusa_num_layers": arguments["blocks"],
            "hidden_size": arguments["sizes"]["hidden_size"],
            "vocab_size": vocab.size,
            "medusa_fc_bias": True,
        }

    def added(self, head: DraftHead) -> dict[str, Tensor]:
        last, shared = head.arguments["blocks"], super().added(head)
        return {f"{i}.{last}.weight": tensor for tensor in shared.values() for i in range(head.arguments["depth"])}

    def completed(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        """Under vLLM's names, with what the oldest repositories leave out: there are always biases."""
        wanted(config, "medusa_num_heads", "medusa_num_layers")
        if config.get(_TENSORRT_HEADS, config["medusa_num_heads"]) != config["medusa_num_heads"]:
            raise UserError(
                f"The configuration says medusa_num_heads={config['medusa_num_heads']} and "
                f"{_TENSORRT_HEADS}={config[_TENSORRT_HEADS]}; make them the same."
            )
        own = ("medusa_num_heads", "medusa_num_layers", _TENSORRT_HEADS)
        told = {key: value for key, value in config.items() if key not in own}
        vocab_size = {"vocab_size": of_target.sizes["vocab_size"]} if of_target.sizes is not None else {}
        counts = {"num_heads": config["medusa_num_heads"], "num_hidden_layers": config["medusa_num_layers"]}
        return super().completed({**vocab_size, "medusa_fc_bias": True, **told, **counts}, of_target)

    def taken(self, tensors: dict[str, Tensor], config: dict[str, Any], of_target: OfTarget) -> DraftVocabulary:
        """Projections that are all the target's own are the shared one."""
        names = [f"{i}.{config['num_hidden_layers']}.weight" for i in range(config["num_heads"])]
        theirs = None if of_target.weights is None else of_target.weights.lm_head_VD.cpu()
        if theirs is not None and all(
            name in tensors and torch.equal(tensors[name], theirs.to(tensors[name].dtype)) for name in names
        ):
            config["original_lm_head"] = True
            for name in names:
                del tensors[name]
        return DraftVocabulary.identity(int(config["vocab_size"]))


class TensorRTMedusaLayout(PaperMedusaLayout):
    """The authors' files, which its converter takes: any number of blocks, and the number of heads under a second name,
    for its two ways in look for either."""

    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary, target_path: str) -> dict[str, Any]:
        return {**super().settings(arguments, vocab, target_path), _TENSORRT_HEADS: arguments["depth"]}

    def target_overrides(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The converter writes what its command says of heads and layers before it looks into the folder."""
        return {"num_medusa_heads": arguments["depth"], "num_medusa_layers": arguments["blocks"]}


class SGLangMTPLayout(MTPLayout):
    """A draft by itself in MiMo's layout, which takes embeddings and projection from whatever target it is given.

    num_nextn_predict_layers sizes its cache; without zeros for the biases they would be what the memory held.
    """

    reader, method, dtype_key = "SGLang", "NEXTN", "torch_dtype"

    def fits(self, config: Mapping[str, Any]) -> bool:
        return super().fits(config) and config["architectures"] == ["MiMoForCausalLM"]

    def check_module(self, arguments: Mapping[str, Any]) -> None:
        if not arguments["final_norm"]:
            raise UserError(
                "SGLang's ERNIE module rotates neighbouring numbers instead of halves and would serve another head; "
                "train the head with head.final_norm=true, or export it with export=vllm."
            )

    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary, target_path: str) -> dict[str, Any]:
        settings = super().settings(arguments, vocab, target_path)
        rope = old_rope(dict(settings.pop("rope_parameters")), self.reader, None)
        return {**settings, **rope, "tie_word_embeddings": False}

    def target_overrides(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The folder says it all."""
        return {}


def old_rope(rope: dict[str, Any], reader: str, kinds: Collection[str] | None) -> dict[str, Any]:
    """Rotary embeddings as configurations had them before transformers 5, which reads them still. UserError on a kind
    that the reader does not have."""
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type", "default")
    if kinds is not None and kind not in kinds:
        raise UserError(
            f"{reader} has no rotary embeddings of the kind {kind}, which this target has; export the head with "
            f"export=vllm."
        )
    # The oldest code looks for `type`, what came after it for `rope_type`.
    scaling = None if kind == "default" else {"rope_type": kind, "type": kind, **dict(sorted(rope.items()))}
    return {"rope_theta": theta, "rope_scaling": scaling}
