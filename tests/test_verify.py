"""The law of chain verification: samples against the target's exact distribution, and controls that must fail."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from eval.verify import Sampling, verify_greedy, verify_sampled
from heads.artifact import UserError
from heads.base import Proposal

V, LENGTH, ROWS = 4, 3, 40_000
SAMPLINGS = {
    "T1": Sampling(1.0),
    "T.6": Sampling(0.6),
    "top_k": Sampling(1.0, top_k=3),
    "top_p": Sampling(0.9, top_p=0.8),
    "min_p": Sampling(1.2, min_p=0.2),
    "all": Sampling(0.8, top_k=3, top_p=0.9, min_p=0.05),
}


def tables(sampling: Sampling, seed: int) -> list[torch.Tensor]:
    """One random distribution for each prefix of each length: table[n] is [V^n, V]."""
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(V**n, V, generator=generator, dtype=torch.float64) * 1.5 for n in range(LENGTH + 3)]
    return [sampling.probabilities(rows) for rows in logits]


def index(tokens_BN: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(len(tokens_BN), dtype=torch.long)
    for column in tokens_BN.T:
        result = result * V + column
    return result


def decode_many(sampling: Sampling, gamma: int, deterministic: bool, control: str = "") -> torch.Tensor:
    """The first LENGTH tokens of ROWS independent decodes [ROWS, LENGTH], rounds of γ drafted tokens each."""
    p, q = tables(sampling, 1), tables(sampling, 2)
    generator = torch.Generator().manual_seed(3)
    text = torch.zeros(ROWS, 0, dtype=torch.long)
    # All rows are kept at a common length: what a round adds beyond the first token is decided by a shared loop
    # over rows with equal lengths, so decode in groups.
    done = []
    groups = [text]
    while groups:
        text = groups.pop()
        if text.shape[1] >= LENGTH:
            done.append(text[:, :LENGTH])
            continue
        depth = min(gamma, LENGTH + 2 - text.shape[1])
        drafted, q_rows = text, []
        for _ in range(depth):
            row_q = q[drafted.shape[1]][index(drafted)]
            token = row_q.argmax(-1) if deterministic else torch.multinomial(row_q, 1, generator=generator)[:, 0]
            drafted = torch.cat([drafted, token[:, None]], 1)
            q_rows.append(row_q)
        p_rows = torch.stack([p[n][index(drafted[:, :n])] for n in range(text.shape[1], text.shape[1] + depth + 1)], 1)
        tokens = drafted[:, text.shape[1] :]
        count = torch.full((len(text),), depth)
        if control == "stop before a token one dislikes":
            count = (tokens != 0).long().cumprod(1).sum(1)
        q_BNV = None if deterministic else torch.stack(q_rows, 1)
        if control == "q is not what was drawn from":
            q_BNV = torch.full_like(torch.stack(q_rows, 1), 1 / V)
        verdict = verify_sampled(p_rows, tokens, count, q_BNV, generator)
        for accepted in range(depth + 1):
            rows = verdict.accepted_B == accepted
            if rows.any():
                groups.append(torch.cat([text[rows], tokens[rows, :accepted], verdict.next_B[rows, None]], 1))
    return torch.cat(done)


def p_value(samples: torch.Tensor, sampling: Sampling) -> float:
    """χ² of the samples against the exact probability of every sequence of LENGTH tokens."""
    p = tables(sampling, 1)
    sequences = torch.cartesian_prod(*[torch.arange(V)] * LENGTH)
    exact = torch.ones(len(sequences), dtype=torch.float64)
    for n in range(LENGTH):
        exact *= p[n][index(sequences[:, :n])].gather(1, sequences[:, n : n + 1])[:, 0]
    seen = torch.bincount(index(samples), minlength=V**LENGTH).double()
    assert seen[exact == 0].sum() == 0, "a sequence of probability zero was produced"
    likely = exact * len(samples) >= 5
    rest = (~likely) & (exact > 0)
    observed = torch.cat([seen[likely], seen[rest].sum()[None]])
    expected = torch.cat([exact[likely], exact[rest].sum()[None]]) * len(samples)
    keep = expected > 0
    return float(chisquare(observed[keep], expected[keep] * (observed[keep].sum() / expected[keep].sum())).pvalue)


@pytest.mark.parametrize("deterministic", [False, True], ids=["drawn", "argmax"])
@pytest.mark.parametrize("gamma", [1, 2, 4])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_law(name: str, gamma: int, deterministic: bool) -> None:
    sampling = SAMPLINGS[name]
    # 36 combinations: each may fail by chance with 1e-5, all together with less than 1 in 2,500.
    assert p_value(decode_many(sampling, gamma, deterministic), sampling) > 1e-5


@pytest.mark.parametrize("control", ["stop before a token one dislikes", "q is not what was drawn from"])
def test_controls_are_caught(control: str) -> None:
    sampling = Sampling(1.0)
    assert p_value(decode_many(sampling, 2, False, control), sampling) < 1e-6


def test_greedy_is_not_soft_acceptance() -> None:
    """At T = 0 a draft that is not the argmax is never accepted, however likely the target finds it."""
    logits = torch.tensor([[[1.0, 1.01, 0.0], [0.0, 0.0, 3.0]]])
    verdict = verify_greedy(logits, Proposal.chain(torch.tensor([[0]])))
    assert verdict.accepted_B.tolist() == [0] and verdict.next_B.tolist() == [1]


def test_greedy_rows_padding_and_bonus() -> None:
    logits = torch.zeros(3, 3, 5)
    for row in range(3):
        for node, token in enumerate((4, 2, 1)):
            logits[row, node, token] = 1
    tokens = torch.tensor([[4, 2], [4, 3], [4, 2]])
    verdict = verify_greedy(logits, Proposal.chain(tokens, torch.tensor([2, 2, 1])))
    assert verdict.accepted_B.tolist() == [2, 1, 1]  # the third row's second token is padding
    assert verdict.next_B.tolist() == [1, 2, 2]


def test_beta_is_the_overlap() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    q = torch.tensor([[[0.2, 0.3, 0.5]]])
    verdict = verify_sampled(p, torch.tensor([[2]]), torch.tensor([1]), q, torch.Generator().manual_seed(0))
    assert verdict.beta_BN is not None and verdict.beta_BN.item() == pytest.approx(0.5)
    assert verdict.accepted_B.item() == 0 and verdict.next_B.item() in (0, 1)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"min_p": 1.5}])
def test_impossible_sampling_is_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match="cannot be"):
        Sampling(**{"temperature": 1.0, **wrong})
