"""What the layouts of one server have in common: a table of names, a configuration, and the refusals around them.

A server keeps silent about much of what is wrong in a folder and then accepts nothing, so what it would swallow is
refused here. A subclass is one kind of head in one server; this module knows no kind and no server.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from heads.artifact import MANIFEST, UserError
from heads.base import DraftHead
from heads.checkpoint import check_finite
from heads.vocab import DraftVocabulary

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONFIG, TENSORS, CARD = "config.json", "model.safetensors", "README.md"
FILES = (CONFIG, TENSORS, CARD)

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


class Layout(ABC):
    """title: as sentences name it; head: the class path of the heads it takes; method: the server's own word for it;
    lends: whether tensors of the target are written too, so that the head must be attached to it."""

    title: str
    head: str
    method: str
    lends = False

    @abstractmethod
    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a configuration is one of this layout."""

    @abstractmethod
    def names(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Our name to the server's of every weight that a head with these arguments has."""

    @abstractmethod
    def settings(self, arguments: Mapping[str, Any], vocab: DraftVocabulary) -> dict[str, Any]:
        """config.json without the number format."""

    @abstractmethod
    def arguments(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Any]:
        """The constructor arguments that a folder of this layout says; the rest is training's affair."""

    def plain_name(self, name: str) -> str:
        """The one spelling of a weight's name, where the server accepts several."""
        return name

    def turned(self, name: str, tensor: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """A weight, by our name, as the server has it. Its own inverse, for the way back."""
        return tensor

    def added(self, head: DraftHead) -> dict[str, Tensor]:
        """What the server wants beside the head's own weights."""
        return {}

    def taken(self, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> DraftVocabulary:
        """Takes what is not a weight of the head out of `tensors`; returns the draft vocabulary."""
        return DraftVocabulary.identity(int(config["vocab_size"]))

    def check(self, head: DraftHead) -> None:
        """Raises UserError where the server would serve something else than was trained."""
        if not head.vocab.full:
            raise UserError(
                f"The server drafts with an {self.title} head from the whole vocabulary, but this head was trained on "
                f"{len(head.vocab.ids_W):,} of {head.vocab.size:,} tokens; train it with head.draft_vocab_size=null."
            )

    def target_overrides(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the server must be told about the target's own configuration."""
        return {}

    def facts(self, arguments: Mapping[str, Any], vocab: DraftVocabulary) -> dict[str, str]:
        """Rows of the model card's table that are of this kind only."""
        return {"draft vocabulary": f"{len(vocab.ids_W):,} of {vocab.size:,}"}

    # ---- there ----------------------------------------------------------------------------------------------------

    def write(self, head: DraftHead, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
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
        return {**self.settings(head.arguments, head.vocab), "dtype": dtype}, tensors

    def check_names(self, tensors: Mapping[str, Tensor], known: Mapping[str, str]) -> None:
        """Raises UserError on a weight that is missing and on one that has no place."""
        if missing := [name for name in known if name not in tensors]:
            raise UserError(
                f"The weight {missing[0]} is missing; the server would load the rest in silence and accept no draft."
            )
        if unknown := [name for name in tensors if name not in known]:
            raise UserError(
                f"The weight {unknown[0]} has no place in vLLM's {self.title} layout; the server would not use it."
            )

    # ---- and back -------------------------------------------------------------------------------------------------

    def read(
        self, folder: Path, config: Mapping[str, Any], own: Mapping[str, Any], num_layers: int
    ) -> tuple[dict[str, Any], DraftVocabulary, dict[str, Tensor]]:
        """Constructor arguments, draft vocabulary and weights; own: the arguments that our own export remembers."""
        tensors = {self.plain_name(name): tensor for name, tensor in read_tensors(folder / TENSORS).items()}
        vocab = self.taken(tensors, config)
        arguments = {**own, **self.arguments(config, tensors, num_layers)}
        ours = {theirs: name for name, theirs in self.names(arguments).items()}
        self.check_names(tensors, ours)
        state = {ours[name]: self.turned(ours[name], tensor, arguments) for name, tensor in tensors.items()}
        return arguments, vocab, state


def block_names(ours: str, theirs: str) -> dict[str, str]:
    """The weights of a decoder block under two names of the block, each with its dot."""
    return {f"{ours}{part}.weight": f"{theirs}{part}.weight" for part in BLOCK}


def sizes_of(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The sizes of a block out of a configuration. Raises UserError where one is missing."""
    wanted(config, *SIZES)
    return {**{key: config[key] for key in SIZES}, "num_target_layers": num_layers}


def wanted(config: Mapping[str, Any], *keys: str) -> None:
    """Raises UserError on the first key that a configuration lacks."""
    if missing := [key for key in keys if key not in config]:
        raise UserError(f"The configuration lacks {missing[0]}; add it as the head was trained.")


def llama_settings(arguments: Mapping[str, Any], title: str) -> dict[str, Any]:
    """The sizes as a Llama configuration says them. Raises UserError on an activation that the servers have not."""
    sizes = arguments["sizes"]
    if sizes["hidden_act"] != "silu":
        raise UserError(f"vLLM's {title} block has silu only, not {sizes['hidden_act']}; train the head with silu.")
    return {key: sizes[key] for key in SIZES}


def check_weights(state: Mapping[str, Tensor]) -> None:
    """Raises UserError on a weight that is not finite, or zero throughout."""
    check_finite(state)
    for name, tensor in state.items():
        if not tensor.any():
            raise UserError(f"The weight {name} is zero throughout: it was neither loaded nor trained; train the head.")


def to_bytes(tensors: dict[str, Tensor]) -> bytes:
    """The file of weights."""
    return save(tensors, metadata={"format": "pt"})


def check_free(folder: Path) -> None:
    """Raises UserError where an export would be written among files that are not its own."""
    known = {*FILES, MANIFEST}
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in known) if folder.is_dir() else []
    strangers = [name for name in strangers if not name.endswith(".tmp")]
    if strangers:
        raise UserError(f"{folder} holds {strangers[0]}, which is not part of an export; give an empty folder.")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises UserError when there is none or it is not JSON."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder} holds no {CONFIG}; give a folder in a server's layout.")
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download or export it again.") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The weights of a folder. Raises UserError when they are not there or not whole."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a folder in a server's layout.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}); download or export it again.") from error
