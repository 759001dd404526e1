"""What other programs print for the numbers of `eval.acceptance`, and how to read it.

Arithmetic on numbers that somebody else has printed; this module reads no trace and no log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """One number of one program: what it is called there, what it is here, and how it becomes that."""

    program: str
    printed: str
    ours: str
    conversion: str


NAMES: tuple[Name, ...] = (
    Name("vLLM", "Mean acceptance length", "tokens_per_round", "the same, of rounds with a proposal only"),
    Name("vLLM", "Per-position acceptance rate", "survival", "the same: joint, not conditional"),
    Name("vLLM", "Avg Draft acceptance rate", "(tokens_per_round - 1) / gamma", "1 + rate * gamma; no alpha"),
    Name("SGLang", "avg_spec_accept_length", "tokens_per_round", "counts the prompt's own token: without_first()"),
    Name("EAGLE (papers)", "average acceptance length tau", "tokens_per_round", "the same, mostly of a tree"),
    Name("EAGLE (papers)", "n-alpha", "alpha_by_position[0]", "alpha at depth 1 after n drafts as input; a chain"),
    Name("Leviathan et al.", "alpha", "alpha_expected", "E(beta): mean of sum(min(p, q)) over positions"),
    Name("Medusa, Hydra", "acceleration rate", "tokens_per_round", "the same, of a tree"),
    Name("SpecForge, TorchSpec", "accept length (training)", "tokens_per_round - 1", "add 1: the target's own token"),
    Name("llama.cpp", "accept = n_accept / n_drafted", "(tokens_per_round - 1) / gamma", "1 + rate * gamma; no alpha"),
)
"""As of vLLM 0.32 and SGLang of 2026; where a conversion names a function, it is below."""


def from_draft_rate(rate: float, gamma: int) -> float:
    """Tokens per round out of accepted / drafted, a rate that falls with γ and is no α."""
    return 1 + rate * gamma


def from_joint_rates(rates: Sequence[float]) -> tuple[list[float | None], float]:
    """(α at each depth, tokens per round) out of joint rates per position, such as vLLM's; α is None where no round
    came that far."""
    before = [1.0, *rates]
    conditional = [here / there if there > 0 else None for here, there in zip(rates, before, strict=False)]
    return conditional, 1 + sum(rates)


def without_first(length: float, *, tokens: float) -> float:
    """Tokens per round out of (tokens of the answer) / (rounds), where the answer's first token came out of the
    prompt's forward; tokens: of the mean answer."""
    return length * (tokens - 1) / tokens


def without_bonus(accepted: float) -> float:
    """Tokens per round out of a mean of accepted drafts."""
    return 1 + accepted
