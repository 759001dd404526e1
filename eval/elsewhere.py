"""What other programs print for the numbers of `eval.acceptance`, and how to read it. Shown with the definitions."""

from __future__ import annotations

from typing import NamedTuple


class Name(NamedTuple):
    """One number of one program: what it is called there, what it is here, and how it becomes that."""

    program: str
    printed: str
    ours: str
    conversion: str


CAPTION = "What others call these numbers"
HEAD = ("program", "printed there", "here", "how to read it")
NAMES: tuple[Name, ...] = (
    Name("vLLM", "Mean acceptance length", "tokens_per_round", "the same, of rounds with a proposal only"),
    Name("vLLM", "Per-position acceptance rate", "survival", "the same, joint; 1 + their sum is tokens_per_round"),
    Name("vLLM", "Avg Draft acceptance rate", "(tokens_per_round - 1) / gamma", "1 + rate * gamma; no alpha"),
    Name(
        "SGLang",
        "avg_spec_accept_length",
        "tokens_per_round",
        "counts the prompt's own token: length * (tokens - 1) / tokens, for answers of so many tokens",
    ),
    Name("EAGLE (papers)", "average acceptance length tau", "tokens_per_round", "the same, mostly of a tree"),
    Name("EAGLE (papers)", "n-alpha", "alpha_by_position[0]", "alpha at depth 1 after n drafts as input; a chain"),
    Name("Leviathan et al.", "alpha", "alpha_expected", "E(beta): mean of sum(min(p, q)) over positions"),
    Name("Medusa, Hydra", "acceleration rate", "tokens_per_round", "the same, of a tree"),
    Name("SpecForge, TorchSpec", "accept length (training)", "tokens_per_round - 1", "add 1: the target's own token"),
    Name("llama.cpp", "accept = n_accept / n_drafted", "(tokens_per_round - 1) / gamma", "1 + rate * gamma; no alpha"),
)
"""As of vLLM 0.32 and SGLang of 2026."""
