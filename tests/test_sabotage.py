"""Exports that are wrong on purpose, one or more for each of the ways in which heads are known to go wrong between
training and a server (numbered): each is noticed before a server sees it.

The manifest of each is made to fit, as if the exporter itself had been wrong. Two checks look at it: reading the
folder back for its target (what `scripts.import_head check=true` does), and comparing it with the head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.artifact import UserError, read_manifest, sha256_file, write_json
from heads.base import DraftHead
from heads.export.folder import check_export
from heads.export.imported import import_head
from heads.export.layout import OfTarget
from tests.servable import servable
from tests.test_formats import FEW, exported, of

TAPS = "eagle_aux_hidden_state_layer_ids"
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@dataclass(frozen=True)
class Wrong:
    """kind, layout: of the export; change: what is done to it; sentence: of the refusal when it is read back, None
    where only the comparison with the head can tell; foreign: whether it is noticed in a folder without our manifest
    too."""

    kind: str
    change: Change
    sentence: str | None
    layout: str = "vllm"
    foreign: bool = False


def put(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def drop(name: str) -> Change:
    return lambda config, tensors: tensors.pop(name)


def add(name: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.update({name: torch.ones(shape)})


def random(name: str) -> Change:
    return lambda config, tensors: tensors.update({name: torch.randn_like(tensors[name])})


def shift(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config[TAPS] = [tap + 1 for tap in config[TAPS]]


def as_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def as_ids_alone(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    as_ids(config, tensors)
    del tensors["t2d"]


def twice(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def swap(name: str) -> Change:
    return lambda config, tensors: tensors.update(
        {name: tensors[name].roll(tensors[name].shape[1] // 2, 1).contiguous()}
    )


def theta(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["rope_parameters"]["rope_theta"] /= 10


def scaled(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def no_biases(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(".bias")]:
        del tensors[name]


def unflagged(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del config["norm_before_residual"]


WRONG = {
    "06-taps-one-layer-late": Wrong("eagle3", shift, r"says taps=\[3, 5, 6\], but the head that was exported has"),
    "06-taps-as-layer-outputs": Wrong("eagle3", put(**{TAPS: [1, 3, 4]}), r"says taps=\[1, 3, 4\]"),
    "06-taps-twice-the-same": Wrong("eagle3", put(**{TAPS: [2, 2, 5]}), "says taps"),
    "06-sglang-taps-as-boundaries": Wrong(
        "eagle3", put(eagle_config={TAPS: [2, 4, 5]}), r"says taps=\[3, 5, 6\]", layout="sglang"
    ),
    "07-tap-behind-the-last-layer": Wrong("eagle3", put(**{TAPS: [2, 4, 8]}), r"says taps=\[2, 4, 8\]"),
    "08-no-d2t": Wrong("eagle3-few", drop("d2t"), "The mapping d2t is missing", foreign=True),
    "08-ids-for-offsets": Wrong("eagle3-few", as_ids, "d2t", foreign=True),
    "08-ids-for-offsets-without-t2d": Wrong("eagle3-few", as_ids_alone, "d2t does not hold", foreign=True),
    "08-sglang-no-d2t": Wrong("eagle3-few", drop("d2t"), "The mapping d2t is missing", layout="sglang", foreign=True),
    "09-a-token-twice": Wrong("eagle3-few", twice, "offsets to distinct ids", foreign=True),
    "10-random-tied-projection": Wrong(
        "medusa", random("lm_head.weight"), "lm_head.weight is not the target's own projection", foreign=True
    ),
    "10-random-embeddings": Wrong(
        "eagle3", random("embed_tokens.weight"), "is not the target's own embedding", layout="speculators", foreign=True
    ),
    "10-random-own-projection": Wrong("eagle3", random("lm_head.weight"), None),
    "11-no-projection": Wrong("medusa", drop("lm_head.weight"), "lm_head.weight is missing", foreign=True),
    "11-no-own-projection": Wrong("eagle3-few", drop("lm_head.weight"), "lm_head.weight is missing", foreign=True),
    "12-rope-theta": Wrong("eagle3", theta, r"says rope_theta=1000.0, but the head that was exported has 10000.0"),
    "12-rope-theta-eagle1": Wrong(
        "eagle", theta, r"says rope_theta=1000.0, but the head that was exported has 10000.0"
    ),
    "12-rope-scaling": Wrong("eagle3", scaled, "says rope_type=linear"),
    "12-sglang-rope-theta": Wrong("eagle3", put(rope_theta=1000.0), "says rope_theta=1000.0", layout="sglang"),
    "12-sglang-mtp-rope-theta": Wrong("mtp", put(rope_theta=1000.0), "says rope_theta=1000.0", layout="sglang"),
    "13-sglang-mtp-norm-missing": Wrong(
        "mtp", drop("model.mtp_layers.0.final_layernorm.weight"), "is missing", layout="sglang", foreign=True
    ),
    "13-norm-before-residual": Wrong("eagle3", put(norm_before_residual=True), "says norm_before_residual=True"),
    "13-norm-output": Wrong("eagle3", put(norm_output=True), "says norm_output=True"),
    "13-flag-left-out": Wrong("eagle3", unflagged, "lacks norm_before_residual", layout="speculators", foreign=True),
    "13-hidden-norm-missing": Wrong(
        "eagle3", drop("layers.0.hidden_norm.weight"), "hidden_norm.weight is missing", foreign=True
    ),
    "13-a-norm-that-eagle1-has-not": Wrong(
        "eagle", add("layers.0.input_layernorm.weight", 32), "input_layernorm.weight has no place", foreign=True
    ),
    "13-halves-swapped-eagle1": Wrong("eagle", swap("fc.weight"), None),
    "13-halves-swapped-mtp": Wrong("mtp", swap("model.mtp_layers.0.input_proj.weight"), None),
    "14-medusa-biases-switched-off": Wrong("medusa", put(medusa_fc_bias=False), "drop the biases", foreign=True),
    "14-medusa-biases-missing": Wrong("medusa", no_biases, "0.bias is missing", foreign=True),
    "14-medusa-stray-head-count": Wrong(
        "medusa", put(num_attention_heads=4), "has the key num_attention_heads", foreign=True
    ),
    "14-medusa-fewer-heads": Wrong("medusa", put(num_heads=3), "says depth=3"),
    "14-medusa-names-it-does-not-know": Wrong(
        "medusa", add("blocks.9.layers.0.weight", 32, 32), "has no place", foreign=True
    ),
    "14-fc-bias-eagle1": Wrong("eagle", add("fc.bias", 32), "fc.bias is a bias", foreign=True),
    "14-fc-bias-eagle3": Wrong("eagle3", add("fc.bias", 32), "fc.bias has no place", foreign=True),
}


def head_of(kind: str) -> DraftHead:
    return servable("eagle3", vocab=FEW) if kind == "eagle3-few" else servable(kind)


def spoil(folder: Path, change: Change) -> None:
    """Change an export and make its manifest fit."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    manifest = read_manifest(folder, "export")
    manifest["files"] = {name: sha256_file(folder / name) for name in manifest["files"]}
    write_json(folder / "manifest.json", manifest)


