"""The proof that a text is the target's own: token by token against transformers' `generate`.

In fp32 and fp64 every token must be the same. In half precision one row and many rows go through different kernels,
so near-ties fall differently; such a divergence is reported with the logit gap at its first token, never hidden.
This module does not know how the text under test was decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eval.decode import Request
from heads.target import FrozenTarget


@dataclass(frozen=True)
class Divergence:
    """The first place where a text leaves the target's own.

    position: index in the generated text; token: what was decoded; other: what `generate` wrote (None past its end);
    gap: how far the target's logits of the two tokens are apart there, in the target's own dtype, one row at a time.
    """

    request: str
    position: int
    token: int | None
    other: int | None
    gap: float | None


@torch.inference_mode()
def generate_texts(
    target: FrozenTarget,
    requests: Sequence[Request],
    max_new_tokens: int,
    rows: int,
    on_done: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """What `generate(do_sample=False)` writes after each prompt, end token included; `rows` prompts at a time.

    on_done is told the length of each text.
    """
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt))
    texts: dict[int, list[int]] = {}
    for first in range(0, len(requests), rows):
        chosen = order[first : first + rows]
        batch = [requests[index] for index in chosen]
        width = max(len(request.prompt) for request in batch)
        ids_BN = torch.zeros(len(batch), width, dtype=torch.long, device=target.device)
        mask_BN = torch.zeros_like(ids_BN)
        for row, request in enumerate(batch):
            ids_BN[row, width - len(request.prompt) :] = torch.tensor(request.prompt, device=target.device)
            mask_BN[row, width - len(request.prompt) :] = 1
        output_BN = target.model.generate(
            ids_BN,
            attention_mask=mask_BN,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=target.eos_token_ids[0] if target.eos_token_ids else 0,
        )
        for index, tokens in zip(chosen, output_BN[:, width:].tolist(), strict=True):
            texts[index] = _until_end(tokens, target.eos_token_ids)
            if on_done is not None:
                on_done(len(texts[index]))
    return [texts[index] for index in range(len(requests))]


def divergences(
    target: FrozenTarget, requests: Sequence[Request], texts: Sequence[list[int]], truths: Sequence[list[int]]
) -> list[Divergence]:
    """Where each text leaves its truth; an empty list is the proof of identity."""
    found = []
    for request, text, truth in zip(requests, texts, truths, strict=True):
        if text == truth:
            continue
        shared = min(len(text), len(truth))
        position = next((n for n in range(shared) if text[n] != truth[n]), shared)
        token = text[position] if position < len(text) else None
        other = truth[position] if position < len(truth) else None
        gap = None
        if token is not None and other is not None:
            ids = torch.tensor([[*request.prompt, *truth[:position]]], device=target.device)
            logits_V = target.logits(target.forward(ids).last_BTD[0, -1]).float()
            gap = abs(logits_V[token] - logits_V[other]).item()
        found.append(Divergence(request.request_id, position, token, other, gap))
    return found


def _until_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    for position, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: position + 1]
    return tokens
