"""The law of verification: what a verifier writes, against the target's exact distribution over a tiny vocabulary.

A made-up target and a made-up draft of four tokens have a random distribution after every text. A case is one sampling
transform, one shape of tree, one kind of siblings and one verifier; `simulate` decodes it many times through
`eval.verify.verify` itself, and `check` compares the texts with the probability of each possible one by a χ² test.
`DAMAGES` are mistakes that public decoders have made; each must be seen. This module knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from scipy.stats import chisquare
from torch import Tensor

from eval.sampling import Sampling
from eval.verify import verify
from heads.artifact import UserError
from heads.base import Proposal

V, LENGTH, PROMPT = 4, 3, 0
SAMPLES = 40_000
LEVEL, CONTROL_LEVEL = 1e-5, 1e-6
"""A case fails below LEVEL: with 200 cases that happens by chance in one run out of 500. A control must be rejected
below CONTROL_LEVEL."""

SAMPLINGS: Mapping[str, Sampling] = {
    "T=1": Sampling(1.0),
    "T=0.6": Sampling(0.6),
    "top-k": Sampling(1.0, top_k=3),
    "top-p": Sampling(0.9, top_p=0.8),
    "min-p": Sampling(1.2, min_p=0.2),
    "penalty": Sampling(1.0, repetition_penalty=1.6),
    "ban": Sampling(1.0, banned=(2,)),
    "all": Sampling(0.8, top_k=3, top_p=0.95, min_p=0.02, repetition_penalty=1.3, banned=(1,)),
}
GREEDY = {"T=0": Sampling(), "T=0, penalty": Sampling(repetition_penalty=1.6)}
CHAINS = {"chain 1": (-1,), "chain 2": (-1, 0), "chain 4": (-1, 0, 1, 2)}
TREES = {
    "fork": (-1, -1, -1),
    "two levels": (-1, -1, 0, 0, 1),
    "uneven": (-1, 0, -1, 0, 2, 1, 1, -1),
}
SHAPES: Mapping[str, tuple[int, ...]] = {**CHAINS, **TREES}
DAMAGES: Mapping[str, str] = {
    "stop": "the draft stops in front of a token that it has already drawn",
    "soft": "at T = 0 a draft is accepted with the probability that the target gives it",
    "siblings": "siblings that were chosen are verified by the rule for drawn ones",
    "wrong_q": "the distribution that is handed over is not the one that was drawn from",
}


@dataclass(frozen=True)
class Case:
    """sampling: a key of SAMPLINGS or GREEDY; shape: of SHAPES; drawn: siblings drawn without replacement, else the
    draft's best ones; verifier: as in eval.verify."""

    sampling: str
    shape: str
    drawn: bool
    verifier: str = "rejection"

    @property
    def name(self) -> str:
        return f"{self.verifier}, {self.sampling}, {self.shape}, {'drawn' if self.drawn else 'chosen'}"


@dataclass(frozen=True)
class Fit:
    """How well `samples` texts fit the exact probabilities: p_value of the χ² test over `cells` groups of texts,
    total_variation between seen and exact frequencies (its noise included), impossible: texts that cannot be."""

    name: str
    samples: int
    p_value: float
    cells: int
    total_variation: float
    impossible: int

    @property
    def passed(self) -> bool:
        return self.p_value > LEVEL

    @staticmethod
    def of(name: str, seen: Tensor, exact: Tensor) -> Fit:
        """seen: how often each text was written; exact: its probability. Texts expected less than five times are taken
        together."""
        samples, impossible = int(seen.sum()), int(seen[exact == 0].sum())
        likely = exact * samples >= 5
        rest = ~likely & (exact > 0)
        observed = torch.cat([seen[likely], seen[rest].sum()[None]])
        expected = torch.cat([exact[likely], exact[rest].sum()[None]]) * samples
        if 0 < expected[-1] < 5 and len(expected) > 1:  # too few even together: with the rarest of the others
            rarest = int(expected[:-1].argmin())
            observed[rarest], expected[rarest] = observed[rarest] + observed[-1], expected[rarest] + expected[-1]
            observed, expected = observed[:-1], expected[:-1]
        observed, expected = observed[expected > 0], expected[expected > 0]
        expected *= observed.sum() / expected.sum()
        alone = len(expected) < 2
        return Fit(
            name=name,
            samples=samples,
            p_value=0.0 if impossible else 1.0 if alone else float(chisquare(observed, expected).pvalue),
            cells=len(expected),
            total_variation=float((seen / samples - exact).abs().sum() / 2),
            impossible=impossible,
        )


