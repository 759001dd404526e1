"""The way back: a folder in one of the layouts, ours or somebody else's, to a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heads.artifact import MANIFEST, UserError, read_manifest
from heads.base import DraftHead
from heads.checkpoint import build_head, fill
from heads.eagle3 import default_taps
from heads.export.folder import FORMATS, format_of
from heads.export.layout import CONFIG, Layout, OfTarget, read_config
from heads.export.vllm_eagle import TAPS
from heads.export.weights import weights_file


def import_head(folder: str | Path, *, layout: str | None = None, of_target: OfTarget | None = None) -> DraftHead:
    """The head in a folder that `export_head` wrote, or somebody else in one of the layouts, in eval mode.

    layout: one of FORMATS, or None: found out; of_target: what the folder need not say. Loss, decay and depth are
    training's affair and come back only from our own exports. Raises UserError when something is missing, unknown, or
    contradicts the target or the manifest.
    """
    folder, of_target = Path(folder), of_target or OfTarget()
    config, manifest, kind = recognised(folder, layout)
    own = manifest["head"]["arguments"] if manifest else {}
    if of_target.sizes is None and "sizes" in own:
        of_target = OfTarget(own["sizes"], of_target.weights, of_target.say)
    if not layout and not manifest:
        config = settled(config, of_target)
    arguments, vocab, state = kind.read(folder, config, own, of_target)
    head = build_head(kind.head, arguments, vocab, source=str(folder))
    fill(head, state, source=str(folder))
    return head.eval()


def recognised(folder: str | Path, layout: str | None = None) -> tuple[dict[str, Any], dict[str, Any], Layout]:
    """The configuration of a folder, the manifest of an export of ours ({} where it is none), and the layout it is in:
    what can be known without the target. Raises UserError when it is in none, or has no weights."""
    folder = Path(folder)
    config = read_config(folder)
    weights_file(folder)
    manifest = read_manifest(folder, "export") if (folder / MANIFEST).is_file() else {}
    formats = [format_of(layout or manifest["layout"])] if layout or manifest else list(FORMATS.values())
    fitting = [kind for how in formats for kind in how.layouts if kind.fits(config)]
    if not fitting:
        kinds = ", ".join(sorted({kind.title for how in formats for kind in how.layouts}))
        raise UserError(
            f"{folder / CONFIG} is of the architecture {config.get('architectures')}; give a head in a layout for "
            f"{kinds}."
        )
    return config, manifest, fitting[0]


def settled(config: dict[str, Any], of_target: OfTarget) -> dict[str, Any]:
    """A configuration with its taps as boundaries at the top. In eagle_config they are boundaries to vLLM, but outputs
    of layers, one less, to SGLang and most trainers: UserError where the target does not tell which."""
    taps = dict(config.get("eagle_config") or {}).get(TAPS)
    if taps is None or TAPS in config:
        return config
    ours = list(default_taps(of_target.num_layers))
    if list(taps) == ours:
        return {**config, TAPS: ours}
    if [tap + 1 for tap in taps] != ours:
        raise UserError(
            f"The taps {taps} in eagle_config are boundaries to vLLM and outputs of layers, one less, to SGLang, and "
            f"here neither is the usual choice; say what the head was trained for: layout=vllm or layout=sglang."
        )
    of_target.say(f"its taps {taps} are outputs of layers, as SGLang counts them: the boundaries {ours}")
    return {**config, TAPS: ours}
