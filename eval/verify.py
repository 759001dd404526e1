"""Exact verification of drafted tokens: pure tensors and a generator. Knows no model and no proposer.

Greedy decoding has its own rule and never goes through probabilities: accept while the draft is the argmax.

T > 0, chains: speculative sampling (arXiv 2211.17192, 2302.01318). Accept x ~ q with probability min(1, p(x)/q(x)); at
the first rejection draw from norm(max(0, p - q)); after γ acceptances draw the bonus token from p. A deterministic
draft is the case q = one-hot: it is accepted with p(x) and its residual is p without x.

T > 0, trees, by one of two rules that the proposal decides and that are never mixed. Deterministic siblings (EAGLE,
arXiv 2401.15077): walk them, accept with p(x), else take x out of p and renormalise. Siblings drawn without
replacement (Sequoia, arXiv 2402.12374, section 3.2): accept with min(1, r(x)/q(x)), else r = norm(max(0, r - q)), and
take x out of q and renormalise; r is p at first.

`block` (arXiv 2403.10444, algorithm 2) judges a chain as a whole: it accepts at least as much. All of these leave the
output exactly p-distributed. `typical` (Medusa, arXiv 2401.10774, section 2.3.1) does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.sampling import Sampling
from eval.tree import node_texts
from heads.artifact import UserError
from heads.base import Proposal

VERIFIERS = ("rejection", "block", "typical")
EXACT = ("rejection", "block")
EPSILON, DELTA = 0.09, 0.3
"""Medusa's own thresholds of typical acceptance."""

AtNodes = Callable[[Tensor, Tensor], Tensor]
"""(rows_R, blocks_R) -> the target's distribution [R, V] after block node blocks_R (0 is the root) of each row."""


@dataclass(frozen=True)
class Verdict:
    """accepted_B: how many drafted tokens of each row stand; next_B: the token the target adds; beta_BN: Σ min(p, q)
    at each node of a chain given its prefix (None for greedy, for trees and where tokens are not judged one by one);
    path_BK: the nodes that stand, padded (None: the first `accepted_B`, as in a chain)."""

    accepted_B: Tensor
    next_B: Tensor
    beta_BN: Tensor | None = None
    path_BK: Tensor | None = None


def verify(
    logits_BNV: Tensor,
    proposal: Proposal,
    sampling: Sampling,
    generator: torch.Generator,
    *,
    verifier: str = "rejection",
    texts: Sequence[Sequence[int]] | None = None,
) -> Verdict:
    """Judge a proposal as `sampling` and `verifier` (one of VERIFIERS) say.

    logits_BNV [B, 1 + N, V]: the target's raw logits after the last committed token and after each node. texts: the
    text of each row, prompt and last committed token included; needed where `sampling.looks_back`. The proposal is
    taken as it is: `Proposal.check` comes first. Raises UserError on a verifier that cannot judge this.
    """
    check_verifier(verifier, sampling)
    text_BNL = None
    if sampling.looks_back:
        assert texts is not None, "a penalty looks at the text"
        text_BNL = node_texts(texts, proposal)
    if sampling.greedy:
        scores_BNV = sampling.scores(logits_BNV, None if text_BNL is None else text_BNL.flatten(0, 1))
        return verify_greedy(scores_BNV, proposal)

    def at(rows_R: Tensor, blocks_R: Tensor) -> Tensor:
        text_RL = None if text_BNL is None else text_BNL[rows_R, blocks_R]
        return sampling.probabilities(logits_BNV[rows_R, blocks_R], text_RL)

    if verifier == "typical":
        return verify_typical(_everywhere(at, logits_BNV), proposal, generator)
    if not proposal.is_chain:
        if verifier == "block":
            raise UserError("verifier=block judges chains only; use verifier=rejection for trees.")
        return verify_tree(at, proposal, generator)
    rule = verify_block if verifier == "block" else verify_sampled
    return rule(_everywhere(at, logits_BNV), proposal.tokens_BN, proposal.count_B, proposal.probs_BNV, generator)


def check_verifier(verifier: str, sampling: Sampling) -> None:
    """Raises UserError when there is no such verifier or greedy decoding has no use for it."""
    if verifier not in VERIFIERS:
        raise UserError(f"verifier={verifier} is unknown; choose one of {', '.join(VERIFIERS)}.")
    if sampling.greedy and verifier != "rejection":
        raise UserError(f"verifier={verifier} needs a temperature above 0; greedy decoding takes verifier=rejection.")


