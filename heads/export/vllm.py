"""Heads as folders that vLLM 0.32 loads, one layout for each kind of head, and the way back.

The kinds are in the files beside this one; heads.export.layout says what is refused. Numbers for the model card come
in as text. This module knows neither training nor evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from heads.artifact import MANIFEST, UserError, read_manifest, sha256_file, write_atomic, write_json, write_manifest
from heads.base import DraftHead
from heads.checkpoint import build_head, class_path, fill, head_name
from heads.export.card import Evidence, ServeFacts, render_card
from heads.export.layout import CARD, CONFIG, FILES, TENSORS, Layout, check_free, read_config, to_bytes
from heads.export.vllm_eagle import Eagle3Layout, EagleLayout
from heads.export.vllm_medusa import MedusaLayout
from heads.export.vllm_mtp import MTPLayout

LAYOUTS: tuple[Layout, ...] = (Eagle3Layout(), EagleLayout(), MedusaLayout(), MTPLayout())
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

    head: attached to its target where `layout_of(…).lends`; target_path: the target as the server will be given it;
    dtype: of the stored weights; evidence: measured numbers; config: the resolved config, for the manifest. Raises
    UserError on anything that the server would misread.
    """
    folder = Path(folder)
    check_free(folder)
    layout = layout_of(class_path(head))
    settings, tensors = layout.write(head, dtype)
    overrides = layout.target_overrides(head.arguments)
    gamma = evidence.gamma if evidence is not None else int(head.arguments["depth"])
    facts = ServeFacts(layout.method, target_path, str(folder), gamma, dtype, dict(target_fingerprint), overrides)
    card = render_card(head_name(head), facts, layout.facts(head.arguments, head.vocab), evidence, licence)
    write_atomic(folder / TENSORS, to_bytes(tensors))
    write_atomic(folder / CARD, card)
    write_json(folder / CONFIG, settings)
    body = {
        "server": "vllm",
        "method": layout.method,
        "target_overrides": overrides,
        "serve": facts.command(),
        "dtype": dtype,
        "target": dict(target_fingerprint),
        "head": {"name": head_name(head), "_target_": layout.head, "arguments": head.arguments},
        "files": {name: sha256_file(folder / name) for name in FILES},
        "numbers": evidence.summary() if evidence is not None else None,
    }
    return write_manifest(folder, "export", body, config)


def layout_of(head: str) -> Layout:
    """The layout for heads of this class path. Raises UserError when vLLM has none."""
    for layout in LAYOUTS:
        if layout.head == head:
            return layout
    kinds = ", ".join(layout.head for layout in LAYOUTS)
    raise UserError(f"vLLM loads no head of the kind {head}; export one of {kinds}, or leave export out of stages=[…].")


def to_vllm(head: DraftHead, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of a head as vLLM names them. Raises UserError where they would be wrong."""
    return layout_of(class_path(head)).write(head, dtype)


def import_vllm(folder: str | Path, *, num_target_layers: int | None = None) -> DraftHead:
    """The head in a folder that `export_vllm` wrote, or somebody else in one of its layouts.

    num_target_layers: layers of the target; our own exports know it. Loss, decay and depth are training's affair and
    come back only from our own exports. Raises UserError when something is missing or unknown.
    """
    folder = Path(folder)
    config = read_config(folder)
    fitting = [layout for layout in LAYOUTS if layout.fits(config)]
    if not fitting:
        kinds = ", ".join(layout.title for layout in LAYOUTS)
        raise UserError(
            f"{folder / CONFIG} is of the architecture {config.get('architectures')}; give a head of vLLM's layouts "
            f"for {kinds}."
        )
    layout = fitting[0]
    own = read_manifest(folder, "export")["head"]["arguments"] if (folder / MANIFEST).is_file() else {}
    if num_target_layers is None:
        num_target_layers = own.get("sizes", {}).get("num_target_layers")
    if num_target_layers is None:
        raise UserError(f"{folder} does not say how many layers its target has; pass num_target_layers.")
    arguments, vocab, state = layout.read(folder, config, own, num_target_layers)
    head = build_head(layout.head, arguments, vocab, source=str(folder))
    fill(head, state, source=str(folder / TENSORS))
    return head.eval()


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
        if read_config(folder) != settings or (folder / TENSORS).read_bytes() != to_bytes(tensors):
            raise UserError(f"{folder} was not exported from the head as it is now; export it again.")
    return manifest
