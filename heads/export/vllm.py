"""EAGLE-3 heads in the layout that vLLM 0.32 loads with `method: eagle3`, and the way back.

First a table of names, then what is not a renaming: offsets of the draft vocabulary, the configuration, and the
refusals. vLLM keeps silent about a missing norm or mapping and then accepts nothing, so what it would swallow is
refused here. This module knows neither training nor evaluation; numbers for the model card come in as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from heads.artifact import MANIFEST, UserError, read_manifest, sha256_file, write_atomic, write_json, write_manifest
from heads.base import DraftHead
from heads.checkpoint import check_finite, head_name
from heads.export.card import Evidence, ServeFacts, render_card
from heads.vocab import DraftVocabulary

METHOD = "eagle3"
EAGLE3 = "heads.eagle3.Eagle3Head"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONFIG, TENSORS, CARD = "config.json", "model.safetensors", "README.md"
FILES = (CONFIG, TENSORS, CARD)

# Ours to vLLM's. `{i}` stands for one entry per tapped state.
NAMES = {
    "fc.weight": "fc.weight",
    "input_layernorm.weight": "layers.0.input_layernorm.weight",
    "hidden_norm.weight": "layers.0.hidden_norm.weight",
    **{
        f"layer.{part}.weight": f"layers.0.{part}.weight"
        for part in (
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
            "post_attention_layernorm",
        )
    },
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
FC_NORM = "fc_norm.{i}.weight"
QK_NORMS = {f"layer.self_attn.{name}_norm.weight": f"layers.0.self_attn.{name}_norm.weight" for name in "qk"}
MAPPINGS = ("d2t", "t2d")

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
FLAGS = ("norm_before_residual", "fc_norm", "norm_output")
# What the server builds the block from, without and with norms on queries and keys.
ARCHITECTURES = {
    False: {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    True: {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"},
}
TAPS = "eagle_aux_hidden_state_layer_ids"
LICENCE = (
    "A head starts from weights of its target and learns from the target's answers, so the target's licence and the "
    "terms of the prompts that were used apply to these weights."
)


def export_vllm(
    head: DraftHead,
    folder: str | Path,
    *,
    target_fingerprint: Mapping[str, str],
    target_path: str,
    dtype: str = "bfloat16",
    evidence: Evidence | None = None,
    licence: str = LICENCE,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the folder that `vllm serve` takes as a draft, with a model card and a manifest, which is returned.

    target_path: the target as the server will be given it; dtype: of the stored weights; evidence: measured numbers;
    config: the resolved config, for the manifest. Raises UserError on anything that the server would misread.
    """
    folder = Path(folder)
    _check_free(folder)
    settings, tensors = to_vllm(head, dtype)
    gamma = evidence.gamma if evidence is not None else int(head.arguments["depth"])
    facts = ServeFacts(METHOD, target_path, str(folder), gamma, dtype, dict(target_fingerprint))
    card = render_card(head_name(head), facts, settings, evidence, licence)
    write_atomic(folder / TENSORS, _bytes(tensors))
    write_atomic(folder / CARD, card)
    write_json(folder / CONFIG, settings)
    body = {
        "server": "vllm",
        "method": METHOD,
        "serve": facts.command(),
        "dtype": dtype,
        "target": dict(target_fingerprint),
        "head": {"name": head_name(head), "_target_": EAGLE3, "arguments": head.arguments},
        "files": {name: sha256_file(folder / name) for name in FILES},
        "numbers": evidence.summary() if evidence is not None else None,
    }
    return write_manifest(folder, "export", body, config)


