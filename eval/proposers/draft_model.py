"""A separate, smaller causal language model as the draft (arXiv 2211.17192, section 2; 2302.01318).

Where it reads the target's tokens it drafts them with its true distributions, over a cache that keeps what was
accepted. A model with another tokenizer drafts through transformers' translation (`eval.proposers.translated_draft`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.proposers.rows import settled
from eval.proposers.translated_draft import TranslatedDraft
from heads.artifact import UserError
from heads.base import Committed, Draw, FeatureNeeds, Proposal
from heads.cache import BlockCache
from heads.target import DTYPES, FrozenTarget
from heads.vocab import DraftVocabulary


def draft_model(*, target: FrozenTarget, path: str) -> DraftModel | TranslatedDraft:
    """The model at `path` (a folder, a Hub id or a .gguf file) as a draft, in the target's number format.

    Raises UserError when there is no such model, or when neither its vocabulary nor its text fits the target's.
    """
    dtype = next(name for name, dtype in DTYPES.items() if dtype == target.dtype)
    try:
        model = FrozenTarget.load(path, dtype=dtype, device=str(target.device))
    except UserError as error:
        reason = str(error).partition(";")[0]
        raise UserError(
            f"rivals.draft_model.path={path} is no draft model ({reason}); give a folder, a Hub id or a .gguf file of "
            f"a causal language model with its tokenizer."
        ) from error
    if target.tokenizer.get_vocab().items() <= model.tokenizer.get_vocab().items():
        return DraftModel(model=model, vocab_size=target.vocab_size)
    return TranslatedDraft(target=target, model=model)


@dataclass
class DraftState:
    """The draft's cache over each row's text; of that text, what is not in the cache yet; what was last drafted."""

    cache: BlockCache
    pending: list[list[int]]
    drafted: list[list[int]] = field(default_factory=list)


class DraftModel:
    """Chains of a model that reads the target's tokens, over the target's vocabulary of `vocab_size` tokens."""

    needs = FeatureNeeds(taps=(), last=False)

    def __init__(self, *, model: FrozenTarget, vocab_size: int) -> None:
        self.model = model
        # Models of one tokenizer pad their vocabularies to different sizes.
        self.vocab = DraftVocabulary(torch.arange(min(model.vocab_size, vocab_size)), vocab_size)

    def start(self, prompts: Sequence[Sequence[int]]) -> DraftState:
        return DraftState(BlockCache(len(prompts), self.model.device), [[prompt[0]] for prompt in prompts])

    def commit(self, state: DraftState, committed: Committed) -> None:
        """What was drafted and accepted stays in the cache, as far as it was fed to the draft; the rest is pending."""
        lengths = list(state.cache.lengths)
        drafted = state.drafted or [[] for _ in lengths]
        for row, tokens in enumerate(settled(committed)):
            fed = drafted[row][:-1]
            shared = next((n for n, pair in enumerate(zip(fed, tokens, strict=False)) if pair[0] != pair[1]), None)
            shared = min(len(fed), len(tokens)) if shared is None else shared
            lengths[row] -= len(fed) - shared
            state.pending[row] += tokens[shared:]
        state.cache.forget(lengths)
        state.drafted = []

    @torch.inference_mode()
    def propose(self, state: DraftState, depth: int, draw: Draw) -> Proposal:
        open_rows = [
            length + len(pending) + depth <= self.model.max_length
            for length, pending in zip(state.cache.lengths, state.pending, strict=True)
        ]
        counts = [len(pending) * fits for pending, fits in zip(state.pending, open_rows, strict=True)]
        count_B = torch.tensor([depth * fits for fits in open_rows], device=self.model.device)
        if not any(counts):  # the texts still open are longer than the draft can read: plain decoding from here
            return Proposal.chain(count_B.new_zeros(len(counts), 0))
        longest = max(counts)
        block = [
            [*pending[:count], *[0] * (longest - count)] for pending, count in zip(state.pending, counts, strict=True)
        ]
        state.pending = [pending[count:] for pending, count in zip(state.pending, counts, strict=True)]
        ids_BN = torch.tensor(block, device=self.model.device)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for _ in range(depth):
            drafted_BK = torch.stack(tokens, 1) if tokens else None
            logits_BW = self._last_logits(state.cache, ids_BN, counts)
            index_B, q_BW = draw(logits_BW, drafted_BK=drafted_BK, vocab=self.vocab)
            tokens.append(index_B)
            if q_BW is not None:
                probs.append(self.vocab.scatter(q_BW))
            ids_BN, counts = index_B[:, None], [int(fits) for fits in open_rows]
        tokens_BN = torch.stack(tokens, 1)
        state.drafted = [row * fits for row, fits in zip(tokens_BN.tolist(), open_rows, strict=True)]
        return Proposal.chain(tokens_BN, count_B, torch.stack(probs, 1) if probs else None)

    def _last_logits(self, cache: BlockCache, ids_BN: Tensor, counts: Sequence[int]) -> Tensor:
        """Logits [B, W] after each row's last new token, which all join the cache."""
        # The target may write an id that only pads its vocabulary; the draft has no embedding of its own for it.
        output = self.model.forward(ids_BN.clamp(max=self.model.vocab_size - 1), cache=cache, counts=counts)
        cache.keep(counts)
        last_B = torch.tensor(counts, device=ids_BN.device).sub(1).clamp(min=0)
        each_B = torch.arange(len(counts), device=ids_BN.device)
        return self.model.logits(output.last_BTD[each_B, last_B])[:, : len(self.vocab.ids_W)]
