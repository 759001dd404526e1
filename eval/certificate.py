"""What was proven about a head on a target, as one page and as JSON: identity, law, and the mistakes that were seen.

It collects the parts and judges them; how they are shown is known in `eval.exactness` and `eval.law`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from eval.decode import DecodeSettings, Proposer, Request
from eval.exactness import WIDE, Identity, LawSettings, identities, law_after
from eval.law import CONTROL_LEVEL, DAMAGES, LEVEL, Fit
from eval.sampling import Sampling
from eval.static_tree import tree_setting
from eval.verify import EXACT
from heads.artifact import UserError
from heads.target import DTYPES, FrozenTarget

HEAD = "head"
"""The name under which the chain of the head is proven."""


@dataclass(frozen=True)
class ProofSettings:
    """What is proven. gamma: drafts per round, depth of the tree; tree: the one beside the chain, as
    eval.static_tree.tree_setting takes it (None: chains only); requests: held-out prompts for the identity; dtypes:
    number formats of it, float32 among them, in which the law is shown; rows: decoded together; samples: decodes of
    each case of the tiny law; prefixes: prompts, shortened to their last prefix_tokens, that are decoded `copies` times
    each. Raises UserError.
    """

    gamma: int = 4
    tree: Mapping[str, int | None] | None = field(default_factory=lambda: {"top_k": 4, "nodes": 12})
    requests: int = 24
    max_new_tokens: int = 48
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    rows: int = 8
    samples: int = 40_000
    prefixes: int = 2
    prefix_tokens: int = 16
    copies: int = 600

    def __post_init__(self) -> None:
        unknown = [dtype for dtype in self.dtypes if dtype not in DTYPES]
        if unknown or "float32" not in self.dtypes:
            raise UserError(
                f"prove.dtypes={list(self.dtypes)} must name some of {', '.join(DTYPES)}, float32 among them."
            )
        if len(set(self.dtypes)) < len(self.dtypes):
            raise UserError(f"prove.dtypes={list(self.dtypes)} says something twice; give each value once.")
        least = {"gamma": 1, "max_new_tokens": 1, "rows": 1, "samples": 1000, "prefixes": 1, "prefix_tokens": 1}
        for name, bound in {**least, "copies": 20, "requests": self.prefixes}.items():
            if vars(self)[name] < bound:
                raise UserError(f"prove.{name}={vars(self)[name]} must be at least {bound}.")
        if self.tree is not None:
            tree_setting(self.tree, "prove.tree")


@dataclass
class Certificate:
    """The parts of a proof. tiny: the law over a tiny vocabulary; real: of next tokens on the target; controls: each
    damage, caught if its p-value is below CONTROL_LEVEL; typical: what is not exact, with its distance."""

    damage: str | None = None
    identity: list[Identity] = field(default_factory=list)
    tiny: list[Fit] = field(default_factory=list)
    real: list[Fit] = field(default_factory=list)
    controls: dict[str, Fit] = field(default_factory=dict)
    typical: list[Fit] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """Everything that speaks against exactness, or against the proof."""
        found = [
            f"{one.proposer} in {one.dtype}: {len(one.divergences)} of {one.requests} texts differ (gaps {one.gaps})"
            for one in self.identity
            if one.passed is False
        ]
        found += [
            f"law of {fit.name}: p = {fit.p_value:.2g}" + (f", {fit.impossible} impossible" if fit.impossible else "")
            for fit in (*self.tiny, *self.real)
            if not fit.passed
        ]
        found += [
            f"control {name} was not seen: p = {fit.p_value:.2g}"
            for name, fit in self.controls.items()
            if fit.p_value >= CONTROL_LEVEL
        ]
        if not (self.tiny and self.real and self.controls and any(one.passed for one in self.identity)):
            found.append("the proof is not complete")
        return found

    @property
    def passed(self) -> bool:
        return not self.complaints

    @property
    def verdict(self) -> str:
        """One line."""
        if not self.passed:
            return f"FAIL: {len(self.complaints)} complaints, the first: {self.complaints[0]}"
        wide = [one for one in self.identity if one.passed]
        judged = [fit for fit in self.real if fit.cells > 1]
        unjudged = len(self.real) - len(judged)
        left = f" ({unjudged} more could not be judged; raise prove.copies)" if unjudged else ""
        return (
            f"PASS: {sum(one.requests for one in wide)} greedy texts ({sum(one.tokens for one in wide)} tokens) are "
            f"the target's own; {len(self.tiny)} + {len(judged)} laws hold{left} "
            f"(smallest p = {min(fit.p_value for fit in (*self.tiny, *self.real)):.2g}); {len(self.controls)} controls "
            f"caught"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "passed": self.passed,
            "complaints": self.complaints,
            "level": LEVEL,
            "control_level": CONTROL_LEVEL,
            **asdict(self),
        }


def prove_on(
    proof: Certificate,
    how: ProofSettings,
    target: FrozenTarget,
    requests: Sequence[Request],
    proposers: Mapping[str, Proposer],
    say: Callable[[str], None],
) -> None:
    """Add to a proof what decoding with these proposers shows on a target: identity, and in float32 the law too."""
    greedy = Sampling(1.0) if proof.damage == "soft" else Sampling()
    settings = DecodeSettings(how.gamma, greedy, how.max_new_tokens, how.rows)
    for one in identities(target, requests, proposers, settings):
        proof.identity.append(one)
        same = one.requests - len(one.divergences)
        say(f"{one.dtype}, {one.proposer}: {same} of {one.requests} texts identical; gaps {one.gaps}")
    if target.dtype != torch.float32:
        return
    for name, proposer in proposers.items():
        for verifier in EXACT if name == HEAD else ("rejection",):  # block verification is for chains that are drawn
            law = LawSettings(Sampling(1.0, top_k=4), verifier, copies=how.copies, gamma=how.gamma, rows=100)
            for request in requests[: how.prefixes]:
                fit = law_after(target, request.prompt[-how.prefix_tokens :], proposer, law)
                proof.real.append(replace(fit, name=f"{name}, {verifier}, after {request.request_id}"))
                say(f"{proof.real[-1].name}: p = {fit.p_value:.2g} over {fit.cells} groups of texts")


def to_markdown(certificate: Certificate, head: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    """The certificate as one page."""
    cases = certificate.tiny
    lines = [
        f"# Exactness certificate: {head['name']} on {target['name']}",
        "",
        f"**{certificate.verdict}.**",
        "",
        f"Head `{head['sha256'][:16]}`, target weights `{target['weights'][:16]}`, tokenizer "
        f"`{target['tokenizer'][:16]}`, template `{target['template'][:16]}`. Command, commit and versions: "
        f"`manifest.json` beside this page; every number: `certificate.json`.",
    ]
    if "modified" in target:
        lines += ["", f"**{target['modified'].capitalize()}.** What is proven is proven of the modified target."]
    if certificate.damage:
        lines += ["", f"A mistake was made on purpose: {DAMAGES[certificate.damage]}."]
    if certificate.complaints:
        lines += ["", *(f"* {complaint}" for complaint in certificate.complaints[:20])]
    lines += [
        *("", "## Greedy: identical to `generate(do_sample=False)`", ""),
        "| proposer | number format | texts | tokens | differing | logit gaps at the first difference | |",
        "|---|---|---|---|---|---|---|",
        *(_identity_row(one) for one in certificate.identity),
        "",
        f"Texts must be identical in {' and '.join(WIDE)} (a float32 difference below {WIDE['float32']:g} is a tie). "
        f"In bfloat16 one row and many rows go through different kernels; differences are listed, not judged.",
        *("", "## Sampled: the law over a tiny vocabulary, enumerated exhaustively", ""),
        "| verifier | transform × shape × siblings | decodes each | smallest p | largest distance | |",
        "|---|---|---|---|---|---|",
        *(_law_row(name, fits) for name, fits in _by_verifier(cases).items()),
        "",
        f"χ² of all texts of three tokens against their exact probabilities; a case fails below p = {LEVEL:g}. "
        f"With {len(cases)} cases a right verifier fails by chance once in {1 / max(len(cases) * LEVEL, LEVEL):,.0f} "
        f"runs. Distance: total variation, sampling noise included.",
        *("", "## Sampled: next tokens of the target after fixed prefixes", ""),
        "| texts | decodes | cells | p | distance | impossible |",
        "|---|---|---|---|---|---|",
        *(_fit_row(fit) for fit in certificate.real),
        *("", "## Controls: mistakes that must be seen", ""),
        f"| mistake | p (must be below {CONTROL_LEVEL:g}) | distance |",
        "|---|---|---|",
        *(
            f"| {DAMAGES[name]} | {fit.p_value:.2g} | {fit.total_variation:.3f} |"
            for name, fit in certificate.controls.items()
        ),
        *("", "## Not exact: typical acceptance (never used unless asked for)", ""),
        f"Total variation distance from the target's law over the tiny vocabulary, where the draft knows nothing of "
        f"the target: {_range(certificate.typical)}; of the exact verifiers, at as many decodes: {_range(cases)}.",
        "",
    ]
    return "\n".join(lines)


def _identity_row(one: Identity) -> str:
    word = {True: "pass", False: "**FAIL**", None: "listed"}[one.passed]
    counts = f"{one.requests} | {one.tokens} | {len(one.divergences)}"
    return f"| {one.proposer} | {one.dtype} | {counts} | {one.gaps} | {word} |"


def _by_verifier(fits: Sequence[Fit]) -> dict[str, list[Fit]]:
    groups: dict[str, list[Fit]] = {}
    for fit in fits:
        name = "greedy" if ", T=0," in fit.name else fit.name.partition(",")[0]
        groups.setdefault(name, []).append(fit)
    return groups


def _law_row(name: str, fits: Sequence[Fit]) -> str:
    word = "pass" if all(fit.passed for fit in fits) else "**FAIL**"
    least = min(fit.p_value for fit in fits)
    furthest = max(fit.total_variation for fit in fits)
    return f"| {name} | {len(fits)} | {fits[0].samples:,} | {least:.2g} | {furthest:.4f} | {word} |"


def _fit_row(fit: Fit) -> str:
    numbers = f"{fit.samples:,} | {fit.cells} | {fit.p_value:.2g} | {fit.total_variation:.3f} | {fit.impossible}"
    return f"| {fit.name} | {numbers} |"


def _range(fits: Sequence[Fit]) -> str:
    values = [fit.total_variation for fit in fits]
    return f"{min(values):.3f} to {max(values):.3f}" if values else "not measured"