CONTROLS: Mapping[str, Case] = {
    "stop": Case("T=1", "chain 2", drawn=True),
    "soft": Case("T=0", "chain 2", drawn=False),
    "siblings": Case("T=1", "fork", drawn=False),
    "wrong_q": Case("T=1", "chain 2", drawn=True),
}
"""Where each damage is shown."""


def exact_cases() -> list[Case]:
    """Every exact verifier × transform × shape × kind of siblings."""
    cases = [Case(name, shape, drawn) for name in SAMPLINGS for shape in SHAPES for drawn in (False, True)]
    cases += [Case(name, shape, drawn, "block") for name in SAMPLINGS for shape in CHAINS for drawn in (False, True)]
    return cases + [Case(name, shape, False) for name in GREEDY for shape in SHAPES]


def typical_cases() -> list[Case]:
    """What is not exact: the distance is measured, nothing is claimed."""
    return [Case(name, shape, False, "typical") for name in ("T=1", "T=0.6", "top-p") for shape in SHAPES]


def check(case: Case, *, damage: str | None = None, samples: int = SAMPLES, seed: int = 3) -> Fit:
    """Decode a case `samples` times and test it. Raises UserError on a damage that does not exist."""
    check_damage(damage)
    tables = _Tables(_sampling(case))
    return Fit.of(case.name, simulate(case, tables, damage=damage, samples=samples, seed=seed), tables.exact_texts())


def check_damage(damage: str | None) -> None:
    """Raises UserError on a damage that does not exist."""
    if damage is not None and damage not in DAMAGES:
        raise UserError(f"damage={damage} is unknown; choose one of {', '.join(DAMAGES)}.")


def simulate(case: Case, tables: _Tables, *, damage: str | None, samples: int, seed: int) -> Tensor:
    """How often each text of LENGTH tokens was written [V^LENGTH] in independent decodes, through the real verifier."""
    generator = torch.Generator().manual_seed(seed)
    parents, sampling = SHAPES[case.shape], _sampling(case)
    if damage == "soft" and sampling.greedy:
        sampling = Sampling(1.0, repetition_penalty=sampling.repetition_penalty)
    state_R = torch.zeros(samples, dtype=torch.long)
    while len(open_R := (state_R < _first(LENGTH)).nonzero()[:, 0]):
        states_BM, proposal = _draft(state_R[open_R], parents, tables, case.drawn, generator)
        proposal = _as_handed_over(proposal, case.drawn, damage)
        verdict = verify(
            tables.p_logits[states_BM],
            proposal,
            sampling,
            generator,
            verifier=case.verifier,
            texts=_texts(state_R[open_R]) if sampling.looks_back else None,
        )
        last_B = verdict.accepted_B
        if verdict.path_BK is not None and verdict.path_BK.shape[1]:
            ends_B = verdict.path_BK.gather(1, (verdict.accepted_B - 1).clamp(min=0)[:, None])[:, 0] + 1
            last_B = torch.where(verdict.accepted_B > 0, ends_B, 0)
        state_R[open_R] = _after(states_BM.gather(1, last_B[:, None])[:, 0], verdict.next_B)
    while len(deep := (state_R >= _first(LENGTH + 1)).nonzero()[:, 0]):
        state_R[deep] = (state_R[deep] - 1) // V
    return torch.bincount(state_R - _first(LENGTH), minlength=V**LENGTH).double()


