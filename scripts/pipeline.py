"""Traffic to a head in one command: collect, train, evaluate, export. A finished stage is used as it is.

python -m scripts.pipeline experiment=demo
python -m scripts.pipeline name=mine target=custom target.path=my/model traffic=jsonl traffic.path=prompts.jsonl
"""

from __future__ import annotations

import time

from omegaconf import DictConfig

from scripts import collect, evaluate, export, train
from scripts.common import script
from scripts.settings import check_all

STAGES = (
    ("1/4 the target answers the prompts", collect.run),
    ("2/4 the head learns from its states", train.run),
    ("3/4 the exact decoder measures the head", evaluate.run),
    ("4/4 the head becomes a folder that a server loads", export.run),
)


def run(cfg: DictConfig) -> None:
    """All stages, one after another."""
    started = time.monotonic()
    print(f"Draftsmith: {cfg.name}, four stages, each resumable; artifacts go to {cfg.run_dir}", flush=True)
    check_all(cfg)
    for title, stage in STAGES:
        print(f"\n[{(time.monotonic() - started) / 60:4.1f} min] {title}", flush=True)
        stage(cfg)
    print(f"\n[{(time.monotonic() - started) / 60:4.1f} min] done", flush=True)


@script()
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.pipeline`."""
    run(cfg)


if __name__ == "__main__":
    main()
