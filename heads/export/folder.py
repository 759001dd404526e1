"""Heads as folders that others load, and the check of a folder against the head it was made from.

What is refused stands in heads.export.layout. Numbers for the model card come in as text. This module knows neither
training nor evaluation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from heads.artifact import MANIFEST, UserError, read_manifest, sha256_file, write_atomic, write_manifest
from heads.base import DraftHead
from heads.checkpoint import class_path, head_name
from heads.export.card import Evidence, ServeFacts, render_card
from heads.export.format import Format
from heads.export.layout import CONFIG
from heads.export.readers import LLAMA_CPP, ORIGINAL, SGLANG, TENSORRT_LLM
from heads.export.vllm import SPECULATORS, VLLM
from heads.export.weights import to_files

CARD = "README.md"
FORMATS = {one.name: one for one in (VLLM, SPECULATORS, SGLANG, ORIGINAL, TENSORRT_LLM, LLAMA_CPP)}
LICENCE = (
    "A head starts from weights of its target and learns from the target's answers, so the target's licence and the "
    "terms of the prompts that were used apply to these weights."
)


def export_head(
    head: DraftHead,
    folder: str | Path,
    *,
    target_fingerprint: Mapping[str, str],
    target_path: str,
    layout: str = "vllm",
    dtype: str = "bfloat16",
    evidence: Evidence | None = None,
    licence: str = LICENCE,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the folder that a server takes as a draft, with a model card and a manifest, which is returned.

    head: attached to its target where the layout lends; target_path: the target as the server will be given it;
    layout: one of FORMATS; dtype: of the stored weights; evidence: measured numbers; config: the resolved config, for
    the manifest. Raises UserError on anything that the reader would misread.
    """
    folder, how = Path(folder), format_of(layout)
    old = check_free(folder)
    kind = how.layout_of(class_path(head))
    overrides = kind.target_overrides(head.arguments)
    gamma = evidence.gamma if evidence is not None else int(head.arguments["depth"])
    facts = ServeFacts(kind.method, target_path, str(folder), gamma, dtype, dict(target_fingerprint), overrides)
    serving = how.serving(facts)
    card = render_card(head_name(head), facts, serving, kind.facts(head.arguments, head.vocab), evidence, licence)
    files = {}
    for name, data in (*content(head, how, dtype, target_path), (CARD, card.encode())):
        write_atomic(folder / name, data)
        files[name] = hashlib.sha256(data).hexdigest()
    for name in old - files.keys():
        (folder / name).unlink(missing_ok=True)
    body = {
        "server": how.server,
        "layout": how.name,
        "method": kind.method,
        "target_overrides": overrides,
        "target_path": target_path,
        "serve": serving.command,
        "dtype": dtype,
        "target": dict(target_fingerprint),
        "head": {"name": head_name(head), "_target_": kind.head, "arguments": head.arguments},
        "files": files,
        "numbers": evidence.summary() if evidence is not None else None,
    }
    return write_manifest(folder, "export", body, config)


def content(head: DraftHead, how: Format, dtype: str, target_path: str) -> Iterator[tuple[str, bytes]]:
    """The files of a head without its card, the weights first. Raises UserError where they would be wrong."""
    layout = how.layout_of(class_path(head))
    settings, tensors = layout.write(head, dtype, target_path)
    yield from to_files(tensors, layout.file)
    yield CONFIG, (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()


def format_of(name: str) -> Format:
    """One of FORMATS. Raises UserError on another name."""
    if name not in FORMATS:
        raise UserError(f"The layout {name!r} is unknown; choose one of {', '.join(FORMATS)}.")
    return FORMATS[name]


def check_free(folder: Path) -> set[str]:
    """The files of an older export there. Raises UserError when there are others, among which one would be written."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    old = set(read_manifest(folder, "export")["files"]) if MANIFEST in names else set()
    # A run that was interrupted leaves the files of one layout and no manifest.
    half = old | {CONFIG, CARD, *(layout.file for how in FORMATS.values() for layout in how.layouts)}
    strangers = sorted(name for name in names - half - {MANIFEST} if not name.endswith(".tmp"))
    if strangers:
        raise UserError(f"{folder} holds {strangers[0]}, which is not part of an export; give an empty folder.")
    return old


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
        for name, data in content(head, format_of(manifest["layout"]), manifest["dtype"], manifest["target_path"]):
            if not (folder / name).is_file() or (folder / name).read_bytes() != data:
                raise UserError(f"{folder} was not exported from the head as it is now; export it again.")
    return manifest
