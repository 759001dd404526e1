"""Wrong exports on purpose: the control of the server check.

Each damage is a mistake that vLLM loads without a word and that leaves the text right. The module works on the files
of an export and knows no head.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from heads.artifact import UserError, write_atomic, write_json

# A tenth of the base, as where it is lost, moved no draft in 200 rounds of short texts; the check of an export's
# configuration against its head (heads.export.folder.check_export) sees any change.
ROPE_FACTOR = 10_000

Files = tuple[dict[str, Any], dict[str, Tensor]]


def _shift_taps(config: dict[str, Any], tensors: dict[str, Tensor]) -> Files:
    key = "eagle_aux_hidden_state_layer_ids"
    return config | {key: [tap + 1 for tap in config[key]]}, tensors


def _zero_norm(config: dict[str, Any], tensors: dict[str, Tensor]) -> Files:
    name = "layers.0.hidden_norm.weight"
    return config, tensors | {name: torch.zeros_like(tensors[name])}


def _drop_mapping(config: dict[str, Any], tensors: dict[str, Tensor]) -> Files:
    return config, {name: tensor for name, tensor in tensors.items() if name != "d2t"}


def _flip_flag(config: dict[str, Any], tensors: dict[str, Tensor]) -> Files:
    return config | {"norm_before_residual": not config["norm_before_residual"]}, tensors


def _change_rope(config: dict[str, Any], tensors: dict[str, Tensor]) -> Files:
    rope = config["rope_parameters"]
    return config | {"rope_parameters": {**rope, "rope_theta": rope["rope_theta"] / ROPE_FACTOR}}, tensors


def _swap_halves(config: dict[str, Any], tensors: dict[str, Tensor]) -> Files:
    """The first projection of EAGLE-1 and of the MTP layouts, whichever is there."""
    name = next(name for name in _JOINS if name in tensors)
    first, second = tensors[name].chunk(2, dim=1)
    return config, tensors | {name: torch.cat([second, first], dim=1)}


def _drop_biases(config: dict[str, Any], tensors: dict[str, Tensor]) -> Files:
    return config | {"medusa_fc_bias": not config["medusa_fc_bias"]}, tensors


_JOINS = ("fc.weight", "model.mtp_linear_proj.0.weight", "model.mtp_layers.0.input_proj.weight")
DAMAGE: Mapping[str, Callable[[dict[str, Any], dict[str, Tensor]], Files]] = {
    "taps": _shift_taps,
    "hidden_norm": _zero_norm,
    "mapping": _drop_mapping,
    "flag": _flip_flag,
    "rope": _change_rope,
    "halves": _swap_halves,
    "bias": _drop_biases,
}
"""Each is a mistake that vLLM loads without a word: taps one layer late, a norm of zeros, no draft vocabulary map, the
residual taken at the wrong side of the norm, another rotary base, embedding and hidden state in each other's place, no
biases. The first three and the flag are of EAGLE-3, the biases of Medusa."""

CONTROLS = {"eagle3": "taps", "eagle": "halves", "mtp": "halves", "medusa": "bias"}
"""The mistake by which the check of each method is checked."""


def damage(export: str | Path, kind: str, folder: str | Path) -> Path:
    """A copy of an export in `folder` with one mistake in it. Raises UserError on a kind that does not exist."""
    if kind not in DAMAGE:
        raise UserError(f"damage={kind} is unknown; choose one of {', '.join(DAMAGE)}.")
    source, folder = Path(export), Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    try:
        config, tensors = DAMAGE[kind](config, load_file(source / "model.safetensors"))
    except (KeyError, StopIteration) as error:
        raise UserError(f"damage={kind} is of another kind of head than {source}; leave it to control=auto.") from error
    write_json(folder / "config.json", config)
    write_atomic(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    return folder
