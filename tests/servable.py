"""A tiny random head of every kind that a server loads, with the whole vocabulary. Not a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from heads.base import DraftHead, TargetWeights
from heads.eagle import EagleHead
from heads.eagle3 import Eagle3Head
from heads.medusa import MedusaHead
from heads.mtp import MTPHead
from heads.vocab import DraftVocabulary
from tests.test_head_checkpoint import tiny_head

KINDS: dict[str, Callable[..., DraftHead]] = {
    "eagle": EagleHead,
    "eagle3": lambda **rest: Eagle3Head(taps=[2, 4, 5], **rest),
    "eagle3-qwen3": lambda **rest: Eagle3Head(taps=[2, 4, 5], qk_norm=True, **rest),
    "medusa": MedusaHead,
    "medusa-own": lambda **rest: MedusaHead(projection="own", blocks=2, **rest),
    "mtp": MTPHead,
    "mtp-ernie": lambda **rest: MTPHead(final_norm=False, **rest),
}
SERVABLE = tuple(KINDS)


def servable(kind: str, *, vocab: DraftVocabulary | None = None, softcap: float | None = None) -> DraftHead:
    """A head of this kind with random weights, attached to a random target of the same sizes."""
    sizes: dict[str, Any] = tiny_head().arguments["sizes"]
    size, width = sizes["vocab_size"], sizes["hidden_size"]
    torch.manual_seed(0)
    head = KINDS[kind](sizes=sizes, vocab=vocab or DraftVocabulary.identity(size))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter))
    weights = TargetWeights(torch.randn(size, width), torch.randn(size, width))
    head.attach(replace(weights, softcap=softcap))
    return head.eval()