def _everywhere(at: AtNodes, logits_BNV: Tensor) -> Tensor:
    rows, blocks = logits_BNV.shape[:2]
    each_R = torch.arange(rows * blocks, device=logits_BNV.device)
    return at(each_R // blocks, each_R % blocks).unflatten(0, (rows, blocks))


# ---- greedy -----------------------------------------------------------------------------------------------------


def verify_greedy(scores_BNV: Tensor, proposal: Proposal) -> Verdict:
    """Walk from the root to the child whose token is the argmax, as long as there is one.

    scores_BNV: the target's logits [B, 1 + N, V], penalised if they are to be.
    """
    tokens_BN, count_B = proposal.tokens_BN, proposal.count_B
    choice_BN = scores_BNV.max(-1).indices  # the first of equals, as argmax, several times sooner
    if proposal.is_chain:
        agreed_BN = (choice_BN[:, :-1] == tokens_BN) & _real(tokens_BN, count_B)
        accepted_B = agreed_BN.long().cumprod(1).sum(1)
        return Verdict(accepted_B, choice_BN.gather(1, accepted_B[:, None])[:, 0])
    paths = []
    rows = zip(tokens_BN.tolist(), proposal.parents_BN.tolist(), choice_BN.tolist(), count_B.tolist(), strict=True)
    for tokens, parents, choice, count in rows:
        path: list[int] = []
        for node in range(count):
            last = path[-1] if path else -1
            if parents[node] == last and tokens[node] == choice[last + 1]:
                path.append(node)
        paths.append(path)
    return _along(paths, choice_BN)


def _along(paths: Sequence[Sequence[int]], following_BN: Tensor) -> Verdict:
    """A verdict out of each row's path, where what follows each block node is known."""
    device, longest = following_BN.device, max(map(len, paths))
    path_BK = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], dtype=torch.long, device=device)
    last_B = torch.tensor([path[-1] + 1 if path else 0 for path in paths], device=device)
    accepted_B = torch.tensor([len(path) for path in paths], device=device)
    return Verdict(accepted_B, following_BN.gather(1, last_B[:, None])[:, 0], path_BK=path_BK)


# ---- chains -----------------------------------------------------------------------------------------------------


def verify_sampled(
    p_BNV: Tensor, tokens_BN: Tensor, count_B: Tensor, q_BNV: Tensor | None, generator: torch.Generator
) -> Verdict:
    """Speculative sampling of chains.

    p_BNV [B, N + 1, V]: the target's distributions after all sampling transforms; q_BNV [B, N, V]: what each drafted
    token was drawn from, after the same transforms, or None for deterministic drafts.
    """
    p_drafted_BN = p_BNV[:, :-1].gather(2, tokens_BN[..., None])[..., 0]
    if q_BNV is None:
        q_drafted_BN, beta_BN = torch.ones_like(p_drafted_BN), p_drafted_BN
    else:
        q_drafted_BN = q_BNV.gather(2, tokens_BN[..., None])[..., 0]
        beta_BN = torch.minimum(p_BNV[:, :-1], q_BNV).sum(-1)
    passed_BN = (_coins(p_drafted_BN, generator) * q_drafted_BN < p_drafted_BN) & _real(tokens_BN, count_B)
    accepted_B = passed_BN.long().cumprod(1).sum(1)
    each_B = torch.arange(len(p_BNV), device=p_BNV.device)
    weights_BV = p_BNV[each_B, accepted_B].clone()
    rejected = (accepted_B < count_B).nonzero()[:, 0]
    if len(rejected):
        place = accepted_B[rejected]
        if q_BNV is None:
            weights_BV[rejected, tokens_BN[rejected, place]] = 0
        else:
            weights_BV[rejected] = _less(weights_BV[rejected], q_BNV[rejected, place])
    return Verdict(accepted_B, _drawn(_or_p(weights_BV, p_BNV, accepted_B), generator), beta_BN)


