"""What every head under conf/head/ owes: it learns, does not look ahead, drafts exactly and comes back whole."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import heads
from eval.acceptance import measure
from eval.decode import DecodeSettings, Proposer, Request, decode
from eval.exactness import DamagedDraft, LawSettings, generate_texts, identities, law_after
from eval.law import CONTROL_LEVEL
from eval.sampling import Sampling
from heads.base import DraftHead, LossSums, TargetFeatures
from heads.checkpoint import load_head, save_head
from heads.layers import BlockSizes
from heads.target import FrozenTarget
from heads.tree_draft import DynamicTree, TreeDrafter
from heads.vocab import DraftVocabulary
from scripts.common import build_head
from tests import e2e
from tests.drafting_cases import check_rejection_leaves_no_trace
from tests.tiny import bring_module, features_of, save_tiny

FILES = sorted((e2e.ROOT / "conf" / "head").glob("*.yaml"))
HEADS = [path.stem for path in FILES]
ANSWER, DRAFTABLE, STEPS = 32, 64, 400
PROMPTS = ((9, 10, 11, 30), (12, 40), (33, 34, 35, 36, 37, 38), (20, 21, 22), (44, 13, 44))
TREE = DynamicTree(top_k=3, nodes=9)


def attention(sizes: BlockSizes, width: int) -> int:
    """Weights of an attention whose input has this width."""
    queries, keys = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    return width * (queries + 2 * keys) + queries * sizes.hidden_size


def block(sizes: BlockSizes, width: int) -> int:
    """Weights of one decoder block, its norm before the MLP included, the one before the attention not."""
    return attention(sizes, width) + 3 * sizes.hidden_size * sizes.intermediate_size + sizes.hidden_size


FORMULAS: dict[str, Callable[[BlockSizes, int, int], int]] = {
    # file under conf/head: parameters by its defaults, of the target's sizes, W draft tokens and depth K
    "eagle": lambda s, w, k: 2 * s.hidden_size * s.hidden_size + block(s, s.hidden_size),
    "eagle3": lambda s, w, k: (3 * s.hidden_size + w + 3) * s.hidden_size + block(s, 2 * s.hidden_size),
    "medusa": lambda s, w, k: k * (s.hidden_size + 1) * s.hidden_size,
    "hydra_mlp": lambda s, w, k: sum(((3 + level) * s.hidden_size + 2) * s.hidden_size for level in range(k)),
    "mtp_native": lambda s, w, k: (2 * s.hidden_size + 4) * s.hidden_size + block(s, s.hidden_size),
    "mtp_blocks": lambda s, w, k: k * ((2 * s.hidden_size + 4) * s.hidden_size + block(s, s.hidden_size)),
    "mtp": lambda s, w, k: (2 * s.hidden_size + 4) * s.hidden_size + block(s, s.hidden_size),
}


@dataclass(frozen=True)
class Case:
    """A head of default settings for a tiny target, untrained and after learning one answer of that target by heart."""

    name: str
    target: FrozenTarget
    fresh: Callable[..., DraftHead]
    trained: DraftHead
    sample: Request
    answer: list[int]
    features: TargetFeatures


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    folder = bring_module(save_tiny(tmp_path_factory.mktemp("contract")))
    return FrozenTarget.load(folder, dtype="float64")


@pytest.fixture(scope="module", params=HEADS)
def case(request: pytest.FixtureRequest, target: FrozenTarget) -> Case:
    return make_case(request.param, target)


def make_case(name: str, target: FrozenTarget, *found_by: str) -> Case:
    """found_by: overrides without which the YAML is not found."""
    sample = Request("sample", "all", PROMPTS[0])
    [answer] = generate_texts(target, [sample], ANSWER, 1)
    vocab = DraftVocabulary.choose(torch.bincount(torch.tensor(answer), minlength=target.vocab_size), DRAFTABLE, [2])

    def fresh(*overrides: str) -> DraftHead:
        cfg = e2e.config(f"head={name}", f"head.draft_vocab_size={DRAFTABLE}", *found_by, *overrides)
        return build_head(cfg, target, vocab).to(target.dtype)

    head = fresh()
    flags = [False] * len(sample.prompt) + [True] * len(answer)
    features = features_of(target, [([*sample.prompt, *answer], flags)], head.needs.taps)
    return Case(name, target, fresh, learn_by_heart(head, features), sample, answer, features)


def learn_by_heart(head: DraftHead, features: TargetFeatures) -> DraftHead:
    """Until every depth predicts every token, or STEPS are over."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        sums = head(features)
        right, count = sums.metrics["acceptance"]
        if torch.equal(right, count):
            break
        (sums.loss / sums.count).backward()
        optimizer.step()
    return head.eval()


