"""The decoding loop: identical to `generate` for every family, proposer, tree and batch; its law; its limits."""

from __future__ import annotations

import string
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma2Config, PreTrainedTokenizerFast

from eval.decode import Clock, DecodeSettings, Request, decode
from eval.exactness import LawSettings, exact_texts, generate_texts, law_after
from eval.proposers.prompt_lookup import PromptLookup
from eval.sampling import Sampling
from eval.trace import dump_traces, parse_traces
from heads.artifact import UserError
from heads.base import FeatureNeeds, Proposal
from heads.target import FrozenTarget
from heads.tree_draft import DynamicTree, TreeDrafter, tree_of
from tests import tiny
from tests.test_eagle3 import FLAGS, make_head
from tests.tiny import FAMILIES, load_tiny

NEW = 24
STATIC = tree_of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0]])
DRAFTS = ("none", "eagle3", "eagle3 static tree", "eagle3 dynamic tree", "prompt_lookup", "oracle", "oracle tree")


def requests(count: int = 5) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    lengths = [3, 11, 6, 1, 17][:count]
    return [
        Request(f"r{n}", "all", tuple(torch.randint(8, 40, (length,), generator=generator).tolist()))
        for n, length in enumerate(lengths)
    ]


def generated(target: FrozenTarget, request: Request, **options) -> list[int]:
    ids = torch.tensor([request.prompt])
    more = {"max_new_tokens": NEW, "do_sample": False, **options}
    output = target.model.generate(ids, attention_mask=torch.ones_like(ids), **more)
    return output[0, len(request.prompt) :].tolist()


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory):
    """`known(family)`: a tiny target in fp64, and what it writes after each request."""
    made: dict[str, tuple[FrozenTarget, list[list[int]]]] = {}

    def get(family: str = "llama") -> tuple[FrozenTarget, list[list[int]]]:
        if family not in made:
            target = load_tiny(tmp_path_factory.mktemp(family), family)
            made[family] = target, [generated(target, request) for request in requests()]
        return made[family]

    return get


