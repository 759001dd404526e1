"""The doctor on the draft vocabulary: which share of the tokens it would cover, where it is chosen and elsewhere.

What counts is the second: a vocabulary covers the text that it was chosen from better than any other. Nothing is
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary
from training.diagnosis import Finding, Section
from training.doctor import Prompts
from training.store import FeatureStore, TokenCounts
from training.traffic import hash_of

_SIZES = (4096, 8192, 16384, 32768)
_ENOUGH = 0.98  # share of the tokens that a draft vocabulary should cover
_ASIDE, _MOST = 10, 500  # one in so many conversations is kept from the choice, and at most so many


@dataclass(frozen=True)
class TokenUse:
    """How often each token was seen where a draft vocabulary is chosen [V] and in other conversations, where it is
    measured [V]; ranks_V: what it is chosen by; source: what was counted, in words; answers: whether that were
    answers."""

    chosen_V: Tensor
    measured_V: Tensor
    ranks_V: Tensor
    source: str
    answers: bool

    @classmethod
    def of(cls, target: FrozenTarget, prompts: Prompts, held_out: set[str], store: FeatureStore | None) -> TokenUse:
        """Of the collected answers; where there are none, of the prompts."""
        if store is not None:
            return cls._of_answers(store)
        sides = [torch.zeros(target.vocab_size, dtype=torch.long) for _ in range(2)]
        for conversation, _, ids in prompts.fitting:
            sides[conversation.id in held_out].add_(torch.bincount(torch.tensor(ids), minlength=target.vocab_size))
        source = "tokens of prompts, those to train on and the held-out ones; a guess until answers are collected"
        return cls(*sides, sides[0], source, False)

    @classmethod
    def _of_answers(cls, store: FeatureStore) -> TokenUse:
        """All of the store are to train on, so some of its conversations are kept from the choice."""
        names = sorted({ref.conversation for ref in store.documents}, key=lambda name: hash_of("coverage", name))
        aside = set(names[: min(_MOST, max(1, len(names) // _ASIDE))])
        every, part = store.token_counts(), _counts(store, aside)
        rest = TokenCounts(every.supervised_V - part.supervised_V, every.prompt_V - part.prompt_V)
        source = (
            f"tokens of the collected answers, in {len(names) - len(aside):,} conversations that it is chosen from and "
            f"{len(aside):,} others, held out here"
        )
        return cls(rest.supervised_V, part.supervised_V, rest.ranks(), source, True)

    def coverage(self, size: int, special_ids: Sequence[int]) -> tuple[float, float]:
        """Share of the tokens in the vocabulary of that size: where it is chosen, and in the other conversations."""
        chosen = DraftVocabulary.choose(self.ranks_V, size, special_ids)
        return chosen.coverage(self.chosen_V), chosen.coverage(self.measured_V)


def _counts(store: FeatureStore, conversations: set[str]) -> TokenCounts:
    """The token counts of some conversations, their states unread."""
    ids = store if store.online else store.select(FeatureNeeds(last=False))
    vocab_size = len(store.token_counts().supervised_V)
    sides = [torch.zeros(vocab_size, dtype=torch.long) for _ in range(2)]
    for ref in store.documents:
        if ref.conversation in conversations:
            read = ids.read(ref)
            for written, side in zip((True, False), sides, strict=True):
                side.add_(torch.bincount(read.ids_T[read.supervised_T == written], minlength=vocab_size))
    return TokenCounts(*sides)


def look_at_vocabulary(target: FrozenTarget, use: TokenUse, wanted: int | None) -> Section:
    """Coverage of draft vocabularies; wanted: the size that the head is to have, None for the whole."""
    sizes = sorted({size for size in (*_SIZES, wanted) if size is not None and size < target.vocab_size})
    covered = {size: use.coverage(size, target.eos_token_ids) for size in sizes} | {target.vocab_size: (1.0, 1.0)}
    distinct = int((use.chosen_V > 0).sum())
    table = (
        ("draft vocabulary", "where chosen", "held out"),
        *(
            (
                f"{size:,}" + (" (head.draft_vocab_size)" if size == wanted else ""),
                *(f"{share:.1%}" for share in shares),
            )
            for size, shares in covered.items()
        ),
    )
    rows = (
        ("counted", use.source),
        ("distinct", f"{distinct:,} of {target.vocab_size:,} tokens occur where it is chosen"),
        ("covered", "the held-out share is the honest one: no acceptance can be above it"),
    )
    found: list[Finding] = []
    if wanted is not None and wanted > target.vocab_size:
        found.append(
            Finding(
                True,
                f"head.draft_vocab_size={wanted} is beyond the {target.vocab_size} tokens of the "
                f"target; set head.draft_vocab_size=null or a number below.",
            )
        )
    elif wanted is not None and use.answers and covered[wanted][1] < _ENOUGH:
        better = next(size for size, (_, share) in covered.items() if share >= _ENOUGH)
        value = "null" if better == target.vocab_size else str(better)
        found.append(
            Finding(
                False,
                f"head.draft_vocab_size={wanted} covers {covered[wanted][1]:.1%} of the tokens of answers that it was "
                f"not chosen from, and the others can never be accepted; set head.draft_vocab_size={value}, where a "
                f"dearer draft pays.",
            )
        )
    return Section("vocabulary", rows, table=table, findings=tuple(found))
