"""A trained Medusa head to Medusa-2: it and its target learn together, and the target is another one afterwards.

python -m scripts.medusa2 name=changed stage1=runs/mine medusa2.rank=16
python -m scripts.medusa2 name=changed stage1=runs/mine train.epochs=1 medusa2.head_weight=0.1
python -m scripts.medusa2 name=changed stage1=runs/mine target=custom target.path=my/model
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from scripts.common import load_target, open_tracker, script
from scripts.settings import build, check_node, check_value, generation_settings, plain, train_settings

if TYPE_CHECKING:
    from heads.base import DraftHead, TargetFeatures
    from heads.target import FrozenTarget
    from training.settings import TrainResult


def run(cfg: DictConfig) -> None:
    """Train into runs/<name>/adapter and runs/<name>/head, continuing from the last checkpoint."""
    from heads.artifact import locked

    _check(cfg)
    print(f"medusa2   {cfg.head_dir} and its target {cfg.target.path} learn together", flush=True)
    with locked(Path(cfg.run_dir) / "head", "trains into"):
        _train_both(cfg)


def _train_both(cfg: DictConfig) -> None:
    from scripts.train import keep_head
    from training.joint import MODIFIED, drift

    folder = Path(cfg.run_dir)
    head, result, held_out, rounding = _trained(cfg, folder)
    print("          the adapted target against the original, on held-out prompts", flush=True)
    adapted = load_target(OmegaConf.merge(cfg, {"target": {"adapter": str(folder / "adapter")}}))
    found = drift(adapted, held_out) | {"of_rounding_alone": rounding}
    parameters = sum(parameter.numel() for parameter in head.parameters())
    keep_head(cfg, head, adapted.fingerprint, result, {"parameters": parameters, "drift": found})
    print(
        f"          mean KL {found['mean_kl']:.4f}, the same greedy choice at {found['greedy_agreement']:.1%} of "
        f"{found['positions']:,} tokens of {found['documents']} answers (rounding alone: {rounding['mean_kl']:.4f}, "
        f"{rounding['greedy_agreement']:.1%})\n"
        f"{MODIFIED}; from here on: target.adapter={folder / 'adapter'} traffic_dir={cfg.traffic_dir}",
        flush=True,
    )


def _check(cfg: DictConfig) -> None:
    """Refuse whatever can be refused before the target is loaded."""
    from heads.artifact import UserError, read_manifest
    from training.joint import check_strength

    check_value("stage1", cfg.stage1, str)
    check_node(cfg, "medusa2")
    check_strength(cfg.medusa2.rank, cfg.medusa2.alpha, cfg.medusa2.head_weight)
    train_settings(cfg)
    generation_settings(cfg)
    if cfg.train.eval_every is not None:
        raise UserError("train.eval_every measures a head against a target that stays; set train.eval_every=null.")
    if cfg.train.lora is not None:
        raise UserError("train.lora adapts a head alone; set train.lora=null, and medusa2.rank= for the target's own.")
    if cfg.medusa2.held_out < 1:
        raise UserError(f"medusa2.held_out={cfg.medusa2.held_out} compares nothing; give at least 1.")
    if cfg.target.adapter is not None:
        raise UserError(
            f"target.adapter={cfg.target.adapter} is given, but Medusa-2 makes an adapter itself; merge yours into "
            f"target.path= first."
        )
    if cfg.target.gguf_file is not None or str(cfg.target.get("path", "")).endswith(".gguf"):
        raise UserError(
            "A GGUF file cannot be adapted, as it is served quantised; give a folder or Hub id as target.path=."
        )
    if Path(cfg.head_dir).resolve() == (Path(cfg.run_dir) / "head").resolve():
        raise UserError(f"name={cfg.name} would overwrite the head of {cfg.stage1}; give this run another name=.")
    name = read_manifest(cfg.head_dir, "head")["name"]
    if name != "medusa":
        raise UserError(f"{cfg.head_dir} is of the kind {name}, and only medusa is trained with its target.")


def _trained(cfg: DictConfig, folder: Path) -> tuple[DraftHead, TrainResult, list[TargetFeatures], dict[str, Any]]:
    """The head and its training, what the original answers to held-out prompts, and how far it is from itself when it
    reads them in one pass; the adapter is in its folder."""
    import torch

    from heads.checkpoint import load_head, read_facts
    from scripts.train import check_origin, open_features
    from training.joint import drift, save_adapter
    from training.loop import train

    store = open_features(cfg)
    target = load_target(cfg)
    check_origin(cfg, store, target)
    head = load_head(cfg.head_dir, target=target)
    held_out = _answers(cfg, target)
    rounding = drift(target, held_out)
    torch.manual_seed(cfg.seed)
    made = build(cfg, "medusa2", _partial_=True)
    joint = made(head=head, target=target)
    parameters = sum(one.numel() for one in joint.parameters() if one.requires_grad)
    print(f"          {parameters / 1e6:.1f} M parameters learn, those of the head included", flush=True)
    stage1 = {
        "features": store.identity,
        "target": target.fingerprint,
        "stage1": read_facts(cfg.head_dir)["sha256"],
    }
    result = train(
        joint,
        store.select(head.needs),
        train_settings(cfg),
        folder=folder / "head",
        tracker=open_tracker(cfg, folder / "head"),
        identity=stage1,
        stream=sys.stderr,
    )
    save_adapter(joint, folder / "adapter", base=cfg.target.path, original=target.fingerprint, config=plain(cfg))
    return head, result, held_out, rounding


def _answers(cfg: DictConfig, target: FrozenTarget) -> list[TargetFeatures]:
    """What the original target writes greedily after held-out prompts, with its states."""
    from dataclasses import replace

    from eval.suite import spread
    from heads.artifact import UserError
    from scripts.prompts import held_out_requests
    from training.regenerate import answer_batch
    from training.states import as_features

    how = replace(generation_settings(cfg), temperature=0.0, top_p=1.0)
    prompts = [request.prompt for request in spread(held_out_requests(cfg), cfg.medusa2.held_out)]
    if not prompts:
        raise UserError(f"{cfg.traffic_dir} holds no held-out prompt that fits; raise generation.max_prompt_tokens.")
    batches = [prompts[begin : begin + how.batch_size] for begin in range(0, len(prompts), how.batch_size)]
    answers = [answer_batch(target, batch, taps=(), generation=how, seed=how.seed) for batch in batches]
    return [as_features(answer) for batch in answers for answer in batch]


@script("medusa2")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.medusa2`."""
    run(cfg)


if __name__ == "__main__":
    main()
