"""Traffic to features: split the prompts, let the target answer those for training, keep its states.

python -m scripts.collect target=custom target.path=my/model traffic=jsonl traffic.path=prompts.jsonl name=mine
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import head_needs, load_target, script
from scripts.ranges import check_target
from scripts.settings import build, generation_settings, plain

if TYPE_CHECKING:
    from heads.base import FeatureNeeds
    from heads.target import FrozenTarget


def run(cfg: DictConfig) -> None:
    """Fill traffic_dir and features_dir; what is finished is used as it is."""
    from training.traffic import write_traffic

    print(f"traffic   reading the prompts into {cfg.traffic_dir}", flush=True)
    show_account(write_traffic(cfg.traffic_dir, build(cfg, "traffic"), config=plain(cfg)), cfg.traffic_dir)
    answer(cfg)


def answer(cfg: DictConfig) -> None:
    """Fill features_dir out of traffic_dir."""
    from heads.artifact import locked
    from training.collect import collect
    from training.traffic import load_traffic

    features, traffic = Path(cfg.features_dir), load_traffic(cfg.traffic_dir)
    print(f"          {len(traffic.train)} conversations to train on, {len(traffic.held_out)} held out", flush=True)
    print(f"target    loading {cfg.target.path}", flush=True)
    target = load_target(cfg)
    check_target(cfg, target)
    print(f"features  the target answers in {cfg.target.dtype}; answers and states come from one pass", flush=True)
    with locked(features, "collects into"):
        manifest = collect(
            target=target,
            conversations=traffic.train,
            folder=features,
            needs=collected_needs(cfg, target),
            generation=generation_settings(cfg),
            config=plain(cfg),
        )
    print(
        f"          {manifest['documents']} answers, {manifest['supervised_tokens']:,} tokens to learn from "
        f"({manifest['tokens']:,} with prompts) in {features}",
        flush=True,
    )


def show_account(manifest: Mapping[str, Any], folder: str) -> None:
    """What became of the rows: a line for the formats that were chosen, and a table where not all were kept."""
    from rich.console import Console
    from rich.table import Column, Table

    rows, formats = manifest["rows"], manifest["reader"].get("formats", {})
    for name, files in formats.items():
        print(f"          {files} {'file' if files == 1 else 'files'} read as {name}", flush=True)
    if rows["kept"] == rows["read"]:
        return
    table = Table(Column(), Column(justify="right"), box=None, padding=(0, 0, 0, 10), show_header=False)
    table.add_row("read", f"{rows['read']:,}")
    table.add_row("kept", f"{rows['kept']:,}")
    for reason, count in manifest["quarantined"].items():
        table.add_row(f"set aside: {reason}", f"{count:,}")
    if rows["over_limit"]:
        table.add_row("over the limit of their slice", f"{rows['over_limit']:,}")
    Console().print(table)
    if rows["quarantined"]:
        print(f"          what was set aside is in {Path(folder) / 'quarantine.jsonl'}", flush=True)


def collected_needs(cfg: DictConfig, target: FrozenTarget) -> FeatureNeeds:
    """What the head of the config needs, and the further taps of collect.taps."""
    from dataclasses import replace

    needs: FeatureNeeds = head_needs(cfg, target)
    return replace(needs, taps=tuple(sorted({*needs.taps, *cfg.collect.taps})))


@script()
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.collect`."""
    run(cfg)


if __name__ == "__main__":
    main()
