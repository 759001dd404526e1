"""What the layouts of one server have in common: a table of names, a configuration, and the refusals around them.

A server keeps silent about much of what is wrong in a folder and then accepts nothing, so what it would swallow is
refused here. A subclass is one kind of head in one server; this module knows no kind and no server.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.artifact import UserError
from heads.base import DraftHead, TargetWeights
from heads.checkpoint import check_finite
from heads.export.weights import TENSORS, read_tensors
from heads.vocab import DraftVocabulary

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONFIG = "config.json"

# Keys of the configuration that are the block's sizes under their own names.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "hidden_act",
)
# A decoder block's weights, ours to those of Llama, each with the name of the block in front.
BLOCK = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "post_attention_layernorm",
)


@dataclass(frozen=True)
class OfTarget:
    """What is known of the target when a folder is read. sizes: those of its layers (heads.layers.BlockSizes); weights:
    to compare with what the folder has of them; say: is told what the folder leaves open."""

    sizes: Mapping[str, Any] | None = None
    weights: TargetWeights | None = None
    say: Callable[[str], None] = lambda text: None

    @property
    def num_layers(self) -> int:
        """Raises UserError when the target is not known."""
        if self.sizes is None:
            raise UserError("The folder does not say how many layers its target has; give the target too.")
        return int(self.sizes["num_target_layers"])

    def check_same(self, name: str, tensor: Tensor, of: str) -> None:
        """Raises UserError unless a tensor is the target's own: its embedding or its projection."""
        if self.weights is None:
            raise UserError(f"The weight {name} should be the target's own {of}; give the target, to compare them.")
        own = self.weights.embedding_VD if of == "embedding" else self.weights.lm_head_VD
        if not torch.equal(tensor, own.to("cpu", tensor.dtype)):
            raise UserError(
                f"The weight {name} is not the target's own {of}: it is of another target or was never loaded; export "
                f"the head again, attached to its target."
            )


