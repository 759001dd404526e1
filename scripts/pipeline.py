"""Traffic to a head in one command: collect, train, evaluate, export. A finished stage is used as it is.

python -m scripts.pipeline experiment=demo
accelerate launch --num_processes 8 -m scripts.pipeline name=mine traffic=jsonl traffic.path=prompts.jsonl
python -m scripts.pipeline --multirun experiment=compare head=medusa,hydra_mlp,eagle,eagle3,mtp
python -m scripts.pipeline name=mine target=custom target.path=my/model traffic=jsonl traffic.path=prompts.jsonl
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from omegaconf import DictConfig, OmegaConf

from scripts import collect, compare, evaluate, export, train
from scripts.common import launched_peers, script
from scripts.settings import check_all, check_value, plain

TOGETHER = ("collect", "train")  # what all processes of a launch do; the others are the first one's
STAGES = {
    "collect": ("the target answers the prompts", collect.run),
    "train": ("the head learns from its states", train.run),
    "evaluate": ("the exact decoder measures the head", evaluate.run),
    "export": ("the head becomes a folder that a server loads", export.run),
    "compare": ("the head beside all that were measured so far", compare.beside),
}


def run(cfg: DictConfig) -> None:
    """All stages of the config, one after another."""
    started, peers = time.monotonic(), launched_peers(cfg)
    say = partial(print, flush=True) if peers.main else (lambda text: None)
    stages = plain(OmegaConf.masked_copy(cfg, "stages"))["stages"]  # the rest would import PyTorch
    check_stages(stages)
    say(f"Draftsmith: {cfg.name}, {len(stages)} stages, each resumable; artifacts go to {cfg.run_dir}")
    check_all(cfg)
    for place, name in enumerate(stages, start=1):
        title, stage = STAGES[name]
        say(f"\n[{(time.monotonic() - started) / 60:4.1f} min] {place}/{len(stages)} {title}")
        if name in TOGETHER:
            stage(cfg)
            continue
        with peers.step():
            if peers.main:
                stage(cfg)
    say(f"\n[{(time.monotonic() - started) / 60:4.1f} min] done")


def check_stages(stages: Sequence[str]) -> None:
    """Raises UserError when a stage is unknown."""
    from heads.artifact import UserError

    check_value("stages", stages, list[str])
    if not stages:
        raise UserError(f"stages=[] leaves nothing to do; choose among {', '.join(STAGES)}.")
    if unknown := [name for name in stages if name not in STAGES]:
        raise UserError(f"stages={list(stages)} names {unknown[0]!r}; choose among {', '.join(STAGES)}.")


@script(one_folder=True, launched=True)
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.pipeline`."""
    from training.processes import start_missing_processes

    start_missing_processes()
    run(cfg)


if __name__ == "__main__":
    main()
