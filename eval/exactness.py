"""The proofs on a real target: greedy texts token by token against transformers' `generate`, the law of sampled ones.

In fp32 and fp64 every token must be the same. In half precision one row and many rows go through different kernels,
so near-ties fall differently; such a divergence is reported with the logit gap at its first token, never hidden.
Sampled texts after a fixed prefix are compared with their exact probabilities (the tiny vocabulary is in `eval.law`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eval.decode import DecodeSettings, Proposer, Request, decode
from eval.law import Fit
from eval.sampling import Sampling
from heads.base import Committed, Draw, Proposal
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


WIDE = {"float64": 0.0, "float32": 1e-4}
"""Number formats in which texts must be identical, and the logit gap below which a divergence is a tie."""


@dataclass(frozen=True)
class Identity:
    """Greedy texts of one proposer in one number format against `generate(do_sample=False)`."""

    proposer: str
    dtype: str
    requests: int
    tokens: int
    divergences: Sequence[Divergence]

    @property
    def passed(self) -> bool | None:
        """None in half precision, where near-ties fall differently and are only reported."""
        if self.dtype not in WIDE:
            return None
        return all(d.gap is not None and d.gap < WIDE[self.dtype] for d in self.divergences)

    @property
    def gaps(self) -> str:
        """The logit gaps at the first divergences, largest first."""
        found = sorted((d.gap for d in self.divergences if d.gap is not None), reverse=True)
        unknown = len(self.divergences) - len(found)
        words = [f"{gap:.2g}" for gap in found[:5]] + (["…"] if len(found) > 5 else [])
        return ", ".join(words + ([f"{unknown} of another length"] if unknown else [])) or "none"


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
        with target.settings_aside():
            output_BN = target.model.generate(
                ids_BN,
                attention_mask=mask_BN,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=list(target.eos_token_ids) or None,
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


def identities(
    target: FrozenTarget, requests: Sequence[Request], proposers: Mapping[str, Proposer], settings: DecodeSettings
) -> Iterator[Identity]:
    """Every proposer's texts under `settings` against what the target writes greedily, one after the other."""
    truths = generate_texts(target, requests, settings.max_new_tokens, settings.rows)
    for name, proposer in proposers.items():
        texts = [trace.tokens for trace in decode(target, requests, proposer, settings)]
        found = divergences(target, requests, texts, truths)
        yield Identity(name, str(target.dtype).removeprefix("torch."), len(texts), sum(map(len, texts)), found)


def _until_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    for position, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: position + 1]
    return tokens


# ---- the law on a real target -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LawSettings:
    """copies: decodes of the same prefix; length: tokens of each, the first of which comes out of the prompt; rows:
    decoded together; the rest as in `DecodeSettings`. Few tokens may be possible (top-k), for all texts are listed."""

    sampling: Sampling
    verifier: str = "rejection"
    copies: int = 1500
    length: int = 3
    gamma: int = 3
    rows: int = 500
    seed: int = 0


def law_after(target: FrozenTarget, prefix: Sequence[int], proposer: Proposer | None, settings: LawSettings) -> Fit:
    """Decode the same prefix many times and compare the texts with their exact probabilities."""
    requests = [Request(f"copy-{number}", "all", tuple(prefix)) for number in range(settings.copies)]
    how = DecodeSettings(
        gamma=settings.gamma,
        sampling=settings.sampling,
        max_new_tokens=settings.length,
        rows=settings.rows,
        seed=settings.seed,
        verifier=settings.verifier,
    )
    texts = [trace.tokens for trace in decode(target, requests, proposer, how)]
    exact = exact_texts(target, prefix, settings.sampling, settings.length)
    return fit_texts(f"{settings.copies} texts of {settings.length} tokens", texts, exact)


def fit_texts(name: str, texts: Sequence[Sequence[int]], exact: Mapping[tuple[int, ...], float]) -> Fit:
    """How well sampled texts fit the probabilities of `exact_texts`."""
    seen: dict[tuple[int, ...], int] = {}
    for text in texts:
        seen[tuple(text)] = seen.get(tuple(text), 0) + 1
    every = [*exact, *(text for text in seen if text not in exact)]
    return Fit.of(
        name,
        torch.tensor([seen.get(text, 0) for text in every], dtype=torch.float64),
        torch.tensor([exact.get(text, 0.0) for text in every], dtype=torch.float64),
    )


@torch.inference_mode()
def exact_texts(
    target: FrozenTarget, prefix: Sequence[int], sampling: Sampling, length: int
) -> dict[tuple[int, ...], float]:
    """The probability of every text of `length` tokens after a prefix, or of fewer where it ends, by plain forwards."""
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    done: dict[tuple[int, ...], float] = {}
    for _ in range(length):
        following: dict[tuple[int, ...], float] = {}
        ids_BT = torch.tensor([[*prefix, *text] for text in growing], device=target.device)
        p_BV = sampling.probabilities(target.logits(target.forward(ids_BT).last_BTD[:, -1]), ids_BT)
        for (text, weight), p_V in zip(growing.items(), p_BV, strict=True):
            tokens = p_V.nonzero()[:, 0]
            for token, share in zip(tokens.tolist(), p_V[tokens].tolist(), strict=True):
                goal = done if token in target.eos_token_ids else following
                goal[(*text, token)] = weight * share
        growing = following
    return {**done, **growing}


class DamagedDraft:
    """A proposer with one of the mistakes of `eval.law.DAMAGES`, so that a proof can be seen to fail."""

    def __init__(self, proposer: Proposer, damage: str, vocab_size: int) -> None:
        self.proposer, self.needs = proposer, proposer.needs
        self.damage, self.vocab_size = damage, vocab_size

    def start(self, prompts: Sequence[Sequence[int]]) -> Any:
        return self.proposer.start(prompts)

    def commit(self, state: Any, committed: Committed) -> None:
        self.proposer.commit(state, committed)

    def propose(self, state: Any, depth: int, draw: Draw) -> Proposal:
        """What the proposer drafts, handed over wrongly."""
        if self.damage == "soft":
            return self.proposer.propose(state, depth, _best)
        proposal = self.proposer.propose(state, depth, draw)
        if self.damage == "stop":
            odd_BN = proposal.tokens_BN % 2
            return replace(proposal, count_B=proposal.count_B.minimum((1 - odd_BN).cumprod(1).sum(1)))
        if self.damage == "siblings" or proposal.probs_BNV is not None:
            even_BNV = torch.full((*proposal.tokens_BN.shape, self.vocab_size), 1 / self.vocab_size)
            return replace(proposal, probs_BNV=even_BNV.to(proposal.tokens_BN.device))
        return proposal


def _best(logits_BW: Tensor, **_: Any) -> tuple[Tensor, None]:
    return logits_BW.argmax(-1), None
