"""The server above T = 0, from our side: the plugin, the law, and acceptance at several draft lengths."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.decode import DecodeSettings, Request, decode
from eval.exactness import exact_texts, fit_texts
from eval.law import Fit
from eval.sampling import Sampling
from eval.server import Limits, Server, lay_plugin
from eval.server_sampling import GreedyDraft, ServedLaw, check_gammas, check_law, compare_at, judged
from eval.trace import RequestTrace, Round
from eval.vllm_plugin import expand
from heads.artifact import UserError
from scripts.serve_parts import check_settings
from tests import e2e
from tests.simulated_traces import trace_of
from tests.test_head_checkpoint import tiny_head
from tests.tiny import load_tiny

GAMMA = 3
REQUESTS = [Request(f"r{n}", "s", (5 + n, 9, 11)) for n in range(8)]


# ---- the plugin -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_request_gets_its_own_value_for_each_of_its_tokens(dtype: torch.dtype) -> None:
    output = torch.full((6,), -1, dtype=dtype)
    values, ends = torch.tensor([2, 0, 3], dtype=dtype), torch.tensor([2, 5, 6], dtype=torch.int32)
    expand(output, values, ends, 0, 1)
    assert output.tolist() == [2, 2, 1, 1, 1, 3]
    half = torch.empty(3)
    expand(half, torch.tensor([0.7]), torch.tensor([3]), 0, 1, 128)
    assert half.tolist() == pytest.approx([0.7] * 3)


def test_the_folder_is_a_plugin_that_replaces_the_kernel(tmp_path: Path) -> None:
    """In an interpreter with a stand-in for vllm, found by the entry point alone, before and after vLLM took hold."""
    site = tmp_path / "site" / "vllm"
    for name in ("utils", "v1/sample"):
        (site / name).mkdir(parents=True)
    (site / "utils" / "cpu_triton_utils.py").write_text("def _expand_kernel_impl(): ...\n")
    holds = "class K:\n    _impl = func = None\nexpand_kernel = K()\n"
    (site / "v1" / "sample" / "rejection_sampler.py").write_text(holds)
    looks = """
import sys, importlib.metadata as m
if 'late' in sys.argv: import vllm.v1.sample.rejection_sampler
(found,) = m.entry_points(group='vllm.general_plugins')
found.load()()
import vllm.utils.cpu_triton_utils as c, vllm.v1.sample.rejection_sampler as r
print(c._expand_kernel_impl.__module__, getattr(r.expand_kernel._impl, '__name__', None))
"""
    path = f"{lay_plugin(tmp_path / 'plugin')}:{site.parent}"
    for argument, expected in (("early", "draftsmith_vllm None"), ("late", "draftsmith_vllm expand")):
        done = subprocess.run(
            [sys.executable, "-c", looks, argument], env={"PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.stdout.strip() == expected, done.stderr


# ---- our side: greedy drafts under a temperature ----------------------------------------------------------------


def test_greedy_drafts_are_accepted_with_the_targets_probability_and_follow_its_law(tmp_path: Path) -> None:
    target, head = load_tiny(tmp_path), tiny_head(torch.float64, depth=4)
    head.attach(target.weights)
    sampling = Sampling(1.0, top_k=4)
    requests = [Request(f"c{n}", "s", (5, 9, 11)) for n in range(1200)]
    how = DecodeSettings(gamma=2, sampling=sampling, max_new_tokens=3, rows=400)
    traces = decode(target, requests, GreedyDraft(head), how)
    fit = fit_texts("greedy drafts", [t.tokens for t in traces], exact_texts(target, (5, 9, 11), sampling, 3))
    assert fit.passed and fit.impossible == 0
    # Σ min(p, q) of a one-hot q is p of the draft: the β of equal prefixes are equal, and no draft is drawn.
    first = {trace.tokens[0]: set() for trace in traces}
    for trace in traces:
        first[trace.tokens[0]] |= {trace.rounds[0].beta[0]} if trace.rounds and trace.rounds[0].beta else set()
    assert all(max(betas) - min(betas) < 1e-9 for betas in first.values() if betas)


# ---- the law ----------------------------------------------------------------------------------------------------


def answering(monkeypatch: pytest.MonkeyPatch, traces: Any) -> list[Server]:
    """Put `traces(server, requests, samplings)` in the real server's place; returns the servers that are asked."""
    asked: list[Server] = []

    def ask(server: Server, requests: Any, limits: Limits, *, folder: Path, name: str, samplings: Any) -> Any:
        asked.append(server)
        found = traces(server, requests, samplings)
        return type("Run", (), {"traces": found, "version": "0", "load_seconds": 1.0, "generate_seconds": 1.0})

    monkeypatch.setattr("eval.server_sampling.ask", ask)
    return asked


def test_the_law_holds_for_a_server_that_samples_rightly_and_the_control_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, law = load_tiny(tmp_path), ServedLaw(texts=1000, temperature=0.7, top_k=4, tokens=3)

    def traces(server: Server, requests: Any, samplings: Any) -> list[RequestTrace]:
        (sampling,) = set(samplings)
        wrong = server.draft is not None and not server.mended
        how = DecodeSettings(gamma=0, sampling=replace(sampling, temperature=2.0) if wrong else sampling)
        return decode(target, requests, None, replace(how, max_new_tokens=law.tokens, rows=500))

    asked = answering(monkeypatch, traces)
    server = Server("py", "t", "float32")
    options: dict[str, Any] = {"gamma": 3, "control": True, "folder": tmp_path}
    found = list(check_law(server, tmp_path / "export", [3, 4, *range(5, 25)], target, law, **options))
    assert [one.passed for one in found] == [True, True, True] and found[2].found.endswith("noticed")
    assert [(one.draft is not None, one.mended) for one in asked] == [(False, False), (True, True), (True, False)]
    options["control"] = False
    assert len(list(check_law(server, tmp_path / "export", [5, 6], target, law, **options))) == 2


