"""Feature stores merged, cut down, sent to object storage and fetched from there; features_dir is the store here.

python -m scripts.store name=both 'merge=[runs/code/features,runs/chat/features]'
python -m scripts.store name=small subset=runs/mine/features 'slices=[code]' count=1000
python -m scripts.store name=mine upload=s3://bucket/mine
python -m scripts.store name=mine download=s3://bucket/mine
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from scripts.common import script
from scripts.settings import check_value, plain

TOOLS = ("merge", "subset", "upload", "download")


def run(cfg: DictConfig) -> None:
    """Do the one thing that is asked for."""
    from heads.artifact import UserError, locked, read_manifest
    from training.remote import is_remote
    from training.store import FeatureStore

    tool = chosen(cfg)
    folder = Path(cfg.features_dir)
    if is_remote(cfg.features_dir):
        raise UserError(f"features_dir={cfg.features_dir} must be a folder here; the address goes to {tool}=.")
    print(f"store     {tool} {cfg[tool]}", flush=True)
    if tool == "upload":
        from training.remote import upload

        sent, there = upload(folder, cfg.upload)
        print(f"          {sent} shards sent, {there} were there; read them with features_dir={cfg.upload}", flush=True)
        return
    for source in {"merge": plain(cfg)["merge"], "subset": [cfg.subset]}.get(tool, []):
        read_manifest(source, "features")  # before a folder is made for what cannot be
    with locked(folder, "fills"):
        _fill(cfg, tool, folder)
    manifest = FeatureStore.open(folder).manifest
    print(f"          {manifest['documents']:,} answers, {manifest['tokens']:,} tokens in {folder}", flush=True)


def _fill(cfg: DictConfig, tool: str, folder: Path) -> None:
    from training.remote import download
    from training.store_tools import merge, subset

    if tool == "merge":
        merge(plain(cfg)["merge"], folder, config=plain(cfg))
    elif tool == "subset":
        subset(cfg.subset, folder, slices=plain(cfg)["slices"], count=cfg.count, config=plain(cfg))
    else:
        fetched, here = download(cfg.download, folder)
        print(f"          {fetched} shards fetched, {here} were here", flush=True)


def chosen(cfg: DictConfig) -> str:
    """Which tool is asked for. Raises UserError unless it is one, with values of the right types."""
    from heads.artifact import UserError

    values = plain(cfg)
    hints = {"merge": list[str], "slices": list[str], "count": int | None}
    for name in (*TOOLS, "slices", "count"):
        check_value(name, values[name], hints.get(name, str | None))
    if values["count"] is not None and values["count"] < 1:
        raise UserError(f"count={values['count']} keeps nothing; give at least 1, or null for all.")
    asked = [name for name in TOOLS if values[name]]
    if len(asked) != 1:
        raise UserError(f"scripts.store does one thing at a time; give one of {', '.join(f'{one}=' for one in TOOLS)}.")
    if asked != ["subset"] and (values["slices"] or values["count"] is not None):
        raise UserError("slices= and count= belong to subset=; leave them out.")
    return asked[0]


@script("store")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.store`."""
    run(cfg)


if __name__ == "__main__":
    main()