def depth_of(head: DraftHead) -> int:
    return int(head.arguments["depth"])


def drafts_trees(head: DraftHead) -> bool:
    return type(head).propose_tree is not DraftHead.propose_tree


def test_every_file_is_enrolled_and_every_head_has_a_file() -> None:
    """A class without a YAML cannot be trained, and would be tested by nobody."""
    assert len(HEADS) == len(list((e2e.ROOT / "conf" / "head").iterdir())) > 0
    named = {str(OmegaConf.load(path)._target_) for path in FILES}
    modules = [import_module(f"heads.{info.name}") for info in pkgutil.iter_modules(heads.__path__)]
    classes = [
        kind
        for module in modules
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, DraftHead) and kind.__module__ == module.__name__
    ]
    found = {f"{kind.__module__}.{kind.__qualname__}" for kind in classes if not inspect.isabstract(kind)}
    assert named == found


def test_parameters_are_counted_by_a_formula(case: Case) -> None:
    if case.name not in FORMULAS:
        pytest.fail(
            f"conf/head/{case.name}.yaml has no formula; add a line for it to FORMULAS in {Path(__file__).name}."
        )
    head = case.fresh()
    sizes = BlockSizes.of(case.target.config, case.target.vocab_size)
    expected = FORMULAS[case.name](sizes, DRAFTABLE, depth_of(head))
    assert sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad) == expected


def test_every_parameter_learns(case: Case) -> None:
    """A block that starts as the identity may hide others for a step or two."""
    head = case.fresh().train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    learnt: set[str] = set()
    for _ in range(3):
        optimizer.zero_grad()
        head(case.features).loss.backward()
        learnt |= {name for name, value in head.named_parameters() if value.grad is not None and value.grad.any()}
        optimizer.step()
    assert learnt == {name for name, _ in head.named_parameters()}


def test_no_pair_looks_ahead(case: Case) -> None:
    """With the control that a head which is given the states of the next position is noticed."""
    head = case.fresh("head.loss=kl")
    with torch.no_grad():  # away from starting points that ignore some input
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    check_no_lookahead(case, head)

    def peeking(features: TargetFeatures) -> LossSums:
        return head(replace(features, taps_TE=features.taps_TE.roll(-1, 0), last_TD=features.last_TD.roll(-1, 0)))

    with pytest.raises(AssertionError, match="looks ahead"):
        check_no_lookahead(case, peeking)


