"""The one decoding loop: propose, one forward of the target, verify, commit. Plain decoding has no proposals.

It joins a target, a proposer and a rule of `eval.verify`, for a batch of requests that accept at different speeds.
It does not know which head or baseline proposes, nor any number computed from the traces it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from eval.trace import RequestTrace, Round
from eval.verify import Sampling, Verdict, verify_greedy, verify_sampled
from heads.artifact import UserError
from heads.base import Committed, Draw, FeatureNeeds, Proposal
from heads.cache import BlockCache
from heads.target import FrozenTarget, TargetOutput


class Proposer(Protocol):
    """What the loop needs of a draft: heads fulfil it as they are (see heads.base.DraftHead)."""

    needs: FeatureNeeds

    def start(self, prompts: Sequence[Sequence[int]]) -> Any: ...

    def commit(self, state: Any, committed: Committed) -> None: ...

    def propose(self, state: Any, depth: int, draw: Draw) -> Proposal: ...


@dataclass(frozen=True)
class Request:
    """One prompt to decode; `slice` groups requests in reports."""

    request_id: str
    slice: str
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class DecodeSettings:
    """gamma: draft length γ, 0 decodes plainly; max_new_tokens: length limit; rows: requests decoded together; seed:
    of all random draws, so that the same call gives the same text."""

    gamma: int = 4
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    rows: int = 1
    seed: int = 0


def decode(
    target: FrozenTarget,
    requests: Sequence[Request],
    proposer: Proposer | None,
    settings: DecodeSettings,
    on_done: Callable[[RequestTrace], None] | None = None,
) -> list[RequestTrace]:
    """Decode every request and return its trace, in the order given.

    on_done is called with each finished request. Raises UserError when a request leaves no room in the context.
    """
    for request in requests:
        _check(request, target, settings)
    # Rows of a batch are padded to the longest prompt: neighbours of like length waste nothing.
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt))
    traces: dict[int, RequestTrace] = {}
    for first in range(0, len(requests), settings.rows):
        chosen = order[first : first + settings.rows]
        batch = [requests[index] for index in chosen]
        found = _Batch(target, batch, proposer, replace(settings, seed=settings.seed + first)).run()
        for index, trace in zip(chosen, found, strict=True):
            traces[index] = trace
            if on_done is not None:
                on_done(trace)
    return [traces[index] for index in range(len(requests))]


def _check(request: Request, target: FrozenTarget, settings: DecodeSettings) -> None:
    needed = len(request.prompt) + settings.max_new_tokens + settings.gamma
    if not request.prompt:
        raise UserError(f"Request {request.request_id} has an empty prompt; give it at least one token.")
    if needed > target.max_length:
        raise UserError(
            f"Request {request.request_id} needs {needed} positions (prompt {len(request.prompt)}, "
            f"{settings.max_new_tokens} new, γ {settings.gamma}) but the target has {target.max_length}; "
            f"shorten the prompt or lower eval.max_new_tokens."
        )


class _Row:
    """The text of one request while it grows."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.rounds: list[Round] = []
        self.finish: str | None = None
        self.seconds = 0.0