def _draft(
    state_B: Tensor, parents: tuple[int, ...], tables: _Tables, drawn: bool, generator: torch.Generator
) -> tuple[Tensor, Proposal]:
    """The state at each block node [B, 1 + N], and the proposal with q: siblings are the k best of q, or k draws."""
    rows, nodes = len(state_B), len(parents)
    states_BM = state_B[:, None].repeat(1, nodes + 1)
    tokens_BN = torch.zeros(rows, nodes, dtype=torch.long)
    q_BNV = torch.zeros(rows, nodes, V, dtype=torch.float64)
    for parent in dict.fromkeys(parents):
        children = [node for node in range(nodes) if parents[node] == parent]
        q_BV = tables.q[states_BM[:, parent + 1]]
        order_BV = q_BV
        if drawn:  # Gumbel's trick: the k largest are k draws without replacement, those of probability 0 last
            noise_BV = torch.rand(q_BV.shape, generator=generator, dtype=torch.float64)
            order_BV = q_BV.log() - (-noise_BV.log()).log()
        for node, token_B in zip(children, order_BV.topk(len(children)).indices.T, strict=True):
            tokens_BN[:, node], q_BNV[:, node] = token_B, q_BV
            states_BM[:, node + 1] = _after(states_BM[:, parent + 1], token_B)
    return states_BM, Proposal(tokens_BN, torch.tensor(parents), torch.full((rows,), nodes), q_BNV)


def _as_handed_over(proposal: Proposal, drawn: bool, damage: str | None) -> Proposal:
    """The proposal as the verifier gets it; with a mistake in it if asked for (`soft` is made in `simulate`)."""
    tokens_BN, q_BNV, count_B = proposal.tokens_BN, proposal.probs_BNV, proposal.count_B
    assert q_BNV is not None
    if damage == "stop":
        count_B = (tokens_BN != 0).long().cumprod(1).sum(1)
    if damage == "wrong_q":
        q_BNV = torch.full_like(q_BNV, 1 / V)
    handed = q_BNV if drawn or damage == "siblings" else None
    return Proposal(tokens_BN, proposal.parents_N, count_B, handed)


class _Tables:
    """Logits of target and draft after every text, by state, and the draft's distribution after the transforms.

    The empty text is state 0, and token x after state s leads to s·V + x + 1.
    """

    def __init__(self, sampling: Sampling) -> None:
        generator = torch.Generator().manual_seed(1)
        states = _first(LENGTH + 4)
        self.sampling = sampling
        self.p_logits = torch.randn(states, V, generator=generator, dtype=torch.float64) * 1.5
        q_logits = torch.randn(states, V, generator=generator, dtype=torch.float64) * 1.5
        warm = sampling if not sampling.greedy else Sampling(1.0, repetition_penalty=sampling.repetition_penalty)
        self.q = self._by_level(warm, q_logits)

    def exact_texts(self) -> Tensor:
        """The probability of each text of LENGTH tokens [V^LENGTH]."""
        if self.sampling.greedy:
            p = torch.nn.functional.one_hot(self._by_level(self.sampling, self.p_logits).argmax(-1), V).double()
        else:
            p = self._by_level(self.sampling, self.p_logits)
        exact = torch.ones(1, dtype=torch.float64)
        for level in range(LENGTH):
            exact = (exact[:, None] * p[_first(level) : _first(level + 1)]).flatten()
        return exact

    @staticmethod
    def _by_level(sampling: Sampling, logits: Tensor) -> Tensor:
        """What `sampling` makes of the logits after every text, level by level because texts differ in length."""
        done, level = [], 0
        while _first(level) < len(logits):
            states = torch.arange(_first(level), _first(level + 1))
            text_RL = torch.tensor(_texts(states))
            transform = sampling.scores if sampling.greedy else sampling.probabilities
            done.append(transform(logits[states], text_RL))
            level += 1
        return torch.cat(done)


def _sampling(case: Case) -> Sampling:
    return {**SAMPLINGS, **GREEDY}[case.sampling]


def _first(level: int) -> int:
    """The first state whose text has `level` tokens."""
    return (V**level - 1) // (V - 1)


def _after(state_R: Tensor, token_R: Tensor) -> Tensor:
    return state_R * V + token_R + 1


def _texts(state_R: Tensor) -> list[list[int]]:
    """The text of each state behind a prompt of one token."""
    texts = []
    for state in state_R.tolist():
        text: list[int] = []
        while state > 0:
            text.append((state - 1) % V)
            state = (state - 1) // V
        texts.append([PROMPT, *reversed(text)])
    return texts
