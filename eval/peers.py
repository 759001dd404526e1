"""The same drafts in transformers' own assisted generation: equal rounds, and whose loop is quicker.

Rounds are compared one to one. Their loop drafts before it has run the prompt, ours after, so for the count they get
the prompt with the answer's first token, from which on both do the same. Seconds are those of the whole answer from
the prompt alone, both in turn. The target is the same loaded model on both sides; this module prints nothing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from eval.bootstrap import FloatArray, cluster_intervals
from eval.decode import DecodeSettings, Proposer, Request, decode
from eval.proposers.draft_model import DraftModel
from eval.proposers.prompt_lookup import PromptLookup
from heads.artifact import UserError
from heads.packed import group_attention, pack_linears
from heads.target import FrozenTarget

Options = Mapping[str, Any]
"""What `generate` takes to draft in the way of one of our proposers."""


@dataclass(frozen=True)
class Answer:
    """One request on both sides: texts, target passes after the first token, and seconds for the whole answer."""

    request: str
    tokens: Sequence[int]
    rounds: int
    seconds: float
    peer_tokens: Sequence[int]
    peer_rounds: int
    peer_seconds: float


@dataclass(frozen=True)
class Comparison:
    """All requests for one draft."""

    answers: Sequence[Answer]

    @property
    def same_texts(self) -> int:
        """Answers that are the same, token by token."""
        return sum(one.tokens == one.peer_tokens for one in self.answers)

    @property
    def different_rounds(self) -> list[Answer]:
        """Answers for which one side needed more passes than the other."""
        return [one for one in self.answers if one.rounds != one.peer_rounds]

    @property
    def tokens_per_round(self) -> tuple[float, float]:
        """Ours and theirs: tokens after the first over target passes after the first."""
        ours = sum(len(one.tokens) - 1 for one in self.answers) / max(1, sum(one.rounds for one in self.answers))
        theirs = sum(len(one.peer_tokens) - 1 for one in self.answers)
        return ours, theirs / max(1, sum(one.peer_rounds for one in self.answers))

    @property
    def speed(self) -> tuple[float, float | None, float | None]:
        """Their seconds over ours, with a 95 % interval from resampling requests (None below eight of them)."""
        ours = np.array([one.seconds for one in self.answers])
        theirs = np.array([one.peer_seconds for one in self.answers])

        def ratio(weights_BR: FloatArray) -> FloatArray:
            return ((weights_BR @ theirs) / (weights_BR @ ours))[:, None]

        value = float(theirs.sum() / ours.sum())
        bounds = cluster_intervals(ratio, clusters=len(self.answers))
        return (value, None, None) if bounds is None else (value, float(bounds[0][0]), float(bounds[1][0]))


def drafts(
    draft: FrozenTarget, target: FrozenTarget, gamma: int, max_ngram: int
) -> dict[str, tuple[Proposer, Options]]:
    """Each draft by name as our proposer and as options of `generate`; `draft` reads the target's tokens.

    Their draft model writes γ tokens in every round: no schedule, no confidence threshold.
    """
    config = draft.model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = gamma, "constant"
    config.assistant_confidence_threshold = 0.0
    lookup = {"prompt_lookup_num_tokens": gamma, "max_matching_ngram_size": max_ngram}
    return {
        "prompt_lookup": (PromptLookup(max_ngram=max_ngram), lookup),
        "draft_model": (DraftModel(model=draft, vocab_size=target.vocab_size), {"assistant_model": draft.model}),
    }


def compare(
    target: FrozenTarget,
    requests: Sequence[Request],
    proposer: Proposer,
    options: Options,
    settings: DecodeSettings,
) -> Comparison:
    """Greedy answers to every request by both loops, one request at a time and in turn; the first one warms up."""
    alone, limit = replace(settings, rows=1), settings.max_new_tokens
    answers = []
    for number, request in enumerate([requests[0], *requests]):
        theirs = _peer(target, request.prompt, options, limit) if number % 2 else None
        started = time.perf_counter()
        trace = decode(target, [request], proposer, alone)[0]
        seconds = time.perf_counter() - started
        theirs = theirs or _peer(target, request.prompt, options, limit)
        # From the first token on; an answer of one token has no rounds.
        counted = _peer(target, (*request.prompt, trace.tokens[0]), options, limit - 1) if trace.rounds else None
        if number:
            rounds = counted.passes if counted is not None else 0
            answers.append(
                Answer(
                    request.request_id, trace.tokens, len(trace.rounds), seconds, theirs.tokens, rounds, theirs.seconds
                )
            )
    return Comparison(answers)


@dataclass(frozen=True)
class _Generated:
    """What `generate` wrote, in how many passes of the target and how many seconds."""

    tokens: list[int]
    passes: int
    seconds: float


@torch.inference_mode()
def _peer(target: FrozenTarget, prompt: Sequence[int], options: Options, limit: int) -> _Generated:
    passes: list[None] = []
    ids_1T = torch.tensor([list(prompt)], device=target.device)
    padding = target.eos_token_ids[0] if target.eos_token_ids else 0
    hook = target.model.register_forward_hook(lambda *_: passes.append(None))
    started = time.perf_counter()
    try:
        output_1T: Tensor = target.model.generate(
            ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=padding,
            **options,
        )
    finally:
        hook.remove()
    tokens = output_1T[0, len(prompt) :].tolist()
    return _Generated(tokens, len(passes), time.perf_counter() - started)


def first_layers(target: FrozenTarget, layers: int) -> FrozenTarget:
    """A model of its own out of a copy of the target's first layers: a draft model where there is no other.

    Raises UserError when the target does not have more layers than that.
    """
    if not 1 <= layers < target.num_layers:
        raise UserError(
            f"bench.draft_layers={layers} must be between 1 and {target.num_layers - 1} for a target of "
            f"{target.num_layers} layers."
        )
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = layers
    if target.config.to_dict().get("layer_types"):
        config.layer_types = target.config.layer_types[:layers]
    model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    weights = target.model.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    model.to(target.device)
    pack_linears(model)
    group_attention(model)
    return FrozenTarget(
        model=model,
        tokenizer=target.tokenizer,
        path=target.path,
        fingerprint=target.fingerprint,
        template=target.template,
    )