def check_no_lookahead(case: Case, loss_of: Callable[[TargetFeatures], LossSums]) -> None:
    """Only x_a … x_b are supervised: the last start is b - 2, the last token that is fed x_{b-1}, the last place at
    which the target is asked b - 1. The label x_b itself must not matter where the loss is against a distribution."""
    first, places_T = len(case.sample.prompt), torch.arange(len(case.features.ids_T))

    def loss(features: TargetFeatures, last: int) -> float:
        torch.manual_seed(5)  # of noise on the features, where a head trains with some
        window = replace(features, supervised_T=(places_T >= first) & (places_T <= last))
        with torch.no_grad():
            return loss_of(window).loss.item()

    def changed(ids_from: int, taps_from: int, judged_from: int) -> TargetFeatures:
        """Other ids, tapped states, and last states with their logits from these places on."""
        ids_T, taps_TE = case.features.ids_T.clone(), case.features.taps_TE.clone()
        last_TD, lse_T = case.features.last_TD.clone(), case.features.lse_T.clone()
        ids_T[ids_from:] = (ids_T[ids_from:] + 7) % 90
        taps_TE[taps_from:] += 1
        last_TD[judged_from:] += 1
        lse_T[judged_from:] += 1
        return replace(case.features, ids_T=ids_T, taps_TE=taps_TE, last_TD=last_TD, lse_T=lse_T)

    nothing = len(places_T)
    for last in (first + 2, first + 4, first + 9):
        before = loss(case.features, last)
        assert loss(changed(last, last - 1, last), last) == pytest.approx(before, rel=1e-12), "it looks ahead"
        # One place earlier is seen, or this test sees nothing.
        assert loss(changed(nothing, nothing, last - 1), last) != pytest.approx(before, rel=1e-6)
        if case.trained.needs.taps:
            assert loss(changed(nothing, last - 2, nothing), last) != pytest.approx(before, rel=1e-9)


def test_one_sample_is_learnt_by_heart(case: Case) -> None:
    """At least 95 % of the examined drafts are accepted, in the decoder and not by teacher forcing."""
    gamma = depth_of(case.trained)
    settings = DecodeSettings(gamma=gamma, max_new_tokens=len(case.answer))
    [trace] = decode(case.target, [case.sample], case.trained, settings)
    assert trace.tokens == case.answer and len(set(case.answer)) > 8, "too easy to mean anything"
    alpha = measure([trace], gamma=gamma, resamples=0).alpha.value
    assert alpha is not None and alpha >= 0.95
    [untrained] = decode(case.target, [case.sample], case.fresh(), settings)
    assert len(untrained.rounds) > len(trace.rounds)


def test_it_comes_back_bit_for_bit(case: Case, tmp_path: Path) -> None:
    save_head(case.trained, tmp_path, target_fingerprint=case.target.fingerprint)
    again = load_head(tmp_path, target=case.target)
    state = case.trained.state_dict()
    assert type(again) is type(case.trained) and again.needs == case.trained.needs
    assert again.arguments == case.trained.arguments and list(again.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    again.attach(case.target.weights)
    with torch.no_grad():
        assert torch.equal(again.eval()(case.features).loss, case.trained(case.features).loss)


def test_greedy_texts_are_the_targets_own(case: Case) -> None:
    """In float64, as a chain and as a tree, with a head that is often right here and mostly wrong there."""
    requests = [Request(str(index), "all", prompt) for index, prompt in enumerate(PROMPTS)]
    drafts: dict[str, Proposer] = {"chain": case.trained}
    if drafts_trees(case.trained):
        drafts["tree"] = TreeDrafter(case.trained, TREE)
    settings = DecodeSettings(gamma=depth_of(case.trained), max_new_tokens=20, rows=len(requests))
    for found in identities(case.target, requests, drafts, settings):
        assert found.divergences == [] and found.requests == len(requests), found.proposer


def test_sampled_texts_follow_the_targets_law(case: Case) -> None:
    """A chain that the head draws itself; with a q that it was not drawn from, the same test must fail."""
    law = LawSettings(Sampling(1.0, top_k=4), copies=1000, length=3, gamma=2, rows=500)
    fit = law_after(case.target, case.sample.prompt, case.trained, law)
    assert fit.impossible == 0 and fit.p_value > 1e-4, fit
    damaged = DamagedDraft(case.trained, "wrong_q", case.target.vocab_size)
    assert law_after(case.target, case.sample.prompt, damaged, law).p_value < CONTROL_LEVEL


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_rejected_drafts_leave_no_trace(case: Case, tree: DynamicTree | None) -> None:
    if tree is not None and not drafts_trees(case.trained):
        pytest.skip("this head drafts chains only")
    check_rejection_leaves_no_trace(case.target, case.trained, depth=min(3, depth_of(case.trained)), tree=tree)