class Layout(ABC):
    """title: as sentences name it; reader: who reads it; head: the class path of the heads it takes; method: the
    reader's own word for it; lends: whether tensors of the target are written too, so that the head must be attached
    to it; whole_vocabulary: whether the reader drafts from all of it; file: of the weights; dtype_key: under which the
    configuration says the number format; inside: how the names of the head's weights begin in the checkpoint of a whole
    model, None where there is no such thing."""

    title: str
    reader = "vLLM"
    head: str
    method: str
    lends = False
    whole_vocabulary = True
    file = TENSORS
    dtype_key = "dtype"
    inside: str | None = None

    @abstractmethod
    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a configuration is one of this layout."""

    @abstractmethod
    def names(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Our name to the server's of every weight that a head with these arguments has."""

    @abstractmethod
    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary, target_path: str) -> dict[str, Any]:
        """config.json without the number format."""

    @abstractmethod
    def arguments(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        """The constructor arguments that a folder of this layout says; the rest is training's affair."""

    def completed(self, config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
        """A configuration in this layout's plainest form: with what may be left out or said otherwise."""
        return dict(config)

    def plain_name(self, name: str) -> str:
        """The one spelling of a weight's name, where the server accepts several."""
        return name

    def turned(self, name: str, tensor: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """A weight, by our name, as the server has it. Its own inverse, for the way back."""
        return tensor

    def added(self, head: DraftHead) -> dict[str, Tensor]:
        """What the server wants beside the head's own weights."""
        return {}

    def taken(self, tensors: dict[str, Tensor], config: dict[str, Any], of_target: OfTarget) -> DraftVocabulary:
        """Takes what is not a weight of the head out of `tensors`; returns the draft vocabulary."""
        wanted(config, "vocab_size")
        return DraftVocabulary.identity(int(config["vocab_size"]))

    def check(self, head: DraftHead) -> None:
        """Raises UserError where the server would serve something else than was trained."""
        if not head.vocab.full:
            raise UserError(
                f"{self.reader} drafts with an {self.title} head from the whole vocabulary, but this head was "
                f"trained on {len(head.vocab.ids_W):,} of {head.vocab.size:,} tokens; train it with "
                f"head.draft_vocab_size=null."
            )

    def target_overrides(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the server's command must say beside the folder: to vLLM about the target's own configuration."""
        return {}

    def facts(self, arguments: Mapping[str, Any], vocab: DraftVocabulary) -> dict[str, str]:
        """Rows of the model card's table that are of this kind only."""
        return {"draft vocabulary": f"{len(vocab.ids_W):,} of {vocab.size:,}"}

    # ---- there ----------------------------------------------------------------------------------------------------

    def write(self, head: DraftHead, dtype: str, target_path: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The configuration and the tensors of a head as the server names them. UserError where they would be wrong."""
        if dtype not in DTYPES:
            raise UserError(f"export.dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
        state = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
        names = self.names(head.arguments)
        self.check_names(state, names)
        check_weights(state)
        self.check(head)
        turned = {names[name]: self.turned(name, tensor, head.arguments) for name, tensor in state.items()}
        tensors = {name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in turned.items()}
        for name, tensor in self.added(head).items():
            tensors[name] = (tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor).cpu().contiguous()
        check_finite({name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()})
        return {**self.settings(head.arguments, head.vocab, target_path), self.dtype_key: dtype}, tensors

    def check_names(self, tensors: Mapping[str, Tensor], known: Mapping[str, str]) -> None:
        """Raises UserError on a weight that is missing and on one that has no place."""
        if missing := [name for name in known if name not in tensors]:
            raise UserError(
                f"The weight {missing[0]} is missing; the server would load the rest in silence and accept no draft."
            )
        if unknown := [name for name in tensors if name not in known]:
            raise UserError(
                f"The weight {unknown[0]} has no place in {self.reader}'s {self.title} layout; it would not be used."
            )

    # ---- and back -------------------------------------------------------------------------------------------------

    def read(
        self, folder: Path, config: Mapping[str, Any], own: Mapping[str, Any], of_target: OfTarget
    ) -> tuple[dict[str, Any], DraftVocabulary, dict[str, Tensor]]:
        """Constructor arguments, draft vocabulary and weights; own: the arguments that our own export remembers, which
        the configuration must not contradict."""
        tensors = {self.plain_name(name): tensor for name, tensor in read_tensors(folder, self.inside).items()}
        completed = self.completed(self.remembered(config, own), of_target)
        vocab = self.taken(tensors, completed, of_target)
        found = self.arguments(completed, of_target)
        if own:
            check_told(found, own, folder)
        arguments = {**own, **found}
        ours = {theirs: name for name, theirs in self.names(arguments).items()}
        self.check_names(tensors, ours)
        state = {ours[name]: self.turned(ours[name], tensor, arguments) for name, tensor in tensors.items()}
        return arguments, vocab, state

    def remembered(self, config: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
        """The configuration with what this reader is told elsewhere, as our own export knows it."""
        return config

    def llama_settings(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes as a Llama configuration says them. UserError on an activation that the servers have not."""
        sizes = arguments["sizes"]
        if sizes["hidden_act"] != "silu":
            raise UserError(
                f"{self.reader}'s {self.title} block has silu only, not {sizes['hidden_act']}; train the head "
                f"with silu."
            )
        return {key: sizes[key] for key in SIZES}


def block_names(ours: str, theirs: str) -> dict[str, str]:
    """The weights of a decoder block under two names of the block, each with its dot."""
    return {f"{ours}{part}.weight": f"{theirs}{part}.weight" for part in BLOCK}


def llama_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """A Llama configuration with the sizes that may be left out, and rotary embeddings in today's form."""
    told = dict(config)
    if "rope_parameters" not in told and "rope_theta" in told:
        scaling = dict(told.get("rope_scaling") or {})
        old = scaling.pop("type", "default")
        kind = scaling.pop("rope_type", old)
        told["rope_parameters"] = {"rope_type": kind, **scaling, "rope_theta": told["rope_theta"]}
    if told.get("head_dim") is None and {"hidden_size", "num_attention_heads"} <= told.keys():
        told["head_dim"] = told["hidden_size"] // told["num_attention_heads"]
    return {"hidden_act": "silu", **told}


def sizes_of(config: Mapping[str, Any], of_target: OfTarget) -> dict[str, Any]:
    """The sizes of a block out of a configuration. Raises UserError where one is missing or cannot be the target's."""
    wanted(config, *SIZES)
    sizes = {**{key: config[key] for key in SIZES}, "num_target_layers": of_target.num_layers}
    for key in ("hidden_size", "vocab_size"):
        if of_target.sizes is not None and sizes[key] != of_target.sizes[key]:
            raise UserError(
                f"The head's {key} is {sizes[key]}, the target's is {of_target.sizes[key]}; give the target that the "
                f"head was trained for."
            )
    return sizes


def check_told(found: Mapping[str, Any], own: Mapping[str, Any], folder: Path) -> None:
    """Raises UserError on the first argument that a folder says otherwise than the head had it when it was exported."""
    for name, value in found.items():
        was = own.get(name)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            check_told(value, was, folder)
        if value != was:
            raise UserError(
                f"{folder / CONFIG} says {name}={value}, but the head that was exported has {was}; export it again, or "
                f"give the layout= that it was exported in."
            )


def wanted(config: Mapping[str, Any], *keys: str) -> None:
    """Raises UserError on the first key that a configuration lacks."""
    if missing := [key for key in keys if key not in config]:
        raise UserError(f"The configuration lacks {missing[0]}; add it as the head was trained.")


def check_weights(state: Mapping[str, Tensor]) -> None:
    """Raises UserError on a weight that is not finite, or zero throughout."""
    check_finite(state)
    for name, tensor in state.items():
        if not tensor.any():
            raise UserError(f"The weight {name} is zero throughout: it was neither loaded nor trained; train the head.")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises UserError when there is none or it is not JSON."""
    path = folder / CONFIG
    if not path.is_file():
        inside = sorted(one.parent for one in folder.glob(f"*/{CONFIG}"))  # exports lie side by side
        such = f", such as {inside[0]}" if inside else ""
        raise UserError(f"{folder} holds no {CONFIG}; give a folder in a server's layout{such}.")
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download or export it again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; download or export it again.")
    return value