def verify_block(
    p_BNV: Tensor, tokens_BN: Tensor, count_B: Tensor, q_BNV: Tensor | None, generator: torch.Generator
) -> Verdict:
    """Block verification of chains (arXiv 2403.10444, algorithm 2); arguments as for `verify_sampled`.

    weight_i = min(1, weight_{i-1} · p(x_i)/q(x_i)) is the share of the target's mass that the block still carries; the
    longest i is accepted at which a coin falls below h_i, and the residual there is max(0, weight_i · p - q).
    """
    rows, nodes, vocabulary = len(tokens_BN), tokens_BN.shape[1], p_BNV.shape[-1]
    if q_BNV is None:
        q_BNV = torch.nn.functional.one_hot(tokens_BN, vocabulary).to(p_BNV.dtype)
    coin_BN = _coins(p_BNV[:, 1:, 0], generator)
    accepted_B = torch.zeros_like(count_B)
    weight_B = p_BNV.new_ones(rows)
    weights_BV = _less(p_BNV[:, 0], q_BNV[:, 0]) if nodes else p_BNV[:, 0]
    weights_BV = torch.where((count_B > 0)[:, None], weights_BV, p_BNV[:, 0])
    for node in range(nodes):
        token_B1 = tokens_BN[:, node, None]
        ratio_B = (p_BNV[:, node].gather(1, token_B1) / q_BNV[:, node].gather(1, token_B1))[:, 0]
        weight_B = (weight_B * ratio_B).clamp(max=1)
        after_BV = p_BNV[:, node + 1]
        if node + 1 < nodes:
            # The last node of a shorter row has no successor: its residual is p itself and h is the weight.
            left_BV = _less(weight_B[:, None] * after_BV, q_BNV[:, node + 1])
            mass_B = left_BV.sum(-1)
            lost_B = mass_B + 1 - weight_B
            # 0/0 only where draft and target agree wholly from here on; what follows is accepted anyway.
            share_B = torch.where(lost_B > 0, mass_B / lost_B, 1.0)
            last_B = count_B == node + 1
            share_B = torch.where(last_B, weight_B, share_B)
            left_BV = torch.where(last_B[:, None], after_BV, left_BV)
        else:
            share_B, left_BV = weight_B, after_BV
        stands_B = (coin_BN[:, node] < share_B) & (node < count_B)
        accepted_B = torch.where(stands_B, node + 1, accepted_B)
        weights_BV = torch.where(stands_B[:, None], left_BV, weights_BV)
    return Verdict(accepted_B, _drawn(_or_p(weights_BV, p_BNV, accepted_B), generator))


def _or_p(weights_BV: Tensor, p_BNV: Tensor, accepted_B: Tensor) -> Tensor:
    """Where rounding alone has left nothing to draw from, p itself."""
    each_B = torch.arange(len(p_BNV), device=p_BNV.device)
    return torch.where(weights_BV.sum(-1, keepdim=True) > 0, weights_BV, p_BNV[each_B, accepted_B])


# ---- trees ------------------------------------------------------------------------------------------------------


