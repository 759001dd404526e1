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
from transformers import StopStringCriteria

from eval.sampling import Sampling
from eval.trace import RequestTrace, Round
from eval.tree import height, node_texts
from eval.verify import Verdict, check_verifier, verify
from heads.artifact import UserError
from heads.base import Committed, Draw, FeatureNeeds, Judged, Proposal
from heads.cache import BlockCache
from heads.target import FrozenTarget, TargetOutput
from heads.vocab import DraftVocabulary


class Proposer(Protocol):
    """What the loop needs of a draft: heads fulfil it as they are (see heads.base.DraftHead).

    `propose` and `commit` take turns, `commit` with the whole prompt first. A row whose text has ended is committed
    with a count of 0 while others go on; what is proposed for it is not looked at.
    """

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
    """gamma: draft length γ (depth of a tree), 0 decodes plainly; max_new_tokens: length limit; rows: requests decoded
    together; seed: of all random draws, so that the same call gives the same text; stop_strings: the text ends with the
    token that completes one, as in `generate`; verifier: one of eval.verify.VERIFIERS; prefill_chunk: positions of a
    prompt that the target takes at once. Raises UserError on values that cannot be.
    """

    gamma: int = 4
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    rows: int = 1
    seed: int = 0
    stop_strings: tuple[str, ...] = ()
    verifier: str = "rejection"
    prefill_chunk: int = 1024

    def __post_init__(self) -> None:
        check_verifier(self.verifier, self.sampling)
        if self.gamma < 0 or min(self.max_new_tokens, self.rows, self.prefill_chunk) < 1 or "" in self.stop_strings:
            raise UserError(
                f"gamma={self.gamma} max_new_tokens={self.max_new_tokens} rows={self.rows} prefill_chunk="
                f"{self.prefill_chunk} stop_strings={list(self.stop_strings)} cannot be: gamma ≥ 0, the others ≥ 1, "
                f"stop strings not empty."
            )


@dataclass
class Clock:
    """Where the seconds of `decode` go; the rest of `total` is the loop's own."""

    target: float = 0.0
    draft: float = 0.0
    total: float = 0.0

    @property
    def loop_share(self) -> float:
        """Share of the time spent outside the forwards of target and draft."""
        return 1 - (self.target + self.draft) / self.total if self.total else 0.0


def decode(
    target: FrozenTarget,
    requests: Sequence[Request],
    proposer: Proposer | None,
    settings: DecodeSettings,
    on_done: Callable[[RequestTrace], None] | None = None,
    clock: Clock | None = None,
) -> list[RequestTrace]:
    """Decode every request and return its trace, in the order given.

    on_done is called with each finished request; clock adds up where the time goes. Raises UserError when a request
    does not fit into the context.
    """
    for request in requests:
        _check(request, target, settings)
    stop = _stop_criteria(target, settings)
    # Rows of a batch are padded to the longest prompt: neighbours of like length waste nothing.
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt))
    traces: dict[int, RequestTrace] = {}
    for first in range(0, len(requests), settings.rows):
        chosen = order[first : first + settings.rows]
        batch = [requests[index] for index in chosen]
        seeded = replace(settings, seed=settings.seed + first)
        found = _Batch(target, batch, proposer, seeded, stop, clock or Clock()).run()
        for index, trace in zip(chosen, found, strict=True):
            traces[index] = trace
            if on_done is not None:
                on_done(trace)
    return [traces[index] for index in range(len(requests))]


def _check(request: Request, target: FrozenTarget, settings: DecodeSettings) -> None:
    needed = len(request.prompt) + settings.max_new_tokens
    if not request.prompt:
        raise UserError(f"Request {request.request_id} has an empty prompt; give it at least one token.")
    if needed > target.max_length:
        raise UserError(
            f"Request {request.request_id} needs {needed} positions (prompt {len(request.prompt)}, "
            f"{settings.max_new_tokens} new) but the target has {target.max_length}; "
            f"shorten the prompt or lower eval.max_new_tokens."
        )


