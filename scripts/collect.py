"""Traffic to features: split the prompts, let the target answer those for training, keep its states.

python -m scripts.collect target=custom target.path=my/model traffic=jsonl traffic.path=prompts.jsonl name=mine
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from scripts.common import head_needs, load_target, script
from scripts.settings import build, generation_settings, plain

if TYPE_CHECKING:
    from heads.base import FeatureNeeds
    from heads.target import FrozenTarget


def run(cfg: DictConfig) -> None:
    """Fill traffic_dir and features_dir; what is finished is used as it is."""
    from training.collect import collect
    from training.traffic import load_traffic, write_traffic

    features = Path(cfg.features_dir)
    print(f"traffic   reading the prompts into {cfg.traffic_dir}", flush=True)
    write_traffic(cfg.traffic_dir, build(cfg, "traffic"), config=plain(cfg))
    traffic = load_traffic(cfg.traffic_dir)
    print(f"          {len(traffic.train)} conversations to train on, {len(traffic.held_out)} held out", flush=True)
    print(f"target    loading {cfg.target.path}", flush=True)
    target = load_target(cfg)
    print(f"features  the target answers in {cfg.target.dtype}; answers and states come from one pass", flush=True)
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
