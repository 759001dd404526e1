"""Every verifier's law, the mistakes that must be seen, plain references of the rules, and refusals."""

from __future__ import annotations

import pytest
import torch

import eval.law as law
from eval.law import CONTROL_LEVEL, CONTROLS, LEVEL, Fit, check, exact_cases
from eval.sampling import Sampling
from eval.verify import verify, verify_block, verify_greedy, verify_sampled, verify_tree
from heads.artifact import UserError
from heads.base import Proposal

SAMPLES = 15_000
TREE = (-1, 0, -1, 0, 2, 1, 1, -1)


@pytest.mark.parametrize("case", exact_cases(), ids=lambda case: case.name)
def test_law(case: law.Case, record_property) -> None:
    """χ² against the exact distribution; all cases together fail by chance in one run out of 600."""
    outcome = check(case, samples=SAMPLES)
    record_property("p_value", outcome.p_value)
    assert outcome.impossible == 0
    assert outcome.p_value > LEVEL


@pytest.mark.parametrize("damage", CONTROLS)
def test_controls_are_caught(damage: str) -> None:
    assert check(CONTROLS[damage], samples=SAMPLES).p_value > LEVEL
    assert check(CONTROLS[damage], damage=damage, samples=SAMPLES).p_value < CONTROL_LEVEL


def test_drawn_siblings_under_the_rule_for_chosen_ones_cost_acceptance_only(monkeypatch) -> None:
    """Given the siblings, walking them with p(x) writes p whatever they are; the converse is the control above."""
    monkeypatch.setattr(law, "_as_handed_over", lambda proposal, *_: Proposal(*_without_q(proposal)))
    assert check(law.Case("T=1", "two levels", drawn=True), samples=SAMPLES).p_value > LEVEL