def _stop_criteria(target: FrozenTarget, settings: DecodeSettings) -> StopStringCriteria | None:
    if not settings.stop_strings:
        return None
    try:
        return StopStringCriteria(target.tokenizer, list(settings.stop_strings))
    except ValueError as error:  # of a vocabulary that cannot be spelled out
        raise UserError(
            f"transformers cannot match stop strings with the tokenizer of {target.path} ({error}); leave stop_strings "
            f"empty, or use a tokenizer that knows the letters a to f."
        ) from error


class _Row:
    """The text of one request while it grows."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.rounds: list[Round] = []
        self.finish: str | None = None
        self.seconds = 0.0

    @property
    def text(self) -> list[int]:
        return [*self.request.prompt, *self.tokens]

    def __len__(self) -> int:
        return len(self.request.prompt) + len(self.tokens)


class _Batch:
    """Requests that share each forward of the target. A finished row idles until the others have finished."""

    def __init__(
        self,
        target: FrozenTarget,
        requests: Sequence[Request],
        proposer: Proposer | None,
        settings: DecodeSettings,
        stop: StopStringCriteria | None,
        clock: Clock,
    ) -> None:
        self.target, self.settings, self.stop, self.clock = target, settings, stop, clock
        self.proposer = proposer if settings.gamma > 0 else None
        self.needs = self.proposer.needs if self.proposer is not None else FeatureNeeds()
        self.rows = [_Row(request) for request in requests]
        self.cache = BlockCache(len(requests), target.device)
        self.prompt_seconds = self.draft_seconds = 0.0
        self.round = 0
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
        self.clock.total += time.perf_counter() - started
        return [self._trace(row, time.perf_counter() - started) for row in self.rows]

    def _prefill(self, prompts: Sequence[Sequence[int]], state: Any) -> None:
        """Run the prompts, in chunks, and settle the first token, which needs no draft."""
        counts, device = [len(prompt) for prompt in prompts], self.target.device
        ids_BN = torch.zeros(len(prompts), max(counts), dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            ids_BN[row, : counts[row]] = torch.tensor(prompt, device=device)
        parts, size = [], self.settings.prefill_chunk
        for first in range(0, max(counts), size):
            taken = [min(max(count - first, 0), size, max(counts) - first) for count in counts]
            parts.append(self._forward(ids_BN[:, first : first + size], taken, None))
            self.cache.keep(taken)
        last_BND = torch.cat([part.last_BTD for part in parts], 1)
        taps_BNE = torch.cat([part.taps_BTE for part in parts], 1)
        count_B, each_B = torch.tensor(counts, device=device), torch.arange(len(counts), device=device)
        verdict = self._verify(last_BND[each_B, count_B - 1][:, None], Proposal.chain(ids_BN[:, :0]))
        for row, token in zip(self.rows, verdict.next_B.tolist(), strict=True):
            self._extend(row, [token])
        if self.proposer is not None:
            next_BN = ids_BN.roll(-1, 1)
            next_BN[each_B, count_B - 1] = verdict.next_B
            self._commit(state, Committed(next_BN, taps_BNE, last_BND, count_B))

    def _round(self, state: Any) -> None:
        """One proposal, one forward of the target over it, and what follows for every row."""
        self.round += 1
        roots_B1 = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self.target.device)
        proposal = self._propose(state, roots_B1)
        block_BN = torch.cat([roots_B1, proposal.tokens_BN], dim=1)
        counts = [1 + count for count in proposal.count_B.tolist()]
        parents_N = None if proposal.is_chain else _with_root(proposal.parents_N)
        output = self._forward(block_BN, counts, parents_N)
        verdict = self._verify(output.last_BTD, proposal)
        accepted = verdict.accepted_B.tolist()
        kept = [1 + count if row.finish is None else 0 for row, count in zip(self.rows, accepted, strict=True)]
        path_BK = None if verdict.path_BK is None else _with_root(verdict.path_BK, of_root=0)
        self.cache.keep(kept, path_BK)
        if self.proposer is not None:
            committed = _committed(block_BN, output, verdict, torch.tensor(kept, device=block_BN.device))
            if self.needs.judged:
                count_B = torch.tensor(counts, device=block_BN.device)
                judged = Judged(block_BN, _with_root(proposal.parents_N), count_B, output.last_BTD)
                committed = replace(committed, judged=judged)
            self._commit(state, committed)
        for index, row in enumerate(self.rows):
            if row.finish is None:
                self._settle(row, index, proposal, verdict)

    def _propose(self, state: Any, roots_B1: Tensor) -> Proposal:
        """What the proposer drafts; fewer than γ tokens where the context ends."""
        if self.proposer is None:
            return Proposal.chain(roots_B1[:, :0])
        left = self.target.max_length - max(len(row) for row in self.rows if row.finish is None)
        started = self._now()
        proposal = self.proposer.propose(state, min(self.settings.gamma, left), self._draw)
        self._drafted(started)
        proposal.check()
        return proposal.trimmed()

    def _settle(self, row: _Row, index: int, proposal: Proposal, verdict: Verdict) -> None:
        """Add a round's tokens to a row's text, up to the end of text or the length limit."""
        count, accepted = int(proposal.count_B[index]), int(verdict.accepted_B[index])
        tree = False
        if verdict.path_BK is None:
            drafted, proposed = proposal.tokens_BN[index, :accepted].tolist(), count
        else:
            parents = proposal.parents_BN[index].tolist()
            tree = parents[:count] != list(range(-1, count - 1))  # a row of its own may be a chain among trees
            path_K = verdict.path_BK[index, :accepted]
            drafted, last = proposal.tokens_BN[index, path_K].tolist(), int(path_K[-1]) if accepted else -1
            # Of a tree, what could have been accepted along this path; of a chain this is its length.
            proposed = accepted + height(parents, count, last)
        kept = self._extend(row, [*drafted, int(verdict.next_B[index])])
        cut = kept <= len(drafted)
        accepted = min(kept, len(drafted))
        examined = accepted + int(not cut and accepted < proposed)
        beta = tuple(verdict.beta_BN[index, :examined].tolist()) if verdict.beta_BN is not None else ()
        dropped: list[int] = [] if cut or tree else proposal.tokens_BN[index, accepted:count].tolist()
        row.rounds.append(Round(proposed, accepted, cut, beta, len(drafted) if cut else None, tree, tuple(dropped)))

    def _extend(self, row: _Row, tokens: Sequence[int]) -> int:
        """Append tokens until the text ends; returns how many were appended."""
        for count, token in enumerate(tokens, start=1):
            row.tokens.append(token)
            if token in self.target.eos_token_ids or self._stops(row):
                row.finish = "stop"
            elif len(row.tokens) >= self.settings.max_new_tokens:
                row.finish = "length"
            if row.finish is not None:
                return count
        return len(tokens)

    def _stops(self, row: _Row) -> bool:
        """Whether the last token completes a stop string."""
        if self.stop is None:
            return False
        tail = torch.tensor([row.text[-self.stop.maximum_token_len :]], device=self.target.device)
        return bool(self.stop(tail, None)[0])

    def _forward(self, ids_BN: Tensor, counts: Sequence[int], parents_N: Tensor | None) -> TargetOutput:
        started = self._now()
        output = self.target.forward(ids_BN, cache=self.cache, counts=counts, parents_N=parents_N, taps=self.needs.taps)
        self.clock.target += self._now() - started
        return output

    def _commit(self, state: Any, committed: Committed) -> None:
        assert self.proposer is not None
        started = self._now()
        self.proposer.commit(state, committed)
        self._drafted(started)

    def _drafted(self, started: float) -> None:
        """Count what the proposer has taken since then."""
        seconds = self._now() - started
        self.clock.draft += seconds
        self.draft_seconds += seconds if self.round > 1 else 0.0

    def _verify(self, last_BND: Tensor, proposal: Proposal) -> Verdict:
        started = self._now()
        logits_BNV = self.target.logits(last_BND)
        self.clock.target += self._now() - started
        if not torch.isfinite(logits_BNV.amax()):  # the maximum of anything with a NaN is NaN
            raise UserError(
                "The target's logits are not finite; run it in a wider type (target.dtype=float32) or choose another."
            )
        sampling, verifier = self.settings.sampling, self.settings.verifier
        texts = [row.text for row in self.rows] if sampling.looks_back else None
        return verify(logits_BNV, proposal, sampling, self.generator, verifier=verifier, texts=texts)

    def _draw(
        self, logits_BW: Tensor, *, drafted_BK: Tensor | None = None, vocab: DraftVocabulary | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """How the draft's tokens are drawn: as the target's are (see heads.base.Draw)."""
        sampling, scores_BW = self.settings.sampling, self._scores(logits_BW, drafted_BK, vocab)
        if sampling.greedy:
            return scores_BW.max(-1).indices, None  # as argmax, and sooner
        q_BW = replace(sampling, repetition_penalty=1.0, banned=()).probabilities(scores_BW)
        return torch.multinomial(q_BW, 1, generator=self.generator)[:, 0], q_BW

    def _scores(self, logits_BW: Tensor, drafted_BK: Tensor | None, vocab: DraftVocabulary | None) -> Tensor:
        """The draft's logits after what penalty and ban change in them, which is known by target id."""
        sampling, size = self.settings.sampling, self.target.vocab_size
        ids_W = torch.arange(size) if vocab is None else vocab.ids_W
        if not (sampling.looks_back or sampling.banned) or len(ids_W) != logits_BW.shape[1]:
            return logits_BW
        ids_W = ids_W.to(logits_BW.device)
        logits_BV = logits_BW.new_full((len(logits_BW), size), -torch.inf)
        logits_BV[:, ids_W] = logits_BW
        text_BNL = None
        if sampling.looks_back:
            empty_B0 = torch.zeros(len(self.rows), 0, dtype=torch.long, device=logits_BW.device)
            path = Proposal.chain(empty_B0 if drafted_BK is None else drafted_BK)
            text_BNL = node_texts([row.text for row in self.rows], path)[:, -1]
        return sampling.scores(logits_BV, text_BNL)[:, ids_W]

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

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
            draft_seconds=self.draft_seconds,
        )