class _Batch:
    """Requests that share each forward of the target. A finished row idles until the others have finished."""

    def __init__(
        self, target: FrozenTarget, requests: Sequence[Request], proposer: Proposer | None, settings: DecodeSettings
    ) -> None:
        self.target, self.settings = target, settings
        self.proposer = proposer if settings.gamma > 0 else None
        self.taps = self.proposer.needs.taps if self.proposer is not None else ()
        self.rows = [_Row(request) for request in requests]
        self.cache = BlockCache(len(requests), target.device)
        self.prompt_seconds = 0.0
        self.generator = torch.Generator(target.device).manual_seed(settings.seed)

    @torch.inference_mode()
    def run(self) -> list[RequestTrace]:
        started = time.perf_counter()
        prompts = [row.request.prompt for row in self.rows]
        state = self.proposer.start(prompts) if self.proposer is not None else None
        self._prefill(prompts, state)
        self.prompt_seconds = time.perf_counter() - started
        while any(row.finish is None for row in self.rows):
            self._round(state)
            elapsed = time.perf_counter() - started
            for row in self.rows:
                if row.finish is not None and not row.seconds:
                    row.seconds = elapsed
        return [self._trace(row, time.perf_counter() - started) for row in self.rows]

    def _prefill(self, prompts: Sequence[Sequence[int]], state: Any) -> None:
        """Run the prompts and settle the first token, which needs no draft."""
        counts = [len(prompt) for prompt in prompts]
        ids_BN = torch.zeros(len(prompts), max(counts), dtype=torch.long, device=self.target.device)
        for row, prompt in enumerate(prompts):
            ids_BN[row, : counts[row]] = torch.tensor(prompt, device=ids_BN.device)
        output = self.target.forward(ids_BN, cache=self.cache, counts=counts, taps=self.taps)
        self.cache.keep(counts)
        count_B = torch.tensor(counts, device=ids_BN.device)
        last_B1D = output.last_BTD[torch.arange(len(counts), device=ids_BN.device), count_B - 1][:, None]
        empty_B0 = ids_BN.new_zeros(len(counts), 0)
        verdict = self._verify(last_B1D, Proposal.chain(empty_B0))
        for row, token in zip(self.rows, verdict.next_B.tolist(), strict=True):
            self._extend(row, [token])
        if self.proposer is not None:
            next_BN = ids_BN.roll(-1, 1)
            next_BN[torch.arange(len(counts), device=ids_BN.device), count_B - 1] = verdict.next_B
            self.proposer.commit(state, Committed(next_BN, output.taps_BTE, output.last_BTD, count_B))

    def _round(self, state: Any) -> None:
        """One proposal, one forward of the target over it, and what follows for every row."""
        roots_B1 = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self.target.device)
        if self.proposer is None:
            proposal = Proposal.chain(roots_B1[:, :0])
        else:
            proposal = self.proposer.propose(state, self.settings.gamma, self._draw)
        block_BN = torch.cat([roots_B1, proposal.tokens_BN], dim=1)
        counts = [1 + count for count in proposal.count_B.tolist()]
        output = self.target.forward(block_BN, cache=self.cache, counts=counts, taps=self.taps)
        verdict = self._verify(output.last_BTD, proposal)
        kept = [1 + count for count in verdict.accepted_B.tolist()]
        self.cache.keep(kept)
        if self.proposer is not None:
            self.proposer.commit(state, _committed(block_BN, output, verdict, max(kept)))
        for index, row in enumerate(self.rows):
            if row.finish is None:
                drafted = proposal.tokens_BN[index, : kept[index] - 1].tolist()
                self._settle(row, int(proposal.count_B[index]), drafted, int(verdict.next_B[index]), verdict, index)

    def _settle(self, row: _Row, proposed: int, drafted: list[int], added: int, verdict: Verdict, index: int) -> None:
        """Add a round's tokens to a row's text, up to the end of text or the length limit."""
        kept = self._extend(row, [*drafted, added])
        cut = kept <= len(drafted)
        accepted = min(kept, len(drafted))
        examined = accepted + int(not cut and accepted < proposed)
        beta = tuple(verdict.beta_BN[index, :examined].tolist()) if verdict.beta_BN is not None else ()
        row.rounds.append(Round(proposed, accepted, cut, beta, len(drafted) if cut else None))

    def _extend(self, row: _Row, tokens: Sequence[int]) -> int:
        """Append tokens until the text ends; returns how many were appended."""
        for count, token in enumerate(tokens, start=1):
            row.tokens.append(token)
            if token in self.target.eos_token_ids:
                row.finish = "stop"
            elif len(row.tokens) >= self.settings.max_new_tokens:
                row.finish = "length"
            if row.finish is not None:
                return count
        return len(tokens)

    def _verify(self, last_BND: Tensor, proposal: Proposal) -> Verdict:
        logits_BNV = self.target.logits(last_BND)
        if not torch.isfinite(logits_BNV.amax()):  # the maximum of anything with a NaN is NaN
            raise UserError(
                "The target's logits are not finite; run it in a wider type (target.dtype=float32) or choose another."
            )
        if self.settings.sampling.greedy:
            return verify_greedy(logits_BNV, proposal.tokens_BN, proposal.count_B)
        p_BNV = self.settings.sampling.probabilities(logits_BNV)
        return verify_sampled(p_BNV, proposal.tokens_BN, proposal.count_B, proposal.probs_BNV, self.generator)

    def _draw(self, logits_BW: Tensor) -> tuple[Tensor, Tensor | None]:
        """How the draft's tokens are drawn: as the target's are."""
        if self.settings.sampling.greedy:
            return logits_BW.argmax(-1), None
        q_BW = self.settings.sampling.probabilities(logits_BW)
        return torch.multinomial(q_BW, 1, generator=self.generator)[:, 0], q_BW

    def _trace(self, row: _Row, elapsed: float) -> RequestTrace:
        assert row.finish is not None
        return RequestTrace(
            request_id=row.request.request_id,
            slice=row.request.slice,
            prompt_length=len(row.request.prompt),
            tokens=row.tokens,
            rounds=row.rounds,
            finish=row.finish,
            seconds=row.seconds or elapsed,
            prompt_seconds=self.prompt_seconds,
        )


def _committed(block_BN: Tensor, output: TargetOutput, verdict: Verdict, longest: int) -> Committed:
    """The slots that a round has settled: the root and the accepted drafts, each with the token that follows it."""
    next_BN = block_BN.roll(-1, 1)
    next_BN[torch.arange(len(block_BN), device=block_BN.device), verdict.accepted_B] = verdict.next_B
    return Committed(
        next_BN[:, :longest], output.taps_BTE[:, :longest], output.last_BTD[:, :longest], verdict.accepted_B + 1
    )