class Oracle:
    """Knows the text and lies at every third token: exercises acceptance of every length.

    As a tree the lie comes first and the truth is its second sibling, so that paths do not lie side by side.
    """

    needs = FeatureNeeds(taps=(), last=False, judged=True)

    def __init__(self, texts: dict[tuple[int, ...], list[int]], tree: bool = False) -> None:
        self.texts, self.tree = texts, tree
        self.judged = []

    def start(self, prompts):
        return {"done": [1 - len(prompt) for prompt in prompts], "texts": [self.texts[prompt] for prompt in prompts]}

    def commit(self, state, committed) -> None:
        state["done"] = [a + int(b) for a, b in zip(state["done"], committed.count_B, strict=True)]
        self.judged.append(committed.judged)

    def propose(self, state, depth, draw) -> Proposal:
        rows = []
        for text, done in zip(state["texts"], state["done"], strict=True):
            ahead = (text[done : done + depth] + [0] * depth)[:depth]
            if self.tree:
                rows.append([token for truth in ahead for token in ((truth + 1) % 96, truth)])
            else:
                rows.append([token if (done + n) % 3 else (token + 1) % 96 for n, token in enumerate(ahead)])
        if not self.tree:
            return Proposal.chain(torch.tensor(rows))
        parents = torch.tensor([2 * (node // 2) - 1 for node in range(2 * depth)])
        return Proposal(torch.tensor(rows), parents, torch.full((len(rows),), 2 * depth))


def draft(kind: str, target: FrozenTarget, batch: list[Request], truth: list[list[int]]):
    """A proposer by name."""
    texts = {request.prompt: text for request, text in zip(batch, truth, strict=True)}
    return {
        "none": lambda: None,
        "eagle3": lambda: make_head(target),
        "eagle3 static tree": lambda: TreeDrafter(make_head(target), STATIC),
        "eagle3 dynamic tree": lambda: TreeDrafter(make_head(target), DynamicTree(top_k=3, nodes=9)),
        "prompt_lookup": lambda: PromptLookup(),
        "oracle": lambda: Oracle(texts),
        "oracle tree": lambda: Oracle(texts, tree=True),
    }[kind]()


# ---- identity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", DRAFTS)
def test_greedy_text_is_the_targets_own(known, family: str, kind: str, rows: int) -> None:
    target, truth = known(family)
    proposer = draft(kind, target, requests(), truth)
    traces = decode(target, requests(), proposer, DecodeSettings(gamma=4, max_new_tokens=NEW, rows=rows))
    assert [trace.tokens for trace in traces] == truth
    for trace in traces:
        assert 1 + sum(r.emitted for r in trace.rounds) == len(trace.tokens)
        assert trace.finish == ("stop" if trace.tokens[-1] == 2 else "length")
    if kind == "oracle":
        assert max(r.accepted for r in traces[0].rounds) == 2  # two right tokens, then a lie
    if kind == "oracle tree":
        assert max(r.accepted for r in traces[0].rounds) == 4  # every second node, along a path with gaps


@pytest.mark.parametrize("kind", ["none", "eagle3", "eagle3 dynamic tree", "prompt_lookup"])
@pytest.mark.parametrize("rule", [{"repetition_penalty": 1.4}, {"banned": (9, 30, 31)}], ids=["penalty", "ban"])
def test_greedy_text_under_penalty_and_ban(known, kind: str, rule: dict) -> None:
    """Each node is penalised by its own prefix: prompt, text and path."""
    target, plain = known()
    option = {"suppress_tokens": list(rule["banned"])} if "banned" in rule else rule
    truth = [generated(target, request, **option) for request in requests()]
    settings = DecodeSettings(gamma=4, sampling=Sampling(**rule), max_new_tokens=NEW, rows=4)
    traces = decode(target, requests(), draft(kind, target, requests(), truth), settings)
    assert [trace.tokens for trace in traces] == truth != plain


def letters() -> PreTrainedTokenizerFast:
    """Of the tiny target's size: single letters, and pairs of them as tokens of their own."""
    alphabet = string.ascii_letters
    pairs = [(alphabet[index], alphabet[index + 1]) for index in range(96 - 8 - len(alphabet))]
    marks = [f"<{index}>" for index in range(8)]
    words = {word: index for index, word in enumerate([*marks, *alphabet, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=pairs))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", DRAFTS)
def test_stop_strings_end_a_text_inside_a_round(known, monkeypatch, kind: str) -> None:
    """The text is cut after the token that completes one, as generate does; a string may end inside a token."""
    target, plain = known()
    monkeypatch.setattr(target, "tokenizer", letters())
    words = target.tokenizer.convert_ids_to_tokens(plain[0])
    stops = ["".join(words[4:7]) + words[7][:1], "".join(words[15:17])]
    truth = [generated(target, request, stop_strings=stops, tokenizer=target.tokenizer) for request in requests()]
    settings = DecodeSettings(gamma=4, max_new_tokens=NEW, rows=4, stop_strings=tuple(stops))
    traces = decode(target, requests(), draft(kind, target, requests(), plain), settings)
    assert [trace.tokens for trace in traces] == truth != plain
    assert traces[0].finish == "stop" and len(truth[0]) < NEW


def test_stop_strings_that_a_tokenizer_cannot_match_are_refused(known) -> None:
    target, _ = known()
    with pytest.raises(UserError, match="leave stop_strings empty"):
        decode(target, requests(1), None, DecodeSettings(stop_strings=("w1 w2",)))


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 dynamic tree", "prompt_lookup"])
def test_a_prompt_in_chunks_is_the_whole_prompt(known, kind: str) -> None:
    """Same texts and same rounds, so the features are the same too."""
    target, truth = known()
    found = [
        decode(target, requests(), draft(kind, target, requests(), truth), settings)
        for settings in (
            DecodeSettings(gamma=3, max_new_tokens=NEW, rows=3),
            DecodeSettings(gamma=3, max_new_tokens=NEW, rows=3, prefill_chunk=4),
        )
    ]
    assert [(t.tokens, t.rounds) for t in found[0]] == [(t.tokens, t.rounds) for t in found[1]]


@pytest.mark.parametrize("kind", ["none", "eagle3", "eagle3 dynamic tree", "oracle tree"])
def test_sliding_window_and_soft_cap(tmp_path, monkeypatch, kind: str) -> None:
    sizes = {**tiny.SIZES, "sliding_window": 4, "query_pre_attn_scalar": 8}
    monkeypatch.setitem(FAMILIES, "gemma2", lambda: Gemma2Config(**sizes))
    target = load_tiny(tmp_path, "gemma2")
    truth = [generated(target, request) for request in requests(4)]
    settings = DecodeSettings(gamma=4, max_new_tokens=NEW, rows=4, prefill_chunk=5)
    traces = decode(target, requests(4), draft(kind, target, requests(4), truth), settings)
    assert [trace.tokens for trace in traces] == truth


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_that_reaches_past_the_context(known, kind: str) -> None:
    """The text may fill the context to its last position; drafts are shortened there."""
    target, _ = known()
    request = Request("long", "all", tuple(range(8, 60)) * 4 + (9,) * (256 - 208 - NEW))
    truth = [generated(target, request)]
    for gamma in (4, 60):
        settings = DecodeSettings(gamma=gamma, max_new_tokens=NEW)
        assert decode(target, [request], draft(kind, target, [request], truth), settings)[0].tokens == truth[0]


@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "norm_before_residual", "v3.1"])
@pytest.mark.parametrize("tree", [None, DynamicTree(3, 8), STATIC], ids=["chain", "dynamic", "static"])
def test_a_row_of_a_batch_is_a_batch_of_one(known, flags: dict, tree) -> None:
    """Same text, same rounds, same acceptance, whatever the neighbours accept."""
    target, _ = known()
    head = make_head(target, **flags) if tree is None else TreeDrafter(make_head(target, **flags), tree)
    alone = decode(target, requests(), head, DecodeSettings(gamma=3, max_new_tokens=NEW, rows=1))
    together = decode(target, requests(), head, DecodeSettings(gamma=3, max_new_tokens=NEW, rows=5))
    assert [(t.tokens, t.rounds) for t in alone] == [(t.tokens, t.rounds) for t in together]


def test_a_tree_of_one_path_is_the_chain(known) -> None:
    """Same texts and the same rounds."""
    target, _ = known()
    settings = DecodeSettings(gamma=3, max_new_tokens=NEW, rows=5)
    chain = decode(target, requests(), make_head(target), settings)
    for tree in (DynamicTree(top_k=1, nodes=3), tree_of([[0], [0, 0], [0, 0, 0]])):
        other = decode(target, requests(), TreeDrafter(make_head(target), tree), settings)
        assert [(t.tokens, t.rounds) for t in chain] == [(t.tokens, t.rounds) for t in other]


# ---- law --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sampling", "verifier"),
    [
        ("eagle3", Sampling(0.7, top_k=3), "rejection"),
        ("eagle3", Sampling(0.7, top_k=3), "block"),
        ("eagle3", Sampling(0.9, top_k=3, repetition_penalty=1.5, banned=(9,)), "rejection"),
        ("eagle3 dynamic tree", Sampling(0.7, top_k=3), "rejection"),
        ("eagle3 static tree", Sampling(0.9, top_k=3, repetition_penalty=1.5), "rejection"),
        ("prompt_lookup", Sampling(0.7, top_k=3), "rejection"),
    ],
)
def test_sampled_tokens_follow_the_target(known, kind: str, sampling: Sampling, verifier: str) -> None:
    """The first three tokens after a fixed prompt, through the whole loop: χ² against exact probabilities."""
    target, _ = known()
    settings = LawSettings(sampling, verifier, copies=1500, length=3, gamma=3, seed=7)
    outcome = law_after(target, (9, 10, 11, 9, 10), draft(kind, target, [], []), settings)
    assert outcome.impossible == 0 and outcome.p_value > 1e-4, outcome


def test_an_early_end_is_part_of_the_law(known) -> None:
    """Texts that end with the end token are among the texts, each with its own probability."""
    target, _ = known()
    texts = exact_texts(target, (9, 10, 11), Sampling(4.0), 2)
    assert any(len(text) == 1 for text in texts) and sum(texts.values()) == pytest.approx(1)


# ---- single facts -----------------------------------------------------------------------------------------------


def test_gamma_zero_and_no_proposer_decode_plainly(known) -> None:
    target, _ = known()
    plain = decode(target, requests(), None, DecodeSettings(gamma=4, max_new_tokens=NEW))
    zero = decode(target, requests(), make_head(target), DecodeSettings(gamma=0, max_new_tokens=NEW))
    assert [t.tokens for t in plain] == [t.tokens for t in zero]
    assert all(r.proposed == 0 for t in zero for r in t.rounds)


def test_a_tree_round_counts_what_could_be_accepted_along_its_path(known) -> None:
    """At a leaf nothing more was proposed; above one the rest of the path was."""
    target, truth = known()
    oracle = draft("oracle tree", target, requests(), truth)
    trace = decode(target, requests(1), oracle, DecodeSettings(gamma=3, max_new_tokens=NEW))[0]
    assert {(r.proposed, r.accepted) for r in trace.rounds[:-1]} == {(3, 3)}


@pytest.mark.parametrize("kind", ["eagle3", "oracle", "prompt_lookup", "eagle3 dynamic tree"])
def test_what_was_drafted_in_vain_is_kept_of_chains(known, kind: str) -> None:
    target, truth = known()
    settings = DecodeSettings(gamma=4, max_new_tokens=NEW, rows=4)
    wrong = 0
    for trace in decode(target, requests(), draft(kind, target, requests(), truth), settings):
        at = 1
        for one in trace.rounds:
            kept = not one.cut and not one.tree
            assert len(one.dropped) == (one.proposed - one.accepted if kept else 0)
            if one.dropped:
                wrong += 1
                assert one.dropped[0] != trace.tokens[at + one.accepted], "the target's own token was no draft's"
            at += one.emitted
        assert parse_traces(dump_traces([trace])) == [trace]
    assert (wrong > 0) == (kind != "eagle3 dynamic tree")


def test_nodes_that_are_padding_in_every_row_are_left_out(known) -> None:
    """Same text, and nothing of them is proposed or judged."""
    target, truth = known()

    class Padded(Oracle):
        def propose(self, state, depth, draw) -> Proposal:
            return replace(super().propose(state, depth, draw), count_B=torch.tensor([1, 2]))

    proposer = Padded({request.prompt: text for request, text in zip(requests(), truth, strict=True)})
    traces = decode(target, requests(2), proposer, DecodeSettings(gamma=4, max_new_tokens=NEW, rows=2))
    assert [trace.tokens for trace in traces] == truth[:2]
    assert [max(r.proposed for r in trace.rounds) for trace in traces] == [1, 2]
    assert proposer.judged[1].tokens_BN.shape[1] == 3


def test_the_judged_block_is_handed_to_who_asks_for_it(known) -> None:
    """Root first, parents with it, and the target's own states: its next token after each node."""
    target, truth = known()
    oracle = draft("oracle tree", target, requests(), truth)
    decode(target, requests(2), oracle, DecodeSettings(gamma=2, max_new_tokens=8, rows=2))
    assert oracle.judged[0] is None
    judged = oracle.judged[1]
    assert judged.parents_N.tolist() == [-1, 0, 0, 2, 2] and judged.count_B.tolist() == [5, 5]
    assert judged.tokens_BN[:, 0].tolist() == [text[0] for text in truth[:2]]
    choice = target.logits(judged.last_BND).argmax(-1)
    assert choice[:, 0].tolist() == [text[1] for text in truth[:2]]
    assert choice[:, 2].tolist() == [text[2] for text in truth[:2]]


def test_the_clock_adds_up(known) -> None:
    target, _ = known()
    clock = Clock()
    decode(target, requests(2), make_head(target), DecodeSettings(max_new_tokens=8), clock=clock)
    assert clock.target > 0 and clock.draft > 0 and clock.target + clock.draft < clock.total
    assert 0 < clock.loop_share < 1 and Clock().loop_share == 0


def test_the_same_seed_gives_the_same_text(known) -> None:
    target, _ = known()
    settings = DecodeSettings(gamma=3, sampling=Sampling(1.0), max_new_tokens=12, rows=2, seed=5)
    first, again, other = (
        [t.tokens for t in decode(target, requests(), make_head(target), one)]
        for one in (settings, settings, replace(settings, seed=6))
    )
    assert first == again != other


# ---- refusals ---------------------------------------------------------------------------------------------------


def test_the_truth_ignores_how_the_target_likes_to_be_sampled(tmp_path) -> None:
    """A penalty in the model's own generation config is not what plain greedy decoding means here."""
    target = load_tiny(tmp_path)
    plain = [trace.tokens for trace in decode(target, requests(), None, DecodeSettings(max_new_tokens=NEW))]
    target.model.generation_config.repetition_penalty = 3.0
    assert [generated(target, request) for request in requests()] != plain
    assert generate_texts(target, requests(), NEW, rows=2) == plain


def test_requests_that_do_not_fit_are_refused(known) -> None:
    target, _ = known()
    with pytest.raises(UserError, match="eval.max_new_tokens"):
        decode(target, [Request("long", "all", (9,) * 250)], None, DecodeSettings(max_new_tokens=NEW))
    with pytest.raises(UserError, match="eval.max_new_tokens"):
        decode(target, [Request("longer", "all", (9,) * 300)], None, DecodeSettings(max_new_tokens=1))
    with pytest.raises(UserError, match="empty prompt"):
        decode(target, [Request("empty", "all", ())], None, DecodeSettings(max_new_tokens=NEW))


@pytest.mark.parametrize(
    "wrong",
    [{"gamma": -1}, {"max_new_tokens": 0}, {"rows": 0}, {"prefill_chunk": 0}, {"stop_strings": ("",)}],
)
def test_impossible_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match="cannot be"):
        DecodeSettings(**wrong)
    with pytest.raises(UserError, match="choose one of"):
        DecodeSettings(verifier="soft")


def test_non_finite_logits_stop_with_a_sentence(tmp_path) -> None:
    target = load_tiny(tmp_path)
    target.model.get_output_embeddings().weight.data[3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        decode(target, requests(1), None, DecodeSettings(max_new_tokens=NEW))


def test_a_proposal_that_is_no_tree_stops_with_a_sentence(known) -> None:
    """The loop refuses it before the target sees it."""
    target, truth = known()

    class Cyclic(Oracle):
        def propose(self, state, depth, draw) -> Proposal:
            tokens = torch.tensor([[9, 10, 11]])
            return Proposal(tokens, torch.tensor([-1, 2, 1]), torch.tensor([3]))

    with pytest.raises(UserError, match="no cycle"):
        decode(target, requests(1), Cyclic({requests()[0].prompt: truth[0]}), DecodeSettings(max_new_tokens=NEW))