def _with_root(nodes: Tensor, of_root: int = -1) -> Tensor:
    """Indices of proposed nodes [..., N] as indices of block nodes [..., 1 + N], with the root's own value in front."""
    return torch.cat([nodes.new_full((*nodes.shape[:-1], 1), of_root), nodes + 1], -1)


def _committed(block_BN: Tensor, output: TargetOutput, verdict: Verdict, kept_B: Tensor) -> Committed:
    """The slots that a round has settled: the root and the accepted drafts, each with the token that follows it."""
    longest, each_B = int(kept_B.max()), torch.arange(len(block_BN), device=block_BN.device)
    if verdict.path_BK is None:
        ids_BM, last_BMD, taps_BME = (states[:, :longest] for states in (block_BN, output.last_BTD, output.taps_BTE))
    else:
        path_BM = _with_root(verdict.path_BK, of_root=0)[:, :longest]
        ids_BM, last_BMD, taps_BME = (
            states[each_B[:, None], path_BM] for states in (block_BN, output.last_BTD, output.taps_BTE)
        )
    next_BM = ids_BM.roll(-1, 1)
    last_B = (kept_B - 1).clamp(min=0)
    next_BM[each_B, last_B] = verdict.next_B
    return Committed(next_BM, taps_BME, last_BMD, kept_B)