def _without_q(proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return proposal.tokens_BN, proposal.parents_N, proposal.count_B


def test_typical_acceptance_is_not_exact_and_its_distance_is_measured() -> None:
    outcomes = [check(case, samples=SAMPLES) for case in law.typical_cases()[:4]]
    assert all(outcome.p_value < CONTROL_LEVEL and outcome.total_variation > 0.1 for outcome in outcomes)
    noise = check(law.Case("T=1", "chain 2", drawn=False), samples=SAMPLES).total_variation
    assert noise < 0.03


# ---- against plain references -----------------------------------------------------------------------------------


def made_up(rows: int, nodes: int, size: int, drawn: bool, parents: tuple[int, ...] | None = None):
    """Distributions after each block node, and a proposal with siblings that differ."""
    generator = torch.Generator().manual_seed(nodes + size)
    p = torch.softmax(torch.randn(rows, nodes + 1, size, generator=generator, dtype=torch.float64) * 1.3, -1)
    parents = parents if parents is not None else tuple(range(-1, nodes - 1))
    tokens, q = torch.zeros(rows, nodes, dtype=torch.long), torch.zeros(rows, nodes, size, dtype=torch.float64)
    for parent in set(parents):
        children = [node for node in range(nodes) if parents[node] == parent]
        given = torch.softmax(torch.randn(rows, size, generator=generator, dtype=torch.float64), -1)
        drawn_tokens = torch.multinomial(given, len(children), generator=generator)
        for child, token in zip(children, drawn_tokens.T, strict=True):
            tokens[:, child], q[:, child] = token, given
    count = torch.randint(0, nodes + 1, (rows,), generator=generator)
    return p, Proposal(tokens, torch.tensor(parents), count, q if drawn else None)


def plain_tree(p, proposal: Proposal, coins) -> tuple[list[int], list[float]]:
    """The two rules for trees as their papers write them, for one row: (accepted nodes, what is drawn from next)."""
    tokens, parents = proposal.tokens_BN[0].tolist(), proposal.parents_N.tolist()
    path: list[int] = []
    residual = p[0].clone()
    while True:
        here = path[-1] if path else -1
        children = [n for n in range(int(proposal.count_B[0])) if parents[n] == here]
        q = proposal.probs_BNV[0, children[0]].clone() if proposal.probs_BNV is not None and children else None
        for child in children:
            token = tokens[child]
            limit = residual[token] if q is None else residual[token] / q[token]
            if coins[child] < limit:
                path.append(child)
                residual = p[child + 1].clone()
                break
            if q is None:
                residual[token] = 0
            else:
                residual = (residual - q).clamp(min=0)
                q[token] = 0
                q = q / q.sum()
            residual = residual / residual.sum()
        else:
            return path, residual.tolist()


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_tree_rules_equal_their_plain_form(drawn: bool) -> None:
    p, proposal = made_up(400, len(TREE), 6, drawn, TREE)
    ours = verify_tree(lambda rows, blocks: p[rows, blocks], proposal, torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(9)
    coins = torch.rand(400, len(TREE), generator=generator, dtype=torch.float64)
    residuals = []
    for row in range(400):
        q = None if proposal.probs_BNV is None else proposal.probs_BNV[row : row + 1]
        one = Proposal(proposal.tokens_BN[row : row + 1], proposal.parents_N, proposal.count_B[row : row + 1], q)
        path, residual = plain_tree(p[row], one, coins[row])
        accepted = int(ours.accepted_B[row])
        assert ours.path_BK[row, :accepted].tolist() == path
        residuals.append(residual)
    expected = torch.multinomial(torch.tensor(residuals, dtype=torch.float64), 1, generator=generator)[:, 0]
    assert (ours.next_B == expected).float().mean() > 0.99  # normalising moves a draw's last digit
    assert ours.accepted_B.max() >= 2


def plain_block(p, tokens: list[int], q, coins) -> tuple[int, torch.Tensor]:
    """Algorithm 2 of arXiv 2403.10444 for one row."""
    weights, tau = [1.0], 0
    for i, token in enumerate(tokens, start=1):
        weights.append(min(1.0, weights[-1] * float(p[i - 1, token] / q[i - 1, token])))
        if i == len(tokens):
            share = weights[i]
        else:
            mass = float((weights[i] * p[i] - q[i]).clamp(min=0).sum())
            share = mass / (mass + 1 - weights[i])
        if coins[i - 1] < share:
            tau = i
    return tau, p[tau] if tau == len(tokens) else (weights[tau] * p[tau] - q[tau]).clamp(min=0)


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_block_verification_equals_its_plain_form(drawn: bool) -> None:
    p, proposal = made_up(400, 4, 6, drawn)
    verdict = verify_block(
        p, proposal.tokens_BN, proposal.count_B, proposal.probs_BNV, torch.Generator().manual_seed(2)
    )
    generator = torch.Generator().manual_seed(2)
    coins = torch.rand(400, 4, generator=generator, dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(proposal.tokens_BN, 6).double()
    q = one_hot if proposal.probs_BNV is None else proposal.probs_BNV
    residuals = []
    for row, count in enumerate(proposal.count_B.tolist()):
        tau, residual = plain_block(p[row], proposal.tokens_BN[row, :count].tolist(), q[row], coins[row])
        assert int(verdict.accepted_B[row]) == tau
        residuals.append(residual)
    expected = torch.multinomial(torch.stack(residuals), 1, generator=generator)[:, 0]
    assert torch.equal(verdict.next_B, expected)


def test_block_verification_accepts_at_least_as_much() -> None:
    p, proposal = made_up(6000, 4, 6, True)
    full = torch.full_like(proposal.count_B, 4)
    accepted = [
        rule(p, proposal.tokens_BN, full, proposal.probs_BNV, torch.Generator().manual_seed(1)).accepted_B
        for rule in (verify_sampled, verify_block)
    ]
    assert accepted[1].double().mean() > accepted[0].double().mean()


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_a_chain_is_the_degenerate_tree(drawn: bool) -> None:
    """Same coins, same verdict, same token."""
    p, proposal = made_up(500, 4, 9, drawn)
    chain = verify_sampled(
        p, proposal.tokens_BN, proposal.count_B, proposal.probs_BNV, torch.Generator().manual_seed(4)
    )
    tree = verify_tree(lambda rows, blocks: p[rows, blocks], proposal, torch.Generator().manual_seed(4))
    assert torch.equal(chain.accepted_B, tree.accepted_B) and torch.equal(chain.next_B, tree.next_B)
    for row, accepted in enumerate(tree.accepted_B.tolist()):
        assert tree.path_BK[row, :accepted].tolist() == list(range(accepted))


def test_a_greedy_chain_is_the_degenerate_greedy_tree() -> None:
    p, proposal = made_up(300, 4, 3, False)
    count = proposal.count_B.clamp(max=3)
    chain = verify_greedy(p[:, :4], Proposal.chain(proposal.tokens_BN[:, :3], count))
    # A fourth node that is only padding makes it a tree.
    tree = verify_greedy(p, Proposal(proposal.tokens_BN, torch.tensor([-1, 0, 1, -1]), count))
    assert chain.path_BK is None and tree.path_BK is not None
    assert torch.equal(chain.accepted_B, tree.accepted_B) and torch.equal(chain.next_B, tree.next_B)


def test_rows_may_have_trees_of_their_own() -> None:
    scores = torch.zeros(2, 4, 5)
    scores[:, 0, 4] = scores[:, 1:, 2] = 1
    tokens = torch.tensor([[3, 4, 2], [4, 2, 2]])
    verdict = verify_greedy(scores, Proposal(tokens, torch.tensor([[-1, -1, 1], [-1, 0, 1]]), torch.tensor([3, 3])))
    assert verdict.accepted_B.tolist() == [2, 3]
    assert verdict.path_BK.tolist() == [[1, 2, 0], [0, 1, 2]]


# ---- single facts -----------------------------------------------------------------------------------------------


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


def test_siblings_beyond_what_could_be_drawn_are_passed_over() -> None:
    """q has one token only; the second sibling can be anything and never stands."""
    p = torch.tensor([[[0.1, 0.9, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]]).expand(500, -1, -1)
    q = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]]).expand(500, -1, -1)
    proposal = Proposal(torch.tensor([[0, 1]]).expand(500, -1), torch.tensor([-1, -1]), torch.full((500,), 2), q)
    verdict = verify_tree(lambda rows, blocks: p[rows, blocks], proposal, torch.Generator().manual_seed(0))
    stands = verdict.accepted_B == 1
    assert 20 < stands.sum() < 90 and (verdict.path_BK[stands, 0] == 0).all()
    assert (verdict.next_B[~stands] == 1).all()


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"min_p": 1.5}, {"repetition_penalty": 0}, {"banned": (-1,)}],
)
def test_impossible_sampling_is_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match="cannot be"):
        Sampling(**{"temperature": 1.0, **wrong})