def verify_tree(at: AtNodes, proposal: Proposal, generator: torch.Generator) -> Verdict:
    """Both rules for trees; a chain gives the verdict and takes the draws of `verify_sampled`.

    Every row stands at a node and walks through the siblings below it; nodes are visited in their order for all rows
    at once, which is each row's own order because parents come first. `at` is asked only for nodes that stand.
    """
    tokens_BN, parents_BN, q_BNV = proposal.tokens_BN, proposal.parents_BN, proposal.probs_BNV
    rows, nodes = tokens_BN.shape
    every_B = torch.arange(rows, device=tokens_BN.device)
    here_B = torch.full_like(every_B, -1)  # the node each row stands at
    r_BV = at(every_B, here_B + 1).clone()  # not normalised; its sum is mass_B, taken as 1 before a rejection
    q_BV = None if q_BNV is None else torch.zeros_like(r_BV)
    mass_B, fresh_B = r_BV.new_ones(rows), torch.ones_like(every_B, dtype=torch.bool)
    coin_BN = _coins(r_BV.new_zeros(rows, nodes), generator)
    path_BK, accepted_B = torch.zeros_like(tokens_BN), torch.zeros_like(every_B)
    for node in range(nodes):
        asked = ((parents_BN[:, node] == here_B) & (node < proposal.count_B)).nonzero()[:, 0]
        if not len(asked):
            continue
        token_R = tokens_BN[asked, node]
        r_R, q_R = r_BV[asked, token_R], r_BV.new_ones(len(asked))
        if q_BV is not None and q_BNV is not None:
            first = asked[fresh_B[asked]]
            q_BV[first] = q_BNV[first, node].to(q_BV.dtype)
            q_R = q_BV[asked, token_R]
        # q(x) = 0: nothing was left to draw, so this sibling only fills up and is passed over.
        passed_R = (coin_BN[asked, node] * q_R * mass_B[asked] < r_R) & (q_R > 0)
        won, lost = asked[passed_R], asked[~passed_R & (q_R > 0)]
        path_BK[won, accepted_B[won]] = node
        accepted_B[won] += 1
        here_B[won] = node
        fresh_B[won], fresh_B[lost] = True, False
        if len(won):
            r_BV[won], mass_B[won] = at(won, here_B[won] + 1), 1
        _take_out(r_BV, q_BV, mass_B, (lost, tokens_BN[lost, node]))
    left_B = r_BV.sum(-1) > 0
    if not left_B.all():  # rounding alone
        r_BV[~left_B] = at(every_B[~left_B], here_B[~left_B] + 1)
    return Verdict(accepted_B, _drawn(r_BV, generator), path_BK=path_BK)


def _take_out(r_BV: Tensor, q_BV: Tensor | None, mass_B: Tensor, lost: tuple[Tensor, Tensor]) -> None:
    """What a rejected token changes, in place: the residual, its mass, and what the next sibling was drawn from."""
    rows_R, token_R = lost
    if not len(rows_R):
        return
    if q_BV is None:
        r_BV[rows_R, token_R] = 0
    else:
        r_BV[rows_R] = _less(r_BV[rows_R] / mass_B[rows_R, None], q_BV[rows_R])
        q_BV[rows_R, token_R] = 0
        rest_R1 = q_BV[rows_R].sum(-1, keepdim=True)
        q_BV[rows_R] = torch.where(rest_R1 > 0, q_BV[rows_R] / rest_R1, 0)
    mass_B[rows_R] = r_BV[rows_R].sum(-1)


# ---- not exact --------------------------------------------------------------------------------------------------


def verify_typical(p_BNV: Tensor, proposal: Proposal, generator: torch.Generator) -> Verdict:
    """Medusa's typical acceptance: a node stands when p(x) > min(ε, δ·exp(-H(p))) all along its path; the longest path
    wins, the first one among equals. This is **not exact**: the output does not follow p."""
    tokens_BN, parents_BN = proposal.tokens_BN, proposal.parents_BN
    entropy_BN = -torch.xlogy(p_BNV, p_BNV).sum(-1)
    least_BN = (DELTA * torch.exp(-entropy_BN)).clamp(max=EPSILON)
    above_BN = parents_BN + 1
    each_B1 = torch.arange(len(tokens_BN), device=tokens_BN.device)[:, None]
    likely_BN = p_BNV[each_B1, above_BN, tokens_BN] > least_BN.gather(1, above_BN)
    paths = []
    rows = zip(likely_BN.tolist(), parents_BN.tolist(), proposal.count_B.tolist(), strict=True)
    for likely, parents, count in rows:
        below: dict[int, list[int]] = {-1: []}
        for node in range(count):
            if likely[node] and parents[node] in below:
                below[node] = [*below[parents[node]], node]
        paths.append(max(below.values(), key=len))
    return _along(paths, _drawn(p_BNV.flatten(0, 1), generator).view(p_BNV.shape[:2]))


# ---- draws ------------------------------------------------------------------------------------------------------


def _coins(like_BN: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(like_BN.shape, generator=generator, dtype=like_BN.dtype, device=like_BN.device)


def _less(p_RV: Tensor, q_RV: Tensor) -> Tensor:
    return (p_RV - q_RV).clamp_min(0)


def _drawn(weights_RV: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(weights_RV, 1, generator=generator)[:, 0]


def _real(tokens_BN: Tensor, count_B: Tensor) -> Tensor:
    """Which nodes are drafted tokens rather than padding."""
    return torch.arange(tokens_BN.shape[1], device=tokens_BN.device) < count_B[:, None]