@pytest.mark.parametrize("mended", [False, True])
def test_a_server_that_fails_is_noticed_as_the_control_and_else_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    target, law = load_tiny(tmp_path), ServedLaw(texts=1000, temperature=0.7, top_k=4, tokens=3)

    def traces(server: Server, requests: Any, samplings: Any) -> list[RequestTrace]:
        if server.draft is not None and server.mended == mended:
            raise UserError("vLLM ended with code 1")
        how = DecodeSettings(gamma=0, sampling=samplings[0], max_new_tokens=law.tokens, rows=500)
        return decode(target, requests, None, how)

    answering(monkeypatch, traces)
    options: dict[str, Any] = {"gamma": 3, "control": True, "folder": tmp_path}
    asked = check_law(Server("py", "t", "float32"), tmp_path / "export", [3, 4, 5], target, law, **options)
    if mended:
        with pytest.raises(UserError, match="code 1"):
            list(asked)
    else:
        found = list(asked)
        assert found[2].passed and "it fails, see" in found[2].found


def test_a_broken_law_fails_and_a_control_that_holds_is_missed() -> None:
    law = ServedLaw(texts=1000)
    good, bad = Fit("x", 1000, 0.3, 9, 0.01, 0), Fit("x", 1000, 1e-9, 9, 0.5, 3)
    assert judged(good, law, must_fail=False).passed and not judged(bad, law, must_fail=False).passed
    assert judged(bad, law, must_fail=True).passed
    missed = judged(good, law, must_fail=True)
    assert not missed.passed and "MISSED" in missed.line


# ---- several draft lengths --------------------------------------------------------------------------------------


def test_every_gamma_is_one_start_with_all_temperatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = load_tiny(tmp_path), tiny_head(torch.float64, depth=4)
    head.attach(target.weights)

    def traces(server: Server, requests: Any, samplings: Any) -> list[RequestTrace]:
        found = []
        for sampling in dict.fromkeys(samplings):
            how = DecodeSettings(gamma=server.gamma, sampling=sampling, max_new_tokens=12, rows=8)
            found += decode(target, REQUESTS, GreedyDraft(head), how)
        assert [request.request_id for request in requests] == [trace.request_id for trace in found]
        return found

    monkeypatch.setattr("eval.server_sampling.REPEATS", 1)  # with the same seed: the server's draws are ours
    asked = answering(monkeypatch, traces)
    rows = list(
        check_gammas(
            Server("py", "t", "float32"),
            tmp_path / "export",
            REQUESTS,
            target,
            head,
            gammas=[1, 3],
            temperatures=[0.0, 1.0],
            limits=Limits(12, target.eos_token_ids),
            rows=8,
            folder=tmp_path,
            say=lambda text: None,
        )
    )
    assert [(row.gamma, row.temperature) for row in rows] == [(1, 0.0), (1, 1.0), (3, 0.0), (3, 1.0)]
    assert [server.gamma for server in asked] == [1, 3] and all(server.mended for server in asked)
    assert all(row.finding.passed for row in rows), [row.finding.line for row in rows]
    assert "8 of 8 requests equal in text and counters" in rows[0].finding.found
    assert len(rows[2].server["survival"]) == 3 and rows[2].difference.value == 0
    json.dumps([row.to_json() for row in rows])


def test_one_draft_more_or_less_fails_where_it_must() -> None:
    def of(rounds: list[list[int]], seed: int = 0) -> list[RequestTrace]:
        return [
            trace_of([Round(GAMMA, n) for n in own], request_id=f"r{i}", seed=i + seed) for i, own in enumerate(rounds)
        ]

    ours = [[i % 4, (i + 1) % 3] for i in range(16)]
    other = [[0, 2], *ours[1:]]
    assert compare_at(GAMMA, 0.0, [of(ours)], of(ours)).finding.passed
    assert not compare_at(GAMMA, 0.0, [of(ours)], of(other)).finding.passed
    assert compare_at(GAMMA, 1.0, [of(ours), of(ours, 7)], of(other, 3)).finding.passed
    far = compare_at(GAMMA, 1.0, [of(ours), of(ours, 7)], of([[0, 0]] * 16, 3)).finding
    assert not far.passed and "does not hold 0" in far.found
    few = compare_at(GAMMA, 1.0, [of(ours[:3])], of(ours[:3])).finding
    assert not few.passed


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("law.texts=10", "law.texts=10 must be at least 1000, or 0"),
        ("law.temperature=0", "law.temperature=0 "),
        ("law.top_p=1.0", "law.top_p=1.0 must be above 0 and below 1"),
        ("law.tokens=9", "at most 10000 texts"),
        ("law.top_k=many", "law.top_k='many' is of the wrong type"),
        ("gammas=[0]", "gammas=.0. must all be at least 1"),
        ("temperature=0.0", "temperature=0.0 above 0"),
        ("api.requests=3", "api.requests=3 must be 0 .leave it out. or from 8 to requests=24"),
        ("api.at_once=1", "api.at_once at least 2"),
        ("dtypes=[int8]", "int8 is unknown; choose some of"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(override: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_settings(e2e.config(override, name="serve_check"))
    assert check_settings(e2e.config("law.texts=1500", name="serve_check")) == ServedLaw(texts=1500)
