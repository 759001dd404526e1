"""Rows of a batch as Python lists: how proposers that look at text read what was settled and give what they found."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heads.base import Committed, Proposal


def settled(committed: Committed) -> list[list[int]]:
    """The tokens that each row has gained."""
    counts = committed.count_B.tolist()
    return [ids[:count] for ids, count in zip(committed.next_ids_BM.tolist(), counts, strict=True)]


def chains(found: Sequence[Sequence[int]], device: torch.device | str) -> Proposal:
    """One deterministic chain per row, each of its own length, possibly none."""
    count_B = torch.tensor([len(tokens) for tokens in found], device=device)
    longest = max(map(len, found))
    padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in found]
    return Proposal.chain(torch.tensor(padded, dtype=torch.long, device=device), count_B)
