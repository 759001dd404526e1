"""A folder in a server's layout, ours or somebody else's, to a head of this project; or only the check of one.

    python -m scripts.import_head name=theirs from=downloaded/eagle3 target=custom target.path=my/model
    python -m scripts.import_head from=runs/demo/export/vllm check=true    # exit code 2 where it is not of this target
    python -m scripts.import_head name=theirs from=org/head layout=sglang

What comes out is runs/<name>/head: evaluate it, compare it, export it in another layout, or train it on with
train.init_from=runs/<name>/head.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from scripts.common import load_target, script
from scripts.settings import check_value, plain

if TYPE_CHECKING:
    from heads.base import DraftHead
    from heads.target import FrozenTarget


def run(cfg: DictConfig) -> None:
    """Write runs/<name>/head out of the folder, unless check=true."""
    from heads.artifact import MANIFEST, UserError, read_manifest, write_manifest
    from heads.checkpoint import check_target, class_path, head_name, save_head
    from heads.export.folder import check_export, format_of
    from heads.export.imported import recognised

    if OmegaConf.is_missing(cfg, "from"):
        raise UserError("import_head needs from=<folder or Hub id> of a head in a server's layout.")
    for name, hint in {"from": str, "layout": str | None, "check": bool}.items():
        check_value(name, cfg[name], hint)
    if cfg.layout is not None:
        format_of(cfg.layout)
    source, folder = local(str(cfg["from"])), Path(cfg.run_dir) / "head"
    origin = {"from": str(cfg["from"]), "layout": cfg.layout}
    if not cfg.check and folder.is_dir() and any(folder.iterdir()):
        if (folder / MANIFEST).is_file() and read_manifest(folder, "head").get("imported") == origin:
            print(f"import    {folder} was imported from there before and is used as it is", flush=True)
            return
        raise UserError(f"{folder} holds another head already; import under another name=.")
    recognised(source, cfg.layout)  # before the target is loaded
    manifest = check_export(source) if (source / MANIFEST).is_file() else None
    print(f"import    {source}", flush=True)
    target = load_target(cfg, "float32")
    if manifest is not None:
        check_target(manifest["target"], target.fingerprint, what=f"The head in {source}")
    head = read(cfg, source, target)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    kind, vocab = class_path(head), head.vocab
    _say(f"{kind}, {parameters / 1e6:.1f} M parameters, drafts from {len(vocab.ids_W):,} of {vocab.size:,} tokens")
    if cfg.check:
        _say(f"sound, and of the target {target.fingerprint['name']}")
        return
    saved = save_head(head, folder, target_fingerprint=target.fingerprint, extra={"imported": origin})
    numbers = {"parameters": parameters, "draft_vocabulary": {"size": len(vocab.ids_W)}}
    body = {**saved, "name": head_name(head), "target": target.fingerprint, "imported": origin, **numbers}
    write_manifest(folder, "head", body, config=plain(cfg))
    _say(f"it is in {folder}; measured on the traffic of a run, with target= as here, by:")
    _say(f"python -m scripts.evaluate run_dir={cfg.run_dir} traffic_dir=runs/…/traffic target=…")


def read(cfg: DictConfig, source: Path, target: FrozenTarget) -> DraftHead:
    """The head, compared with the target as far as it says anything of it."""
    from heads.export.imported import import_head
    from heads.export.layout import OfTarget
    from heads.layers import BlockSizes

    sizes = asdict(BlockSizes.of(target.config, target.vocab_size))
    head = import_head(source, layout=cfg.layout, of_target=OfTarget(sizes, target.weights, _say))
    own = head.arguments.get("sizes", sizes)
    for key in ("rope_parameters", "rms_norm_eps"):
        if own[key] != sizes[key]:
            _say(f"note: its {key} is {own[key]}, the target's {sizes[key]}; it is kept, as servers keep it")
    return head


def local(source: str) -> Path:
    """A folder as it is, a Hub id as the folder it was downloaded to. Raises UserError where there is neither."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    from heads.artifact import UserError

    if source and Path(source).is_dir():
        return Path(source)
    refusal = f"from={source} is neither a folder nor a repository on the Hub that can be reached; correct it."
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise UserError(refusal)
    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.pt"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(refusal) from error


def _say(text: str) -> None:
    print(f"{'':10}{text}", flush=True)


@script("import_head")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.import_head`."""
    run(cfg)


if __name__ == "__main__":
    main()
