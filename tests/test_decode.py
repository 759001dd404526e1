"""The decoding loop: identical to `generate` for every family, proposer and batch; its law at T = 1; its limits."""

from __future__ import annotations

import pytest
import torch

from eval.decode import DecodeSettings, Request, decode
from eval.proposers.prompt_lookup import PromptLookup
from eval.verify import Sampling
from heads.artifact import UserError
from heads.base import FeatureNeeds, Proposal
from heads.target import FrozenTarget
from tests.test_eagle3 import FLAGS, make_head
from tests.tiny import FAMILIES, load_tiny

NEW = 24


def requests(count: int = 5) -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    lengths = [3, 11, 6, 1, 17][:count]
    return [
        Request(f"r{n}", "all", tuple(torch.randint(8, 40, (length,), generator=generator).tolist()))
        for n, length in enumerate(lengths)
    ]


def generated(target: FrozenTarget, request: Request) -> list[int]:
    ids = torch.tensor([request.prompt])
    output = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return output[0, len(request.prompt) :].tolist()


class Oracle:
    """Knows the text and lies at every third token: exercises acceptance of every length."""

    needs = FeatureNeeds(taps=(), last=False)

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def start(self, prompts):
        return {"prompts": [len(prompt) for prompt in prompts], "done": [1 - len(prompt) for prompt in prompts]}

    def commit(self, state, committed) -> None:
        state["done"] = [a + int(b) for a, b in zip(state["done"], committed.count_B, strict=True)]

    def propose(self, state, depth, draw) -> Proposal:
        rows = []
        for text, done in zip(self.texts, state["done"], strict=True):
            ahead = (text[done : done + depth] + [0] * depth)[:depth]
            rows.append([token if (done + n) % 3 else (token + 1) % 96 for n, token in enumerate(ahead)])
        return Proposal.chain(torch.tensor(rows))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["none", "eagle3", "prompt_lookup", "oracle"])
def test_greedy_text_is_the_targets_own(tmp_path, family: str, kind: str, rows: int) -> None:
    target = load_tiny(tmp_path, family)
    truth = [generated(target, request) for request in requests()]
    batch = requests()[:rows] if kind == "oracle" else requests()
    proposer = {
        "none": lambda: None,
        "eagle3": lambda: make_head(target),
        "prompt_lookup": lambda: PromptLookup(),
        "oracle": lambda: Oracle(truth[:rows]),
    }[kind]()
    traces = decode(target, batch, proposer, DecodeSettings(gamma=4, max_new_tokens=NEW, rows=rows))
    assert [trace.tokens for trace in traces] == truth[: len(batch)]
    for trace in traces:
        assert 1 + sum(r.emitted for r in trace.rounds) == len(trace.tokens)
        assert trace.finish == ("stop" if trace.tokens[-1] == 2 else "length")
    if kind == "oracle":
        assert max(r.accepted for r in traces[0].rounds) == 2  # two right tokens, then a lie


@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "norm_before_residual", "v3.1"])
def test_a_row_of_a_batch_is_a_batch_of_one(tmp_path, flags: dict) -> None:
    """Same text, same rounds, same acceptance, whatever the neighbours accept."""
    target = load_tiny(tmp_path)
    head = make_head(target, **flags)
    alone = decode(target, requests(), head, DecodeSettings(gamma=3, max_new_tokens=NEW, rows=1))
    together = decode(target, requests(), head, DecodeSettings(gamma=3, max_new_tokens=NEW, rows=5))
    assert [(t.tokens, t.rounds) for t in alone] == [(t.tokens, t.rounds) for t in together]


@pytest.mark.parametrize("kind", ["eagle3", "prompt_lookup"])
def test_sampled_tokens_follow_the_target(tmp_path, kind: str) -> None:
    """The second and third token after a fixed prompt: frequencies against the target's exact probabilities."""
    target = load_tiny(tmp_path)
    sampling, copies = Sampling(0.7, top_k=3), 1500
    proposer = make_head(target) if kind == "eagle3" else PromptLookup()
    prompt = (9, 10, 11, 9, 10)
    batch = [Request(str(n), "all", prompt) for n in range(copies)]
    traces = decode(target, batch, proposer, DecodeSettings(3, sampling, max_new_tokens=3, rows=copies, seed=7))
    counts: dict[tuple[int, ...], int] = {}
    for trace in traces:
        key = tuple(trace.tokens)
        counts[key] = counts.get(key, 0) + 1
    chi, cells = 0.0, 0
    for key, exact in _sequences(target, prompt, sampling).items():
        expected = exact * copies
        if expected >= 5:
            chi, cells = chi + (counts.get(key, 0) - expected) ** 2 / expected, cells + 1
    assert set(counts) <= set(_sequences(target, prompt, sampling))
    assert chi < cells + 5 * (2 * cells) ** 0.5, f"χ² {chi:.1f} over {cells} cells"


def _sequences(target: FrozenTarget, prompt: tuple[int, ...], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Exact probability of every text of three tokens (fewer where it ends)."""
    open_, done = {(): 1.0}, {}
    for _ in range(3):
        following = {}
        for text, weight in open_.items():
            last = target.forward(torch.tensor([prompt + text])).last_BTD[:, -1]
            p_V = sampling.probabilities(target.logits(last))[0]
            for token in p_V.nonzero()[:, 0].tolist():
                goal = done if token == 2 else following
                goal[(*text, token)] = weight * p_V[token].item()
        open_ = following
    return {**done, **open_}


def test_gamma_zero_and_no_proposer_decode_plainly(tmp_path) -> None:
    target = load_tiny(tmp_path)
    plain = decode(target, requests(), None, DecodeSettings(gamma=4, max_new_tokens=NEW))
    zero = decode(target, requests(), make_head(target), DecodeSettings(gamma=0, max_new_tokens=NEW))
    assert [t.tokens for t in plain] == [t.tokens for t in zero]
    assert all(r.proposed == 0 for t in zero for r in t.rounds)


def test_requests_that_do_not_fit_are_refused(tmp_path) -> None:
    target = load_tiny(tmp_path)
    with pytest.raises(UserError, match="eval.max_new_tokens"):
        decode(target, [Request("long", "all", (9,) * 250)], None, DecodeSettings(max_new_tokens=NEW))
    with pytest.raises(UserError, match="empty prompt"):
        decode(target, [Request("empty", "all", ())], None, DecodeSettings(max_new_tokens=NEW))


def test_non_finite_logits_stop_with_a_sentence(tmp_path) -> None:
    target = load_tiny(tmp_path)
    target.model.get_output_embeddings().weight.data[3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        decode(target, requests(1), None, DecodeSettings(max_new_tokens=NEW))
