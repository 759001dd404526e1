"""Traffic to features: split the prompts, let the target answer those for training, keep its states.

python -m scripts.collect target=custom target.path=my/model traffic=jsonl traffic.path=prompts.jsonl name=mine
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from scripts.common import head_needs, load_target, script
from scripts.settings import build, generation_settings, plain


def run(cfg: DictConfig) -> None:
    """Fill runs/<name>/traffic and runs/<name>/features; what is finished is used as it is."""
    from training.collect import collect
    from training.traffic import load_traffic, write_traffic

    folder = Path(cfg.run_dir)
    print(f"traffic   reading the prompts into {folder / 'traffic'}", flush=True)
    write_traffic(folder / "traffic", build(cfg, "traffic"), config=plain(cfg))
    traffic = load_traffic(folder / "traffic")
    print(f"          {len(traffic.train)} conversations to train on, {len(traffic.held_out)} held out", flush=True)
    print(f"target    loading {cfg.target.path}", flush=True)
    target = load_target(cfg)
    print(f"features  the target answers in {cfg.target.dtype}; answers and states come from one pass", flush=True)
    manifest = collect(
        target=target,
        conversations=traffic.train,
        folder=folder / "features",
        needs=head_needs(cfg, target),
        generation=generation_settings(cfg),
        config=plain(cfg),
    )
    print(
        f"          {manifest['documents']} answers, {manifest['supervised_tokens']:,} tokens to learn from "
        f"({manifest['tokens']:,} with prompts) in {folder / 'features'}",
        flush=True,
    )


@script()
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.collect`."""
    run(cfg)


if __name__ == "__main__":
    main()
