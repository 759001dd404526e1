"""One training process of `scripts.bench`, started by it: a head on made-up features, a turn at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def prepare(request: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], dict[str, Any]]]:
    """The head of request["config"], after two steps; see training.turns for what is told."""
    import torch
    from omegaconf import OmegaConf

    from heads.vocab import DraftVocabulary
    from scripts.common import build_head, load_target
    from scripts.settings import build
    from training.bench import StepBench, made_up_features
    from training.turns import forget_peak, memory

    torch.set_num_threads(request["threads"])
    cfg = OmegaConf.create(request["config"])
    target = load_target(cfg)
    head = build_head(cfg, target, DraftVocabulary(torch.tensor(request["vocabulary"]), target.vocab_size))
    target.drop_layers()  # only what the head borrows is needed; the memory is the training's own
    head.attach(target.weights)
    lengths, size = request["lengths"], target.hidden_size
    features = made_up_features(head, hidden_size=size, lengths=lengths, prompt_share=0.0).to(target.device)
    loaded, _ = memory(target.device)
    forget_peak(target.device)
    bench = StepBench(head, features, build(cfg, "optim"), bf16=cfg.train.mixed_precision == "bf16")
    trained = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)

    def turn(steps: int) -> dict[str, Any]:
        seconds, share = bench.turn(steps)
        most = memory(target.device)[1]
        return {"seconds": seconds, "positions": steps * sum(lengths), "memory": most, "share": share}

    return {"loaded": loaded, "trained": trained, "flops": bench.flops}, turn


if __name__ == "__main__":
    from training.turns import serve

    serve(prepare)