def to_vllm(head: DraftHead, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of a head as vLLM names them. Raises UserError where they would be wrong."""
    class_path = f"{type(head).__module__}.{type(head).__qualname__}"
    if class_path != EAGLE3:
        raise UserError(f"{class_path} has no layout for vLLM yet; export a head of the kind {EAGLE3}.")
    if dtype not in DTYPES:
        raise UserError(f"export.dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
    arguments = head.arguments
    _check_taps(head)
    state = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    names = names_for(arguments)
    _check_names(state, names)
    _check_weights(state)
    tensors = {names[name]: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in state.items()}
    check_finite(tensors)
    vocab = head.vocab
    _check_vocab(vocab, state["lm_head.weight"], arguments["sizes"]["vocab_size"])
    if not vocab.full:
        tensors |= {"d2t": vocab.d2t.to(torch.int64).contiguous(), "t2d": vocab.t2d.contiguous()}
    return _settings(arguments, len(vocab.ids_W), dtype), tensors


def import_vllm(
    folder: str | Path, *, num_target_layers: int | None = None
) -> tuple[dict[str, Any], DraftVocabulary, dict[str, Tensor]]:
    """What `export_vllm` wrote, or somebody else in this layout: constructor arguments, draft vocabulary and weights.

    num_target_layers: layers of the target; our own exports know it. Loss, decay and depth are training's affair and
    come back only from our own exports. Raises UserError when something is missing or unknown.
    """
    folder = Path(folder)
    config = _read_config(folder)
    own = read_manifest(folder, "export")["head"]["arguments"] if (folder / MANIFEST).is_file() else {}
    if num_target_layers is None:
        num_target_layers = own.get("sizes", {}).get("num_target_layers")
    if num_target_layers is None:
        raise UserError(f"{folder} does not say how many layers its target has; pass num_target_layers.")
    arguments = {
        **own,
        "sizes": {**{key: config[key] for key in SIZES}, "num_target_layers": num_target_layers},
        "taps": list(config[TAPS]),
        **{flag: bool(config.get(flag, False)) for flag in FLAGS},
        "qk_norm": config["architectures"] == ARCHITECTURES[True]["architectures"],
    }
    tensors = {_plain_name(name): tensor for name, tensor in _read_tensors(folder / TENSORS).items()}
    vocab = _import_vocab(tensors, config["vocab_size"], config["draft_vocab_size"])
    ours = {theirs: name for name, theirs in names_for(arguments).items()}
    _check_names(tensors, ours)
    return arguments, vocab, {ours[name]: tensor for name, tensor in tensors.items()}


def names_for(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Our name to vLLM's of every weight that a head with these arguments has."""
    norms = [FC_NORM.format(i=i) for i in range(len(arguments["taps"]))] if arguments["fc_norm"] else []
    return {**{name: name for name in norms}, **NAMES, **(QK_NORMS if arguments["qk_norm"] else {})}


def check_export(folder: str | Path, *, head: DraftHead | None = None) -> dict[str, Any]:
    """The manifest of a finished export whose files are still what it says, and which is of `head` if one is given.

    Raises UserError otherwise.
    """
    folder = Path(folder)
    manifest = read_manifest(folder, "export")
    for name, sha256 in manifest["files"].items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            raise UserError(f"{folder / name} is not the file that the manifest describes; export the head again.")
    if head is not None:
        settings, tensors = to_vllm(head, manifest["dtype"])
        if _read_config(folder) != settings or (folder / TENSORS).read_bytes() != _bytes(tensors):
            raise UserError(f"{folder} was not exported from the head as it is now; export it again.")
    return manifest


def _settings(arguments: Mapping[str, Any], draft_size: int, dtype: str) -> dict[str, Any]:
    """config.json. The number of taps is said twice where it is not vLLM's default of three."""
    sizes, taps = arguments["sizes"], list(arguments["taps"])
    if sizes["hidden_act"] != "silu":
        raise UserError(f"vLLM's EAGLE-3 block has silu only, not {sizes['hidden_act']}; train the head with silu.")
    return {
        **ARCHITECTURES[arguments["qk_norm"]],
        "num_hidden_layers": 1,
        **{key: sizes[key] for key in SIZES},
        "draft_vocab_size": draft_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        TAPS: taps,
        **({"num_aux_hidden_states": len(taps)} if len(taps) != 3 else {}),
        **{flag: arguments[flag] for flag in FLAGS},
        "dtype": dtype,
    }


def _bytes(tensors: dict[str, Tensor]) -> bytes:
    return save(tensors, metadata={"format": "pt"})


def _check_free(folder: Path) -> None:
    """An export is never written among files that are not its own."""
    known = {*FILES, MANIFEST}
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in known) if folder.is_dir() else []
    strangers = [name for name in strangers if not name.endswith(".tmp")]
    if strangers:
        raise UserError(f"{folder} holds {strangers[0]}, which is not part of an export; give an empty folder.")


def _check_taps(head: DraftHead) -> None:
    head.needs.check(head.arguments["sizes"]["num_target_layers"])
    if list(head.needs.taps) != list(head.arguments["taps"]):
        raise UserError(
            f"The head reads the taps {list(head.needs.taps)} but says {head.arguments['taps']}; load it again."
        )


def _check_names(tensors: Mapping[str, Tensor], known: Mapping[str, str]) -> None:
    if missing := [name for name in known if name not in tensors]:
        raise UserError(
            f"The weight {missing[0]} is missing; the server would load the rest in silence and accept no draft."
        )
    if unknown := [name for name in tensors if name not in known]:
        raise UserError(f"The weight {unknown[0]} has no place in vLLM's EAGLE-3 layout; the server would not use it.")


def _check_weights(state: Mapping[str, Tensor]) -> None:
    check_finite(state)
    for name, tensor in state.items():
        if not tensor.any():
            raise UserError(f"The weight {name} is zero throughout: it was neither loaded nor trained; train the head.")


def _check_vocab(vocab: DraftVocabulary, lm_head_WD: Tensor, vocab_size: int) -> None:
    ids = vocab.ids_W
    ascending = ids.dtype == torch.int64 and bool((ids[1:] > ids[:-1]).all())
    if not ascending or not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size or vocab.size != vocab_size:
        raise UserError(
            f"The draft vocabulary must be ascending, distinct ids below {vocab_size}; use DraftVocabulary.choose."
        )
    if len(ids) != len(lm_head_WD):
        raise UserError(
            f"The draft vocabulary has {len(ids)} tokens but lm_head has {len(lm_head_WD)} rows; train again."
        )


def _import_vocab(tensors: dict[str, Tensor], size: int, draft_size: int) -> DraftVocabulary:
    """The draft vocabulary out of the offsets, which are taken from `tensors`."""
    mappings = {name: tensors.pop(name) for name in MAPPINGS if name in tensors}
    if draft_size == size:
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
        raise UserError("The mappings d2t and t2d contradict each other (ids instead of offsets?); export them again.")
    return vocab


def _plain_name(name: str) -> str:
    """`midlayer.` is another accepted spelling of `layers.0.`."""
    return re.sub(r"^midlayer\.", "layers.0.", name)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder} holds no {CONFIG}; give a folder in vLLM's EAGLE-3 layout.")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download or export it again.") from error
    known = [kind["architectures"] for kind in ARCHITECTURES.values()]
    if config.get("architectures") not in known:
        raise UserError(
            f"{path} is of the architecture {config.get('architectures')}, not one of {known}; give an EAGLE-3 head."
        )
    if missing := [key for key in (*SIZES, "draft_vocab_size", TAPS) if key not in config]:
        raise UserError(f"{path} lacks {missing[0]}; add it as the head was trained.")
    return dict(config)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a folder in vLLM's EAGLE-3 layout.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}); download or export it again.") from error
