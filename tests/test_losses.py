"""The losses: value and gradient of every kind against plain autograd, and the walk over passes and chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heads.artifact import UserError
from heads.base import Projection, TargetWeights
from heads.kernels import KINDS, TOP_K, Said, kernel_of, reference_loss
from heads.losses import Objective, TargetRows, UnrolledSums, _likeliest, unrolled_loss

STARTS, DEPTH, WIDTH, VOCABULARY, DRAFTABLE = 11, 3, 6, 40, 25
BREAKS = (4, 9)  # the first start of another turn


@dataclass(frozen=True)
class Problem:
    """Output states, a projection and a target with mass outside the draft vocabulary. p_NW is its softmax over the
    whole vocabulary, taken by other means than the loss takes it."""

    hidden_KND: Tensor
    projection: Projection
    target: TargetRows
    p_NW: Tensor
    valid_KN: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """What is differentiated by."""
        parts = (self.hidden_KND, self.projection.weight, self.projection.bias_W)
        return [part for part in parts if part is not None and part.requires_grad]

    def sums(self, objective: Objective) -> UnrolledSums:
        return unrolled_loss(self.hidden_KND, self.projection, self.target, self.valid_KN, objective)


def problem(*, per_pass: bool = False, bias: bool = False, softcap: float | None = None) -> Problem:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids_W = torch.randperm(VOCABULARY, generator=generator)[:DRAFTABLE].sort().values
    full = TargetWeights(random(VOCABULARY, WIDTH), random(VOCABULARY, WIDTH), random(VOCABULARY), 3.0)
    last_ND = random(STARTS, WIDTH)
    logits_NV = 3.0 * torch.tanh((last_ND @ full.lm_head_VD.T + full.bias_V) / 3.0)
    token_N = torch.randint(-1, DRAFTABLE, (STARTS,), generator=generator)
    token_N[[2, 5]] = -1
    passes = (DEPTH,) if per_pass else ()
    projection = Projection(
        random(*passes, DRAFTABLE, WIDTH).requires_grad_(),
        random(*passes, DRAFTABLE).requires_grad_() if bias else None,
        softcap,
    )
    turn_N = torch.tensor([sum(start >= first for first in BREAKS) for start in range(STARTS)])
    valid_KN = torch.zeros(DEPTH, STARTS, dtype=torch.bool)
    for k in range(DEPTH):
        valid_KN[k, : STARTS - k] = turn_N[k:] == turn_N[: STARTS - k]
    return Problem(
        random(DEPTH, STARTS, WIDTH).requires_grad_(),
        projection,
        TargetRows(last_ND, full.over(ids_W), logits_NV.logsumexp(-1), token_N),
        logits_NV.softmax(-1)[:, ids_W],
        valid_KN,
    )


def plain_total(of: Problem, objective: Objective, *, through_weights: bool = False) -> Tensor:
    """The loss pair by pair, in fp64 and with nothing but autograd."""
    total = torch.zeros((), dtype=torch.float64)
    weight, bias_W = of.projection.weight.double(), of.projection.bias_W
    for n in range(STARTS):
        survived = torch.ones((), dtype=torch.float64)
        for k in of.valid_KN[:, n].nonzero()[:, 0].tolist():
            logits_W = (weight[k] if weight.dim() == 3 else weight) @ of.hidden_KND[k, n].double()
            if bias_W is not None:
                logits_W = logits_W + (bias_W[k] if bias_W.dim() == 2 else bias_W)
            if of.projection.softcap is not None:
                logits_W = of.projection.softcap * torch.tanh(logits_W / of.projection.softcap)
            p_W, token = of.p_NW[n + k], of.target.token_N[n + k]
            loss = reference_loss(objective.kind, logits_W[None], p_W[None], token[None], objective.eta)[0]
            total = total + loss * (survived if objective.decay == "survival" else objective.decay**k)
            overlap = torch.minimum(p_W, logits_W.softmax(-1)).sum()
            survived = survived * (overlap if through_weights else overlap.detach())
    return total


def assert_same(of: Problem, objective: Objective) -> None:
    sums, total = of.sums(objective), plain_total(of, objective)
    torch.testing.assert_close(sums.total, total)
    # A factor, so that the backward pass has something to do.
    ours = torch.autograd.grad(sums.total * 0.7, of.leaves)
    for a, b in zip(ours, torch.autograd.grad(total * 0.7, of.leaves), strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b)


def said(logits_CV: Tensor, draftable: int, token_C: Tensor) -> Said:
    """What a target with these logits says; the draft can propose the first tokens."""
    log_p_CW = torch.log_softmax(logits_CV, -1)[:, :draftable]
    p_CW = log_p_CW.exp()
    return Said(p_CW, (p_CW * log_p_CW).sum(-1), token_C)


# ---- kinds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_definition_over_the_whole_vocabulary(kind: str) -> None:
    """q is zero outside W, so each sum over the whole vocabulary is taken as the books write it."""
    torch.manual_seed(0)
    p_V = torch.randn(VOCABULARY, dtype=torch.float64).mul(2).softmax(0)
    logits_W = torch.randn(DRAFTABLE, dtype=torch.float64)
    q_V = torch.cat([logits_W.softmax(0), torch.zeros(VOCABULARY - DRAFTABLE, dtype=torch.float64)])
    found = reference_loss(kind, logits_W[None], p_V[None, :DRAFTABLE], torch.tensor([7]), 3.0).item()
    p, q = p_V.tolist(), q_V.tolist()
    alpha = 1 - sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    inside = [(a, b) for a, b in zip(p, q, strict=True) if b > 0]
    kl = sum(a * math.log(a / b) for a, b in inside)
    mixed = [(a, b, (a + b) / 2) for a, b in zip(p, q, strict=True)]
    expected = {
        "ce": -math.log(q[7]),
        "kl": kl,
        "topk_kl": sum(a * math.log(a / b) for a, b in sorted(inside, reverse=True)[:TOP_K]),
        "rkl": sum(b * math.log(b / a) for a, b in inside),
        "jsd": sum(a * math.log(a / m) + (b * math.log(b / m) if b else 0) for a, b, m in mixed) / 2,
        "tv": 1 - alpha,
        "lk_alpha": -math.log(alpha),
        "lk_lambda": math.exp(-3 * alpha) * kl + (1 - math.exp(-3 * alpha)) * (1 - alpha),
    }[kind]
    assert 0.05 < sum(p[DRAFTABLE:]) < 0.95 and found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_kernel_equals_reference(kind: str, dtype: torch.dtype) -> None:
    """fp32 differs from fp64 by its rounding only."""
    torch.manual_seed(1)
    logits_CV = torch.randn(9, VOCABULARY, dtype=dtype) * 2
    logits_CW = torch.randn(9, DRAFTABLE, dtype=dtype).mul_(2).requires_grad_()
    token_C = torch.randint(0, DRAFTABLE, (9,))
    token_C[4] = -1
    says = said(logits_CV, DRAFTABLE, token_C)
    before = logits_CW.detach().clone(), says.p_CW.clone()
    loss_C, gradient_CW, overlap_C = kernel_of(kind, 2.0)(logits_CW.detach(), says)
    assert torch.equal(logits_CW, before[0]) and torch.equal(says.p_CW, before[1]), "other passes read them too"
    exact_CW = logits_CW.double()
    p_CW = said(logits_CV.double(), DRAFTABLE, token_C).p_CW
    expected_C = reference_loss(kind, exact_CW, p_CW, token_C, 2.0)
    (expected_CW,) = torch.autograd.grad(expected_C.sum(), logits_CW)
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(loss_C, expected_C.to(dtype), **tolerance)
    torch.testing.assert_close(gradient_CW, expected_CW, **tolerance)
    torch.testing.assert_close(overlap_C, torch.minimum(p_CW, exact_CW.softmax(-1)).sum(-1).to(dtype), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits_give_finite_gradients(kind: str) -> None:
    """Rows where p and q are points on the same token, on different ones, or on tokens out of reach. Adding a constant
    to the logits changes nothing, so each gradient sums to zero."""
    signs = torch.tensor([[1.0, -1, -1, -1, -1], [-1, 1, -1, -1, -1], [1, 1, -1, -1, -1], [-1, -1, -1, -1, 1]])
    target_CV = torch.cat([signs] * 4) * 1e4
    logits_CW = torch.cat([signs.roll(shift, 0) for shift in range(4)])[:, :3] * 1e4
    token_C = torch.arange(16) % 4 - 1
    loss_C, gradient_CW, overlap_C = kernel_of(kind, 3.0)(logits_CW, said(target_CV, 3, token_C))
    assert loss_C.isfinite().all() and gradient_CW.isfinite().all()
    assert ((overlap_C >= 0) & (overlap_C <= 1)).all() and overlap_C.min() == 0 and overlap_C.max() == 1
    assert (gradient_CW.sum(-1).abs() <= 1e-5).all() and gradient_CW.abs().max() < 100


def test_likelihood_of_acceptance_learns_where_the_overlap_is_tiny() -> None:
    """On a point it is cross-entropy, 80 nats away too; total variation sees next to nothing there."""
    logits_CW = torch.tensor([[0.0, 80.0, 0.0]])
    says = said(torch.tensor([[1e4, 0.0, 0.0]]), 3, torch.tensor([0]))
    loss_C, gradient_CW, overlap_C = kernel_of("lk_alpha", 3.0)(logits_CW, says)
    assert overlap_C.item() < 1e-34 and loss_C.item() == pytest.approx(80)
    torch.testing.assert_close(gradient_CW, kernel_of("ce", 3.0)(logits_CW, says)[1])
    assert gradient_CW[0].tolist() == pytest.approx([-1, 1, 0])
    assert kernel_of("tv", 3.0)(logits_CW, says)[1].abs().max() < 1e-34


def test_a_token_that_cannot_be_drafted_teaches_nothing_and_is_lost() -> None:
    of = problem()
    rows = replace(of.target, token_N=torch.full((STARTS,), -1))
    sums = replace(of, target=rows).sums(Objective("ce"))
    sums.total.backward()
    assert sums.total == 0 and of.hidden_KND.grad.abs().max() == 0 and not sums.match_KN.any()
    assert (sums.overlap_KN[of.valid_KN] > 0).all()


def test_mass_outside_the_draft_vocabulary_is_lost() -> None:
    rows = torch.eye(3, dtype=torch.float64)[:2]
    last = torch.tensor([[0.0, 0.0, 2.0]], dtype=torch.float64)
    target = TargetRows(last, TargetWeights(rows, rows), last.logsumexp(-1), torch.tensor([-1]))
    hidden, weight = torch.zeros(1, 1, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    sums = unrolled_loss(hidden, Projection(weight), target, torch.ones(1, 1, dtype=torch.bool), Objective("tv"))
    inside = 2 / (2 + torch.e**2)
    assert sums.overlap_KN.item() == pytest.approx(inside)
    assert not sums.match_KN.item()


def cut(monkeypatch, *, places: int, at_a_time: int) -> None:
    """Chunks of so many places, of which so many are judged at a time."""
    monkeypatch.setattr("heads.losses.PLACES", 1)
    monkeypatch.setattr("heads.losses.LOGITS", places * DEPTH * DRAFTABLE)
    monkeypatch.setattr("heads.losses.SLICE", at_a_time * DRAFTABLE)


# ---- passes and chunks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [{}, {"per_pass": True, "bias": True, "softcap": 2.5}], ids=["shared", "per pass"])
@pytest.mark.parametrize("decay", [0.8, "survival"])
def test_unrolled_equals_reference(monkeypatch, kind: str, shape: dict, decay: float | str) -> None:
    cut(monkeypatch, places=3, at_a_time=2)
    assert_same(problem(**shape), Objective(kind, decay, 2.0))


@pytest.mark.parametrize("shape", [{"bias": True}, {"softcap": 1.5}, {"per_pass": True}], ids=str)
@pytest.mark.parametrize("at_a_time", [1, 3, STARTS])
@pytest.mark.parametrize("places", [1, 2, 5, STARTS - 1, STARTS])
def test_chunks_of_any_size(monkeypatch, shape: dict, places: int, at_a_time: int) -> None:
    cut(monkeypatch, places=places, at_a_time=at_a_time)
    assert_same(problem(**shape), Objective("lk_lambda", "survival"))


def test_the_first_of_equals_is_the_likeliest() -> None:
    """Few values, so that most rows have ties; the token is the argmax, another of them, something else, or none."""
    logits_CW = torch.randint(0, 3, (500, 7)).float()
    token_C = torch.randint(-1, 7, (500,))
    expected_C = torch.tensor([row.index(max(row)) for row in logits_CW.tolist()]) == token_C
    assert 20 < expected_C.sum() < 400
    assert torch.equal(_likeliest(logits_CW, token_C), expected_C)


def test_metrics_of_each_pair() -> None:
    of = problem(per_pass=True)
    sums = of.sums(Objective("kl"))
    expected = torch.zeros(DEPTH, dtype=torch.float64)
    for k, n in of.valid_KN.nonzero().tolist():
        logits_W = of.projection.weight[k] @ of.hidden_KND[k, n]
        p_W, token = of.p_NW[n + k], of.target.token_N[n + k]
        overlap = torch.minimum(p_W, logits_W.softmax(-1)).sum()
        torch.testing.assert_close(sums.overlap_KN[k, n], overlap.detach())
        assert sums.match_KN[k, n] == (logits_W.argmax() == token)
        expected[k] += reference_loss("kl", logits_W[None], p_W[None], token[None])[0].detach()
    torch.testing.assert_close(sums.loss_K, expected)
    assert not sums.match_KN[~of.valid_KN].any() and not sums.overlap_KN[~of.valid_KN].any()


def test_control_survival_weights_are_held_constant() -> None:
    """Were they not, passes would be taught to be rejected early; the gradients differ, so the test above can tell."""
    of, objective = problem(), Objective("kl", "survival")
    (held,) = torch.autograd.grad(plain_total(of, objective), of.hidden_KND)
    (moved,) = torch.autograd.grad(plain_total(of, objective, through_weights=True), of.hidden_KND)
    assert (held - moved).abs().max() > 1e-2


@pytest.mark.parametrize("per_pass", [False, True])
def test_frozen_projection_costs_one_product_less(per_pass: bool) -> None:
    trained = problem(per_pass=per_pass, bias=True)
    weight, bias_W = trained.projection.weight.detach(), trained.projection.bias_W.detach()
    frozen = replace(trained, projection=Projection(weight, bias_W))
    gradients, flops = [], []
    for of in (trained, frozen):
        with FlopCounterMode(display=False) as counter:
            (gradient,) = torch.autograd.grad(of.sums(Objective()).total, of.hidden_KND)
        gradients.append(gradient)
        flops.append(counter.get_total_flops())
    rows = sum(STARTS - k for k in range(DEPTH))
    assert torch.equal(*gradients)
    # The product for the weight, and the one of a column for the bias.
    assert flops[0] - flops[1] == 2 * rows * DRAFTABLE * WIDTH + 2 * rows * DRAFTABLE


def test_without_a_gradient_to_make_the_sums_are_the_same_for_less() -> None:
    """States that want none save a second product with the projection: what is left are the logits of both sides."""
    of = replace(trained := problem(), projection=Projection(trained.projection.weight.detach()))
    found = []
    for hidden_KND in (of.hidden_KND, of.hidden_KND.detach()):
        with FlopCounterMode(display=False) as counter:
            sums = replace(of, hidden_KND=hidden_KND).sums(Objective())
        found.append((sums, counter.get_total_flops()))
    (learnt, dear), (measured, cheap) = found
    assert torch.equal(learnt.total, measured.total) and torch.equal(learnt.overlap_KN, measured.overlap_KN)
    assert dear - cheap == 2 * sum(STARTS - k for k in range(DEPTH)) * DRAFTABLE * WIDTH
    assert learnt.total.requires_grad and not measured.total.requires_grad


def test_the_target_lends_its_frozen_projection() -> None:
    weights = problem().target.weights
    lent = weights.projection
    last_ND = torch.randn(4, WIDTH, dtype=torch.float64)
    logits_NW = lent.softcap * torch.tanh((last_ND @ lent.weight.T + lent.bias_W) / lent.softcap)
    torch.testing.assert_close(logits_NW, weights.logits(last_ND))
    assert not lent.weight.requires_grad and not lent.bias_W.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_states(kind: str) -> None:
    """bf16 states and weights: the products are rounded to 8 bits, the sums over the vocabulary are not. Total within
    1 % and every gradient within 3 % of its norm of fp64 on the same rounded numbers; within 10 % for the kinds whose
    gradient jumps where q passes p."""
    of, tolerance = problem(per_pass=True), 0.1 if kind in ("tv", "lk_alpha", "lk_lambda") else 0.03
    hidden = of.hidden_KND.detach().bfloat16().requires_grad_()
    weight = of.projection.weight.detach().bfloat16().requires_grad_()
    lent = of.target.weights
    single = TargetWeights(lent.embedding_VD, lent.lm_head_VD.float(), lent.bias_V.float(), lent.softcap)
    rows = replace(of.target, last_ND=of.target.last_ND.float(), weights=single, lse_N=of.target.lse_N.float())
    half = replace(of, hidden_KND=hidden, projection=Projection(weight), target=rows)
    sums, total = half.sums(Objective(kind)), plain_total(half, Objective(kind))
    assert sums.total.dtype is sums.overlap_KN.dtype is torch.float32
    assert sums.total.item() == pytest.approx(total.item(), rel=1e-2)
    expected = torch.autograd.grad(total, half.leaves)
    for a, b in zip(torch.autograd.grad(sums.total, half.leaves), expected, strict=True):
        assert a.dtype is torch.bfloat16 and (a - b).float().norm() < tolerance * b.float().norm()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"kind": "mse"}, "head.loss to one of ce, kl, topk_kl"),
        ({"decay": "slow"}, "set head.decay"),
        ({"decay": 0.0}, "set head.decay"),
        ({"decay": math.nan}, "set head.decay"),
        ({"eta": -1.0}, "set head.eta"),
        ({"eta": math.inf}, "set head.eta"),
    ],
    ids=str,
)
def test_objective_that_cannot_be(wrong: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Objective(**wrong)
