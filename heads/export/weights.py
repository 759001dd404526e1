"""The weights of a folder as files: safetensors, in parts where they are large, and the pickles of older repositories.

Pickles are read with nothing but tensors allowed in them.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from heads.artifact import UserError

TENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, MEDUSA = "pytorch_model.bin", "medusa_lm_head.pt"
_LAYERS = "model.layers."
LARGEST = 5 * 10**9  # bytes of one file, as everywhere on the Hub
# Where weights are looked for, in this order.
NAMES = (INDEX, TENSORS, "medusa_lm_head.safetensors", PICKLED, MEDUSA)


def to_files(tensors: dict[str, Tensor], name: str, *, largest: int = LARGEST) -> Iterator[tuple[str, bytes]]:
    """The files of weights by their names: `name`, or its parts and their index where it would be too large."""
    if not name.endswith(".safetensors"):
        memory = io.BytesIO()
        # A view would be saved with all that it is a view of.
        torch.save({one: tensor.clone() for one, tensor in tensors.items()}, memory)
        yield name, memory.getvalue()
        return
    pattern = name.replace(".safetensors", "{suffix}.safetensors")
    plan = split_torch_state_dict_into_shards(tensors, filename_pattern=pattern, max_shard_size=largest)
    for part, names in plan.filename_to_tensors.items():
        yield part, save({one: tensors[one] for one in names}, metadata={"format": "pt"})
    if plan.is_sharded:
        yield INDEX, json.dumps({"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}, indent=2).encode()


def read_tensors(folder: Path, inside: str | None = None) -> dict[str, Tensor]:
    """The weights of a folder; of the checkpoint of a whole model, which has layers, only those that begin with
    `inside`. Raises UserError when they are not there or not whole."""
    found = weights_file(folder)
    if found != INDEX:
        return _within(_read(folder / found), inside)
    whole = json.loads((folder / INDEX).read_text())["weight_map"]
    index = _within(whole, inside)
    tensors: dict[str, Tensor] = {}
    for part in sorted(set(index.values())):
        tensors |= {name: tensor for name, tensor in _read(folder / part).items() if name in index or name not in whole}
    if tensors.keys() != index.keys():
        odd = min(tensors.keys() ^ index.keys())
        raise UserError(f"The parts of {folder} and their index differ in {odd}; download or export it again.")
    return tensors


def weights_file(folder: Path) -> str:
    """The file that the weights of a folder begin with. Raises UserError when there is none."""
    for name in NAMES:
        if (folder / name).is_file():
            return name
    raise UserError(f"{folder} holds no weights (none of {', '.join(NAMES)}); give a folder in a server's layout.")


def _within(named: dict[str, Any], inside: str | None) -> dict[str, Any]:
    """What begins with `inside`, if layers of a whole model are there too."""
    if inside is None or not any(name.startswith(_LAYERS) for name in named):
        return named
    return {name: value for name, value in named.items() if name.startswith(inside)}


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path} does not exist though its index names it; download or export it again.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "it ends too early"
        raise UserError(f"{path} is not a whole file of weights ({reason}); download or export it again.") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UserError(f"{path} holds something else than named weights; give a folder in a server's layout.")
    return tensors