@pytest.mark.parametrize("name", WRONG)
def test_it_is_noticed_before_a_server_sees_it(tmp_path: Path, name: str) -> None:
    wrong = WRONG[name]
    head = head_of(wrong.kind)
    folder = exported(tmp_path / "a", head, wrong.layout, dtype="float32")
    check_export(folder, head=head)
    import_head(folder, of_target=of(head))  # the control: unspoilt, both are content
    spoil(folder, wrong.change)
    check_export(folder)
    with pytest.raises(UserError, match="was not exported from the head as it is now"):
        check_export(folder, head=head)
    if wrong.sentence is None:
        import_head(folder, of_target=of(head))
        return
    with pytest.raises(UserError, match=wrong.sentence):
        import_head(folder, of_target=of(head))
    if wrong.foreign:
        (folder / "manifest.json").unlink()
        with pytest.raises(UserError, match=wrong.sentence):
            import_head(folder, of_target=of(head))


def test_every_pitfall_from_6_to_14_has_a_case() -> None:
    assert {int(name[:2]) for name in WRONG} == set(range(6, 15))


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 64), ("vocab_size", 128)])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "mtp"])
def test_a_folder_of_another_target_is_refused(tmp_path: Path, kind: str, key: str, value: int) -> None:
    """By its sizes, where it has no manifest that names its target."""
    head = servable(kind)
    folder = exported(tmp_path / "a", head, "vllm", dtype="float32")
    (folder / "manifest.json").unlink()
    other = OfTarget({**head.arguments["sizes"], key: value}, head.target)
    with pytest.raises(UserError, match=rf"The head's {key} is \d+, the target's is {value}"):
        import_head(folder, of_target=other)