@pytest.mark.parametrize(
    ("parents", "words"),
    [([-1, 2, 1], "node 1 has parent 2"), ([0, -1, 0], "node 0 has parent 0"), ([-1, -2, 0], "node 1 has parent -2")],
)
def test_what_is_no_tree_is_refused(parents: list[int], words: str) -> None:
    proposal = Proposal(torch.tensor([[1, 2, 3]]), torch.tensor(parents), torch.tensor([3]))
    with pytest.raises(UserError, match=words):
        proposal.check()
    with pytest.raises(UserError, match="0 to 3 per row"):
        Proposal.chain(torch.tensor([[1, 2, 3]]), torch.tensor([4])).check()
    with pytest.raises(UserError, match="parents of shape"):
        Proposal(torch.tensor([[1, 2, 3]]), torch.tensor([-1, 0]), torch.tensor([3])).check()


@pytest.mark.parametrize("total", [0.9, 1.2, float("nan")])
def test_a_draft_distribution_that_does_not_sum_to_one_is_refused(total: float) -> None:
    q = torch.tensor([[[0.5, 0.25, total - 0.75]]])
    with pytest.raises(UserError, match="sums? to 1"):
        Proposal.chain(torch.tensor([[0]]), probs_BNV=q).check()


def test_verifiers_that_cannot_judge_this_are_refused() -> None:
    chain = Proposal.chain(torch.tensor([[0, 1]]))
    tree = Proposal(torch.tensor([[0, 1]]), torch.tensor([-1, -1]), torch.tensor([2]))
    for proposal, sampling, verifier, words in (
        (chain, Sampling(1.0), "soft", "choose one of rejection, block, typical"),
        (chain, Sampling(), "block", "temperature above 0"),
        (chain, Sampling(), "typical", "temperature above 0"),
        (tree, Sampling(1.0), "block", "chains only"),
    ):
        with pytest.raises(UserError, match=words):
            verify(torch.zeros(1, 3, 4), proposal, sampling, torch.Generator(), verifier=verifier)
    with pytest.raises(UserError, match="damage=nonsense is unknown"):
        check(CONTROLS["stop"], damage="nonsense")


def test_rare_texts_do_not_decide_a_fit_alone() -> None:
    """One text of a kind that is expected .03 times in all happens in one run of thirty, and proves nothing."""
    exact = torch.tensor([0.5, 0.49995, 0.00005], dtype=torch.float64)
    fit = Fit.of("peaked", torch.tensor([300.0, 299.0, 1.0]), exact)
    assert fit.cells == 2 and fit.p_value > 0.5
